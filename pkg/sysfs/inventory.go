package sysfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// rdmaAlways are the drivers all of whose hardware has RDMA: a function of
// theirs without an RDMA device is one that lacks it.
var rdmaAlways = []string{"mlx4_core", "mlx5_core"}

// Functions lists the functions that carry an RDMA device, here or in another
// namespace, or that should: virtual functions whose physical one does, and
// those of a driver whose hardware always has RDMA. They are ordered by bus and
// address.
func (fs FS) Functions() ([]Function, error) {
	var list []Function
	for _, bus := range []Bus{PCI, Auxiliary} {
		addresses, err := readNames(fs.path("bus", string(bus), "devices"))
		if err != nil {
			return nil, fmt.Errorf("list functions: %w", err)
		}
		for _, address := range addresses {
			f := Function{fs: fs, Bus: bus, Address: address}
			if ValidateAddress(address) == nil && f.capable() {
				list = append(list, f)
			}
		}
	}
	return list, nil
}

// readNames lists a directory's names in order, none if it does not exist.
func readNames(dir string) ([]string, error) {
	list, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	names := make([]string, 0, len(list))
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names, nil
}

func (f Function) capable() bool {
	if exists(f.path("infiniband")) || exists(f.path("infiniband_verbs")) {
		return true
	}
	if f.Bus != PCI {
		return false
	}
	driver, _ := f.Driver()
	return exists(f.path("physfn/infiniband")) || slices.Contains(rdmaAlways, driver)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// PhysicalFunction gives the address of the physical function that a virtual
// one belongs to (the link "physfn") and its number there (the link "virtfnN"
// that leads back); ok is false for a function that is not virtual.
func (f Function) PhysicalFunction() (address string, number int, ok bool) {
	target, err := os.Readlink(f.path("physfn"))
	if err != nil {
		return "", 0, false
	}
	for _, name := range entries(f.path("physfn")) {
		digits, isVF := strings.CutPrefix(name, "virtfn")
		if !isVF {
			continue
		}
		back, err := os.Readlink(f.path("physfn", name))
		if n, convErr := strconv.Atoi(digits); err == nil && convErr == nil && filepath.Base(back) == f.Address {
			return filepath.Base(target), n, true
		}
	}
	return filepath.Base(target), -1, true
}

// VirtualFunctions tells how many virtual functions a physical one has now (the
// file "sriov_numvfs").
func (f Function) VirtualFunctions() int { return f.number("sriov_numvfs", 0) }

// NUMANode gives the node of the machine that the function is at (the file
// "numa_node", for an auxiliary device that of the device below it), -1 if the
// machine has only one or does not say.
func (f Function) NUMANode() int {
	if f.Bus == Auxiliary {
		target, err := filepath.EvalSymlinks(f.path())
		if err != nil {
			return -1
		}
		return readNumber(filepath.Join(filepath.Dir(target), "numa_node"), -1)
	}
	return f.number("numa_node", -1)
}

// Parent names the PCI function below an auxiliary device, "" if there is none.
func (f Function) Parent() string {
	target, err := filepath.EvalSymlinks(f.path())
	if err != nil || f.Bus != Auxiliary {
		return ""
	}
	parent := filepath.Base(filepath.Dir(target))
	if !exists(f.fs.path("bus/pci/devices", parent)) {
		return ""
	}
	return parent
}

func (f Function) number(file string, otherwise int) int { return readNumber(f.path(file), otherwise) }

func readNumber(path string, otherwise int) int {
	data, err := os.ReadFile(path)
	if err != nil {
		return otherwise
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		return otherwise
	}
	return n
}

// DriverModule names the kernel module of the bound driver (the link
// "driver/module"), "" if no driver is bound or if it is built in.
func (f Function) DriverModule() string {
	target, err := os.Readlink(f.path("driver/module"))
	if err != nil {
		return ""
	}
	return filepath.Base(target)
}

// RDMAModules names the modules that make RDMA devices of a driver's functions,
// none if the driver does so itself.
func RDMAModules(driver string) []string { return rdmaModules[driver] }

// DeviceNumber is the number of a character device.
type DeviceNumber struct {
	Major uint32 `json:"major"`
	Minor uint32 `json:"minor"`
}

func (n DeviceNumber) String() string { return fmt.Sprintf("%d:%d", n.Major, n.Minor) }

// CharDeviceNode is an RDMA character device as its class shows it, whichever
// namespace its RDMA device is in.
type CharDeviceNode struct {
	CharDevice
	Number DeviceNumber // the file "dev"
	// Function is the address of the parent; "" for a software device, which
	// has none.
	Function string
}

// CharDeviceNodes lists all RDMA character devices of the machine (the classes
// infiniband_verbs and infiniband_mad), by kind and number.
func (fs FS) CharDeviceNodes() ([]CharDeviceNode, error) {
	var list []CharDeviceNode
	for _, class := range []string{"infiniband_verbs", "infiniband_mad"} {
		names, err := readNames(fs.path("class", class))
		if err != nil {
			return nil, fmt.Errorf("list RDMA character devices: %w", err)
		}
		for _, name := range names {
			kind := Kind(strings.TrimRight(name, "0123456789"))
			if kind != Uverbs && kind != Umad && kind != Issm {
				continue
			}
			device, err := os.ReadFile(fs.path("class", class, name, "ibdev"))
			if err != nil {
				continue // it went between the two reads
			}
			node := CharDeviceNode{CharDevice: CharDevice{Name: name, Kind: kind, Device: strings.TrimSpace(string(device))}}
			if node.Number, err = readDeviceNumber(fs.path("class", class, name, "dev")); err != nil {
				continue
			}
			if parent, err := os.Readlink(fs.path("class", class, name, "device")); err == nil {
				node.Function = filepath.Base(parent)
			}
			list = append(list, node)
		}
	}
	slices.SortFunc(list, func(a, b CharDeviceNode) int {
		if a.Kind != b.Kind {
			return strings.Compare(string(b.Kind), string(a.Kind)) // uverbs, umad, issm
		}
		return a.CharDevice.Number() - b.CharDevice.Number()
	})
	return list, nil
}

func readDeviceNumber(path string) (DeviceNumber, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return DeviceNumber{}, err
	}
	var n DeviceNumber
	if _, err := fmt.Sscanf(string(data), "%d:%d", &n.Major, &n.Minor); err != nil {
		return n, fmt.Errorf("%s holds no device number: %w", path, err)
	}
	return n, nil
}

