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

// Umad gives the name of a port's node for management datagrams, e.g. umad3.
// ErrDeviceNotFound: the device is not in the Conn's namespace, or the port has
// no such node. Ask only for a device that has had one: where ib_umad is not
// loaded the kernel loads it (ib_get_client_nl_info in
// drivers/infiniband/core/device.c, 5.3 to 7.3).
//
// The kind "issm" cannot be asked for: up to 7.3 the kernel answers that there
// is none, after a try to load a module for it (measured on 6.1).
func (c *Conn) Umad(index, port uint32) (string, error) {
	return c.charDevice(fmt.Sprintf("look up the umad node of RDMA device %d port %d", index, port),
		uint32Attr(nl.RDMA_NLDEV_ATTR_DEV_INDEX, index), uint32Attr(nl.RDMA_NLDEV_ATTR_PORT_INDEX, port), textAttr(attrCharDevType, "umad"))
}

// CharDevices gives the names of a device's nodes: uverbs, then umad. Unlike
// sysfs, which lists a device's nodes below its parent, this works for a device
// that has none. ErrDeviceNotFound is as with Uverbs; the others can be missing.
// It is for devices without issm, as those of RoCE are from 6.12 on.
func (c *Conn) CharDevices(d Device) ([]string, error) {
	uverbs, err := c.Uverbs(d.Index)
	if err != nil {
		return nil, err
	}
	nodes := []string{uverbs}
	for port := uint32(1); port <= d.Ports; port++ {
		node, err := c.Umad(d.Index, port)
		if errors.Is(err, ErrDeviceNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, node)
	}
	return nodes, nil
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
