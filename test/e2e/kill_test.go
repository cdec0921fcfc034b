package e2e

import (
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/rtnl"
)

// killedAt runs a verb and kills it at point number n, counted from 0. Without
// such a point it runs to its end.
func (a attachment) killedAt(n int, command string) (at point, got answer) {
	GinkgoHelper()
	i := 0
	got = a.traced(command, func(p point) bool {
		i++
		if i-1 == n {
			at = p
		}
		return i-1 == n
	})
	return at, got
}

// expectLockFree makes sure that nothing holds the node lock.
func expectLockFree() {
	GinkgoHelper()
	lock, err := os.Open(stateDir + "/lock")
	if os.IsNotExist(err) {
		return
	}
	Expect(err).NotTo(HaveOccurred())
	Expect(unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)).To(Succeed(), "the node lock must be free")
	Expect(lock.Close()).To(Succeed())
}

// onlyRecord makes sure that the state directory holds the record of one
// attachment and nothing else.
func onlyRecord(a attachment) {
	GinkgoHelper()
	Expect(records()).To(HaveLen(1))
	Expect(records()[0]).To(HavePrefix(a.id + "@"))
}

// victim is a call that gets killed.
type victim struct {
	command string
	keys    map[string]any              // more of its configuration
	prepare func(old pod, a attachment) // what the call finds
	settle  func(next pod)              // makes the node fit for an ADD again, nil if it is
	kept    func(p pod)                 // makes sure of what the pod keeps through ADD and DEL, nil if of nothing
	from    string                      // the first call to be killed at, "" is the very first
	calls   []string                    // what it must have been killed at, among others
	labels  Labels
}

var victims = map[string]victim{
	// Up to 7.2 the kernel takes two requests to move a device under another
	// name, and there is a point between them.
	"ADD under another name, on a fresh node": {
		command: "ADD", keys: map[string]any{"rdmaDeviceName": "rail0"}, labels: Label(kernelSpec),
		prepare: func(pod, attachment) { Expect(os.RemoveAll("/run/cni")).To(Succeed()) },
		calls: []string{
			"mkdirat cni", "mkdirat rdma", "openat lock", "flock", "write lock", "openat .new", "write .new", "renameat record",
			"sendto", "setns", "write stdout", "write stderr", "close lock",
		},
	},
	"ADD that finds a dead pod's record and name": {
		command: "ADD",
		prepare: func(pod, attachment) {
			dead := fastPod()
			vfAttachment(dead, 0).succeed("ADD")
			run("ip", "netns", "exec", dead.name, "rdma", "dev", "set", vfDevice(0), "name", "mine")
			dead.kill()
			Eventually(func() []string { return rdmaNames(hostNetns) }, patience).Should(ContainElement("mine"))
		},
		calls: []string{"unlinkat record", "sendto", "renameat record"},
	},
	"ADD whose move fails half-way and is undone": {
		command: "ADD",
		prepare: func(pod, attachment) { sim("fault %s enable-errno=5", vfDevice(0)) },
		settle: func(next pod) { // a fault that was not used up waits for the next move
			for strings.Contains(run("cat", simControl), "enable-errno=5") {
				_ = exec.Command("rdma", "dev", "set", vfDevice(0), "netns", next.name).Run()
				run("ip", "netns", "exec", next.name, "rdma", "dev", "set", vfDevice(0), "netns", hostName)
			}
		},
		calls: []string{"unlinkat record", "sendto", "renameat record", "setns"},
	},
	"DEL of a device under another name": {
		command: "DEL", keys: map[string]any{"rdmaDeviceName": "rail0"}, labels: Label(kernelSpec),
		prepare: func(_ pod, a attachment) { a.succeed("ADD") },
		calls:   []string{"flock", "setns", "sendto", "unlinkat record", "close lock"},
	},
	"ADD of a device with an InfiniBand port": {
		// Up to its record it is like any other.
		command: "ADD", prepare: prepareInfiniBand, settle: giveDecorated, kept: expectDecorated, from: "renameat record",
		calls: []string{"renameat record", "sendto (change an RDMA device)", "sendto (netlink request", "setns"},
	},
	"DEL of a device with an InfiniBand port": {
		command: "DEL", settle: giveDecorated, kept: expectDecorated,
		prepare: func(old pod, a attachment) {
			prepareInfiniBand(old, a)
			a.succeed("ADD")
		},
		calls: []string{"unlinkat record", "sendto (change an RDMA device)", "sendto (netlink request", "setns"},
	},
	"DEL of a device that the pod has renamed": {
		command: "DEL",
		prepare: func(old pod, a attachment) {
			a.succeed("ADD")
			run("ip", "netns", "exec", old.name, "rdma", "dev", "set", vfDevice(0), "name", "mine")
		},
		calls: []string{"sendto", "unlinkat record"},
	},
}

