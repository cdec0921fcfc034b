package attachment

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/rtnl"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// function finds the function that a request is about.
func (s *session) function(req Request, pod *rdma.Namespace) (sysfs.Function, error) {
	if req.Function != "" {
		f, err := s.Sysfs.Function(req.Function)
		if err != nil {
			return f, &FunctionError{err}
		}
		return f, nil
	}
	parent, err := netdevParent(pod, req.IfName)
	if err != nil {
		return sysfs.Function{}, err
	}
	if parent != "" {
		if f, err := s.Sysfs.Function(parent); err == nil {
			return f, nil
		}
	}
	address, err := s.vfOfMAC(req.MAC)
	if err != nil {
		return sysfs.Function{}, &FunctionError{fmt.Errorf("no deviceID was given, and interface %s in the pod (parent device %q) leads to no function; by its MAC: %w; "+
			"give the plugin a deviceID (Multus does so from the resource annotation of the network)", req.IfName, parent, err)}
	}
	f, err := s.Sysfs.Function(address)
	if err != nil {
		return f, &FunctionError{err}
	}
	return f, nil
}

// netdevParent names the device behind a network interface of a namespace, ""
// if the interface is not there or has none. Drivers report it as the bus
// address of ETHTOOL_GDRVINFO, on any kernel.
func netdevParent(ns *rdma.Namespace, name string) (parent string, err error) {
	err = ns.Run(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return os.NewSyscallError("open a socket in the pod", err)
		}
		info, err := unix.IoctlGetEthtoolDrvinfo(fd, name)
		if err == nil {
			parent = unix.ByteSliceToString(info.Bus_info[:])
		}
		return unix.Close(fd)
	})
	return parent, err
}

// vfOfMAC finds the VF whose administrative MAC, as the PF's driver knows it,
// is mac. The VF's own netdev is no help: it is inside the pod.
func (s *session) vfOfMAC(mac string) (address string, err error) {
	want, err := net.ParseMAC(mac)
	if err != nil {
		return "", fmt.Errorf("the previous result has no usable MAC for it (%q)", mac)
	}
	links, err := rtnl.Dump(netlink.LinkList)
	if err != nil {
		return "", fmt.Errorf("list the host's interfaces: %w", err)
	}
	for _, link := range links {
		for _, vf := range link.Attrs().Vfs {
			if !bytes.Equal(vf.Mac, want) {
				continue
			}
			found, err := s.Sysfs.VirtualFunction(link.Attrs().Name, vf.ID)
			if err != nil {
				return "", fmt.Errorf("the MAC %s: %w", mac, err)
			}
			if address != "" && address != found {
				return "", fmt.Errorf("the MAC %s belongs to both %s and %s", mac, address, found)
			}
			address = found
		}
	}
	if address == "" {
		return "", fmt.Errorf("no VF of this node has the administrative MAC %s", mac)
	}
	return address, nil
}

// verbsNode gives the verbs node of a device that conn sees, and tells whether
// it is one of the function's. A device whose arrival failed half-way has none,
// and owns up to nothing. recorded is what is known of the device, nil if
// nothing: one that has its recorded index and still a recorded node needs no
// look into sysfs, whose entries are new after a move.
func verbsNode(conn *rdma.Conn, f sysfs.Function, index uint32, recorded *state.Device) (node string, own bool, err error) {
	node, err = conn.Uverbs(index)
	if errors.Is(err, rdma.ErrDeviceNotFound) {
		return "", false, nil
	}
	if err != nil {
		return "", false, err
	}
	if f.Soft() { // it has no function in sysfs
		return node, true, nil
	}
	if recorded != nil && index == recorded.Index && (slices.Contains(recorded.CharDevices, node) || slices.Contains(recorded.CharDevicesInPod, node)) {
		return node, true, nil
	}
	own, err = f.HasNode(node)
	return node, own, err
}

// charNames lists the character devices of the RDMA device that is called
// device at present.
func charNames(chars []sysfs.CharDevice, device string) []string {
	names := make([]string, 0, len(chars))
	for _, c := range chars {
		if c.Device == device {
			names = append(names, c.Name)
		}
	}
	return names
}
