package rdma

import (
	"fmt"

	"github.com/vishvananda/netlink/nl"
)

const (
	cmdPortGet    = 5  // RDMA_NLDEV_CMD_PORT_GET
	attrNdevIndex = 50 // RDMA_NLDEV_ATTR_NDEV_INDEX
)

// Port is a port of a device.
type Port struct {
	// State is the port's logical state as the InfiniBand specification counts
	// it: 1 down, 2 initializing, 3 armed, 4 active.
	State uint8
	// Netdev is the name of its network interface, empty if it has none or if
	// that is in another namespace than the Conn.
	Netdev string
	// NetdevIndex is the index of that interface, 0 without one.
	NetdevIndex uint32
}

// Port reads port number port, counted from 1, of a device in the Conn's
// namespace.
func (c *Conn) Port(index, port uint32) (Port, error) {
	attrs, err := c.get(fmt.Sprintf("look up port %d of RDMA device %d", port, index), cmdPortGet,
		uint32Attr(nl.RDMA_NLDEV_ATTR_DEV_INDEX, index), uint32Attr(nl.RDMA_NLDEV_ATTR_PORT_INDEX, port))
	if err != nil {
		return Port{}, err
	}
	state, _ := attrs.uint8(nl.RDMA_NLDEV_ATTR_PORT_STATE)
	netdev, _ := attrs.uint32(attrNdevIndex)
	return Port{State: state, Netdev: attrs.text(nl.RDMA_NLDEV_ATTR_NDEV_NAME), NetdevIndex: netdev}, nil
}

// portStates are the names of port states, as ibstat and sysfs write them.
var portStates = []string{"", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"}

// StateName names the port's state.
func (p Port) StateName() string {
	if int(p.State) < len(portStates) && p.State > 0 {
		return portStates[p.State]
	}
	return fmt.Sprintf("state %d", p.State)
}

// Active tells whether the port can carry data.
func (p Port) Active() bool { return p.State == 4 }
