package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ibDevice gives VF number i an RDMA device with InfiniBand ports instead of its
// own, for the rest of the spec. The stock ib_ipoib makes the interfaces.
func ibDevice(i int, keys string) {
	GinkgoHelper()
	run("modprobe", "ib_ipoib")
	replaceDevice(i, "link=ib "+keys)
	Expect(ipoibOf("", vfs[i])).NotTo(BeEmpty(), "ib_ipoib made an interface")
}

// ipoibOf names the IPoIB interfaces of a function in a pod, "" is the host.
func ipoibOf(podName, function string) []string {
	GinkgoHelper()
	var names []string
	for _, l := range ipJSON(podName, "-d", "link") {
		if l["link_type"] == "infiniband" && l["parentdev"] == function {
			names = append(names, l["ifname"].(string))
		}
	}
	slices.Sort(names)
	return names
}

func ipJSON(podName string, args ...string) []map[string]any {
	GinkgoHelper()
	args = append([]string{"-j"}, args...)
	if podName != "" {
		args = append([]string{"-n", podName}, args...)
	}
	out := run("ip", args...)
	var list []map[string]any
	if strings.TrimSpace(out) != "" {
		Expect(json.Unmarshal([]byte(out), &list)).To(Succeed(), out)
	}
	return list
}

// giveInterface moves the IPoIB interface of VF number i into the pod as net1,
// as a delegate does.
func (p pod) giveInterface(i int) {
	GinkgoHelper()
	run("ip", "link", "set", ipoibOf("", vfs[i])[0], "netns", p.name)
	run("ip", "-n", p.name, "link", "set", ipoibOf(p.name, vfs[i])[0], "name", "net1", "up")
}

func (p pod) ip(args string) {
	GinkgoHelper()
	run("ip", append([]string{"-n", p.name}, strings.Fields(args)...)...)
}

// ibState is all that iproute2 knows of the IPoIB interfaces of a namespace and
// the routes over them, one line each, without what each interface or each
// moment has anew.
func ibState(podName string) []string {
	GinkgoHelper()
	var list []string
	line := func(object map[string]any) {
		text, err := json.Marshal(object)
		Expect(err).NotTo(HaveOccurred())
		list = append(list, string(text))
	}
	names := map[any]bool{}
	for _, l := range ipJSON(podName, "-d", "addr") {
		if l["link_type"] != "infiniband" {
			continue
		}
		names[l["ifname"]] = true
		// A parent in another namespace is shown as whatever has its number here.
		for _, key := range []string{"ifindex", "link", "link_index", "address", "operstate", "qdisc", "vfinfo_list"} {
			delete(l, key)
		}
		// Whether there is a carrier is the subnet's affair.
		l["flags"] = slices.DeleteFunc(l["flags"].([]any), func(f any) bool { return f == "NO-CARRIER" || f == "LOWER_UP" || f == "M-DOWN" })
		for _, a := range l["addr_info"].([]any) {
			address := a.(map[string]any)
			for _, key := range []string{"valid_life_time", "preferred_life_time"} {
				if address[key] != float64(4294967295) {
					address[key] = "limited"
				}
			}
			for _, key := range []string{"tentative", "nodad", "protocol"} {
				delete(address, key)
			}
		}
		addresses := l["addr_info"].([]any)
		delete(l, "addr_info")
		line(l)
		for _, a := range addresses {
			line(map[string]any{"ifname": l["ifname"], "address": a})
		}
	}
	for _, family := range []string{"-4", "-6"} {
		for _, r := range ipJSON(podName, family, "-d", "route", "show", "table", "all") {
			if names[r["dev"]] && !(r["protocol"] == "kernel" && family == "-6") {
				r["flags"] = slices.DeleteFunc(r["flags"].([]any), func(f any) bool { return f == "linkdown" || f == "dead" })
				line(r)
			}
		}
	}
	slices.Sort(list)
	return list
}

