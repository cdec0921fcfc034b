// Package ipoib reads what has been set on the IPoIB interfaces of a function,
// and sets it again on those that the kernel makes in their place: an IPoIB
// interface is a user of its RDMA device, so a move of the device removes it,
// its partition children, addresses and routes with it, and makes a fresh one
// (drivers/infiniband/ulp/ipoib/ipoib_main.c).
package ipoib

import (
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
)

// Interface is an IPoIB interface and what has been set on it. It is part of
// the records.
type Interface struct {
	Name  string `json:"name"`
	Alias string `json:"alias,omitempty"`
	// Home: it belongs into the plugin's own namespace, not into the pod's.
	Home bool `json:"home,omitempty"`
	// PortGUID tells which port it is on: the end of its hardware address.
	PortGUID rdma.GUID `json:"portGUID"`
	// PKey is the partition that it is in. A Child was made for one besides
	// that of the port's first table entry.
	PKey      uint16    `json:"pkey"`
	Child     bool      `json:"child,omitempty"`
	Connected bool      `json:"connected,omitempty"` // mode connected, not datagram
	Umcast    bool      `json:"umcast,omitempty"`    // user space may join its multicast groups
	MTU       int       `json:"mtu"`
	TxQueue   int       `json:"txQueue"`
	Up        bool      `json:"up,omitempty"`
	Addresses []Address `json:"addresses,omitempty"`
	Routes    []Route   `json:"routes,omitempty"`

	// HardwareAddr begins with the number of a queue pair: it is another one
	// after each move.
	HardwareAddr net.HardwareAddr `json:"-"`
	// Obstacle says what is on the interface that cannot be set again.
	Obstacle string `json:"-"`

	index int
}

// Address is an address of an interface.
type Address struct {
	Local     netip.Prefix `json:"local"`
	Peer      netip.Prefix `json:"peer,omitzero"`
	Broadcast netip.Addr   `json:"broadcast,omitzero"`
	Label     string       `json:"label,omitempty"`
	Scope     int          `json:"scope,omitempty"`
	Flags     int          `json:"flags,omitempty"` // those that are set, not found out
	// Tentative: the kernel still asks whether somebody else has it.
	Tentative bool `json:"tentative,omitempty"`
	// Valid and Preferred are how many seconds it lasts, 0 for ever.
	Valid     int `json:"valid,omitempty"`
	Preferred int `json:"preferred,omitempty"`
}

// Route is a route over an interface that the kernel has not made by itself.
type Route struct {
	Destination netip.Prefix `json:"destination"`
	Gateway     netip.Addr   `json:"gateway,omitzero"`
	Source      netip.Addr   `json:"source,omitzero"`
	Table       int          `json:"table"`
	Priority    int          `json:"priority,omitempty"`
	Scope       int          `json:"scope,omitempty"`
	Protocol    int          `json:"protocol,omitempty"`
	Type        int          `json:"type,omitempty"`
	TOS         int          `json:"tos,omitempty"`
	Flags       int          `json:"flags,omitempty"`
	MTU         int          `json:"mtu,omitempty"`
	MTULock     bool         `json:"mtuLock,omitempty"`
	AdvMSS      int          `json:"advMSS,omitempty"`
	Window      int          `json:"window,omitempty"`
	HopLimit    int          `json:"hopLimit,omitempty"`
	InitCwnd    int          `json:"initCwnd,omitempty"`
	InitRwnd    int          `json:"initRwnd,omitempty"`
	RTOMin      int          `json:"rtoMin,omitempty"`
	QuickACK    int          `json:"quickACK,omitempty"`
	Congestion  string       `json:"congestion,omitempty"`
}

// Mode names the mode as the kernel does.
func (i Interface) Mode() string {
	if i.Connected {
		return "connected"
	}
	return "datagram"
}

// Replaces tells whether the interface is the one that stands for old after a
// move of the RDMA device. Several children can be in one partition.
func (i Interface) Replaces(old Interface) bool {
	return i.PortGUID == old.PortGUID && i.Child == old.Child &&
		(!i.Child || i.PKey == old.PKey && (i.Name == old.Name || i.Name == old.passingName()))
}

// passingName is what a child is called between its making and its naming.
func (i Interface) passingName() string {
	h := fnv.New32a()
	_, _ = h.Write([]byte(i.Name))
	return fmt.Sprintf("ipoib-%08x", h.Sum32())
}

