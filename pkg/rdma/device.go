package rdma

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const attrDevProtocol = 67 // RDMA_NLDEV_ATTR_DEV_PROTOCOL, since 5.2

// GUID is a node GUID as its 64-bit number.
type GUID uint64

// String writes a GUID as the kernel and ibv_devinfo do: 5054:00ff:fe12:3457.
func (g GUID) String() string {
	return fmt.Sprintf("%04x:%04x:%04x:%04x", uint16(g>>48), uint16(g>>32), uint16(g>>16), uint16(g))
}

// MarshalText makes a GUID readable in records and in JSON output.
func (g GUID) MarshalText() ([]byte, error) { return []byte(g.String()), nil }

// UnmarshalText reads what MarshalText wrote.
func (g *GUID) UnmarshalText(text []byte) error {
	const form = "0000:0000:0000:0000"
	digits := make([]byte, 0, len(form))
	for i, c := range text {
		if i%5 != 4 {
			digits = append(digits, c)
		} else if c != ':' {
			digits = nil
		}
	}
	v, err := strconv.ParseUint(string(digits), 16, 64)
	if err != nil || len(text) != len(form) || len(digits) != 16 {
		return fmt.Errorf("%q is not a GUID of the form %s", text, form)
	}
	*g = GUID(v)
	return nil
}

// Device is an RDMA device as RDMA netlink describes it.
type Device struct {
	Index    uint32 // the kernel's number for it; a move and a rename keep it
	Name     string // e.g. mlx5_3; unique on the node up to 7.2, in its namespace from 7.3
	NodeGUID GUID   // zero for a VF that had no administrative MAC when its driver bound
	Protocol string // of its first port: roce, ib, iw, opa or usnic; empty before 5.2
	Ports    uint32 // ports are numbered from 1 to Ports
}

func deviceFrom(attrs attributes) (Device, error) {
	var d Device
	var ok bool
	if d.Index, ok = attrs.uint32(nl.RDMA_NLDEV_ATTR_DEV_INDEX); !ok {
		return d, errors.New("the kernel described an RDMA device without its index")
	}
	d.Name = attrs.text(nl.RDMA_NLDEV_ATTR_DEV_NAME)
	guid, _ := attrs.uint64(nl.RDMA_NLDEV_ATTR_NODE_GUID)
	d.NodeGUID = GUID(guid)
	d.Protocol = attrs.text(attrDevProtocol)
	d.Ports, _ = attrs.uint32(nl.RDMA_NLDEV_ATTR_PORT_INDEX)
	return d, nil
}

// Device looks up the device of an index in the Conn's namespace. The answer
// is exact: ErrDeviceNotFound means that it is not there now.
func (c *Conn) Device(index uint32) (Device, error) {
	op := fmt.Sprintf("look up RDMA device %d", index)
	attrs, err := c.get(op, nl.RDMA_NLDEV_CMD_GET, uint32Attr(nl.RDMA_NLDEV_ATTR_DEV_INDEX, index))
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENODEV) {
		return Device{}, fmt.Errorf("%s: %w", op, ErrDeviceNotFound)
	}
	if err != nil {
		return Device{}, err
	}
	return deviceFrom(attrs)
}

// Devices lists the devices of the Conn's namespace. The kernel's dump is not
// atomic: while another device leaves the namespace, one that stays can be
// missing from the list, and nothing marks such a list
// (drivers/infiniband/core/device.c, ib_enum_all_devs). What is listed was
// there; what is not listed has to be asked for again.
func (c *Conn) Devices() ([]Device, error) {
	replies, err := c.dump("list RDMA devices", nl.RDMA_NLDEV_CMD_GET)
	if err != nil {
		return nil, err
	}
	devices := make([]Device, 0, len(replies))
	for _, attrs := range replies {
		d, err := deviceFrom(attrs)
		if err != nil {
			return nil, err
		}
		devices = append(devices, d)
	}
	return devices, nil
}

// dumpsForName is how often DeviceByName asks before it believes that a
// device is not there. One dump in a hundred missed a device on a node whose
// other devices moved all the time.
const dumpsForName = 5

