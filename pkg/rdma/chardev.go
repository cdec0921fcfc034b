package rdma

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const (
	cmdGetCharDev   = 15 // RDMA_NLDEV_CMD_GET_CHARDEV, since 5.3
	attrCharDevType = 69 // RDMA_NLDEV_ATTR_CHARDEV_TYPE
	attrCharDevName = 70 // RDMA_NLDEV_ATTR_CHARDEV_NAME
)

// Uverbs gives the name of a device's verbs node, e.g. uverbs3. The number
// behind it is the lowest that was free when the device last arrived in a
// namespace, so it can change with each move. ErrDeviceNotFound: the device is
// not in the Conn's namespace, or has no verbs node, which is the state of one
// whose arrival failed half-way.
func (c *Conn) Uverbs(index uint32) (string, error) {
	return c.charDevice(fmt.Sprintf("look up the verbs node of RDMA device %d", index),
		uint32Attr(nl.RDMA_NLDEV_ATTR_DEV_INDEX, index), textAttr(attrCharDevType, "uverbs"))
}

// PortNode gives the name of a port's node of a kind, "umad" or "issm", e.g.
// umad3. ErrDeviceNotFound: the device is not in the Conn's namespace or the
// port has no such node. Ask only for kinds that the device has had: for one
// that no loaded module serves the kernel loads a module (get_nl_info in
// drivers/infiniband/core/device.c, 5.3 to 7.3).
func (c *Conn) PortNode(index, port uint32, kind string) (string, error) {
	return c.charDevice(fmt.Sprintf("look up the %s node of RDMA device %d port %d", kind, index, port),
		uint32Attr(nl.RDMA_NLDEV_ATTR_DEV_INDEX, index), uint32Attr(nl.RDMA_NLDEV_ATTR_PORT_INDEX, port), textAttr(attrCharDevType, kind))
}

func (c *Conn) charDevice(op string, attrs ...*nl.RtAttr) (string, error) {
	answer, err := c.get(op, cmdGetCharDev, attrs...)
	switch {
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENOENT), errors.Is(err, unix.EOPNOTSUPP):
		return "", fmt.Errorf("%w: %w", err, ErrDeviceNotFound)
	case err != nil:
		return "", err
	}
	return answer.text(attrCharDevName), nil
}
