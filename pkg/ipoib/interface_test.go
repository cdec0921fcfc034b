package ipoib

import (
	"net"
	"net/netip"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func ipNetOf(s string) *net.IPNet {
	ip, n, err := net.ParseCIDR(s)
	Expect(err).NotTo(HaveOccurred())
	if v4 := ip.To4(); v4 != nil {
		ip = v4
	}
	return &net.IPNet{IP: ip, Mask: n.Mask}
}

// net1 is an interface with something in every field.
func net1() Interface {
	return Interface{
		Name: "net1", Alias: "ib3", PortGUID: 0x2c90300000001, PKey: 0x8005, Connected: true, Umcast: true, MTU: 2044, TxQueue: 256, Up: true,
		Addresses: []Address{{Local: netip.MustParsePrefix("192.168.8.2/24")}},
		Routes:    []Route{{Destination: netip.MustParsePrefix("10.8.0.0/16"), Gateway: netip.MustParseAddr("192.168.8.1"), Table: 254, Priority: 50}},
	}
}

var _ = Describe("an interface", func() {
	It("misses nothing that it has, with more besides", func() {
		now := net1()
		now.PKey = 0x8011 // the subnet manager's to change
		now.Addresses = append(now.Addresses, Address{Local: netip.MustParsePrefix("fe80::1/64")})
		now.Addresses[0].Tentative = true
		Expect(now.Missing(net1())).To(BeEmpty())
		old := net1()
		old.Addresses = append(old.Addresses, Address{Local: netip.MustParsePrefix("fd00::1/64"), Valid: 5})
		Expect(now.Missing(old)).To(BeEmpty(), "its time can be over")
	})

	DescribeTable("misses", func(change func(i *Interface), says string) {
		now := net1()
		change(&now)
		Expect(now.Missing(net1())).To(Equal(says))
	},
		Entry("its name", func(i *Interface) { i.Name = "ib0" }, "its name is ib0 instead of net1"),
		Entry("its alias", func(i *Interface) { i.Alias = "" }, "its alias is  instead of ib3"),
		Entry("its mode", func(i *Interface) { i.Connected = false }, "its mode is datagram instead of connected"),
		Entry("umcast", func(i *Interface) { i.Umcast = false }, "umcast is false instead of true"),
		Entry("its MTU", func(i *Interface) { i.MTU = 4092 }, "its MTU is 4092 instead of 2044"),
		Entry("its queue", func(i *Interface) { i.TxQueue = 1 }, "its transmit queue length is 1 instead of 256"),
		Entry("being up", func(i *Interface) { i.Up = false }, "up is false instead of true"),
		Entry("an address", func(i *Interface) { i.Addresses[0].Label = "other" }, "address 192.168.8.2/24 is gone"),
		Entry("a route", func(i *Interface) { i.Routes[0].Priority = 51 }, "route 10.8.0.0/16 via 192.168.8.1 metric 50 table 254 is gone"),
		Entry("several", func(i *Interface) { i.MTU, i.Routes = 1, nil }, "its MTU is 1 instead of 2044, route 10.8.0.0/16 via 192.168.8.1 metric 50 table 254 is gone"),
	)

	DescribeTable("replaces another", func(change func(i *Interface), replaces bool) {
		old, now := net1(), net1()
		old.Child, now.Child = true, true
		change(&now)
		Expect(now.Replaces(old)).To(Equal(replaces))
	},
		Entry("itself", func(*Interface) {}, true),
		Entry("not on another port", func(i *Interface) { i.PortGUID++ }, false),
		Entry("not in another partition", func(i *Interface) { i.PKey++ }, false),
		Entry("not under another name, since several can be in a partition", func(i *Interface) { i.Name = "x" }, false),
		Entry("under the name that it has before it is named", func(i *Interface) { i.Name = net1().passingName() }, true),
		Entry("not its own parent", func(i *Interface) { i.Child = false }, false),
	)

	It("that is no child is known by its port, whatever it is called and its partition is", func() {
		now := Interface{Name: "ib0", PortGUID: net1().PortGUID, PKey: 0xffff}
		Expect(now.Replaces(net1())).To(BeTrue())
	})
})

var _ = Describe("an address", func() {
	DescribeTable("is set as it was read", func(a netlink.Addr, want func(out *netlink.Addr)) {
		out := addressFrom(a).toNetlink()
		expected := a
		want(&expected)
		Expect(out.IPNet.String()).To(Equal(expected.IPNet.String()))
		Expect(out.Peer).To(Equal(expected.Peer))
		Expect([]byte(out.Broadcast)).To(Equal([]byte(expected.Broadcast)))
		Expect(out.Label).To(Equal(expected.Label))
		Expect(out.Scope).To(Equal(expected.Scope))
		Expect(out.Flags).To(Equal(expected.Flags))
		Expect(out.ValidLft).To(Equal(expected.ValidLft))
		Expect(out.PreferedLft).To(Equal(expected.PreferedLft))
	},
		Entry("with a broadcast", netlink.Addr{
			IPNet: ipNetOf("192.168.8.2/24"), Broadcast: net.IPv4(192, 168, 8, 255).To4(), Label: "net1:x", Flags: unix.IFA_F_PERMANENT | unix.IFA_F_SECONDARY, ValidLft: forever, PreferedLft: forever,
		}, func(out *netlink.Addr) { out.Flags = 0 }),
		Entry("without a broadcast, which the library would make up", netlink.Addr{
			IPNet: ipNetOf("192.168.8.2/24"), Scope: 253, Flags: unix.IFA_F_NOPREFIXROUTE, ValidLft: forever, PreferedLft: forever,
		}, func(out *netlink.Addr) { out.Broadcast = net.IPv4zero }),
		Entry("with a peer", netlink.Addr{
			IPNet: ipNetOf("10.1.1.1/32"), Peer: ipNetOf("10.1.1.2/30"), ValidLft: forever, PreferedLft: forever,
		}, func(out *netlink.Addr) { out.Broadcast = net.IPv4zero }),
		Entry("that nobody else has: it is not asked for again", netlink.Addr{
			IPNet: ipNetOf("fd00::2/64"), Flags: unix.IFA_F_MANAGETEMPADDR, ValidLft: 5000, PreferedLft: 4000,
		}, func(out *netlink.Addr) {
			out.Broadcast, out.Flags = net.IPv4zero, unix.IFA_F_MANAGETEMPADDR|unix.IFA_F_NODAD
		}),
		Entry("that is still asked for", netlink.Addr{
			IPNet: ipNetOf("fd00::2/64"), Flags: unix.IFA_F_TENTATIVE, ValidLft: forever, PreferedLft: forever,
		}, func(out *netlink.Addr) { out.Broadcast, out.Flags = net.IPv4zero, 0 }),
		Entry("whose time is over: for the library 0 is for ever", netlink.Addr{
			IPNet: ipNetOf("fd00::2/64"), Flags: unix.IFA_F_TENTATIVE, ValidLft: 10, PreferedLft: 0,
		}, func(out *netlink.Addr) { out.Broadcast, out.Flags, out.PreferedLft = net.IPv4zero, 0, 1 }),
	)
})

var _ = Describe("a route", func() {
	It("is set as it was read", func() {
		r := netlink.Route{
			LinkIndex: 7, Dst: ipNetOf("10.8.0.0/16"), Gw: net.IPv4(192, 168, 8, 1).To4(), Src: net.IPv4(192, 168, 8, 2).To4(), Table: 77, Priority: 50,
			Scope: unix.RT_SCOPE_LINK, Protocol: unix.RTPROT_STATIC, Type: unix.RTN_UNICAST, Tos: 4, Flags: int(netlink.FLAG_ONLINK),
			MTU: 1400, MTULock: true, AdvMSS: 1300, Window: 9, Hoplimit: 3, InitCwnd: 10, InitRwnd: 11, RtoMin: 12, QuickACK: 1, Congctl: "cubic",
		}
		Expect(routeFrom(r).toNetlink(7)).To(Equal(&r))
		r.Flags |= unix.RTNH_F_LINKDOWN // the kernel's own account
		Expect(routeFrom(r).Flags).To(Equal(int(netlink.FLAG_ONLINK)))
	})

	It("that the kernel makes is left to it", func() {
		Expect(madeByKernel(netlink.Route{Protocol: unix.RTPROT_KERNEL})).To(BeTrue())
		Expect(madeByKernel(netlink.Route{Protocol: unix.RTPROT_RA})).To(BeTrue())
		Expect(madeByKernel(netlink.Route{Protocol: unix.RTPROT_BOOT})).To(BeFalse())
	})
})

var _ = Describe("what cannot be made again", func() {
	link := func(index int) *netlink.IPoIB { return &netlink.IPoIB{LinkAttrs: netlink.LinkAttrs{Index: index}} }
	on := func(parent int) netlink.LinkAttrs {
		return netlink.LinkAttrs{Index: 9, Name: "upper", ParentIndex: parent}
	}

	It("is found", func() {
		Expect(obstacle(link(5), []netlink.Link{link(5)})).To(BeEmpty())
		Expect(obstacle(link(5), []netlink.Link{&netlink.IPoIB{LinkAttrs: on(5)}})).To(BeEmpty(), "its own children are made again")
		Expect(obstacle(link(5), []netlink.Link{&netlink.Vlan{LinkAttrs: on(6)}})).To(BeEmpty())
		Expect(obstacle(link(5), []netlink.Link{&netlink.Vlan{LinkAttrs: on(5)}})).To(ContainSubstring("vlan interface upper is stacked on it"))
		slave := link(5)
		slave.MasterIndex = 8
		Expect(obstacle(slave, nil)).To(ContainSubstring("enslaved"))
		child := link(5)
		child.ParentIndex, child.Mode = 4, netlink.IPOIB_MODE_CONNECTED
		Expect(obstacle(child, nil)).To(ContainSubstring("connected"))
	})
})
