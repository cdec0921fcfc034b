package e2e

import (
	"crypto/sha512"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
)

// withSoftRoCE labels specs that need the stock driver rdma_rxe of a kernel that
// can move its devices, and Debian's programs for RDMA traffic in the guest
// (make test-softroce). The test driver's devices are apart from it, see loadRXE.
const withSoftRoCE = "softroce"

// softDevice is the name that the plugin gives to its device on net1.
const softDevice = "rxe_net1"

// softNetwork is the network [delegate, rdma], the latter with softRoCE and more
// keys.
func softNetwork(delegate, keys map[string]any) network {
	GinkgoHelper()
	rdma := map[string]any{"type": "rdma", "softRoCE": true}
	maps.Copy(rdma, keys)
	delegate = maps.Clone(delegate)
	delegate["ipam"] = map[string]any{
		"type": "host-local", "dataDir": "/run/host-local",
		"ranges": []any{[]any{map[string]any{"subnet": "192.168.7.0/24"}}},
	}
	DeferCleanup(os.RemoveAll, "/run/host-local")
	return newNetwork(map[string]any{"cniVersion": "1.1.0", "name": "soft", "plugins": []any{delegate, rdma}})
}

func ptpNetwork() network {
	return softNetwork(map[string]any{"type": "ptp"}, map[string]any{"waitForGID": "10s"})
}

// macvlanNetwork joins its pods without the host's routes.
func macvlanNetwork() network {
	GinkgoHelper()
	run("ip", "link", "add", "lower", "type", "veth", "peer", "name", "lower-peer")
	DeferCleanup(run, "ip", "link", "del", "lower")
	run("ip", "link", "set", "lower", "up")
	run("ip", "link", "set", "lower-peer", "up")
	return softNetwork(map[string]any{"type": "macvlan", "master": "lower"}, map[string]any{"waitForGID": "10s"})
}

func (n network) succeed(verb string, p pod) string {
	GinkgoHelper()
	out, err := n.cnitool(verb, p)
	Expect(err).NotTo(HaveOccurred(), out)
	return out
}

// addressIn adds a pod to a network and gives its address.
func (n network) addressIn(p pod) string {
	GinkgoHelper()
	var result struct{ IPs []struct{ Address string } }
	out := n.succeed("add", p)
	Expect(json.Unmarshal([]byte(out), &result)).To(Succeed(), out)
	Expect(result.IPs).To(HaveLen(1))
	ip, _, err := net.ParseCIDR(result.IPs[0].Address)
	Expect(err).NotTo(HaveOccurred())
	return ip.String()
}

// gidIndex gives the place of an address in a device's GID table.
func gidIndex(p pod, device, address string) string {
	GinkgoHelper()
	script := `mount -t sysfs pod /mnt && cd /mnt/class/infiniband/` + device + `/ports/1/gids && grep . *`
	for line := range strings.Lines(run("ip", "netns", "exec", p.name, "unshare", "-m", "sh", "-c", script)) {
		index, gid, _ := strings.Cut(strings.TrimSpace(line), ":")
		if ip := net.ParseIP(gid); ip != nil && ip.String() == address {
			return index
		}
	}
	Fail("no GID of " + device + " in " + p.name + " is " + address)
	return ""
}

// traffic is a program of two ends, one in each of two pods.
type traffic struct{ server, client *end }

type end struct {
	*exec.Cmd
	out  safeBuffer
	done chan struct{} // closed when it has ended
}

// begin starts a program in a pod. It is killed at the end of the spec.
func begin(p pod, args ...string) *end {
	GinkgoHelper()
	e := &end{Cmd: exec.Command("ip", append([]string{"netns", "exec", p.name}, args...)...), done: make(chan struct{})}
	e.Cmd.Stdout, e.Cmd.Stderr = &e.out, &e.out
	Expect(e.Start()).To(Succeed())
	go func() {
		_ = e.Cmd.Wait()
		close(e.done)
	}()
	DeferCleanup(e.kill)
	return e
}

func (e *end) kill() {
	_ = e.Process.Kill()
	<-e.done
}

func (e *end) running() bool {
	select {
	case <-e.done:
		return false
	default:
		return true
	}
}

// longPatience is for programs that move data under emulation.
const longPatience = 2 * time.Minute