// ibChain is the network [ib-sriov, rdma].
func ibChain(function string, ibSriov map[string]any) map[string]any {
	delegate := map[string]any{
		"type": "ib-sriov", "deviceID": function, "mtu": 2044,
		"ipam": map[string]any{
			"type": "host-local", "dataDir": "/run/host-local",
			"ranges": []any{[]any{map[string]any{"subnet": "192.168.8.0/24"}}},
			"routes": []any{map[string]any{"dst": "10.8.0.0/16"}},
		},
	}
	maps.Copy(delegate, ibSriov)
	return map[string]any{
		"cniVersion": "1.0.0", "name": "ib",
		"plugins": []any{delegate, map[string]any{"type": "rdma", "deviceID": function}},
	}
}

var _ = Describe("InfiniBand: the chain [ib-sriov, rdma]", Label(kernelSpec), func() {
	for _, parent := range []string{"a VF", "an auxiliary device"} {
		It("leaves the pod of "+parent+" with a working interface, and its DEL succeeds", func() {
			function, device := vfs[0], vfDevice(0)
			if parent == "a VF" {
				ibDevice(0, "")
			} else {
				function, device = "rdmasim.sf.7", "ibsf"
				run("modprobe", "ib_ipoib")
				sim("add name=%s parent=aux:%s link=ib", device, function)
				DeferCleanup(sim, "del %s", device)
			}
			p, n, home := newPod(), newNetwork(ibChain(function, nil)), ipoibOf("", function)
			Expect(home).To(HaveLen(1))
			out, err := n.cnitool("add", p)
			Expect(err).NotTo(HaveOccurred(), out)
			var result struct {
				Interfaces []struct{ Name, Mac string }
				IPs        []struct{ Address string }
			}
			Expect(json.Unmarshal([]byte(out), &result)).To(Succeed(), out)

			By("the pod has the interface with all that was set, and the device; the host has neither")
			Expect(ipoibOf(p.name, function)).To(Equal([]string{"net1"}))
			Expect(ipoibOf("", function)).To(BeEmpty())
			Expect(rdmaNames(p.path)).To(ConsistOf(device))
			Expect(rdmaNames(hostNetns)).NotTo(ContainElement(device))
			inNetns(p.path, func() {
				link, err := netlink.LinkByName("net1")
				Expect(err).NotTo(HaveOccurred())
				Expect(link.Attrs().MTU).To(Equal(2044))
				Expect(link.Attrs().RawFlags & unix.IFF_UP).NotTo(BeZero())
				Expect(result.Interfaces).To(HaveLen(1))
				Expect(result.Interfaces[0].Mac).To(Equal(link.Attrs().HardwareAddr.String()), "the result has the new address, with the new queue pair")
				addresses, err := netlink.AddrList(link, netlink.FAMILY_V4)
				Expect(err).NotTo(HaveOccurred())
				Expect(addresses).To(HaveLen(1))
				Expect(addresses[0].IPNet.String()).To(Equal(result.IPs[0].Address))
				routes, err := netlink.RouteList(link, netlink.FAMILY_V4)
				Expect(err).NotTo(HaveOccurred())
				Expect(routes).To(ContainElement(WithTransform(func(r netlink.Route) string { return r.Dst.String() }, Equal("10.8.0.0/16"))))
			})
			out, err = n.cnitool("check", p)
			Expect(err).NotTo(HaveOccurred(), out)

			out, err = n.cnitool("del", p)
			Expect(err).NotTo(HaveOccurred(), out)
			Expect(ipoibOf("", function)).To(Equal(home))
			Expect(rdmaNames(hostNetns)).To(ContainElement(device))
			Expect(rdmaNames(p.path)).To(BeEmpty())
			Expect(records()).To(BeEmpty())
			out, err = n.cnitool("del", p)
			Expect(err).NotTo(HaveOccurred(), out)
		})
	}

	It("whose ib-sriov moved the device itself (rdmaIsolation) is recognised: verified, not brought home", func() {
		ibDevice(0, "")
		p, n, home := newPod(), newNetwork(ibChain(vfs[0], map[string]any{"rdmaIsolation": true})), ipoibOf("", vfs[0])
		out, err := n.cnitool("add", p)
		Expect(err).NotTo(HaveOccurred(), out)
		expectIn(p, 0)
		Expect(ipoibOf(p.name, vfs[0])).To(Equal([]string{"net1"}))
		Expect(records()).To(HaveLen(1))
		before := ibState(p.name)
		out, err = n.cnitool("check", p)
		Expect(err).NotTo(HaveOccurred(), out)

		By("the plugin's own calls say so, and touch nothing")
		a := vfAttachment(p, 0).named("ib", "cnitool-"+cnitoolID())
		Expect(a.succeed("ADD").logged("WARN")).To(ContainElement(ContainSubstring("already")))
		Expect(a.succeed("DEL").logged("WARN")).To(ContainElement(ContainSubstring("another plugin")))
		expectIn(p, 0)
		Expect(records()).To(BeEmpty())
		Expect(a.succeed("ADD").logged("WARN")).To(ContainElement(And(ContainSubstring("in the pod already"), ContainSubstring("rdmaIsolation"))))
		Expect(a.with("rdmaDeviceName", "rail0").succeed("DEL").exit).To(BeZero())
		e := a.with("rdmaDeviceName", "rail0").fail("ADD")
		Expect(e.Code).To(Equal(105))
		Expect(e.Msg).To(ContainSubstring("rdmaIsolation"))
		a.succeed("ADD")
		Expect(ibState(p.name)).To(Equal(before))
		By("no other pod gets it")
		Expect(vfAttachment(newPod(), 0).fail("ADD").Code).To(Equal(11))

		out, err = n.cnitool("del", p)
		Expect(err).NotTo(HaveOccurred(), out)
		expectHome(0)
		Expect(ipoibOf("", vfs[0])).To(Equal(home))
		Expect(records()).To(BeEmpty())
	})

	It("whose pod is gone ends, and the next pod gets device and interface", func() {
		ibDevice(0, "")
		p, q, n, home := newPod(), newPod(), newNetwork(ibChain(vfs[0], nil)), ipoibOf("", vfs[0])
		out, err := n.cnitool("add", p)
		Expect(err).NotTo(HaveOccurred(), out)
		p.remove()
		out, err = n.cnitool("del", p)
		Expect(err).NotTo(HaveOccurred(), out)
		expectHome(0)
		Expect(records()).To(BeEmpty())
		out, err = n.cnitool("add", q)
		Expect(err).NotTo(HaveOccurred(), out)
		expectIn(q, 0)
		Expect(ipoibOf(q.name, vfs[0])).To(Equal([]string{"net1"}))
		out, err = n.cnitool("del", q)
		Expect(err).NotTo(HaveOccurred(), out)
		expectHome(0)
		Expect(ipoibOf("", vfs[0])).To(HaveLen(len(home)))
	})
})