// DeviceByName looks up a device of the Conn's namespace by its name, which
// the kernel does not offer: it takes a dump, and up to dumpsForName of them
// before it says ErrDeviceNotFound.
func (c *Conn) DeviceByName(name string) (Device, error) {
	for range dumpsForName {
		devices, err := c.Devices()
		if err != nil {
			return Device{}, err
		}
		for _, d := range devices {
			if d.Name == name {
				return d, nil
			}
		}
	}
	return Device{}, fmt.Errorf("look up RDMA device %s: %w", name, ErrDeviceNotFound)
}

// Rename gives a device of the Conn's namespace a new name. EEXIST: the name
// is taken, up to 7.2 in whichever namespace.
func (c *Conn) Rename(index uint32, name string) error {
	if err := ValidateName(name); err != nil {
		return err
	}
	return c.set(fmt.Sprintf("rename RDMA device %d to %s", index, name), nl.RDMA_NLDEV_CMD_SET,
		uint32Attr(nl.RDMA_NLDEV_ATTR_DEV_INDEX, index), textAttr(nl.RDMA_NLDEV_ATTR_DEV_NAME, name))
}

// Move moves a device from the Conn's namespace, in which the calling thread
// must be, into another. The kernel tears the device down for its users and
// builds it up again in the target; the call returns when that is done, and
// nothing bounds how long it takes or interrupts it.
//
// EOPNOTSUPP: the mode is Shared, or the driver cannot release its users
// (no disassociate_ucontext). EINVAL, ENODEV: the device is not in this
// namespace. After other errors the device can be in either namespace. A
// kernel before 5.2 answers success and does nothing, so look afterwards.
func (c *Conn) Move(index uint32, target *Namespace) error {
	return c.set(fmt.Sprintf("move RDMA device %d", index), nl.RDMA_NLDEV_CMD_SET,
		uint32Attr(nl.RDMA_NLDEV_ATTR_DEV_INDEX, index), uint32Attr(nl.RDMA_NLDEV_NET_NS_FD, uint32(target.fd)))
}

// MoveAs moves a device as Move does and gives it a name on the way, so that
// nobody in the target sees it under the old one. From 7.3 on the kernel does
// both in one step, and EEXIST says that the name is taken in the target.
// Before, it takes a request with a name for a renaming alone, in which EEXIST
// says that the name is taken in some namespace; the move follows. If that
// fails the device is here, under the new name.
func (c *Conn) MoveAs(index uint32, target *Namespace, name string) error {
	if err := ValidateName(name); err != nil {
		return err
	}
	err := c.set(fmt.Sprintf("move RDMA device %d as %s", index, name), nl.RDMA_NLDEV_CMD_SET,
		uint32Attr(nl.RDMA_NLDEV_ATTR_DEV_INDEX, index), uint32Attr(nl.RDMA_NLDEV_NET_NS_FD, uint32(target.fd)),
		textAttr(nl.RDMA_NLDEV_ATTR_DEV_NAME, name))
	if err != nil {
		return err
	}
	if _, err := c.Device(index); errors.Is(err, ErrDeviceNotFound) {
		return nil
	}
	return c.Move(index, target)
}

// maxNameLength is one less than the kernel's IB_DEVICE_NAME_MAX: it accepts
// a name of 64 characters and cuts it to 63.
const maxNameLength = 63

// ValidateName refuses names that the kernel takes although they break its own
// sysfs entry (a slash, "..", blanks) or that it cuts.
func ValidateName(name string) error {
	switch {
	case name == "":
		return errors.New("an RDMA device name cannot be empty")
	case len(name) > maxNameLength:
		return fmt.Errorf("RDMA device name %q has %d characters, the kernel keeps %d", name, len(name), maxNameLength)
	case name == "." || name == "..":
		return fmt.Errorf("%q cannot be an RDMA device name", name)
	}
	if i := strings.IndexFunc(name, func(r rune) bool { return !nameRune(r) }); i >= 0 {
		return fmt.Errorf("RDMA device name %q: only letters, digits, and . _ - are allowed", name)
	}
	return nil
}

func nameRune(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' || r == '-' || r == '.'
}

// LinkLayer names what the device's first port is attached to, "" if the kernel
// did not say.
func (d Device) LinkLayer() string {
	switch d.Protocol {
	case "ib":
		return "InfiniBand"
	case "opa":
		return "OmniPath"
	case "roce", "iw", "usnic":
		return "Ethernet"
	default:
		return ""
	}
}