// What comes after a death, before the ADD of a new container.
var aftermaths = map[string]func(old pod, a attachment, v victim){
	"its DEL comes": func(old pod, a attachment, v victim) {
		a.succeed("DEL")
		Expect(rdmaNames(old.path)).To(BeEmpty())
		Expect(dirNames("/sys/bus/pci/devices/" + vfs[0] + "/infiniband")).To(HaveLen(1))
		Expect(records()).NotTo(ContainElement(HavePrefix(a.id + "@")))
		expectLockFree()
		a.succeed("DEL") // runtimes send more than one
		v.check(old)
		old.kill()
	},
	"only its namespace dies": func(old pod, _ attachment, _ victim) { old.kill() },
}

// first is the number of the first point to be killed at.
func (v victim) first() int {
	GinkgoHelper()
	if v.from == "" {
		return 0
	}
	p := fastPod()
	a := vfAttachment(p, 0)
	v.prepare(p, a)
	// What the first call of all makes once would shift the count.
	Expect(os.MkdirAll(stateDir, 0o700)).To(Succeed())
	Expect(os.WriteFile(stateDir+"/lock", nil, 0o600)).To(Succeed())
	n, first := 0, -1
	Expect(a.traced(v.command, func(at point) bool {
		if strings.HasSuffix(at.call, " offsets") {
			return false // written for a device that is new, as it is here
		}
		if first < 0 && at.call == v.from {
			first = n
		}
		n++
		return false
	}).exit).To(BeZero())
	Expect(first).To(BeNumerically(">=", 0), "no call "+v.from)
	a.succeed("DEL")
	p.kill()
	if v.settle != nil {
		next := fastPod()
		v.settle(next)
		next.kill()
	}
	return first
}

// everyVariable overrides how many points make one that is tried.
const everyVariable = "KILL_EVERY"

// every is how many points make one that is tried. With interfaces to be made
// and compared each takes seconds, so a run takes some, another one others.
func (v victim) every() int {
	GinkgoHelper()
	if text := os.Getenv(everyVariable); text != "" {
		n, err := strconv.Atoi(text)
		Expect(err).NotTo(HaveOccurred(), everyVariable)
		Expect(n).To(BeNumerically(">", 0), everyVariable)
		return n
	}
	if v.kept != nil {
		return 3
	}
	return 1
}

func (v victim) check(p pod) {
	GinkgoHelper()
	if v.kept != nil {
		v.kept(p)
	}
}