// cnitoolID is the container ID that cnitool has given to the one pod that is
// attached.
func cnitoolID() string {
	GinkgoHelper()
	names := records()
	Expect(names).To(HaveLen(1))
	id, _, _ := strings.Cut(names[0], "@")
	return strings.TrimPrefix(id, "cnitool-")
}

// named is the attachment as another network and container know it.
func (a attachment) named(network, containerID string) attachment {
	a = a.with("name", network)
	a.id = containerID
	return a
}

// decorate sets on net1 of the pod what can be set, with two children.
func (p pod) decorate() {
	GinkgoHelper()
	for _, command := range []string{
		"link set net1 down", "link set net1 alias the-delegate's-word mtu 2000 txqueuelen 77", "link set net1 up",
		"addr add 192.168.8.2/24 brd + dev net1", "addr add 192.168.8.3/24 dev net1 label net1:x",
		"addr add 10.1.1.1 peer 10.1.1.2/32 dev net1", "addr add 172.16.0.1/30 scope link noprefixroute dev net1",
		"addr add fd00:8::2/64 dev net1 nodad", "addr add fd00:9::2/64 dev net1 nodad valid_lft 5000 preferred_lft 4000",
		"route add 10.8.0.0/16 via 192.168.8.1 dev net1 metric 50 src 192.168.8.3 mtu 1400 advmss 1300",
		"route add 10.9.0.0/16 dev net1 scope link table 77", "route add default via 192.168.8.254 dev net1 metric 700",
		"route add 10.10.0.0/16 via 203.0.113.1 dev net1 onlink", "route add blackhole 10.66.0.0/16",
		"-6 route add fd00:a::/64 via fd00:8::1 dev net1 metric 5", "-6 route add default via fd00:8::ff dev net1 table 78",
		"link add link net1 name part type ipoib pkey 0x8006", "link set part mtu 1800 alias child", "link set part up",
		"addr add 192.168.9.2/24 dev part", "route add 10.20.0.0/16 via 192.168.9.1 dev part",
		"link add link net1 name idle type ipoib pkey 0x8007",
	} {
		p.ip(command)
	}
	run("ip", "netns", "exec", p.name, "unshare", "-m", "sh", "-c",
		"mount -t sysfs pod /mnt && echo 1 > /mnt/class/net/net1/umcast && echo connected > /mnt/class/net/net1/mode && ip link set net1 mtu 5000")
	p.ip("link set part type ipoib umcast 1")
}

