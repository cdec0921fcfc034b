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
	op := fmt.Sprintf("look up the verbs node of RDMA device %d", index)
	attrs, err := c.get(op, cmdGetCharDev,
		uint32Attr(nl.RDMA_NLDEV_ATTR_DEV_INDEX, index), textAttr(attrCharDevType, "uverbs"))
	switch {
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENODEV), errors.Is(err, unix.EOPNOTSUPP):
		return "", fmt.Errorf("%w: %w", err, ErrDeviceNotFound)
	case err != nil:
		return "", err
	}
	return attrs.text(attrCharDevName), nil
}
