package ipoib

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/rtnl"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// Handle reaches the interfaces of the network namespace in which it was
// opened, and is used on a thread that is there (rdma.Namespace.Run).
type Handle struct{ nl *netlink.Handle }

// Open opens a Handle in the network namespace of the calling thread.
func Open() (*Handle, error) {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	return &Handle{nl}, nil
}

// Close closes the Handle.
func (h *Handle) Close() { h.nl.Close() }

// kind is what rtnetlink calls such interfaces.
const kind = "ipoib"

// Interfaces lists the IPoIB interfaces of a function, those that have children
// first. With stacks it also looks for what is stacked on them, which takes the
// list of all interfaces.
func (h *Handle) Interfaces(function string, stacks bool) ([]Interface, error) {
	ask := ipoibLinks
	if stacks {
		ask = h.nl.LinkList
	}
	links, err := rtnl.Dump(ask)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("open a socket", err)
	}
	defer func() { _ = unix.Close(socket) }()
	var list []Interface
	for _, link := range links {
		l, ok := link.(*netlink.IPoIB)
		if !ok || !belongs(socket, l.Name, function) {
			continue
		}
		i, err := h.read(l, links)
		if err != nil {
			return nil, fmt.Errorf("read interface %s: %w", l.Name, err)
		}
		list = append(list, i)
	}
	return last(list, func(i Interface) bool { return i.Child }), nil
}

// Names names the IPoIB interfaces of the namespace, without children, by the
// GUID of their port.
func Names() (map[rdma.GUID]string, error) {
	links, err := rtnl.Dump(ipoibLinks)
	if err != nil {
		return nil, fmt.Errorf("list IPoIB interfaces: %w", err)
	}
	names := map[rdma.GUID]string{}
	for _, l := range links {
		if a := l.Attrs(); a.ParentIndex == 0 && len(a.HardwareAddr) == hardwareLength {
			names[portGUID(a.HardwareAddr)] = a.Name
		}
	}
	return names, nil
}

// A hardware address is a queue pair's number and a GID, which ends in the GUID
// of the port.
const hardwareLength = 20

func portGUID(address net.HardwareAddr) rdma.GUID {
	return rdma.GUID(binary.BigEndian.Uint64(address[hardwareLength-8:]))
}

// last puts the elements that are so behind the others.
func last[T any](list []T, so func(T) bool) []T {
	var first, second []T
	for _, e := range list {
		if so(e) {
			second = append(second, e)
		} else {
			first = append(first, e)
		}
	}
	return append(first, second...)
}

// ipoibLinks lists the IPoIB interfaces of the thread's namespace: the kernel
// leaves out the others, of which a host has hundreds.
func ipoibLinks() ([]netlink.Link, error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
	req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated(kind))
	req.AddData(info)
	messages, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
	if err != nil {
		return nil, err
	}
	links := make([]netlink.Link, 0, len(messages))
	for _, m := range messages {
		l, err := netlink.LinkDeserialize(nil, m)
		if err != nil {
			return nil, err
		}
		links = append(links, l)
	}
	return links, nil
}

// belongs tells whether an interface hangs on a function. The driver reports
// that as the bus address of ETHTOOL_GDRVINFO, on any kernel.
func belongs(socket int, name, function string) bool {
	info, err := unix.IoctlGetEthtoolDrvinfo(socket, name)
	return err == nil && unix.ByteSliceToString(info.Bus_info[:]) == function
}