var _ = Describe("InfiniBand: an interface", Label(kernelSpec), func() {
	var p pod
	var a attachment
	var home []string
	// setUp gives the function its device, and the pod the interface.
	setUp := func(keys string) {
		GinkgoHelper()
		ibDevice(0, keys)
		home = ipoibOf("", vfs[0])
		p = newPod()
		a = vfAttachment(p, 0)
		p.giveInterface(0)
		// Back it goes as a delegate's DEL brings it.
		DeferCleanup(func() {
			if _, err := os.Stat(p.path); err == nil && slices.Contains(ipoibOf(p.name, vfs[0]), "net1") {
				run("ip", "-n", p.name, "link", "set", "net1", "netns", hostName, "name", home[0])
			}
		})
	}

	It("keeps all that was set on it and on its children, through ADD and through DEL", func() {
		setUp("")
		p.decorate()
		before := ibState(p.name)
		Expect(before).To(ContainElement(ContainSubstring(`"ifname":"idle"`)))
		Expect(before).To(ContainElement(And(ContainSubstring(`"dst":"10.9.0.0/16"`), ContainSubstring(`"table":"77"`))))
		a.succeed("ADD")
		expectIn(p, 0)
		Expect(ibState(p.name)).To(Equal(before))
		Expect(a.succeed("CHECK").logged("ERROR")).To(BeEmpty())
		a.succeed("ADD") // again: nothing to do
		Expect(ibState(p.name)).To(Equal(before))
		Expect(a.succeed("DEL").logged("ERROR")).To(BeEmpty())
		expectHome(0)
		Expect(ibState(p.name)).To(Equal(before), "the delegate's DEL finds what its ADD left")
		Expect(ipoibOf("", vfs[0])).To(BeEmpty())
		for _, child := range []string{"part", "idle"} {
			p.ip("link del " + child)
		}
	})

	It("that is down, without addresses, stays so", func() {
		setUp("")
		p.ip("link set net1 down")
		before := ibState(p.name)
		a.succeed("ADD")
		Expect(ibState(p.name)).To(Equal(before))
		a.succeed("DEL")
		Expect(ibState(p.name)).To(Equal(before))
	})

	It("of the other port, and a child on the host, are there again under their names", func() {
		setUp("ports=2")
		other := home[1]
		for _, command := range []string{
			"link set " + other + " name second mtu 1500 up", "addr add 192.168.20.1/24 dev second", "link add link second name kid type ipoib pkey 0x8009",
		} {
			run("ip", strings.Fields(command)...)
		}
		p.ip("addr add 192.168.8.2/24 dev net1")
		p.ip("link add link net1 name out type ipoib pkey 0x8008")
		p.ip("link set out netns " + hostName)
		run("ip", "addr", "add", "192.168.21.1/24", "dev", "out")
		inPod, onHost := ibState(p.name), ibState("")
		a.succeed("ADD")
		expectIn(p, 0)
		Expect(ibState(p.name)).To(Equal(inPod))
		Expect(ibState("")).To(Equal(onHost))
		a.succeed("CHECK")
		a.succeed("DEL")
		expectHome(0)
		Expect(ibState(p.name)).To(Equal(inPod))
		Expect(ibState("")).To(Equal(onHost))
		run("ip", "link", "del", "kid")
		run("ip", "link", "del", "out")
	})

	It("is not needed: a device without one is moved all the same", func() {
		run("modprobe", "ib_ipoib")
		run("rmmod", "ib_ipoib")
		DeferCleanup(run, "modprobe", "ib_ipoib")
		replaceDevice(0, "link=ib")
		p = newPod()
		a = vfAttachment(p, 0)
		a.succeed("ADD")
		expectIn(p, 0)
		a.succeed("CHECK")
		a.succeed("DEL")
		expectHome(0)
	})

	It("goes into the pod although the name that it has at first is taken there", func() {
		setUp("")
		p.ip("link add " + home[0] + " type dummy")
		before := ibState(p.name)
		a.succeed("ADD")
		Expect(ibState(p.name)).To(Equal(before))
		a.succeed("DEL")
		Expect(ibState(p.name)).To(Equal(before))
		p.ip("link del " + home[0])
	})

	It("is as before if the move fails half-way", func() {
		setUp("")
		p.decorate()
		before := ibState(p.name)
		sim("fault %s enable-errno=5", vfDevice(0))
		e := a.fail("ADD")
		Expect(e.Code).To(Equal(103))
		Expect(e.Msg).To(ContainSubstring("EIO"))
		expectHome(0)
		Expect(ibState(p.name)).To(Equal(before))
		Expect(ipoibOf("", vfs[0])).To(BeEmpty())
		Expect(records()).To(BeEmpty())
		a.succeed("ADD")
		Expect(ibState(p.name)).To(Equal(before))
		a.succeed("DEL")
		p.ip("link del part")
		p.ip("link del idle")
	})

	It("is as before if a later step fails, and the error names the step", func() {
		setUp("")
		p.decorate()
		before := ibState(p.name)
		changes := 0
		got := a.traced("ADD", func(at point) bool {
			if !strings.Contains(at.call, "change an RDMA device") {
				return false
			}
			changes++
			switch changes {
			case 2: // the device has moved: somebody takes the interface's name
				p.ip("link add net1 type dummy")
			case 3: // the undo begins
				p.ip("link del net1")
			}
			return false
		})
		e := got.failure()
		Expect(e.Code).To(Equal(103))
		Expect(e.Msg).To(And(ContainSubstring("IPoIB interface net1"), ContainSubstring("name"), ContainSubstring("exists")))
		Expect(changes).To(Equal(4))
		expectHome(0)
		Expect(ibState(p.name)).To(Equal(before))
		Expect(records()).To(BeEmpty())
		p.ip("link del part")
		p.ip("link del idle")
	})

	It("with something on it that cannot be made again is refused before anything is touched", func() {
		setUp("")
		p.ip("addr add 192.168.8.2/24 dev net1")
		p.ip("link add other type dummy")
		p.ip("link set other up")
		p.ip("route add 10.9.0.0/16 nexthop dev net1 nexthop dev other")
		before := ibState(p.name)
		e := a.fail("ADD")
		Expect(e.Code).To(Equal(102))
		Expect(e.Msg).To(And(ContainSubstring("net1"), ContainSubstring("10.9.0.0/16"), ContainSubstring("after rdma")))
		expectHome(0)
		Expect(ibState(p.name)).To(Equal(before))
		Expect(records()).To(BeEmpty())
		p.ip("link del other")
	})

	It("is not waited for with waitForGID, which is for RoCE", func() {
		setUp("")
		e := a.with("waitForGID", "5s").fail("ADD")
		Expect(e.Code).To(Equal(105))
		Expect(e.Msg).To(ContainSubstring("waitForGID"))
		expectHome(0)
		Expect(ipoibOf(p.name, vfs[0])).To(Equal([]string{"net1"}))
	})

	It("is brought back by DEL also when the record is damaged", func() {
		setUp("")
		p.decorate()
		before := ibState(p.name)
		a.succeed("ADD")
		Expect(os.WriteFile(recordOf(a, 0), []byte("{"), 0o600)).To(Succeed())
		a.succeed("DEL")
		expectHome(0)
		Expect(ibState(p.name)).To(Equal(before))
		p.ip("link del part")
		p.ip("link del idle")
	})

	Context("in CHECK", func() {
		BeforeEach(func() {
			setUp("pkey=0x8005")
			p.ip("addr add 192.168.8.2/24 dev net1")
			p.ip("link set net1 mtu 2000")
			a.succeed("ADD")
			Expect(a.succeed("CHECK").logged("WARN")).To(BeEmpty())
		})
		AfterEach(func() {
			a.succeed("DEL")
			expectHome(0)
		})

		DescribeTable("that has lost something is a mismatch", func(command, says string) {
			for one := range strings.SplitSeq(command, ";") {
				p.ip(one)
			}
			e := a.fail("CHECK")
			Expect(e.Code).To(Equal(104))
			Expect(e.Msg).To(And(ContainSubstring("net1"), ContainSubstring(says)))
		},
			Entry("its MTU", "link set net1 mtu 1900", "1900 instead of 2000"),
			Entry("its address", "addr del 192.168.8.2/24 dev net1", "192.168.8.2/24 is gone"),
			Entry("its state", "link set net1 down", "up is false"),
			Entry("its name", "link set net1 down; link set net1 name other; link set other up", "its name is other"),
		)

		It("whose port has another GUID is a mismatch", func() {
			data, err := os.ReadFile(recordOf(a, 0))
			Expect(err).NotTo(HaveOccurred())
			changed := strings.Replace(string(data), `"ports":[{"guid":"0272`, `"ports":[{"guid":"0372`, 1)
			Expect(changed).NotTo(Equal(string(data)))
			Expect(os.WriteFile(recordOf(a, 0), []byte(changed), 0o600)).To(Succeed())
			e := a.fail("CHECK")
			Expect(e.Code).To(Equal(104))
			Expect(e.Msg).To(And(ContainSubstring("port 1"), ContainSubstring("GUID")))
		})

		It("whose port is not active, or in another partition, is a warning", func() {
			sim("port %s state=init", vfDevice(0))
			Expect(a.succeed("CHECK").logged("WARN")).To(ContainElement(And(ContainSubstring("INIT"), ContainSubstring("subnet manager"))))
			sim("port %s state=active", vfDevice(0))
			sim("port %s pkey=0x8011", vfDevice(0))
			Eventually(func() []string { return a.succeed("CHECK").logged("WARN") }, patience).
				Should(ContainElement(And(ContainSubstring("partition 0x8011"), ContainSubstring("0x8005"))))
		})
	})
})

