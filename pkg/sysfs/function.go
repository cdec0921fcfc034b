package sysfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/Mellanox/rdmamap"
	"golang.org/x/sys/unix"
)

// Bus is the kernel bus of a function.
type Bus string

// The buses that carry RDMA devices a pod can get.
const (
	PCI       Bus = "pci"       // virtual and physical functions
	Auxiliary Bus = "auxiliary" // scalable functions
)

// Function is a PCI function or an auxiliary device: the parent of an RDMA
// device, and the part of its identity that outlives names and numbers.
type Function struct {
	Bus     Bus
	Address string // as the bus names it, e.g. 0000:3b:00.2 or mlx5_core.sf.4
	fs      FS
}

func (f Function) String() string {
	switch {
	case f.Soft():
		return "interface " + f.Address
	case f.Bus == PCI:
		return "PCI function " + f.Address
	}
	return "auxiliary device " + f.Address
}

func (f Function) path(elem ...string) string {
	return f.fs.path(append([]string{"bus", string(f.Bus), "devices", f.Address}, elem...)...)
}

// Driver gives the driver that is bound (the link "driver"), "" if none is.
func (f Function) Driver() (string, error) {
	target, err := os.Readlink(f.path("driver"))
	if errors.Is(err, os.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("driver of %s: %w", f, err)
	}
	return filepath.Base(target), nil
}

// RDMADevices lists the names of the function's RDMA devices (the directory
// "infiniband") in the namespace of the sysfs mount. If there are none it
// returns ErrNoRDMADevice or, if they are in another namespace, ErrElsewhere.
// While a device moves, for milliseconds, either can be wrong.
func (f Function) RDMADevices() ([]string, error) {
	names := f.rdmamapDevices()
	if len(names) > 0 {
		slices.Sort(names)
		return names, nil
	}
	// rdmamap answers nil for no device, for a device in another namespace and
	// for every error. The kernel removes the directory with the last device,
	// and leaves it empty while the devices are in other namespaces.
	_, err := os.Stat(f.path(rdmamap.RdmaClassName))
	switch {
	case err == nil:
		return nil, fmt.Errorf("%s: %w", f, ErrElsewhere)
	case errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("%s: %w", f, ErrNoRDMADevice)
	default:
		return nil, fmt.Errorf("RDMA devices of %s: %w", f, err)
	}
}

func (f Function) rdmamapDevices() []string {
	if f.Bus == Auxiliary {
		return rdmamap.GetRdmaDevicesForAuxdev(f.Address)
	}
	return rdmamap.GetRdmaDevicesForPcidev(f.Address)
}

var (
	// ErrNoRDMADevice: the function has no RDMA device in any namespace.
	ErrNoRDMADevice = errors.New("no RDMA device")
	// ErrElsewhere: the function's RDMA device is in another network namespace
	// than the one whose sysfs is read.
	ErrElsewhere = errors.New("the RDMA device is in another network namespace")
)

// Kind is a kind of RDMA character device.
type Kind string

// The kinds, each named as its nodes below /dev/infiniband begin.
const (
	Uverbs Kind = "uverbs" // verbs: one a device
	Umad   Kind = "umad"   // management datagrams: one a port that has them
	Issm   Kind = "issm"   // subnet manager: one a port, not for RoCE from 6.12 on
)

// CharDevice is a character device of an RDMA device. Its class has no
// namespace, so it is seen wherever the device is.
type CharDevice struct {
	Name   string // the node below /dev/infiniband, e.g. uverbs3
	Kind   Kind
	Device string // the RDMA device's name in its own namespace (the file "ibdev")
}

// CharDevices lists the character devices of the function's RDMA devices (the
// directories "infiniband_verbs" and "infiniband_mad"), by kind and number.
func (f Function) CharDevices() ([]CharDevice, error) {
	var list []CharDevice
	for _, class := range []string{"infiniband_verbs", "infiniband_mad"} {
		err := eachEntry(f.path(class), func(dir int, name string) error {
			kind := Kind(strings.TrimRight(name, "0123456789"))
			if kind != Uverbs && kind != Umad && kind != Issm {
				return nil
			}
			// A node can go between the two reads: then it is not there.
			if device, err := readAttribute(dir, name+"/ibdev"); err == nil {
				list = append(list, CharDevice{Name: name, Kind: kind, Device: device})
			}
			return nil
		})
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("character devices of %s: %w", f, err)
		}
	}
	slices.SortFunc(list, func(a, b CharDevice) int {
		if a.Kind != b.Kind {
			return strings.Compare(string(b.Kind), string(a.Kind)) // uverbs, umad, issm
		}
		return a.Number() - b.Number()
	})
	return list, nil
}

// HasNode tells whether one of the function's RDMA devices, in whichever
// namespace, has the character device of that name.
func (f Function) HasNode(name string) (bool, error) {
	class := "infiniband_mad"
	if strings.HasPrefix(name, string(Uverbs)) {
		class = "infiniband_verbs"
	}
	err := unix.Access(f.path(class, name), unix.F_OK)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("character device %s of %s: %w", name, f, os.NewSyscallError("access", err))
	}
	return true, nil
}

// Number is that in the name, e.g. 3 of uverbs3.
func (c CharDevice) Number() int {
	n, _ := strconv.Atoi(strings.TrimPrefix(c.Name, string(c.Kind)))
	return n
}

// Netdevs lists the function's network interfaces (the directory "net") that
// are in the namespace of the sysfs mount.
func (f Function) Netdevs() []string { return entries(f.path("net")) }

// entries lists a directory's names, none if it cannot be read.
func entries(dir string) []string {
	list, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	names := make([]string, 0, len(list))
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}
