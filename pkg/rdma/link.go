package rdma

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// RXE is the link type of soft-RoCE, the driver rdma_rxe.
const RXE = "rxe"

// AddLink makes a software RDMA device on a network interface of the Conn's
// namespace. Wherever that is, the kernel registers the device in the initial
// namespace; it loads the driver if it has to. It refuses the driver's second
// device on one interface with EEXIST, a name that is taken there with ENFILE or
// EEXIST, a VLAN interface with EPERM, and a type of which it has no driver with
// EINVAL.
func (c *Conn) AddLink(kind, name, netdev string) error {
	if err := ValidateName(name); err != nil {
		return err
	}
	return c.set(fmt.Sprintf("add %s link %s on interface %s", kind, name, netdev), nl.RDMA_NLDEV_CMD_NEWLINK,
		textAttr(nl.RDMA_NLDEV_ATTR_DEV_NAME, name), textAttr(nl.RDMA_NLDEV_ATTR_LINK_TYPE, kind),
		textAttr(nl.RDMA_NLDEV_ATTR_NDEV_NAME, netdev))
}

// DeleteLink removes a software RDMA device of the Conn's namespace with all
// that its users have on it. ErrDeviceNotFound: it is not there. EINVAL: it is
// no software device.
func (c *Conn) DeleteLink(index uint32) error {
	op := fmt.Sprintf("delete the link of RDMA device %d", index)
	err := c.set(op, nl.RDMA_NLDEV_CMD_DELLINK, uint32Attr(nl.RDMA_NLDEV_ATTR_DEV_INDEX, index))
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENODEV) {
		if _, lookErr := c.Device(index); errors.Is(lookErr, ErrDeviceNotFound) {
			return fmt.Errorf("%s: %w", op, ErrDeviceNotFound)
		}
	}
	return err
}