var _ = Describe("kill -9 at any point", func() {
	for _, name := range slices.Sorted(maps.Keys(victims)) {
		v := victims[name]
		It("of "+name, v.labels, func() {
			covered := map[string]bool{}
			every := v.every()
			points, first := 0, v.first()+int(GinkgoRandomSeed())%every
			for unharmed := false; !unharmed; points++ {
				for after, follow := range aftermaths {
					if v.kept != nil && (points%2 == 0) != (after == "its DEL comes") {
						continue // what is after one call is before the next one
					}
					old, next := fastPod(), fastPod()
					a, b := vfAttachment(old, 0), vfAttachment(next, 0)
					for key, value := range v.keys {
						a = a.with(key, value)
					}
					v.prepare(old, a)
					at, got := a.killedAt(first+points*every, v.command)
					if unharmed = got.exit != killed; unharmed {
						Expect(at.call).To(BeEmpty(), "the plugin outlived its kill")
					} else {
						Expect(at.call).NotTo(BeEmpty(), "the plugin died by itself")
						covered[at.call] = true
					}
					By(fmt.Sprintf("point %d, %s: %s", first+points*every, at, after))
					follow(old, a, v)
					if v.settle != nil {
						v.settle(next)
					}
					b.succeed("ADD")
					a.succeed("DEL") // too late
					expectIn(next, 0)
					v.check(next)
					onlyRecord(b)
					expectLockFree()
					b.succeed("DEL")
					v.check(next)
					next.kill()
					expectHome(0)
					Expect(records()).To(BeEmpty())
				}
			}
			points-- // the last round found none
			names := slices.Sorted(maps.Keys(covered))
			fmt.Printf("\nkill -9 of %s: %d points, at %s\n", name, points, strings.Join(names, "; "))
			if every > 1 {
				fmt.Printf("one point of %d, from number %d on, by the seed; %s=1 takes all\n", every, first, everyVariable)
				Expect(points).To(BeNumerically(">", 5))
				return
			}
			for _, call := range v.calls {
				Expect(slices.ContainsFunc(names, func(c string) bool { return strings.HasPrefix(c, call) })).
					To(BeTrue(), "no kill at %q, but at %q", call, names)
			}
			Expect(points).To(BeNumerically(">=", 2*len(names)), "each call has a point before and one after it")
		})
	}

	It("in the middle of a move: the kernel ends the move, and until then the lock is held", Label(kernelSpec), func() {
		for after, follow := range aftermaths {
			old, next := fastPod(), fastPod()
			a, b := vfAttachment(old, 0), vfAttachment(next, 0)
			sim("fault %s remove-delay-ms=1000", vfDevice(0))
			c := a.start("ADD")
			Eventually(func() string { return threadStates(c.Process.Pid) }, patience).Should(ContainSubstring("D"), "the plugin is inside the move")
			Expect(c.Process.Kill()).To(Succeed())
			Expect(tryLock()).To(MatchError(unix.EWOULDBLOCK), "a process inside the move holds the lock, though it is dead")
			By(after)
			follow(old, a, victim{})
			b.succeed("ADD")
			Expect(c.Wait()).NotTo(Succeed())
			expectIn(next, 0)
			onlyRecord(b)
			b.succeed("DEL")
			next.kill()
			expectHome(0)
		}
	})
})

// prepareInfiniBand gives VF 0 an InfiniBand port, once, and the pod its
// interface.
func prepareInfiniBand(old pod, _ attachment) {
	GinkgoHelper()
	if !strings.Contains(run("cat", simControl), "link=ib") {
		ibDevice(0, "")
	}
	giveDecorated(old)
}

// ipoibLinks lists the IPoIB interfaces of the calling thread's namespace: first
// the one that is no child.
func ipoibLinks() (parent *netlink.IPoIB, children []*netlink.IPoIB) {
	GinkgoHelper()
	links, err := rtnl.Dump(netlink.LinkList) // a namespace dies meanwhile
	Expect(err).NotTo(HaveOccurred())
	for _, l := range links {
		i, ok := l.(*netlink.IPoIB)
		switch {
		case !ok:
		case i.ParentDev == "" && i.ParentIndex != 0:
			children = append(children, i)
		default:
			parent = i
		}
	}
	return parent, children
}

var (
	decorAddress, _ = netlink.ParseAddr("192.168.8.2/24")
	decorChild, _   = netlink.ParseAddr("192.168.9.2/24")
	decorNet, _     = netlink.ParseIPNet("10.8.0.0/16")
	decorGateway    = net.IPv4(192, 168, 8, 1).To4()
)

