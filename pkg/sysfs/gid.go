package sysfs

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// MountHere opens a sysfs that shows the network namespace of the calling
// thread, without attaching it anywhere: it goes with close. The FS is good for
// any thread of the process (fsopen(2), since 5.2).
func MountHere() (fs FS, closeFS func() error, err error) { return mountHere(unix.MOUNT_ATTR_RDONLY) }

func mountHere(attributes int) (fs FS, closeFS func() error, err error) {
	context, err := unix.Fsopen("sysfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return "", nil, os.NewSyscallError("fsopen sysfs", err)
	}
	defer func() { _ = unix.Close(context) }()
	if err := unix.FsconfigCreate(context); err != nil {
		return "", nil, os.NewSyscallError("fsconfig sysfs", err)
	}
	mount, err := unix.Fsmount(context, unix.FSMOUNT_CLOEXEC, attributes)
	if err != nil {
		return "", nil, os.NewSyscallError("fsmount sysfs", err)
	}
	return FS("/proc/self/fd/" + strconv.Itoa(mount)), func() error { return unix.Close(mount) }, nil
}

// Ports lists the port numbers of a device (the directory "ports"), the device
// seen through fs.
func (fs FS) Ports(device string) ([]uint32, error) {
	dir, err := os.ReadDir(fs.path("class/infiniband", device, "ports"))
	if err != nil {
		return nil, fmt.Errorf("ports of RDMA device %s: %w", device, err)
	}
	ports := make([]uint32, 0, len(dir))
	for _, e := range dir {
		port, err := strconv.ParseUint(e.Name(), 10, 32)
		if err != nil {
			return nil, fmt.Errorf("ports of RDMA device %s: %w", device, err)
		}
		ports = append(ports, uint32(port))
	}
	return ports, nil
}

// DevicesNamed counts the RDMA devices of that name in all namespaces: one at
// the most up to kernel 7.2. Devices without verbs node do not count.
func (fs FS) DevicesNamed(name string) int {
	n := 0
	for _, uverbs := range entries(fs.path("class/infiniband_verbs")) {
		device, err := os.ReadFile(fs.path("class/infiniband_verbs", uverbs, "ibdev"))
		if err == nil && strings.TrimSpace(string(device)) == name {
			n++
		}
	}
	return n
}

// RoCEv2Addresses lists the addresses of a device's RoCEv2 GIDs on one port
// (the files "gids/N" and "gid_attrs/types/N"), the device seen through fs.
func (fs FS) RoCEv2Addresses(device string, port uint32) ([]netip.Addr, error) {
	dir := fs.path("class/infiniband", device, "ports", strconv.FormatUint(uint64(port), 10))
	types, err := os.ReadDir(dir + "/gid_attrs/types")
	if err != nil {
		return nil, fmt.Errorf("GIDs of RDMA device %s port %d: %w", device, port, err)
	}
	var addresses []netip.Addr
	for _, e := range types {
		kind, err := os.ReadFile(dir + "/gid_attrs/types/" + e.Name())
		if errors.Is(err, unix.EINVAL) {
			continue // an empty entry
		}
		if err != nil {
			return nil, fmt.Errorf("GIDs of RDMA device %s port %d: %w", device, port, err)
		}
		if strings.TrimSpace(string(kind)) != "RoCE v2" {
			continue
		}
		gid, err := os.ReadFile(dir + "/gids/" + e.Name())
		if err != nil {
			continue // taken out between the two reads
		}
		a, err := netip.ParseAddr(strings.TrimSpace(string(gid)))
		if err != nil {
			return nil, fmt.Errorf("GID %s of RDMA device %s port %d: %w", e.Name(), device, port, err)
		}
		addresses = append(addresses, a.Unmap())
	}
	return addresses, nil
}
