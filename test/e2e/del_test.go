package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

// recordOf is the record file of an attachment to VF number i.
func recordOf(a attachment, i int) string {
	return filepath.Join(stateDir, a.id+"@"+a.ifname+"@"+vfs[i]+".json")
}

var _ = Describe("DEL converges", Label(kernelSpec), func() {
	var p pod
	var a attachment
	BeforeEach(func() {
		p = newPod()
		a = vfAttachment(p, 0)
		a.succeed("ADD")
		expectIn(p, 0)
	})
	// delTwice is what every runtime does.
	delTwice := func(a attachment) answer {
		GinkgoHelper()
		got := a.succeed("DEL")
		Expect(got.stdout).To(BeEmpty())
		expectHome(0)
		Expect(records()).To(BeEmpty())
		a.succeed("DEL")
		expectHome(0)
		return got
	}

	It("when the namespace is there", func() {
		delTwice(a)
		Expect(rdmaNames(p.path)).To(BeEmpty())
	})

	It("when the namespace's path is gone: the kernel brings the device home", func() {
		p.remove()
		delTwice(a)
	})

	It("when CNI_NETNS is empty and the namespace is gone", func() {
		p.remove()
		a.netns = ""
		delTwice(a)
	})

	It("when CNI_NETNS is empty but the namespace lives", func() {
		a.netns = ""
		delTwice(a)
		Expect(rdmaNames(p.path)).To(BeEmpty())
	})

	It("when the path is no namespace any more", func() {
		run("umount", p.path)
		Expect(p.path).To(BeARegularFile())
		delTwice(a)
		Expect(os.Remove(p.path)).To(Succeed())
	})

	It("when the path leads to another namespace", func() {
		run("ip", "netns", "del", p.name)
		run("ip", "netns", "add", p.name)
		delTwice(a)
	})

	It("when CNI_NETNS is the host's namespace", func() {
		a.netns = "/proc/self/ns/net"
		delTwice(a)
	})

	It("when the device is at home already", func() {
		run("ip", "netns", "exec", p.name, "rdma", "dev", "set", vfDevice(0), "netns", hostName)
		expectHome(0)
		delTwice(a)
	})

	It("when the pod has renamed the device", func() {
		run("ip", "netns", "exec", p.name, "rdma", "dev", "set", vfDevice(0), "name", "mine")
		Expect(rdmaNames(p.path)).To(ConsistOf("mine"))
		Expect(delTwice(a).logged("WARN")).To(ContainElement(ContainSubstring("mine")))
	})

	It("when the pod has renamed the device and the kernel brought it home", func() {
		run("ip", "netns", "exec", p.name, "rdma", "dev", "set", vfDevice(0), "name", "mine")
		p.remove()
		Eventually(func() []string { return rdmaNames(hostNetns) }, patience).Should(ContainElement("mine"))
		delTwice(a)
	})

	It("when the device's old name is taken: it comes home under the other one", func() {
		run("ip", "netns", "exec", p.name, "rdma", "dev", "set", vfDevice(0), "name", "mine")
		run("rdma", "dev", "set", vfDevice(3), "name", vfDevice(0))
		got := a.succeed("DEL")
		Expect(got.logged("ERROR")).To(ContainElement(And(ContainSubstring("mine"), ContainSubstring("is taken"))))
		Expect(rdmaNames(hostNetns)).To(ContainElements("mine", vfDevice(0)))
		run("rdma", "dev", "set", vfDevice(0), "name", vfDevice(3))
		run("rdma", "dev", "set", "mine", "name", vfDevice(0))
	})

	It("when the pod has moved the device on to a third namespace", func() {
		third := newPod()
		run("ip", "netns", "exec", p.name, "rdma", "dev", "set", vfDevice(0), "netns", third.name)
		Expect(rdmaNames(third.path)).To(ConsistOf(vfDevice(0)))
		Expect(delTwice(a).logged("ERROR")).To(ContainElement(ContainSubstring(third.path)))
		Expect(rdmaNames(third.path)).To(BeEmpty())
	})

	It("when only an open file keeps the namespace alive", func() {
		file, err := os.Open(p.path)
		Expect(err).NotTo(HaveOccurred())
		defer file.Close()
		p.remove()
		Expect(delTwice(a).logged("ERROR")).To(ContainElement(ContainSubstring("/fd/")))
	})

	DescribeTable("when the record is damaged", func(damage func(path string), lost bool) {
		damage(recordOf(a, 0))
		if lost {
			p.remove()
		}
		got := delTwice(a)
		Expect(got.logged("ERROR")).To(ContainElement(ContainSubstring("unusable")))
	},
		Entry("empty", func(path string) { Expect(os.Truncate(path, 0)).To(Succeed()) }, false),
		Entry("cut short", func(path string) { Expect(os.Truncate(path, 40)).To(Succeed()) }, false),
		Entry("empty, and the namespace is gone", func(path string) { Expect(os.Truncate(path, 0)).To(Succeed()) }, true),
		Entry("of a newer version", func(path string) {
			Expect(os.WriteFile(path, []byte(`{"version":"3.0"}`), 0o600)).To(Succeed())
		}, false),
	)

	It("when the configuration is damaged: the record decides", func() {
		a.conf = map[string]any{"cniVersion": "1.1.0", "name": "rail", "type": "rdma", "deviceID": 7, "prevResult": []any{"x"}, "logLevel": false}
		delTwice(a)
	})

	It("when the configuration names another device: the record decides", func() {
		delTwice(a.with("deviceID", vfs[1]))
		expectHome(1)
	})

	It("when the driver was unbound and bound again", func() {
		sim("del %s", vfDevice(0))
		sim("add name=%s parent=pci:%s", vfDevice(0), vfs[0])
		expectHome(0)
		e := a.fail("CHECK")
		Expect(e.Code).To(Equal(104))
		Expect(e.Msg).To(ContainSubstring("at home"))
		delTwice(a)
	})

	It("when the function has lost its RDMA device", func() {
		sim("del %s", vfDevice(0))
		got := a.succeed("DEL")
		Expect(got.logged("WARN")).To(ContainElement(ContainSubstring("no RDMA device now")))
		Expect(records()).To(BeEmpty())
		sim("add name=%s parent=pci:%s", vfDevice(0), vfs[0])
	})

	It("when ADD died before the move", func() {
		a.succeed("DEL")
		a.succeed("ADD")
		record, err := os.ReadFile(recordOf(a, 0))
		Expect(err).NotTo(HaveOccurred())
		a.succeed("DEL")
		// What a kill leaves between the record and the move.
		Expect(os.WriteFile(recordOf(a, 0), setPhase(record, "intended"), 0o600)).To(Succeed())
		delTwice(a)
	})

	It("when ADD died after the move", func() {
		record, err := os.ReadFile(recordOf(a, 0))
		Expect(err).NotTo(HaveOccurred())
		Expect(os.WriteFile(recordOf(a, 0), setPhase(record, "intended"), 0o600)).To(Succeed())
		Expect(a.fail("CHECK").Msg).To(ContainSubstring("not finished"))
		delTwice(a)
	})
})

