package rdma

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// CMConfig is the configfs tree of the RDMA connection manager, module rdma_cm
// (Documentation/ABI/testing/configfs-rdma_cm, since 4.11 for the TOS). It knows
// no namespaces: devices inside pods are reached from the host. Its key is the
// device's name, so the name must be unique on the node. Each move of a device
// resets what was set here.
type CMConfig string

// DefaultCMConfig is where the tree is.
const DefaultCMConfig CMConfig = "/sys/kernel/config/rdma_cm"

// TOS reads the default type of service (0 to 255) that rdma_cm gives to RoCE
// connections over each port of a device, from port 1 on.
func (root CMConfig) TOS(device string, ports uint32) (tos []uint8, err error) {
	err = root.with(device, func(dir string) error {
		for port := uint32(1); port <= ports; port++ {
			v, err := readTOS(dir, port)
			if err != nil {
				return err
			}
			tos = append(tos, v)
		}
		return nil
	})
	return tos, err
}

// SetTOS sets the default type of service of each port, tos[0] that of port 1,
// and makes sure that the kernel took it.
func (root CMConfig) SetTOS(device string, tos []uint8) error {
	return root.with(device, func(dir string) error {
		for i, want := range tos {
			port := uint32(i + 1)
			if err := os.WriteFile(tosFile(dir, port), strconv.AppendUint(nil, uint64(want), 10), 0); err != nil {
				return fmt.Errorf("set the default TOS of RDMA device %s port %d: %w", device, port, err)
			}
			got, err := readTOS(dir, port)
			if err != nil {
				return err
			}
			if got != want {
				return fmt.Errorf("set the default TOS of RDMA device %s port %d to %d: it reads %d afterwards", device, port, want, got)
			}
		}
		return nil
	})
}

// with makes the device's directory for the time of fn. One that was there is
// somebody else's and stays.
func (root CMConfig) with(device string, fn func(dir string) error) error {
	if err := ValidateName(device); err != nil {
		return err
	}
	if _, err := os.Stat(string(root)); errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%s does not exist: load the module rdma_cm and mount configfs on /sys/kernel/config (mount -t configfs none /sys/kernel/config): %w", root, err)
	}
	dir := filepath.Join(string(root), device)
	err := os.Mkdir(dir, 0o755)
	if errors.Is(err, os.ErrExist) {
		return fn(dir)
	}
	if err != nil {
		return fmt.Errorf("open the rdma_cm settings of RDMA device %s: %w", device, err)
	}
	return errors.Join(fn(dir), os.Remove(dir))
}

func tosFile(dir string, port uint32) string {
	return filepath.Join(dir, "ports", strconv.FormatUint(uint64(port), 10), "default_roce_tos")
}

func readTOS(dir string, port uint32) (uint8, error) {
	data, err := os.ReadFile(tosFile(dir, port))
	if err != nil {
		return 0, fmt.Errorf("read the default TOS: %w", err)
	}
	v, err := strconv.ParseUint(strings.TrimSpace(string(data)), 10, 8)
	if err != nil {
		return 0, fmt.Errorf("read the default TOS in %s: %w", tosFile(dir, port), err)
	}
	return uint8(v), nil
}
