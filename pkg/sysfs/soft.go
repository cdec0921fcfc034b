package sysfs

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// What stands for the function of a software RDMA device, which has no parent:
// the network interface that it is on.
const (
	Netdev Bus = "netdev" // somebody else has made the device
	RXE    Bus = "rxe"    // the plugin makes it, by the driver rdma_rxe, and removes it
)

// Interface identifies a network interface among those that live: the inode
// number of its network namespace and its index there. Such a device never
// leaves its interface, and is gone when that goes or changes its namespace.
type Interface struct {
	Netns uint64
	Index int
}

// Soft tells whether an interface stands for the function.
func (f Function) Soft() bool { return f.Bus == Netdev || f.Bus == RXE }

// InterfaceFunction makes the function that stands for an interface. Its
// address, such as rxe.4026532345.3, is one that no bus gives.
func (fs FS) InterfaceFunction(bus Bus, i Interface) Function {
	return Function{fs: fs, Bus: bus, Address: fmt.Sprintf("%s.%d.%d", bus, i.Netns, i.Index)}
}

// InterfaceOf reads such an address, false if it is another one.
func InterfaceOf(address string) (bus Bus, i Interface, ok bool) {
	parts := strings.Split(address, ".")
	if len(parts) != 3 || parts[0] != string(Netdev) && parts[0] != string(RXE) {
		return "", Interface{}, false
	}
	netns, netnsErr := strconv.ParseUint(parts[1], 10, 64)
	index, indexErr := strconv.ParseUint(parts[2], 10, 31)
	if netnsErr != nil || indexErr != nil {
		return "", Interface{}, false
	}
	return Bus(parts[0]), Interface{Netns: netns, Index: int(index)}, true
}

// SoftDevice is an RDMA device of the namespace of the sysfs mount that the
// driver rdma_rxe has made.
type SoftDevice struct {
	Name string
	// Netdev is the present name of its interface (the file "parent"), in
	// whichever namespace that is.
	Netdev string
}

// SoftDevices lists them. Other drivers' devices do not have the file.
func (fs FS) SoftDevices() ([]SoftDevice, error) {
	names, err := readNames(fs.path("class/infiniband"))
	if err != nil {
		return nil, fmt.Errorf("list RDMA devices: %w", err)
	}
	var list []SoftDevice
	for _, name := range names {
		netdev, err := os.ReadFile(fs.path("class/infiniband", name, "parent"))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("interface of RDMA device %s: %w", name, err)
		}
		list = append(list, SoftDevice{Name: name, Netdev: strings.TrimSpace(string(netdev))})
	}
	return list, nil
}