func setPhase(record []byte, phase string) []byte {
	GinkgoHelper()
	var r map[string]any
	Expect(json.Unmarshal(record, &r)).To(Succeed())
	r["phase"] = phase
	out, err := json.Marshal(r)
	Expect(err).NotTo(HaveOccurred())
	return out
}

var _ = Describe("DEL without a record", func() {
	It("does nothing, wherever the configured device is", func() {
		p := newPod()
		run("rdma", "dev", "set", vfDevice(0), "netns", p.name)
		vfAttachment(p, 0).succeed("DEL")
		Expect(rdmaNames(p.path)).To(ConsistOf(vfDevice(0)))
		run("ip", "netns", "exec", p.name, "rdma", "dev", "set", vfDevice(0), "netns", hostName)
	})

	It("honours records of the upstream plugin", func() {
		for _, extra := range []map[string]any{{}, {"rdmaQoS": map[string]any{"tos": 0, "tc": 0}}} {
			p := newPod()
			a := vfAttachment(p, 0)
			run("rdma", "dev", "set", vfDevice(0), "name", "inpod")
			run("rdma", "dev", "set", "inpod", "netns", p.name)
			record := map[string]any{"version": "1.0", "deviceID": vfs[0], "sandboxRdmaDevName": vfDevice(0), "containerRdmaDevName": "inpod"}
			for k, v := range extra {
				record[k] = v
			}
			data, err := json.Marshal(record)
			Expect(err).NotTo(HaveOccurred())
			Expect(os.MkdirAll("/var/lib/cni/rdma", 0o700)).To(Succeed())
			path := "/var/lib/cni/rdma/rail-" + p.id + "-net1"
			Expect(os.WriteFile(path, data, 0o600)).To(Succeed())

			e := vfAttachment(newPod(), 0).fail("ADD")
			Expect(e.Msg).To(ContainSubstring(path))
			a.succeed("CHECK")
			a.succeed("DEL")
			expectHome(0)
			Expect(path).NotTo(BeAnExistingFile())
			a.succeed("DEL")
		}
	})

	It("drops an upstream record whose namespace is gone, once the device is home", func() {
		p := newPod()
		run("rdma", "dev", "set", vfDevice(0), "netns", p.name)
		Expect(os.MkdirAll("/var/lib/cni/rdma", 0o700)).To(Succeed())
		path := "/var/lib/cni/rdma/rail-" + p.id + "-net1"
		Expect(os.WriteFile(path, []byte(`{"version":"1.0","deviceID":"`+vfs[0]+`","sandboxRdmaDevName":"`+vfDevice(0)+`","containerRdmaDevName":"`+vfDevice(0)+`"}`), 0o600)).To(Succeed())
		p.remove()
		vfAttachment(p, 0).succeed("DEL")
		expectHome(0)
		Expect(path).NotTo(BeAnExistingFile())
	})
})

// This spec leaves the guest without RDMA, so it gets one of its own.
var _ = Describe("a kernel whose RDMA modules are unloaded", Label(alone), func() {
	It("refuses ADD and STATUS with the module's name, and lets DEL succeed", func() {
		p := newPod()
		a := vfAttachment(p, 0)
		addVFDevices()
		a.succeed("ADD")
		run("rmmod", "rdmasim", "rdma_ucm", "rdma_cm", "iw_cm", "ib_cm", "ib_umad", "ib_uverbs", "ib_core")
		e := a.fail("ADD")
		Expect(e.Code).To(Equal(101))
		Expect(e.Msg).To(ContainSubstring("ib_core"))
		Expect(attachment{conf: a.conf}.fail("STATUS").Code).To(Equal(50))
		Expect(records()).To(HaveLen(1))
		a.succeed("DEL")
		Expect(records()).To(BeEmpty())
		vfAttachment(p, 1).succeed("DEL")
	})
})
