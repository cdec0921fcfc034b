package e2e

import (
	"encoding/json"
	"os"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

var _ = Describe("CHECK", func() {
	var p pod
	var a attachment
	BeforeEach(func() {
		p = newPod()
		a = vfAttachment(p, 0)
	})

	It("refuses an attachment that does not exist", func() {
		e := a.fail("CHECK")
		Expect(e.Code).To(Equal(104))
		Expect(e.Msg).To(ContainSubstring("no record"))
	})

	Context("of an attachment", func() {
		BeforeEach(func() {
			// RoCE belongs to its own netdev, so CHECK wants that one in the pod.
			p.takeNetdev(0)
			a.succeed("ADD")
			DeferCleanup(func() { a.succeed("DEL") })
		})

		It("passes", func() { Expect(a.succeed("CHECK").stdout).To(BeEmpty()) })

		DescribeTable("finds what is wrong", func(change func(), says ...string) {
			change()
			e := a.fail("CHECK")
			for _, s := range says {
				Expect(e.Msg).To(ContainSubstring(s))
			}
		},
			Entry("no prevResult", func() { a = a.with("prevResult", nil) }, "prevResult"),
			Entry("another interface in prevResult", func() {
				a.conf["prevResult"].(map[string]any)["interfaces"].([]any)[0].(map[string]any)["name"] = "net9"
			}, "net1"),
			Entry("another device in the configuration", func() { a = a.with("deviceID", vfs[1]) }, vfs[0], vfs[1]),
			Entry("the device was brought home", func() {
				run("ip", "netns", "exec", p.name, "rdma", "dev", "set", vfDevice(0), "netns", hostName)
			}, vfDevice(0), "at home"),
			Entry("the device was renamed", func() {
				run("ip", "netns", "exec", p.name, "rdma", "dev", "set", vfDevice(0), "name", "mine")
			}, vfDevice(0), "mine"),
			Entry("a foreign device", func() {
				run("rdma", "dev", "set", vfDevice(3), "netns", p.name)
				DeferCleanup(run, "ip", "netns", "exec", p.name, "rdma", "dev", "set", vfDevice(3), "netns", hostName)
			}, vfDevice(3)),
			Entry("a damaged record", func() {
				Expect(os.WriteFile(recordOf(a, 0), []byte("{"), 0o600)).To(Succeed())
			}, "unusable"),
			Entry("the device's netdev is gone from the pod", func() {
				run("ip", "-n", p.name, "link", "set", "net1", "netns", hostName)
				DeferCleanup(run, "ip", "link", "set", "net1", "netns", p.name)
			}, "net1"),
		)

		It("refuses another namespace than that of ADD", func() {
			other := newPod()
			a := a
			a.netns = other.path
			a = a.with("prevResult", map[string]any{
				"cniVersion": "1.1.0",
				"interfaces": []any{map[string]any{"name": "net1", "sandbox": other.path}},
			})
			Expect(a.fail("CHECK").Msg).To(And(ContainSubstring(p.path), ContainSubstring(other.path)))
		})
	})
})

var _ = Describe("GC", func() {
	type valid = map[string]any
	gc := func(network string, key string, list any) attachment {
		a := attachment{conf: map[string]any{"cniVersion": "1.1.0", "name": network, "type": "rdma"}}
		if key != "" {
			a.conf[key] = list
		}
		return a
	}

	It("ends what is not valid and has lost its namespace, and nothing else", func() {
		dead, valid1, other, live := newPod(), newPod(), newPod(), newPod()
		vfAttachment(dead, 0).succeed("ADD")
		vfAttachment(valid1, 1).succeed("ADD")
		vfAttachment(other, 2).with("name", "another").succeed("ADD")
		vfAttachment(live, 3).succeed("ADD")
		dead.remove()
		got := gc("rail", "cni.dev/valid-attachments", []any{valid{"containerID": valid1.id, "ifname": "net1"}}).succeed("GC")
		Expect(got.stdout).To(BeEmpty())
		expectHome(0)
		expectIn(valid1, 1)
		expectIn(other, 2)
		expectIn(live, 3) // an incomplete list is no proof of death
		Expect(got.logged("WARN")).To(ContainElement(And(ContainSubstring(live.id), ContainSubstring("alive"))))
		Expect(records()).To(HaveLen(3))
		for i, p := range []pod{valid1, other, live} {
			vfAttachment(p, i+1).succeed("DEL")
		}
	})

	DescribeTable("with a list that", func(key string, list any, collected bool) {
		p := newPod()
		vfAttachment(p, 0).succeed("ADD")
		p.remove()
		Eventually(func() []string { return rdmaNames(hostNetns) }, patience).Should(ContainElement(vfDevice(0)))
		gc("rail", key, list).succeed("GC")
		if collected {
			Expect(records()).To(BeEmpty())
		} else {
			Expect(records()).To(HaveLen(1))
		}
		vfAttachment(p, 0).succeed("DEL")
	},
		Entry("is null", "cni.dev/valid-attachments", nil, true),
		Entry("is empty", "cni.dev/valid-attachments", []any{}, true),
		Entry("is the legacy one", "cni.dev/attachments", []any{}, true),
		Entry("is absent", "", nil, false),
	)

	It("refuses a list of the wrong type and changes nothing", func() {
		p := newPod()
		vfAttachment(p, 0).succeed("ADD")
		p.remove()
		e := gc("rail", "cni.dev/valid-attachments", "all").fail("GC")
		Expect(e.Msg).To(ContainSubstring("cni.dev/valid-attachments"))
		Expect(records()).To(HaveLen(1))
		vfAttachment(p, 0).succeed("DEL")
	})

	It("leaves records that it cannot read", func() {
		Expect(os.MkdirAll(stateDir, 0o700)).To(Succeed())
		path := stateDir + "/x@net1@" + vfs[0] + ".json"
		Expect(os.WriteFile(path, nil, 0o600)).To(Succeed())
		gc("rail", "cni.dev/valid-attachments", []any{}).succeed("GC")
		Expect(path).To(BeARegularFile())
		Expect(os.Remove(path)).To(Succeed())
	})
})

var _ = Describe("STATUS", func() {
	status := attachment{conf: map[string]any{"cniVersion": "1.1.0", "name": "rail", "type": "rdma"}}

	It("is ready, and does not wait for the lock", func() {
		Expect(os.MkdirAll(stateDir, 0o700)).To(Succeed())
		release := holdLock()
		defer release()
		status.succeed("STATUS")
	})

	It("is not ready if the state directory cannot be written", func() {
		Expect(os.RemoveAll(stateDir)).To(Succeed())
		Expect(os.MkdirAll("/run/cni", 0o755)).To(Succeed())
		Expect(os.WriteFile(stateDir, nil, 0o600)).To(Succeed())
		DeferCleanup(os.Remove, stateDir)
		e := status.fail("STATUS")
		Expect(e.Code).To(Equal(50))
		Expect(e.Msg).To(ContainSubstring(stateDir))
	})
})

var _ = Describe("every version of the specification", func() {
	for _, version := range []string{"0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		It("attaches and detaches with "+version, func() {
			p := newPod()
			a := vfAttachment(p, 0).with("cniVersion", version)
			prev := map[string]any{"cniVersion": version}
			if version >= "0.3.0" {
				prev["interfaces"] = []any{map[string]any{"name": "net1", "sandbox": p.path}}
			} else {
				prev["ip4"] = map[string]any{"ip": "192.168.7.2/24"}
			}
			a = a.with("prevResult", prev)
			want, err := json.Marshal(prev)
			Expect(err).NotTo(HaveOccurred())
			Expect(a.succeed("ADD").stdout).To(MatchJSON(want))
			expectIn(p, 0)
			a.succeed("DEL")
			expectHome(0)
		})
	}
})