// exit waits for the end of the program and gives its status.
func (e *end) exit() int {
	GinkgoHelper()
	Eventually(e.done, longPatience).Should(BeClosed(), "%v: %s", e.Args, &e.out)
	return e.ProcessState.ExitCode()
}

// listens waits until a program accepts TCP connections, by which the programs
// for RDMA traffic find each other.
func (e *end) listens() {
	GinkgoHelper()
	listening := regexp.MustCompile(`(?m)^ *\d+: [0-9A-F]+:[0-9A-F]{4} [0-9A-F]+:0000 0A`)
	Eventually(func() bool {
		if !e.running() {
			return false
		}
		for _, file := range []string{"tcp", "tcp6"} {
			data, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", e.Process.Pid, file))
			if err == nil && listening.Match(data) {
				return true
			}
		}
		return false
	}, patience).Should(BeTrue(), "%v: %s", e.Args, &e.out)
}

// between starts a program for RDMA traffic in two pods.
func between(server pod, address string, client pod, clientAddress string, program ...string) traffic {
	GinkgoHelper()
	flag := "-x" // perftest's
	if program[0] == "ibv_rc_pingpong" {
		flag = "-g"
		program = append(program, "-e") // it sleeps while it waits, and leaves the processor to others
	}
	with := func(p pod, flag, address string) []string {
		return append(slices.Clone(program), "-d", softDevice, flag, gidIndex(p, softDevice, address))
	}
	t := traffic{server: begin(server, with(server, flag, address)...)}
	t.server.listens()
	t.client = begin(client, append(with(client, flag, clientAddress), address)...)
	return t
}

func (t traffic) succeeds() {
	GinkgoHelper()
	Expect(t.client.exit()).To(BeZero(), "%s", &t.client.out)
	Expect(t.server.exit()).To(BeZero(), "%s", &t.server.out)
}

// flows tells whether both ends of a traffic without end still run.
func (t traffic) flows() bool { return t.server.running() && t.client.running() }

func (t traffic) kill() {
	t.client.kill()
	t.server.kill()
}

// endless is a number of messages that nobody waits for.
const endless = "10000000"

// packets counts what a pod's device has sent and received.
func packets(p pod) (counts [2]string) {
	GinkgoHelper()
	fields := strings.Fields(run("ip", "netns", "exec", p.name, "rdma", "statistic", "show", "link", softDevice+"/1"))
	for i, counter := range []string{"sent_pkts", "rcvd_pkts"} {
		at := slices.Index(fields, counter)
		Expect(at).To(BeNumerically(">", 0), "%v", fields)
		counts[i] = fields[at+1]
	}
	return counts
}

// progress waits until each of the pods has sent and received more packets.
func progress(pods ...pod) {
	GinkgoHelper()
	for _, p := range pods {
		before := packets(p)
		Eventually(func() bool {
			now := packets(p)
			return now[0] != before[0] && now[1] != before[1]
		}, longPatience).Should(BeTrue(), "packets of %s go and come, besides %v", p.name, before)
	}
}

// softPod makes a pod with a veth interface net1 whose other end is on the host.
func softPod(make func() pod) pod {
	GinkgoHelper()
	p := make()
	run("ip", "link", "add", "net1", "netns", p.name, "type", "veth", "peer", "name", "veth-"+p.name)
	run("ip", "-n", p.name, "link", "set", "net1", "up")
	return p
}

// softAttachment asks for a soft-RoCE device on net1 of p.
func softAttachment(p pod) attachment {
	a := vfAttachment(p, 0)
	return a.with("deviceID", nil).with("softRoCE", true)
}

// expectNoSoftDevice makes sure that no software device is anywhere.
func expectNoSoftDevice() {
	GinkgoHelper()
	Eventually(func() []string {
		return slices.DeleteFunc(dirNames("/sys/class/infiniband_verbs"), func(node string) bool {
			_, err := os.Lstat("/sys/class/infiniband_verbs/" + node + "/device") // the others' parent
			return err == nil || node == "abi_version"
		})
	}, patience).Should(BeEmpty())
}