// read reads what has been set on one of the links.
func (h *Handle) read(l *netlink.IPoIB, links []netlink.Link) (Interface, error) {
	i := Interface{
		Name: l.Name, Alias: l.Alias, PKey: l.Pkey, Child: l.ParentIndex != 0,
		Connected: l.Mode == netlink.IPOIB_MODE_CONNECTED, Umcast: l.Umcast != 0,
		MTU: l.MTU, TxQueue: l.TxQLen, Up: l.RawFlags&unix.IFF_UP != 0,
		HardwareAddr: l.HardwareAddr, Obstacle: obstacle(l, links), index: l.Index,
	}
	if len(l.HardwareAddr) != hardwareLength {
		return i, fmt.Errorf("its hardware address %s is not that of an IPoIB interface", l.HardwareAddr)
	}
	i.PortGUID = portGUID(l.HardwareAddr)
	addresses, err := rtnl.Dump(func() ([]netlink.Addr, error) { return h.nl.AddrList(l, netlink.FAMILY_ALL) })
	if err != nil {
		return i, fmt.Errorf("list its addresses: %w", err)
	}
	for _, a := range addresses {
		i.Addresses = append(i.Addresses, addressFrom(a))
	}
	return i, h.readRoutes(&i)
}

// obstacle says what hangs on an interface that would go with it.
func obstacle(l *netlink.IPoIB, links []netlink.Link) string {
	if l.ParentIndex != 0 && l.Mode == netlink.IPOIB_MODE_CONNECTED {
		return "it is a child in mode connected, which could be set through netlink only, where the kernel lets go of a lock twice when another caller comes between"
	}
	if l.MasterIndex != 0 {
		return fmt.Sprintf("it is enslaved to interface %d", l.MasterIndex)
	}
	for _, other := range links {
		_, child := other.(*netlink.IPoIB)
		if a := other.Attrs(); a.ParentIndex == l.Index && !child && a.Index != l.Index {
			return fmt.Sprintf("%s interface %s is stacked on it", other.Type(), a.Name)
		}
	}
	return ""
}

func (h *Handle) readRoutes(i *Interface) error {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := rtnl.Dump(func() ([]netlink.Route, error) {
			return h.nl.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
		})
		if err != nil {
			return fmt.Errorf("list its routes: %w", err)
		}
		for _, r := range routes {
			if slices.ContainsFunc(r.MultiPath, func(n *netlink.NexthopInfo) bool { return n.LinkIndex == i.index }) {
				i.Obstacle = fmt.Sprintf("route %s uses it beside others", r.Dst)
			}
			if r.LinkIndex != i.index || madeByKernel(r) {
				continue
			}
			if r.Encap != nil || r.Via != nil || r.NewDst != nil || r.MPLSDst != nil {
				i.Obstacle = fmt.Sprintf("route %s over it is encapsulated", r.Dst)
			}
			i.Routes = append(i.Routes, routeFrom(r))
		}
	}
	// A gateway is accepted when the way to it is there.
	i.Routes = last(i.Routes, func(r Route) bool { return r.Gateway.IsValid() })
	return nil
}

// madeByKernel tells routes that come with an address, with the interface, or
// from a router's advertisements.
func madeByKernel(r netlink.Route) bool {
	switch r.Protocol {
	case unix.RTPROT_KERNEL, unix.RTPROT_RA, unix.RTPROT_REDIRECT:
		return true
	}
	return false
}

// Move moves an interface into another namespace, where it arrives down and
// without addresses.
func (h *Handle) Move(i Interface, to *rdma.Namespace) error {
	link := i.link()
	err := h.nl.LinkSetNsFd(link, to.FD())
	if errors.Is(err, unix.EEXIST) {
		// Its name is taken there. The one that it shall have comes later.
		passing := fmt.Sprintf("ipoib-%d", i.index)
		err = errors.Join(h.nl.LinkSetDown(link), h.nl.LinkSetName(link, passing))
		if err == nil {
			err = h.nl.LinkSetNsFd(link, to.FD())
		}
	}
	if err != nil {
		return fmt.Errorf("move it to network namespace %s: %w", to.ID(), err)
	}
	return nil
}

