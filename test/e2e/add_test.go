package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

var _ = Describe("ADD", func() {
	It("gives back prevResult unchanged, keys of others included", func() {
		p := newPod()
		a := vfAttachment(p, 0)
		a.conf["prevResult"].(map[string]any)["vendor.example/extra"] = "kept"
		want, err := json.Marshal(a.conf["prevResult"])
		Expect(err).NotTo(HaveOccurred())
		got := a.succeed("ADD")
		Expect(got.stdout).To(MatchJSON(want))
		expectIn(p, 0)
		a.succeed("DEL")
		expectHome(0)
	})

	It("is repeatable: the device stays where it is", func() {
		p := newPod()
		a := vfAttachment(p, 0)
		a.succeed("ADD")
		a.succeed("ADD")
		expectIn(p, 0)
		Expect(records()).To(HaveLen(1))
		a.succeed("DEL")
		expectHome(0)
	})

	It("accepts a 253-character network name and a 200-character container ID", func() {
		p := newPod()
		p.takeNetdev(0)
		a := vfAttachment(p, 0).with("name", strings.Repeat("n", 253))
		a.id = strings.Repeat("c", 200)
		a.succeed("ADD")
		expectIn(p, 0)
		a.succeed("CHECK")
		a.succeed("DEL")
		expectHome(0)
	})

	It("finds the VF by the MAC of prevResult when the pod has no such interface", func() {
		p := newPod()
		a := vfAttachment(p, 2).with("deviceID", nil)
		mac := strings.TrimSpace(run("cat", "/sys/class/net/"+netdevOf(vfs[2])+"/address"))
		a.conf["prevResult"].(map[string]any)["interfaces"].([]any)[0].(map[string]any)["mac"] = strings.ToUpper(mac)
		a.succeed("ADD")
		expectIn(p, 2)
		a.succeed("DEL")
		expectHome(2)
	})

	It("reports character devices that the move renumbered, and succeeds", Label(kernelSpec), func() {
		p := newPod()
		p.takeNetdev(1)
		sim("del %s", vfDevice(0)) // a hole below the others
		a := vfAttachment(p, 1)
		before := charDevices()
		got := a.succeed("ADD")
		after := charDevices()
		Expect(after).NotTo(Equal(before), "the kernel takes the lowest free number")
		Expect(got.logged("ERROR")).To(ConsistOf(And(ContainSubstring("changed the character devices"),
			ContainSubstring("uverbs1"), ContainSubstring("uverbs0"))))
		Expect(a.succeed("CHECK").logged("ERROR")).To(ConsistOf(ContainSubstring("changed the character devices")))
		a.succeed("DEL")
		sim("del *")
		addVFDevices()
	})

	It("remembers by how much a device's index and verbs node differ, and does not believe it blindly", func() {
		sim("del *")
		addVFDevices() // the same numbers again, but later indexes
		devices := rdmaDevices(hostNetns)
		Expect(charDevices()).To(HaveKeyWithValue("uverbs0", HaveSuffix(" "+vfDevice(0))))
		Expect(devices[vfDevice(0)]).NotTo(BeZero())
		offsets := filepath.Join(stateDir, "offsets")
		Expect(os.MkdirAll(stateDir, 0o700)).To(Succeed())
		for _, guess := range []string{"", fmt.Sprintln(devices[vfDevice(1)]), fmt.Sprintln(1 << 31)} {
			Expect(os.WriteFile(offsets, []byte(guess), 0o600)).To(Succeed())
			p := newPod()
			a := vfAttachment(p, 0)
			a.succeed("ADD")
			expectIn(p, 0)
			a.succeed("DEL")
			expectHome(0)
			Expect(os.ReadFile(offsets)).To(BeEquivalentTo(fmt.Sprintf("%d\n%s", devices[vfDevice(0)], guess)))
			p.remove()
		}
	})

	Describe("refuses, and changes nothing", func() {
		// Each entry prepares one fault, and says what the message has to name.
		DescribeTable("bad requests",
			func(change func(p pod, a attachment) attachment, code int, says ...string) {
				p := newPod()
				a := change(p, vfAttachment(p, 0))
				before := snapshot()
				e := a.fail("ADD")
				Expect(e.Code).To(Equal(code), e.Msg)
				for _, s := range says {
					Expect(e.Msg).To(ContainSubstring(s))
				}
				Expect(snapshot()).To(Equal(before))
				Expect(rdmaNames(hostNetns)).To(ConsistOf(vfDevice(0), vfDevice(1), vfDevice(2), vfDevice(3)))
			},
			Entry("without prevResult", func(_ pod, a attachment) attachment { return a.with("prevResult", nil) },
				7, "prevResult", "sriov"),
			Entry("a namespace that is missing", func(_ pod, a attachment) attachment { a.netns = "/run/netns/nowhere"; return a },
				8, "/run/netns/nowhere"),
			Entry("a namespace path that is a directory", func(_ pod, a attachment) attachment { a.netns = "/tmp"; return a },
				8, "/tmp", "not a network namespace"),
			Entry("a namespace path that is a plain file", func(_ pod, a attachment) attachment { a.netns = "/etc/passwd"; return a },
				8, "/etc/passwd", "not a network namespace"),
			Entry("a namespace of another type", func(_ pod, a attachment) attachment { a.netns = "/proc/self/ns/mnt"; return a },
				8, "another type"),
			Entry("its own namespace", func(_ pod, a attachment) attachment { a.netns = "/proc/self/ns/net"; return a },
				8, "runs in"),
			Entry("a function that does not exist", func(_ pod, a attachment) attachment { return a.with("deviceID", "0000:99:00.1") },
				102, "0000:99:00.1", "no such PCI function"),
			Entry("a deviceID that leads elsewhere", func(_ pod, a attachment) attachment { return a.with("deviceID", "../../net/lo") },
				7, "deviceID", "../../net/lo"),
			Entry("two device IDs that differ", func(_ pod, a attachment) attachment { return a.with("pciBusID", vfs[1]) },
				7, "deviceID", "pciBusID", vfs[0], vfs[1]),
			Entry("a deviceID of the wrong type", func(_ pod, a attachment) attachment { return a.with("deviceID", 7) },
				7, "deviceID", "7"),
			Entry("no way to find the function", func(_ pod, a attachment) attachment { return a.with("deviceID", nil) },
				102, "net1", "02:00:00:00:00:99", "deviceID"),
			Entry("a function whose driver has no RDMA", func(_ pod, a attachment) attachment { return a.with("deviceID", "0000:01:11.0") },
				102, "0000:01:11.0", "igbvf"),
		)

		It("a function without driver", func() {
			p, vf := newPod(), "0000:01:11.0"
			run("sh", "-c", "echo "+vf+" > /sys/bus/pci/drivers/igbvf/unbind")
			e := vfAttachment(p, 0).with("deviceID", vf).fail("ADD")
			Expect(e.Msg).To(And(ContainSubstring(vf), ContainSubstring("no driver")))
			run("sh", "-c", "echo "+vf+" > /sys/bus/pci/drivers/igbvf/bind")
			Eventually(func() []string { return dirNames("/sys/bus/pci/devices/" + vf + "/net") }, patience).Should(HaveLen(1))
		})

		It("a function with several RDMA devices, naming them", func() {
			p := newPod()
			sim("add name=second parent=pci:%s", vfs[0])
			e := vfAttachment(p, 0).fail("ADD")
			Expect(e.Msg).To(And(ContainSubstring("second"), ContainSubstring(vfDevice(0))))
			Expect(rdmaNames(hostNetns)).To(ContainElements("second", vfDevice(0)))
			sim("del second")
		})

		It("a driver that cannot release its devices, naming it", Label(kernelSpec), func() {
			p := newPod()
			sim("del %s", vfDevice(0))
			sim("add name=%s parent=pci:%s movable=0", vfDevice(0), vfs[0])
			e := vfAttachment(p, 0).fail("ADD")
			Expect(e.Code).To(Equal(103))
			Expect(e.Msg).To(And(ContainSubstring(vfDevice(0)), ContainSubstring("igbvf"), ContainSubstring("EOPNOTSUPP"), ContainSubstring("disassociate_ucontext")))
			expectHome(0)
		})

		It("a device that another live pod has, naming the pod", func() {
			owner, p := newPod(), newPod()
			owner.takeNetdev(0)
			first := vfAttachment(owner, 0)
			first.args = "IgnoreUnknown=true;K8S_POD_NAMESPACE=training;K8S_POD_NAME=worker-0"
			first.succeed("ADD")
			e := vfAttachment(p, 0).fail("ADD")
			Expect(e.Code).To(Equal(11))
			Expect(e.Msg).To(And(ContainSubstring("training/worker-0"), ContainSubstring(owner.id), ContainSubstring(owner.path)))
			expectIn(owner, 0)
			first.succeed("CHECK")
			vfAttachment(p, 0).succeed("DEL")
			expectIn(owner, 0)
			first.succeed("DEL")
			expectHome(0)
		})

		It("a device in a namespace that no record knows, saying how it is reached", func() {
			stranger, p := newPod(), newPod()
			run("rdma", "dev", "set", vfDevice(0), "netns", stranger.name)
			e := vfAttachment(p, 0).fail("ADD")
			Expect(e.Code).To(Equal(11))
			Expect(e.Msg).To(And(ContainSubstring("no record"), ContainSubstring(stranger.path)))
			stranger.remove()
			Eventually(func() []string { return rdmaNames(hostNetns) }, patience).Should(ContainElement(vfDevice(0)))
		})

		It("a pod that already holds a foreign device", func() {
			p := newPod()
			run("rdma", "dev", "set", vfDevice(3), "netns", p.name)
			e := vfAttachment(p, 0).fail("ADD")
			Expect(e.Code).To(Equal(104))
			Expect(e.Msg).To(And(ContainSubstring(vfDevice(3)), ContainSubstring("no record")))
			expectHome(0)
			Expect(records()).To(BeEmpty())
			p.remove()
			Eventually(func() []string { return rdmaNames(hostNetns) }, patience).Should(ContainElement(vfDevice(3)))
		})
	})

	It("takes the device home again if it arrives incomplete", Label(kernelSpec), func() {
		p := newPod()
		sim("fault %s enable-errno=5", vfDevice(0))
		e := vfAttachment(p, 0).fail("ADD")
		Expect(e.Msg).To(And(ContainSubstring(vfDevice(0)), ContainSubstring("EIO")))
		expectHome(0)
		Expect(records()).To(BeEmpty())
		vfAttachment(p, 0).succeed("ADD")
		vfAttachment(p, 0).succeed("DEL")
	})

	It("undoes the attachment if nobody can be told of it", func() {
		p := newPod()
		a := vfAttachment(p, 0)
		stdin, err := json.Marshal(a.conf)
		Expect(err).NotTo(HaveOccurred())
		c := a.command("ADD", stdin)
		reader, writer, err := os.Pipe()
		Expect(err).NotTo(HaveOccurred())
		Expect(reader.Close()).To(Succeed())
		c.Cmd.Stdout = writer
		Expect(c.Run()).NotTo(Succeed())
		Expect(writer.Close()).To(Succeed())
		Expect(c.ProcessState.ExitCode()).To(Equal(1), "an exit, not a death by SIGPIPE; stderr %s", c.stderr.String())
		expectHome(0)
		Expect(rdmaNames(p.path)).To(BeEmpty())
		Expect(records()).To(BeEmpty())
	})

	It("waits for a device that is on its way home from a dead pod, and drops that pod's record", func() {
		old, p := newPod(), newPod()
		p.takeNetdev(0)
		vfAttachment(old, 0).succeed("ADD")
		old.remove() // no DEL; the kernel tears the namespace down behind our back
		got := vfAttachment(p, 0).succeed("ADD")
		expectIn(p, 0)
		Expect(got.logged("WARN")).To(ContainElement(ContainSubstring(old.id)))
		Expect(records()).To(HaveLen(1))
		By("a late DEL of the old pod does not touch the new one's device")
		vfAttachment(old, 0).succeed("DEL")
		expectIn(p, 0)
		vfAttachment(p, 0).succeed("CHECK")
		vfAttachment(p, 0).succeed("DEL")
		expectHome(0)
	})

	It("says who holds the device when a dead pod's namespace is kept alive", func() {
		old, p := newPod(), newPod()
		vfAttachment(old, 0).succeed("ADD")
		holder := inPod(old)
		old.remove()
		e := vfAttachment(p, 0).fail("ADD")
		Expect(e.Code).To(Equal(11))
		Expect(e.Msg).To(And(ContainSubstring(old.id), ContainSubstring(fmt.Sprintf("/proc/%d/", holder.Process.Pid)), ContainSubstring("sleep")))
		By("the DEL of the old pod fetches it from there")
		vfAttachment(old, 0).succeed("DEL")
		expectHome(0)
		vfAttachment(p, 0).succeed("ADD")
		vfAttachment(p, 0).succeed("DEL")
	})
})