var _ = Describe("InfiniBand: the lock of ib-sriov", func() {
	const lockFile = "/var/run/cni/ib-sriov/cni.lock"
	hold := func() *os.File {
		GinkgoHelper()
		Expect(os.MkdirAll(filepath.Dir(lockFile), 0o755)).To(Succeed())
		DeferCleanup(os.RemoveAll, filepath.Dir(lockFile))
		f, err := os.OpenFile(lockFile, os.O_CREATE|os.O_RDWR, 0o600)
		Expect(err).NotTo(HaveOccurred())
		Expect(unix.Flock(int(f.Fd()), unix.LOCK_EX)).To(Succeed())
		return f
	}

	It("is waited for, bounded, before anything is touched, and taken around ADD and DEL", func() {
		ibDevice(0, "")
		p := newPod()
		a := vfAttachment(p, 0)
		p.giveInterface(0)
		home := hold()
		before := ibState(p.name)
		e := a.fail("ADD")
		Expect(e.Code).To(Equal(11))
		Expect(e.Msg).To(And(ContainSubstring(lockFile), ContainSubstring("ib-sriov")))
		expectHome(0)
		Expect(ibState(p.name)).To(Equal(before))
		Expect(records()).To(BeEmpty())

		c := a.start("ADD")
		Consistently(func() []string { return rdmaNames(p.path) }, time.Second).Should(BeEmpty())
		Expect(home.Close()).To(Succeed())
		got := c.wait()
		Expect(got.exit).To(BeZero(), got.stdout)
		expectIn(p, 0)

		home = hold()
		Expect(a.fail("DEL").Code).To(Equal(11))
		expectIn(p, 0)
		Expect(home.Close()).To(Succeed())
		a.succeed("DEL")
		expectHome(0)
		run("ip", "-n", p.name, "link", "set", "net1", "netns", hostName)
	})

	It("is no affair of a RoCE device", func() {
		home := hold()
		defer home.Close()
		p := newPod()
		a := vfAttachment(p, 0)
		a.succeed("ADD")
		a.succeed("DEL")
		expectHome(0)
	})
})