// AddChild makes a child of parent like want, down: beside the parent, or in
// the namespace to under a passing name, since the kernel refuses a name that is
// taken beside the parent.
func (h *Handle) AddChild(parent, want Interface, to *rdma.Namespace) error {
	// The library's LinkAdd would bring the code for every kind of interface
	// into the plugin, a fifth of a megabyte.
	req := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
	req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	req.AddData(nl.NewRtAttr(unix.IFLA_LINK, nl.Uint32Attr(uint32(parent.index))))
	if to == nil {
		req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(want.Name)))
	} else {
		req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(want.passingName())))
		req.AddData(nl.NewRtAttr(unix.IFLA_NET_NS_FD, nl.Uint32Attr(uint32(to.FD()))))
	}
	if err := sendData(req, nl.IFLA_IPOIB_PKEY, want.PKey); err != nil {
		return fmt.Errorf("make it again on %s: %w", parent.Name, err)
	}
	return nil
}

// sendData sends a request with one attribute of IPoIB's own.
func sendData(req *nl.NetlinkRequest, attribute int, value uint16) error {
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated(kind))
	info.AddRtAttr(nl.IFLA_INFO_DATA, nil).AddRtAttr(attribute, nl.Uint16Attr(value))
	req.AddData(info)
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

func (i Interface) setUmcast(on bool) error {
	req := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK)
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(i.index)
	req.AddData(msg)
	value := uint16(0)
	if on {
		value = 1
	}
	return sendData(req, nl.IFLA_IPOIB_UMCAST, value)
}

// Name gives interface i, down, the name that want has.
func (h *Handle) Name(i, want Interface) error {
	if i.Name == want.Name {
		return nil
	}
	if i.Up { // before 6.2 the kernel renames no interface that is up
		if err := h.nl.LinkSetDown(i.link()); err != nil {
			return fmt.Errorf("set it down: %w", err)
		}
	}
	if err := h.nl.LinkSetName(i.link(), want.Name); err != nil {
		return fmt.Errorf("name %s so: %w", i.Name, err)
	}
	return nil
}

// Set makes interface i, which has the name of want, into what want was. It can
// be repeated. The error names the step.
func (h *Handle) Set(i, want Interface) error {
	link := i.link()
	steps := []struct {
		name string
		need bool
		do   func() error
	}{
		{"set its alias", i.Alias != want.Alias, func() error { return h.nl.LinkSetAlias(link, want.Alias) }},
		{"set its mode " + want.Mode(), i.Connected != want.Connected, func() error { return sysfs.SetIPoIBMode(want.Name, want.Mode()) }},
		{"set umcast", i.Umcast != want.Umcast, func() error { return i.setUmcast(want.Umcast) }},
		// The mode has an MTU of its own.
		{fmt.Sprintf("set its MTU %d", want.MTU), i.MTU != want.MTU || i.Connected != want.Connected, func() error { return h.nl.LinkSetMTU(link, want.MTU) }},
		{fmt.Sprintf("set its transmit queue length %d", want.TxQueue), i.TxQueue != want.TxQueue, func() error { return h.nl.LinkSetTxQLen(link, want.TxQueue) }},
		{"set it up", want.Up, func() error { return h.nl.LinkSetUp(link) }},
		{"set it down", !want.Up, func() error { return h.nl.LinkSetDown(link) }},
	}
	for _, step := range steps {
		if !step.need {
			continue
		}
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	for _, a := range want.Addresses {
		if slices.ContainsFunc(i.Addresses, a.equals) {
			continue
		}
		// The kernel can have made a link-local one meanwhile.
		if err := h.nl.AddrAdd(link, a.toNetlink()); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("add its address %s: %w", a.Local, err)
		}
	}
	for _, r := range want.Routes {
		if slices.Contains(i.Routes, r) {
			continue
		}
		if err := h.nl.RouteAdd(r.toNetlink(i.index)); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("add its route %s: %w", r, err)
		}
	}
	return nil
}

func (i Interface) link() netlink.Link {
	return &netlink.IPoIB{LinkAttrs: netlink.LinkAttrs{Index: i.index, Name: i.Name}}
}