func readlink(path string) string {
	GinkgoHelper()
	link, err := os.Readlink(path)
	Expect(err).NotTo(HaveOccurred())
	return link
}

var _ = Describe("a node in shared mode", Ordered, Label(kernelSpec), func() {
	BeforeAll(func() { setMode("shared") })
	AfterAll(func() { setMode("exclusive") })

	It("refuses ADD and says how to change the mode", func() {
		p := newPod()
		e := vfAttachment(p, 0).fail("ADD")
		Expect(e.Code).To(Equal(101))
		Expect(e.Msg).To(And(ContainSubstring("shared"), ContainSubstring("rdma system set netns exclusive"), ContainSubstring("EBUSY"),
			ContainSubstring("netns_mode=0"), ContainSubstring("initramfs")))
		Expect(records()).To(BeEmpty())
		p.remove() // the mode changes before what DeferCleanup has
	})

	It("is not available", func() {
		e := attachment{conf: map[string]any{"cniVersion": "1.1.0", "name": "rail", "type": "rdma"}}.fail("STATUS")
		Expect(e.Code).To(Equal(50))
		Expect(e.Msg).To(ContainSubstring("shared"))
	})

	It("impairs attachments that were made before", func() {
		Expect(os.MkdirAll(stateDir, 0o700)).To(Succeed())
		record := filepath.Join(stateDir, "c@net1@"+vfs[0]+".json")
		Expect(os.WriteFile(record, []byte("{}"), 0o600)).To(Succeed())
		e := attachment{conf: map[string]any{"cniVersion": "1.1.0", "name": "rail", "type": "rdma"}}.fail("STATUS")
		Expect(e.Code).To(Equal(51))
		Expect(os.Remove(record)).To(Succeed())
	})
})