// ConnectionManager gives the number of /dev/infiniband/rdma_cm, which all
// users of librdmacm share (class misc); it is an os.ErrNotExist while the
// module rdma_ucm is not loaded.
func (fs FS) ConnectionManager() (DeviceNumber, error) {
	return readDeviceNumber(fs.path("class/misc/rdma_cm/dev"))
}

// NetdevMTU gives the MTU of an interface of the namespace of the sysfs mount,
// 0 if it cannot be read.
func (fs FS) NetdevMTU(name string) int { return readNumber(fs.path("class/net", name, "mtu"), 0) }

// NetdevState gives the operational state of such an interface (the file
// "operstate"), e.g. up, down or unknown; "" if it cannot be read.
func (fs FS) NetdevState(name string) string {
	data, err := os.ReadFile(fs.path("class/net", name, "operstate"))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// BondMaster names the bond that an interface belongs to, "" if to none.
func (fs FS) BondMaster(name string) string {
	target, err := os.Readlink(fs.path("class/net", name, "master"))
	if err != nil || !exists(fs.path("class/net", filepath.Base(target), "bonding")) {
		return ""
	}
	return filepath.Base(target)
}

// NetworkFunction is a PCI function of the class "network controller".
type NetworkFunction struct {
	Address, Vendor, Device string // vendor and device are the IDs of the PCI registry, e.g. 0x15b3
	Driver                  string // "" if none is bound
}

// NetworkFunctions lists the PCI functions that are network or InfiniBand
// controllers (the file "class" begins with 0x02), whether or not they can do
// RDMA.
func (fs FS) NetworkFunctions() ([]NetworkFunction, error) {
	addresses, err := readNames(fs.path("bus/pci/devices"))
	if err != nil {
		return nil, fmt.Errorf("list PCI functions: %w", err)
	}
	var list []NetworkFunction
	for _, address := range addresses {
		f := Function{fs: fs, Bus: PCI, Address: address}
		if !strings.HasPrefix(f.text("class"), "0x02") {
			continue
		}
		driver, err := f.Driver()
		if err != nil {
			return nil, err
		}
		list = append(list, NetworkFunction{Address: address, Vendor: f.text("vendor"), Device: f.text("device"), Driver: driver})
	}
	return list, nil
}

func (f Function) text(file string) string {
	data, err := os.ReadFile(f.path(file))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// ModuleHolders lists the modules that use another one (the directory
// /sys/module/NAME/holders).
func (fs FS) ModuleHolders(name string) []string { return entries(fs.path("module", name, "holders")) }

// GIDUse counts the entries of a port's GID table and those that are in use.
func (fs FS) GIDUse(device string, port uint32) (used, size int, err error) {
	dir := fs.path("class/infiniband", device, "ports", strconv.FormatUint(uint64(port), 10), "gids")
	names, err := os.ReadDir(dir)
	if err != nil {
		return 0, 0, fmt.Errorf("GIDs of RDMA device %s port %d: %w", device, port, err)
	}
	for _, e := range names {
		gid, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err == nil && strings.Trim(string(gid), "0:\n") != "" {
			used++
		}
	}
	return used, len(names), nil
}
