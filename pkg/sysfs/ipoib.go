package sysfs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// SetIPoIBMode sets the mode, datagram or connected, of an IPoIB interface (the
// file "mode" of class/net) in the network namespace of the calling thread.
// netlink has it too, but there the kernel lets go of a lock twice when another
// caller comes between (ulp/ipoib/ipoib_main.c, ipoib_set_mode).
func SetIPoIBMode(netdev, mode string) (err error) {
	fs, closeFS, err := mountHere(0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeFS()) }()
	err = os.WriteFile(fs.path("class/net", netdev, "mode"), []byte(mode+"\n"), 0)
	if errors.Is(err, unix.EBUSY) {
		return nil // set all the same: the kernel could not take that lock back
	}
	return err
}

// IBPort is what an InfiniBand port has from its subnet manager, or from who
// administers the VF.
type IBPort struct {
	GUID uint64 // zero: no port GUID was set
	PKey uint16 // the first entry of its partition table
}

// IBPort reads a port (the files "gids/0" and "pkeys/0"), the device seen
// through fs.
func (fs FS) IBPort(device string, port uint32) (IBPort, error) {
	dir := fs.path("class/infiniband", device, "ports", strconv.FormatUint(uint64(port), 10))
	gid, err := os.ReadFile(dir + "/gids/0")
	if err != nil {
		return IBPort{}, fmt.Errorf("GID of RDMA device %s port %d: %w", device, port, err)
	}
	address, err := netip.ParseAddr(strings.TrimSpace(string(gid)))
	if err != nil || !address.Is6() {
		return IBPort{}, fmt.Errorf("GID of RDMA device %s port %d: %q is none", device, port, gid)
	}
	bytes := address.As16()
	text, err := os.ReadFile(dir + "/pkeys/0")
	if err != nil {
		return IBPort{}, fmt.Errorf("partition key of RDMA device %s port %d: %w", device, port, err)
	}
	key, err := strconv.ParseUint(strings.TrimSpace(string(text)), 0, 16)
	if err != nil {
		return IBPort{}, fmt.Errorf("partition key of RDMA device %s port %d: %w", device, port, err)
	}
	return IBPort{GUID: binary.BigEndian.Uint64(bytes[8:]), PKey: uint16(key)}, nil
}
