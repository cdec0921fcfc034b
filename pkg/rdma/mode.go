package rdma

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Mode says how the RDMA devices of a node relate to its network namespaces.
// It is one setting for the whole kernel, since 5.2.
type Mode uint8

const (
	// Exclusive: a device is in one namespace, and usable only there.
	Exclusive Mode = 0
	// Shared: every device is usable from every namespace; none can be moved.
	Shared Mode = 1
)

func (m Mode) String() string {
	switch m {
	case Exclusive:
		return "exclusive"
	case Shared:
		return "shared"
	default:
		return fmt.Sprintf("mode %d", uint8(m))
	}
}

// ErrNoModes: the kernel is older than 5.2.
var ErrNoModes = errors.New("this kernel has no RDMA namespace modes, which came with 5.2")

// Mode asks for the node's mode; any namespace gives the same answer. ErrNoModes:
// it is too old.
func (c *Conn) Mode() (Mode, error) {
	attrs, err := c.get("read the RDMA namespace mode", nl.RDMA_NLDEV_CMD_SYS_GET)
	if errors.Is(err, unix.EINVAL) {
		return 0, ErrNoModes
	}
	if err != nil {
		return 0, err
	}
	v, ok := attrs.uint8(nl.RDMA_NLDEV_SYS_ATTR_NETNS_MODE)
	if !ok {
		return 0, errors.New("read the RDMA namespace mode: the kernel's answer holds none")
	}
	return Mode(v), nil
}

// SetMode changes the node's mode. EBUSY: another network namespace exists, or
// one is still being torn down; the kernel changes the mode only while the
// initial one is alone. Setting the mode that holds already always succeeds.
func (c *Conn) SetMode(m Mode) error {
	return c.set("set the RDMA namespace mode to "+m.String(), nl.RDMA_NLDEV_CMD_SYS_SET,
		nl.NewRtAttr(nl.RDMA_NLDEV_SYS_ATTR_NETNS_MODE, nl.Uint8Attr(uint8(m))))
}

// ParseMode reads a mode's name.
func ParseMode(s string) (Mode, error) {
	for _, m := range []Mode{Exclusive, Shared} {
		if s == m.String() {
			return m, nil
		}
	}
	return 0, fmt.Errorf("%q is no RDMA namespace mode; there are exclusive and shared", s)
}

// MarshalText makes a mode readable in JSON output.
func (m Mode) MarshalText() ([]byte, error) { return []byte(m.String()), nil }