// Missing lists what was set on want and is not on i. Addresses and routes that
// i has besides are no fault.
func (i Interface) Missing(want Interface) string {
	var list []string
	differs := func(what string, got, wanted any) {
		if got != wanted {
			list = append(list, fmt.Sprintf("%s is %v instead of %v", what, got, wanted))
		}
	}
	differs("its name", i.Name, want.Name)
	differs("its alias", i.Alias, want.Alias)
	differs("its mode", i.Mode(), want.Mode())
	differs("umcast", i.Umcast, want.Umcast)
	differs("its MTU", i.MTU, want.MTU)
	differs("its transmit queue length", i.TxQueue, want.TxQueue)
	differs("up", i.Up, want.Up)
	for _, a := range want.Addresses {
		if a.Valid == 0 && !slices.ContainsFunc(i.Addresses, a.equals) { // others end by themselves
			list = append(list, "address "+a.Local.String()+" is gone")
		}
	}
	for _, r := range want.Routes {
		if !slices.Contains(i.Routes, r) {
			list = append(list, "route "+r.String()+" is gone")
		}
	}
	return strings.Join(list, ", ")
}

// equals leaves out what time changes.
func (a Address) equals(b Address) bool {
	a.Tentative, a.Valid, a.Preferred = b.Tentative, b.Valid, b.Preferred
	return a == b
}

func (r Route) String() string {
	s := r.Destination.String()
	if r.Gateway.IsValid() {
		s += " via " + r.Gateway.String()
	}
	return fmt.Sprintf("%s metric %d table %d", s, r.Priority, r.Table)
}

// keptFlags are those flags of an address that somebody has set: the others
// are the kernel's own account of it.
const keptFlags = unix.IFA_F_HOMEADDRESS | unix.IFA_F_MANAGETEMPADDR | unix.IFA_F_NOPREFIXROUTE | unix.IFA_F_MCAUTOJOIN

// forever is how the kernel writes a lifetime without end.
const forever = 0xffffffff

func addressFrom(a netlink.Addr) Address {
	lifetime := func(seconds int) int {
		if seconds == forever {
			return 0
		}
		return max(seconds, 1)
	}
	return Address{
		Local: prefix(a.IPNet), Peer: prefix(a.Peer), Broadcast: ip(a.Broadcast), Label: a.Label, Scope: a.Scope,
		Flags: a.Flags & keptFlags, Tentative: a.Flags&unix.IFA_F_TENTATIVE != 0,
		Valid: lifetime(a.ValidLft), Preferred: lifetime(a.PreferedLft),
	}
}

func (a Address) toNetlink() *netlink.Addr {
	lifetime := func(seconds int) int {
		if seconds == 0 {
			return forever
		}
		return seconds
	}
	out := &netlink.Addr{
		IPNet: ipNet(a.Local), Peer: ipNet(a.Peer), Broadcast: a.Broadcast.AsSlice(), Label: a.Label, Scope: a.Scope, Flags: a.Flags,
		ValidLft: lifetime(a.Valid), PreferedLft: lifetime(a.Preferred),
	}
	if out.Broadcast == nil {
		out.Broadcast = net.IPv4zero // the library's word for none
	}
	if !a.Tentative && a.Local.Addr().Is6() {
		// That nobody else has it was found out already, on the same port.
		out.Flags |= unix.IFA_F_NODAD
	}
	return out
}

func routeFrom(r netlink.Route) Route {
	const keptFlags = int(netlink.FLAG_ONLINK | netlink.FLAG_PERVASIVE)
	return Route{
		Destination: prefix(r.Dst), Gateway: ip(r.Gw), Source: ip(r.Src), Table: r.Table, Priority: r.Priority,
		Scope: int(r.Scope), Protocol: int(r.Protocol), Type: r.Type, TOS: r.Tos, Flags: r.Flags & keptFlags,
		MTU: r.MTU, MTULock: r.MTULock, AdvMSS: r.AdvMSS, Window: r.Window, HopLimit: r.Hoplimit,
		InitCwnd: r.InitCwnd, InitRwnd: r.InitRwnd, RTOMin: r.RtoMin, QuickACK: r.QuickACK, Congestion: r.Congctl,
	}
}

func (r Route) toNetlink(link int) *netlink.Route {
	return &netlink.Route{
		LinkIndex: link, Dst: ipNet(r.Destination), Gw: r.Gateway.AsSlice(), Src: r.Source.AsSlice(), Table: r.Table, Priority: r.Priority,
		Scope: netlink.Scope(r.Scope), Protocol: netlink.RouteProtocol(r.Protocol), Type: r.Type, Tos: r.TOS, Flags: r.Flags,
		MTU: r.MTU, MTULock: r.MTULock, AdvMSS: r.AdvMSS, Window: r.Window, Hoplimit: r.HopLimit,
		InitCwnd: r.InitCwnd, InitRwnd: r.InitRwnd, RtoMin: r.RTOMin, QuickACK: r.QuickACK, Congctl: r.Congestion,
	}
}

func ip(a net.IP) netip.Addr {
	addr, _ := netip.AddrFromSlice(a)
	return addr.Unmap()
}

func prefix(n *net.IPNet) netip.Prefix {
	if n == nil {
		return netip.Prefix{}
	}
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(ip(n.IP), bits)
}

func ipNet(p netip.Prefix) *net.IPNet {
	if !p.IsValid() {
		return nil
	}
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