var _ = Describe("soft-RoCE", Label(withSoftRoCE), func() {
	BeforeEach(func() {
		run("modprobe", "rdma_rxe")
		DeferCleanup(expectNoSoftDevice)
	})

	It("gives pods of the chain [ptp, rdma] isolated devices of the same name, with traffic between them", func() {
		n, p, q := ptpNetwork(), newPod(), newPod()
		home := rdmaNames(hostNetns)
		address, other := n.addressIn(p), n.addressIn(q)
		Expect(rdmaNames(p.path)).To(ConsistOf(softDevice))
		Expect(rdmaNames(q.path)).To(ConsistOf(softDevice))
		Expect(rdmaNames(hostNetns)).To(Equal(home))
		n.succeed("check", p)
		n.succeed("check", q)

		By("the kernel lets nobody open another one's verbs node")
		nodes := map[string]string{} // by pod
		for _, pod := range []pod{p, q} {
			r := listOne("--pod", containerOf(pod))
			Expect(r).To(And(HaveField("Type", "software"), HaveField("Device", softDevice), HaveField("Netdevs", ConsistOf("net1")),
				HaveField("Holder.Place", "pod"), HaveField("Holder.Network", "soft")))
			Expect(r.CharDevices).NotTo(BeEmpty())
			nodes[pod.name] = "/dev/infiniband/" + r.CharDevices[0].Name
		}
		Expect(nodes[p.name]).NotTo(Equal(nodes[q.name]))
		open := func(where, node string) (err error) {
			inNetns(where, func() {
				var f *os.File
				if f, err = os.OpenFile(node, os.O_RDWR, 0); err == nil {
					err = f.Close()
				}
			})
			return err
		}
		Expect(open(p.path, nodes[p.name])).To(Succeed())
		Expect(open(q.path, nodes[q.name])).To(Succeed())
		Expect(open(p.path, nodes[q.name])).To(MatchError(unix.EPERM))
		Expect(open(q.path, nodes[p.name])).To(MatchError(unix.EPERM))
		Expect(open(hostNetns, nodes[p.name])).To(MatchError(unix.EPERM))

		By("data goes both ways")
		between(p, address, q, other, "ibv_rc_pingpong", "-n", "100").succeeds()
		between(q, other, p, address, "ibv_rc_pingpong", "-n", "100").succeeds()
		written := between(p, address, q, other, "ib_write_bw", "-s", "65536", "-n", "100")
		written.succeeds()
		fields := strings.Fields(regexp.MustCompile(`(?m)^ *65536 .*$`).FindString(written.client.out.String()))
		Expect(fields).To(HaveLen(5), "%s", &written.client.out)
		average, err := strconv.ParseFloat(fields[3], 64)
		Expect(err).NotTo(HaveOccurred())
		Expect(average).To(BeNumerically(">", 0))

		n.succeed("del", p)
		n.succeed("del", q)
		n.succeed("del", q)
		expectNoSoftDevice()
		Expect(records()).To(BeEmpty())
	})

	It("carries traffic before, during and after the coming and going of other pods", func() {
		n, p, q := ptpNetwork(), newPod(), newPod()
		address, other := n.addressIn(p), n.addressIn(q)
		flow := between(p, address, q, other, "ibv_rc_pingpong", "-n", endless)
		progress(p, q)
		for range 2 {
			third, fourth := newPod(), newPod()
			n.succeed("add", third)
			progress(p, q)
			n.succeed("add", fourth)
			progress(p, q)
			n.succeed("del", third)
			progress(p, q)
			fourth.remove() // its namespace goes first
			progress(p, q)
			n.succeed("del", fourth)
			progress(p, q)
			third.remove()
		}
		Expect(flow.flows()).To(BeTrue(), "%s %s", &flow.client.out, &flow.server.out)
		flow.kill()
		between(p, address, q, other, "ibv_rc_pingpong", "-n", "50").succeeds()
		n.succeed("del", p)
		n.succeed("del", q)
	})

	It("ends a connection when one side's DEL comes, and no other one", func() {
		n := macvlanNetwork()
		var pods []pod
		var addresses []string
		for range 4 {
			p := newPod()
			pods, addresses = append(pods, p), append(addresses, n.addressIn(p))
		}
		cut := between(pods[0], addresses[0], pods[1], addresses[1], "ibv_rc_pingpong", "-n", endless)
		kept := between(pods[2], addresses[2], pods[3], addresses[3], "ibv_rc_pingpong", "-n", endless)
		progress(pods...)
		n.succeed("del", pods[0])
		Expect(rdmaNames(pods[0].path)).To(BeEmpty())
		// The partner may wait for ever: rdma_rxe takes a retry count of 7, which
		// these programs ask for, for endless. But nothing comes any more.
		progress(pods[2:]...)
		last := packets(pods[1])
		progress(pods[2:]...)
		progress(pods[2:]...)
		Expect(packets(pods[1])[1]).To(Equal(last[1]), "packets received")
		Expect(rdmaNames(pods[1].path)).To(ConsistOf(softDevice))
		n.succeed("check", pods[1])
		progress(pods[2:]...)
		Expect(kept.flows()).To(BeTrue(), "%s", &kept.client.out)
		kept.kill()
		cut.kill()

		By("the peer's device works on, with another partner")
		between(pods[1], addresses[1], pods[3], addresses[3], "ibv_rc_pingpong", "-n", "50").succeeds()
		for _, p := range pods[1:] {
			n.succeed("del", p)
		}
	})

	It("works on macvlan", func() {
		n, p, q := macvlanNetwork(), newPod(), newPod()
		address, other := n.addressIn(p), n.addressIn(q)
		between(p, address, q, other, "ibv_rc_pingpong", "-n", "50").succeeds()
		n.succeed("del", p)
		n.succeed("del", q)
	})

	Context("on a physical interface without RDMA device", func() {
		var n network
		BeforeEach(func() {
			sim("del %s", vfDevice(3))
			DeferCleanup(sim, "add name=%s parent=pci:%s driver=none", vfDevice(3), vfs[3])
			n = softNetwork(map[string]any{"type": "host-device", "pciBusID": vfs[3]}, nil)
		})

		It("is gone when the interface is home again", func() {
			netdev, p := netdevOf(vfs[3]), newPod()
			n.succeed("add", p)
			Expect(rdmaNames(p.path)).To(ConsistOf(softDevice))
			n.succeed("check", p)
			n.succeed("del", p)
			Expect(netdevOf(vfs[3])).To(Equal(netdev))
			expectNoSoftDevice()
		})

		It("is gone with the namespace, whose interface the kernel takes home", func() {
			netdev, p := netdevOf(vfs[3]), newPod()
			n.succeed("add", p)
			p.remove()
			Eventually(func() []string { return dirNames("/sys/bus/pci/devices/" + vfs[3] + "/net") }, patience).Should(HaveLen(1))
			expectNoSoftDevice()
			_, _ = n.cnitool("del", p) // the delegate's DEL may want a namespace
			Expect(softAttachmentOf(p).call("DEL").exit).To(BeZero())
			run("ip", "link", "set", netdevOf(vfs[3]), "name", netdev)
			Expect(records()).To(BeEmpty())
		})
	})

	It("never takes the place of an adapter's device, unless that is said", func() {
		p := newPod()
		p.takeNetdev(0)
		a := softAttachment(p)
		for _, a := range []attachment{a, a.with("deviceID", vfs[0])} {
			e := a.fail("ADD")
			Expect(e.Code).To(Equal(102))
			Expect(e.Msg).To(And(ContainSubstring(vfs[0]), ContainSubstring("softRoCEOverHardware")))
		}
		By("also while it is elsewhere")
		q := newPod()
		run("rdma", "dev", "set", vfDevice(0), "netns", q.name)
		Expect(a.fail("ADD").Code).To(Equal(102))
		run("ip", "netns", "exec", q.name, "rdma", "dev", "set", vfDevice(0), "netns", hostName)
		expectHome(0)
		expectNoSoftDevice()
		Expect(records()).To(BeEmpty())

		By("said so")
		over := a.with("deviceID", vfs[0]).with("softRoCEOverHardware", true)
		over.succeed("ADD")
		Expect(rdmaNames(p.path)).To(ConsistOf(softDevice))
		expectHome(0)
		over.succeed("CHECK")
		over.succeed("DEL")
		expectHome(0)
	})

	It("says what is missing where there is no driver", func() {
		run("rmmod", "rdma_rxe")
		module := strings.TrimSpace(run("sh", "-c", "find /lib/modules -name rdma_rxe.ko"))
		Expect(os.Rename(module, module+".away")).To(Succeed())
		DeferCleanup(os.Rename, module+".away", module)
		p := softPod(newPod)
		e := softAttachment(p).fail("ADD")
		Expect(e.Code).To(Equal(102))
		Expect(e.Msg).To(And(ContainSubstring("rdma_rxe"), ContainSubstring("7.3"), ContainSubstring("net1")))
		Expect(records()).To(BeEmpty())
	})

	DescribeTable("refuses", func(change func(p pod, a attachment) attachment, code int, says string) {
		p := softPod(newPod)
		e := change(p, softAttachment(p)).fail("ADD")
		Expect(e.Code).To(Equal(code), e.Msg)
		Expect(e.Msg).To(ContainSubstring(says))
		Expect(records()).To(BeEmpty())
		expectNoSoftDevice()
		Expect(rdmaNames(p.path)).To(BeEmpty())
	},
		Entry("an interface that is not there", func(p pod, a attachment) attachment {
			run("ip", "-n", p.name, "link", "del", "net1")
			return a
		}, 102, "no interface net1"),
		Entry("a VLAN interface", func(p pod, a attachment) attachment {
			run("modprobe", "8021q")
			run("ip", "-n", p.name, "link", "set", "net1", "name", "trunk")
			run("ip", "-n", p.name, "link", "add", "link", "trunk", "name", "net1", "type", "vlan", "id", "5")
			return a
		}, 102, "VLAN"),
		Entry("a deviceID that does not exist", func(_ pod, a attachment) attachment { return a.with("deviceID", "0000:99:00.0") }, 102, "0000:99:00.0"),
		Entry("an interface as deviceID", func(_ pod, a attachment) attachment { return a.with("deviceID", "rxe.4026531840.1") }, 102, "no such PCI function"),
		Entry("softRoCEOverHardware alone", func(_ pod, a attachment) attachment {
			return a.with("softRoCE", nil).with("softRoCEOverHardware", true)
		}, 7, "softRoCEOverHardware"),
		Entry("a word for softRoCE", func(_ pod, a attachment) attachment { return a.with("softRoCE", "yes") }, 7, "softRoCE"),
	)

	It("takes the name from the configuration, and a second attachment of the pod another one", func() {
		p := softPod(newPod)
		a := softAttachment(p).with("rdmaDeviceName", "{ifname}-rdma")
		a.succeed("ADD")
		Expect(rdmaNames(p.path)).To(ConsistOf("net1-rdma"))
		run("ip", "-n", p.name, "link", "add", "net@2", "type", "dummy")
		b := softAttachment(p).with("prevResult", map[string]any{
			"cniVersion": "1.1.0", "interfaces": []any{map[string]any{"name": "net@2", "sandbox": p.path}},
		})
		b.ifname = "net@2"
		b.succeed("ADD")
		Expect(rdmaNames(p.path)).To(ConsistOf("net1-rdma", "rxe_net_2"))
		a.succeed("CHECK")
		b.succeed("CHECK")
		a.succeed("DEL")
		Expect(rdmaNames(p.path)).To(ConsistOf("rxe_net_2"))
		b.succeed("DEL")
		Expect(rdmaNames(p.path)).To(BeEmpty())
	})

	Context("in a node that is a container, as with kind", func() {
		// inNode runs the plugin in a namespace that is not the initial one.
		inNode := func(node pod, unseen bool, a attachment, verb string) answer {
			GinkgoHelper()
			args := []string{"netns", "exec", node.name}
			if unseen { // the machine's namespaces have neither paths nor processes there
				args = append(args, "unshare", "-m", "-p", "-f", "sh", "-c", "umount -l /run/netns/"+hostName+"; mount -t proc proc /proc; exec "+filepath.Join(binDir, "rdma"))
			} else {
				args = append(args, filepath.Join(binDir, "rdma"))
			}
			c := a.command(verb, a.stdin())
			in := &call{Cmd: exec.Command("ip", args...)}
			in.Env, in.Stdin, in.Cmd.Stdout, in.Cmd.Stderr = c.Env, c.Stdin, &in.stdout, &in.stderr
			return in.finish()
		}

		It("fetches the device from the initial namespace, if a path leads there", func() {
			node, p := newPod(), softPod(newPod)
			a := softAttachment(p)
			succeeds := func(verb string) {
				GinkgoHelper()
				got := inNode(node, false, a, verb)
				Expect(got.exit).To(BeZero(), "%s: stdout %s stderr %s", verb, got.stdout, got.stderr)
			}
			succeeds("ADD")
			Expect(rdmaNames(p.path)).To(ConsistOf(softDevice))
			Expect(rdmaNames(node.path)).To(BeEmpty())
			succeeds("CHECK")
			succeeds("DEL")
			Expect(rdmaNames(p.path)).To(BeEmpty())
			expectNoSoftDevice()
		})

		It("says how to let it, if none does", func() {
			node, p := newPod(), softPod(newPod)
			e := inNode(node, true, softAttachment(p), "ADD").failure()
			Expect(e.Code).To(Equal(102))
			Expect(e.Msg).To(And(ContainSubstring("initial network namespace"), ContainSubstring("kind")))
			Expect(records()).To(BeEmpty())
			p.remove()
			expectNoSoftDevice()
		})
	})

	It("stays with its first device when ADD is repeated", func() {
		p := softPod(newPod)
		a := softAttachment(p)
		a.succeed("ADD")
		index := rdmaDevices(p.path)[softDevice]
		a.succeed("ADD")
		Expect(rdmaDevices(p.path)).To(Equal(map[string]uint32{softDevice: index}))
		onlyRecord(a)
		a.succeed("DEL")
	})

	It("notices in CHECK that its device has gone, and DEL converges", func() {
		p := softPod(newPod)
		a := softAttachment(p)
		a.succeed("ADD")
		run("ip", "netns", "exec", p.name, "rdma", "link", "del", softDevice)
		e := a.fail("CHECK")
		Expect(e.Code).To(Equal(104))
		Expect(e.Msg).To(ContainSubstring(softDevice))
		a.succeed("DEL")
		Expect(records()).To(BeEmpty())
	})

	It("is removed by DEL from wherever the pod has put it", func() {
		p, third := softPod(newPod), newPod()
		a := softAttachment(p)
		a.succeed("ADD")
		renameIn(p, softDevice, "mine")
		run("ip", "netns", "exec", p.name, "rdma", "dev", "set", "mine", "netns", third.name)
		a.succeed("DEL")
		Expect(rdmaNames(third.path)).To(BeEmpty())
		expectNoSoftDevice()
		Expect(records()).To(BeEmpty())
	})

	DescribeTable("is ended by gc and by a late DEL after its namespace's death", func(end func(a attachment)) {
		p := softPod(newPod)
		a := softAttachment(p)
		a.succeed("ADD")
		p.remove()
		expectNoSoftDevice()
		end(a)
		Expect(records()).To(BeEmpty())
	},
		Entry("DEL", func(a attachment) { a.succeed("DEL") }),
		Entry("gc", func(attachment) { Expect(companion("gc").exit).To(BeZero()) }),
		Entry("GC", func(a attachment) {
			a.with("cni.dev/valid-attachments", []any{}).succeed("GC")
		}),
	)

	It("is left by gc and GC while its pod lives", func() {
		p := softPod(newPod)
		a := softAttachment(p)
		a.succeed("ADD")
		Expect(companion("gc").exit).To(BeZero())
		a.with("cni.dev/valid-attachments", []any{}).succeed("GC")
		a.succeed("CHECK")
		a.succeed("DEL")
	})

	It("is removed although its record cannot be read, and left while gc cannot tell", func() {
		p := softPod(newPod)
		a := softAttachment(p)
		a.succeed("ADD")
		Expect(records()).To(HaveLen(1))
		Expect(os.WriteFile(filepath.Join(stateDir, records()[0]), nil, 0o600)).To(Succeed())
		Expect(companion("gc").exit).To(BeZero())
		Expect(records()).To(HaveLen(1))
		Expect(rdmaNames(p.path)).To(ConsistOf(softDevice))
		a.succeed("DEL")
		Expect(rdmaNames(p.path)).To(BeEmpty())
		expectNoSoftDevice()
		Expect(records()).To(BeEmpty())
	})

	DescribeTable("survives the plugin's death at any change", func(command string, calls ...string) {
		met := map[string]bool{}
		for n := 0; ; n++ {
			p := softPod(fastPod)
			a := softAttachment(p)
			if command == "DEL" {
				a.succeed("ADD")
			}
			i := 0
			var at point
			got := a.traced(command, func(p point) bool {
				if !strings.HasPrefix(p.call, "sendto") && !strings.HasSuffix(p.call, " record") {
					return false // the other points are those of every attachment
				}
				i++
				at = p
				return i-1 == n
			})
			if got.exit != killed {
				Expect(got.exit).To(BeZero(), got.stdout)
				a.succeed("DEL")
				p.kill()
				break
			}
			met[at.call] = true
			By(fmt.Sprintf("%d, %s", n, at))
			switch n % 3 {
			case 0: // its DEL comes
				a.succeed("DEL")
				Expect(rdmaNames(p.path)).To(BeEmpty())
				p.kill()
			case 1: // it is tried again
				a.succeed("ADD")
				Expect(rdmaNames(p.path)).To(ConsistOf(softDevice))
				a.succeed("CHECK")
				a.succeed("DEL")
				p.kill()
			case 2: // its namespace dies, and nobody sends a DEL
				p.kill()
				Eventually(func() []string {
					Expect(companion("gc").exit).To(BeZero())
					return records()
				}, patience).Should(BeEmpty())
			}
			expectNoSoftDevice()
			Expect(records()).To(BeEmpty())
			expectLockFree()
		}
		Expect(slices.Collect(maps.Keys(met))).To(ConsistOf(calls))
	},
		Entry("of ADD", "ADD", "renameat record", "sendto (make or remove an RDMA device)", "sendto (change an RDMA device)"),
		Entry("of DEL", "DEL", "sendto (make or remove an RDMA device)", "unlinkat record"),
	)

	Context("made by an administrator", func() {
		// byHand makes a device on net1 of a pod as rdma(8) does.
		byHand := func(p pod, name string) {
			GinkgoHelper()
			run("ip", "netns", "exec", p.name, "rdma", "link", "add", name, "type", "rxe", "netdev", "net1")
		}
		DescribeTable("is moved, and comes home under its name", func(keys ...string) {
			p := softPod(newPod)
			byHand(p, "mine")
			a := vfAttachment(p, 0).with("deviceID", nil)
			for _, key := range keys {
				a = a.with(key, true)
			}
			a = a.with("rdmaDeviceName", "rail")
			index := rdmaDevices(hostNetns)["mine"]
			a.succeed("ADD")
			Expect(rdmaDevices(p.path)).To(Equal(map[string]uint32{"rail": index}))
			a.succeed("CHECK")
			a.succeed("ADD")
			Expect(rdmaDevices(p.path)).To(Equal(map[string]uint32{"rail": index}))
			a.succeed("DEL")
			Expect(rdmaDevices(hostNetns)).To(HaveKeyWithValue("mine", index))
			a.succeed("DEL")
			Expect(rdmaDevices(hostNetns)).To(HaveKeyWithValue("mine", index))
			run("rdma", "link", "del", "mine")
		},
			Entry("by a configuration without softRoCE"),
			Entry("by one with it, which makes no second one", "softRoCE"),
		)

		It("is told from that of another pod whose interface has the same name", func() {
			p, q := softPod(newPod), softPod(newPod)
			byHand(p, "one")
			byHand(q, "two")
			b := vfAttachment(q, 0).with("deviceID", nil)
			b.succeed("ADD")
			Expect(rdmaNames(q.path)).To(ConsistOf("two"))
			Expect(rdmaNames(hostNetns)).To(ContainElement("one"))
			By("also by its address, when the MAC was changed after it was made")
			run("ip", "-n", p.name, "addr", "add", "192.168.8.1/24", "dev", "net1")
			run("ip", "-n", p.name, "link", "set", "net1", "address", "02:00:00:00:00:42")
			a := vfAttachment(p, 0).with("deviceID", nil)
			a.succeed("ADD")
			Expect(rdmaNames(p.path)).To(ConsistOf("one"))
			a.succeed("DEL")
			b.succeed("DEL")
			Expect(rdmaNames(hostNetns)).To(ContainElements("one", "two"))
		})

		It("is refused when nothing tells it from another one", func() {
			p, q := softPod(newPod), softPod(newPod)
			for _, p := range []pod{p, q} {
				run("ip", "-n", p.name, "link", "set", "net1", "address", "02:00:00:00:00:42")
			}
			byHand(p, "one")
			byHand(q, "two")
			e := vfAttachment(p, 0).with("deviceID", nil).fail("ADD")
			Expect(e.Code).To(Equal(102))
			Expect(e.Msg).To(And(ContainSubstring("one, two"), ContainSubstring("02:00:00:00:00:42")))
			Expect(records()).To(BeEmpty())
		})

		It("is not taken for another interface's because of its name", func() {
			p, q := softPod(newPod), softPod(newPod)
			byHand(q, "rxe_net1")
			e := vfAttachment(p, 0).with("deviceID", nil).fail("ADD")
			Expect(e.Code).To(Equal(102))
			Expect(rdmaNames(hostNetns)).To(ContainElement("rxe_net1"))
			a := softAttachment(p)
			a.succeed("ADD")
			a.succeed("DEL")
			Expect(rdmaNames(hostNetns)).To(ContainElement("rxe_net1"))
		})

		It("keeps its rdma_cm, since doctor does not try to move it", func() {
			p := softPod(newPod)
			byHand(p, "mine")
			got := companion("doctor", "--probe", "mine")
			Expect(got.exit).To(Equal(1))
			Expect(got.stdout + got.stderr).To(ContainSubstring("rdma_cm"))
			Expect(run("rdma", "resource", "show", "qp", "link", "mine/1")).To(ContainSubstring("GSI"))
		})

		It("is refused while it is in the pod without a record", func() {
			p := softPod(newPod)
			byHand(p, "mine")
			run("rdma", "dev", "set", "mine", "netns", p.name)
			e := softAttachment(p).fail("ADD")
			Expect(e.Code).To(Equal(11))
			Expect(e.Msg).To(And(ContainSubstring("in the pod already"), ContainSubstring("no record")))
			Expect(rdmaNames(p.path)).To(ConsistOf("mine"))
			Expect(records()).To(BeEmpty())
		})

		It("goes with the namespace; DEL and gc know", func() {
			p := softPod(newPod)
			byHand(p, "mine")
			a := vfAttachment(p, 0).with("deviceID", nil)
			a.succeed("ADD")
			p.remove()
			expectNoSoftDevice()
			a.succeed("DEL")
			Expect(records()).To(BeEmpty())
		})
	})

	// Should one of these fail because the device has its queue pair, the kernel
	// has learnt it: then doctor and the documents may say so.
	DescribeTable("has no rdma_cm once it was moved, in whichever order, and doctor says so", func(steps ...string) {
		p := softPod(newPod)
		run("ip", "-n", p.name, "link", "set", "net1", "down")
		queuePairs := func(where string) string {
			return run("ip", "netns", "exec", where, "rdma", "resource", "show", "qp", "link", "soft/1")
		}
		for _, step := range steps {
			switch step {
			case "add":
				run("ip", "netns", "exec", p.name, "rdma", "link", "add", "soft", "type", "rxe", "netdev", "net1")
				Expect(queuePairs(hostName)).To(ContainSubstring("GSI"), "it has before a move")
			case "up":
				run("ip", "-n", p.name, "link", "set", "net1", "up")
			case "move":
				run("rdma", "dev", "set", "soft", "netns", p.name)
			case "back":
				run("ip", "netns", "exec", p.name, "rdma", "dev", "set", "soft", "netns", hostName)
			}
		}
		Expect(queuePairs(p.name)).NotTo(ContainSubstring("GSI"))
		var findings []finding
		companionJSON(&findings, 0, "doctor", "--netns", p.path)
		Expect(findings).To(ContainElement(And(HaveField("Check", "rdma-cm"), HaveField("Severity", "WARN"), HaveField("Device", "soft"))))
	},
		Entry("made on an interface that is up", "up", "add", "move"),
		Entry("set up before the move", "add", "up", "move"),
		Entry("set up after the move", "add", "move", "up"),
		Entry("moved twice", "up", "add", "move", "back", "move"),
	)
})

var _ = Describe("soft-RoCE before its release", Label(kernelSpec), func() {
	It("is refused by the kernel, which ADD says with the release that is needed, and nothing is left", func() {
		needKernel("from 7.3 on soft-RoCE devices can be moved", "6.1", "6.12")
		loadRXE()
		p := softPod(newPod)
		e := softAttachment(p).fail("ADD")
		Expect(e.Code).To(Equal(103))
		Expect(e.Msg).To(And(ContainSubstring("rdma_rxe"), ContainSubstring("EOPNOTSUPP"), ContainSubstring("from Linux 7.3 on"), ContainSubstring(release())))
		Expect(records()).To(BeEmpty())
		expectNoSoftDevice()
		softAttachment(p).succeed("DEL")
	})
})

// containerOf is the container ID that cnitool gives to a pod.
func containerOf(p pod) string {
	sum := sha512.Sum512([]byte(p.path))
	return fmt.Sprintf("cnitool-%x", sum[:10])
}

// softAttachmentOf is the attachment that cnitool made of a pod.
func softAttachmentOf(p pod) attachment {
	a := softAttachment(p)
	a.id = containerOf(p)
	return a
}