var _ = Describe("InfiniBand: the companion", func() {
	It("shows GUIDs, partition and state of the ports, at home and in a pod", func() {
		ibDevice(0, "pkey=0x8005")
		p := newPod()
		a := vfAttachment(p, 0)
		p.giveInterface(0)
		port := func() map[string]any {
			GinkgoHelper()
			out, err := exec.Command(filepath.Join(binDir, "rdma-cni"), "list", "--pci", vfs[0], "-o", "json").Output()
			Expect(err).NotTo(HaveOccurred())
			var rows []struct {
				LinkLayer string
				Ports     []map[string]any
			}
			Expect(json.Unmarshal(out, &rows)).To(Succeed(), string(out))
			Expect(rows).To(HaveLen(1), string(out))
			Expect(rows[0].LinkLayer).To(Equal("InfiniBand"))
			Expect(rows[0].Ports).To(HaveLen(1))
			return rows[0].Ports[0]
		}
		guid, err := os.ReadFile("/sys/class/infiniband/" + vfDevice(0) + "/ports/1/gids/0")
		Expect(err).NotTo(HaveOccurred())
		want := And(HaveKeyWithValue("guid", strings.TrimSpace(string(guid))[20:]), HaveKeyWithValue("pkey", "0x8005"), HaveKeyWithValue("state", "ACTIVE"))
		Expect(port()).To(want)
		a.succeed("ADD")
		Expect(port()).To(want)
		Expect(port()).To(HaveKeyWithValue("netdev", "net1"))
		sim("port %s state=init", vfDevice(0))
		Expect(port()).To(HaveKeyWithValue("state", "INIT"))
		out, _ := exec.Command(filepath.Join(binDir, "rdma-cni"), "doctor", "--show-pass").CombinedOutput()
		Expect(string(out)).To(And(ContainSubstring("0x8005"), ContainSubstring("INIT"), ContainSubstring(fmt.Sprint(strings.TrimSpace(string(guid))[20:]))))
		a.succeed("DEL")
		run("ip", "-n", p.name, "link", "set", "net1", "netns", hostName)
	})
})