// giveDecorated brings the interface of VF 0, wherever it is by now, into the
// pod as net1, with something set on it. It runs no program: a spec calls it
// hundreds of times.
func giveDecorated(p pod) {
	GinkgoHelper()
	Eventually(func() []string { return rdmaNames(hostNetns) }, patience).Should(ContainElement(vfDevice(0)))
	var link *netlink.IPoIB
	Eventually(func() *netlink.IPoIB {
		var left []*netlink.IPoIB
		link, left = ipoibLinks()
		for _, child := range left { // of dead pods
			Expect(netlink.LinkDel(child)).To(Succeed())
		}
		return link
	}, patience).ShouldNot(BeNil())
	ns, err := os.Open(p.path)
	Expect(err).NotTo(HaveOccurred())
	defer ns.Close()
	Expect(netlink.LinkSetNsFd(link, int(ns.Fd()))).To(Succeed())
	inNetns(p.path, func() {
		link, _ := ipoibLinks()
		child := &netlink.IPoIB{LinkAttrs: netlink.NewLinkAttrs(), Pkey: 0x8006, Mode: netlink.IPOIB_MODE_DATAGRAM}
		child.Name, child.ParentIndex = "part", link.Index
		for _, err := range []error{
			netlink.LinkSetName(link, "net1"), netlink.LinkSetMTU(link, 2000), netlink.LinkSetAlias(link, "kept"), netlink.LinkSetUp(link),
			netlink.AddrAdd(link, decorAddress), netlink.RouteAdd(&netlink.Route{LinkIndex: link.Index, Dst: decorNet, Gw: decorGateway, Priority: 50}),
			netlink.LinkAdd(child), netlink.AddrAdd(child, decorChild),
		} {
			Expect(err).NotTo(HaveOccurred())
		}
	})
}

// expectDecorated makes sure that the pod's interface is as giveDecorated has
// left it.
func expectDecorated(p pod) {
	GinkgoHelper()
	atHome, _ := ipoibLinks()
	Expect(atHome).To(BeNil())
	inNetns(p.path, func() {
		link, children := ipoibLinks()
		Expect(link).NotTo(BeNil())
		Expect(link.Name).To(Equal("net1"))
		Expect(link.MTU).To(Equal(2000))
		Expect(link.Alias).To(Equal("kept"))
		Expect(link.RawFlags & unix.IFF_UP).NotTo(BeZero())
		Expect(children).To(HaveLen(1))
		Expect(children[0].Name).To(Equal("part"))
		Expect(children[0].Pkey).To(Equal(uint16(0x8006)))
		for l, want := range map[netlink.Link]*netlink.Addr{link: decorAddress, children[0]: decorChild} {
			addresses, err := rtnl.Dump(func() ([]netlink.Addr, error) { return netlink.AddrList(l, netlink.FAMILY_V4) })
			Expect(err).NotTo(HaveOccurred())
			Expect(addresses).To(HaveLen(1))
			Expect(addresses[0].IPNet.String()).To(Equal(want.IPNet.String()))
		}
		routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Dst: decorNet}, netlink.RT_FILTER_DST)
		Expect(err).NotTo(HaveOccurred())
		Expect(routes).To(HaveLen(1))
		Expect(routes[0].Priority).To(Equal(50))
		Expect(routes[0].Gw.Equal(decorGateway)).To(BeTrue())
	})
}

// start begins a call and leaves it running.
func (a attachment) start(command string) *call {
	GinkgoHelper()
	c := a.command(command, a.stdin())
	Expect(c.Start()).To(Succeed())
	return c
}

// wait waits for the end of a started call.
func (c *call) wait() answer {
	GinkgoHelper()
	if err := c.Wait(); err != nil {
		Expect(err).To(BeAssignableToTypeOf(&exec.ExitError{}))
	}
	return answer{exit: c.ProcessState.ExitCode(), stdout: c.stdout.String(), stderr: c.stderr.String()}
}

// threadStates gives the state letters of a process's threads, see proc(5).
func threadStates(pid int) string {
	var states strings.Builder
	dir := fmt.Sprintf("/proc/%d/task", pid)
	for _, tid := range dirNames(dir) {
		stat, err := os.ReadFile(dir + "/" + tid + "/stat")
		if err != nil {
			continue // it has ended
		}
		rest := stat[strings.LastIndexByte(string(stat), ')')+2:]
		states.WriteByte(rest[0])
	}
	return states.String()
}

// tryLock takes the node lock and gives it back.
func tryLock() error {
	lock, err := os.Open(stateDir + "/lock")
	if err != nil {
		return err
	}
	defer lock.Close()
	return unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
}
