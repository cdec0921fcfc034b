package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

const cmConfig = "/sys/kernel/config/rdma_cm"

// tos reads the default TOS of a device's ports as any tool would.
func tos(device string, ports int) []string {
	GinkgoHelper()
	dir := filepath.Join(cmConfig, device)
	Expect(os.Mkdir(dir, 0o755)).To(Succeed())
	defer os.Remove(dir)
	var values []string
	for port := 1; port <= ports; port++ {
		data, err := os.ReadFile(fmt.Sprintf("%s/ports/%d/default_roce_tos", dir, port))
		Expect(err).NotTo(HaveOccurred())
		values = append(values, strings.TrimSpace(string(data)))
	}
	return values
}

func setTOS(device, value string) {
	GinkgoHelper()
	dir := filepath.Join(cmConfig, device)
	Expect(os.Mkdir(dir, 0o755)).To(Succeed())
	defer os.Remove(dir)
	Expect(os.WriteFile(dir+"/ports/1/default_roce_tos", []byte(value), 0)).To(Succeed())
}

// trafficClass reads the files of the host's view of a device.
func trafficClass(device string, port int) string {
	GinkgoHelper()
	data, err := os.ReadFile(fmt.Sprintf("/sys/class/infiniband/%s/tc/%d/traffic_class", device, port))
	Expect(err).NotTo(HaveOccurred())
	return strings.TrimSpace(string(data))
}

// replaceDevice makes the device of VF number i anew with other keys.
func replaceDevice(i int, keys string) {
	GinkgoHelper()
	sim("del %s", vfDevice(i))
	sim("add name=%s parent=pci:%s %s", vfDevice(i), vfs[i], keys)
	DeferCleanup(func() {
		sim("del %s", vfDevice(i))
		sim("add name=%s parent=pci:%s", vfDevice(i), vfs[i])
	})
}

func args(cni map[string]any) map[string]any { return map[string]any{"cni": cni} }

var _ = Describe("rdmaDeviceName", func() {
	var p pod
	BeforeEach(func() { p = newPod() })

	DescribeTable("gives the device its name inside the pod, and takes it back",
		func(change func(a attachment) attachment, want string) {
			p.takeNetdev(0)
			a := change(vfAttachment(p, 0))
			a.succeed("ADD")
			Expect(rdmaNames(p.path)).To(ConsistOf(want))
			a.succeed("CHECK")
			a.succeed("ADD")
			a.succeed("DEL")
			expectHome(0)
		},
		Entry("literally", func(a attachment) attachment { return a.with("rdmaDeviceName", "rdma_rail0") }, "rdma_rail0"),
		Entry("after the interface", func(a attachment) attachment { return a.with("rdmaDeviceName", "roce_{ifname}") }, "roce_net1"),
		Entry("after the function", func(a attachment) attachment { return a.with("rdmaDeviceName", "{pci}") }, "0000-01-10.0"),
		Entry("after the position", func(a attachment) attachment { return a.with("rdmaDeviceName", "rail{index}") }, "rail0"),
		Entry("as the pod's author wants it", func(a attachment) attachment {
			return a.with("args", args(map[string]any{"rdmaDeviceName": "mine"}))
		}, "mine"),
		Entry("as the administrator wants it rather than the pod's author", func(a attachment) attachment {
			return a.with("rdmaDeviceName", "ours").with("args", args(map[string]any{"rdmaDeviceName": "mine"}))
		}, "ours"),
		Entry("which may be the one it has", func(a attachment) attachment { return a.with("rdmaDeviceName", vfDevice(0)) }, vfDevice(0)),
	)

	It("is taken back when the kernel brought the device home", func() {
		a := vfAttachment(p, 0).with("rdmaDeviceName", "rail0")
		a.succeed("ADD")
		p.remove()
		Eventually(func() []string { return rdmaNames(hostNetns) }, patience).Should(ContainElement("rail0"))
		a.succeed("DEL")
		expectHome(0)
	})

	It("is taken back by the next ADD when nobody called DEL", func() {
		next := newPod()
		vfAttachment(p, 0).with("rdmaDeviceName", "rail0").succeed("ADD")
		p.remove()
		a := vfAttachment(next, 0)
		a.succeed("ADD")
		expectIn(next, 0)
		a.succeed("DEL")
		expectHome(0)
	})

	DescribeTable("is refused if it is no name", func(name any, says string) {
		e := vfAttachment(p, 0).with("rdmaDeviceName", name).fail("ADD")
		Expect(e.Code).To(Equal(7))
		Expect(e.Msg).To(And(ContainSubstring("rdmaDeviceName"), ContainSubstring(says)))
		expectHome(0)
	},
		Entry("with a slash", "a/b", "a/b"),
		Entry("dots", "..", ".."),
		Entry("with a percent sign", "rail%d", "rail%d"),
		Entry("of 64 characters", strings.Repeat("x", 64), "64"),
		Entry("a number", 7, "7"),
	)

	It("is refused under args.cni too, and nothing else there chooses a device", func() {
		e := vfAttachment(p, 0).with("args", args(map[string]any{"rdmaDeviceName": "a/b"})).fail("ADD")
		Expect(e.Msg).To(ContainSubstring("args.cni"))
		a := vfAttachment(p, 0).with("args", args(map[string]any{"deviceID": vfs[1], "pciBusID": vfs[1], "devices": "all"}))
		a.succeed("ADD")
		expectIn(p, 0)
		a.succeed("DEL")
	})

	Context("in a kernel with names per namespace", Label(kernelSpec), func() {
		BeforeEach(func() { namesPerPod() })

		It("can be the same in two pods, and each gets its own TOS", func() {
			other := newPod()
			first := vfAttachment(p, 0).with("rdmaDeviceName", "rail0").with("rdmaQoS", map[string]any{"tos": 104})
			second := vfAttachment(other, 1).with("rdmaDeviceName", "rail0").with("rdmaQoS", map[string]any{"tos": 32})
			setTOS(vfDevice(1), "56")
			first.succeed("ADD")
			second.succeed("ADD")
			Expect(rdmaNames(p.path)).To(ConsistOf("rail0"))
			Expect(rdmaNames(other.path)).To(ConsistOf("rail0"))
			By("telling them apart by names that they have for a moment only")
			for _, want := range []struct {
				in  pod
				tos string
			}{{p, "104"}, {other, "32"}} {
				run("ip", "netns", "exec", want.in.name, "rdma", "dev", "set", "rail0", "name", "alone")
				Expect(tos("alone", 1)).To(Equal([]string{want.tos}))
				run("ip", "netns", "exec", want.in.name, "rdma", "dev", "set", "alone", "name", "rail0")
			}
			first.succeed("DEL")
			second.succeed("DEL")
			expectHome(0)
			expectHome(1)
			Expect(tos(vfDevice(1), 1)).To(Equal([]string{"56"}))
		})

		It("can be that of a device at home, and comes home all the same", func() {
			a := vfAttachment(p, 0).with("rdmaDeviceName", vfDevice(2))
			a.succeed("ADD")
			Expect(rdmaNames(p.path)).To(ConsistOf(vfDevice(2)))
			a.succeed("DEL")
			expectHome(0)
			expectHome(2)
		})

		It("can be that of a device at home, and the kernel brings it home under another", func() {
			a := vfAttachment(p, 0).with("rdmaDeviceName", vfDevice(2))
			a.succeed("ADD")
			p.remove()
			a.succeed("DEL")
			expectHome(0)
			expectHome(2)
		})

		It("may be taken at home when the device returns", func() {
			a := vfAttachment(p, 0)
			a.succeed("ADD")
			run("rdma", "dev", "set", vfDevice(3), "name", vfDevice(0))
			got := a.succeed("DEL")
			Expect(got.logged("ERROR")).To(ContainElement(ContainSubstring("is taken")))
			Expect(rdmaNames(p.path)).To(BeEmpty())
			Expect(rdmaNames(hostNetns)).To(HaveLen(4))
			Expect(records()).To(BeEmpty())
			run("rdma", "dev", "set", vfDevice(0), "name", vfDevice(3))
			now := dirNames(filepath.Join("/sys/bus/pci/devices", vfs[0], "infiniband"))
			Expect(now).To(HaveLen(1))
			run("rdma", "dev", "set", now[0], "name", vfDevice(0))
		})
	})

	Context("when it is taken", Label(kernelSpec), func() {
		BeforeEach(func() { uniqueNames() })

		It("names the pod that has it", func() {
			other := newPod()
			first := vfAttachment(other, 1).with("rdmaDeviceName", "rail0")
			first.args = "K8S_POD_NAMESPACE=training;K8S_POD_NAME=worker-1"
			first.succeed("ADD")
			e := vfAttachment(p, 0).with("rdmaDeviceName", "rail0").fail("ADD")
			Expect(e.Code).To(Equal(105))
			Expect(e.Msg).To(And(ContainSubstring("rail0"), ContainSubstring("training/worker-1"), ContainSubstring("7.2")))
			expectHome(0)
			Expect(rdmaNames(other.path)).To(ConsistOf("rail0"))
			first.succeed("DEL")
			expectHome(1)
		})

		It("names the host's device, and never takes that one instead", func() {
			e := vfAttachment(p, 0).with("rdmaDeviceName", vfDevice(2)).fail("ADD")
			Expect(e.Code).To(Equal(105))
			Expect(e.Msg).To(ContainSubstring("a device of the host"))
			expectHome(0)
			expectHome(2)
		})
	})
})

var _ = Describe("rdmaQoS", func() {
	var p pod
	BeforeEach(func() { p = newPod() })
	qos := func(values map[string]any) map[string]any { return values }

	It("sets the TOS of every port inside the pod, and gives back the host's", func() {
		replaceDevice(0, "ports=2")
		setTOS(vfDevice(0), "56")
		a := vfAttachment(p, 0).with("rdmaQoS", qos(map[string]any{"tos": 104}))
		a.succeed("ADD")
		Expect(tos(vfDevice(0), 2)).To(Equal([]string{"104", "104"}))
		a.succeed("DEL")
		expectHome(0)
		Expect(tos(vfDevice(0), 2)).To(Equal([]string{"56", "0"}))
		Expect(dirNames(cmConfig)).To(BeEmpty())
	})

	It("gives back the host's TOS also when the kernel brought the device home", func() {
		setTOS(vfDevice(0), "56")
		a := vfAttachment(p, 0).with("rdmaQoS", qos(map[string]any{"tos": 104})).with("rdmaDeviceName", "rail0")
		a.succeed("ADD")
		Expect(tos("rail0", 1)).To(Equal([]string{"104"}))
		p.remove()
		a.succeed("DEL")
		expectHome(0)
		Expect(tos(vfDevice(0), 1)).To(Equal([]string{"56"}))
	})

	It("sets the traffic class of every port, and gives back the host's", func() {
		replaceDevice(0, "ports=2 tc=1")
		Expect(os.WriteFile("/sys/class/infiniband/"+vfDevice(0)+"/tc/1/traffic_class", []byte("8"), 0)).To(Succeed())
		a := vfAttachment(p, 0).with("rdmaQoS", qos(map[string]any{"tc": 96}))
		a.succeed("ADD")
		out := run("ip", "netns", "exec", p.name, "unshare", "-m", "sh", "-c", "mount -t sysfs pod /mnt && cat /mnt/class/infiniband/"+vfDevice(0)+"/tc/*/traffic_class")
		Expect(strings.Fields(out)).To(Equal([]string{"Global", "tclass=96", "Global", "tclass=96"}))
		a.succeed("DEL")
		expectHome(0)
		Expect(trafficClass(vfDevice(0), 1)).To(Equal("Global tclass=8"))
		Expect(trafficClass(vfDevice(0), 2)).To(Equal("Global tclass=-1"))
	})

	It("leaves untouched what is not asked for", func() {
		replaceDevice(0, "tc=1")
		Expect(os.WriteFile("/sys/class/infiniband/"+vfDevice(0)+"/tc/1/traffic_class", []byte("8"), 0)).To(Succeed())
		a := vfAttachment(p, 0).with("rdmaQoS", qos(map[string]any{"tos": 0}))
		a.succeed("ADD")
		a.succeed("DEL")
		Expect(trafficClass(vfDevice(0), 1)).To(Equal("Global tclass=8"))
	})

	It("is taken from args.cni where the administrator has set nothing", func() {
		a := vfAttachment(p, 0).with("args", args(map[string]any{"rdmaQoS": map[string]any{"tos": 32}}))
		a.succeed("ADD")
		Expect(tos(vfDevice(0), 1)).To(Equal([]string{"32"}))
		a.succeed("DEL")
		a = a.with("rdmaQoS", qos(map[string]any{"tos": 64}))
		a.succeed("ADD")
		Expect(tos(vfDevice(0), 1)).To(Equal([]string{"64"}))
		a.succeed("DEL")
	})

	It("fails for a driver without traffic class, unless that is not required", func() {
		a := vfAttachment(p, 0).with("rdmaQoS", qos(map[string]any{"tc": 96}))
		e := a.fail("ADD")
		Expect(e.Code).To(Equal(105))
		Expect(e.Msg).To(And(ContainSubstring("traffic class"), ContainSubstring(vfDevice(0))))
		expectHome(0)
		a = vfAttachment(p, 0).with("rdmaQoS", qos(map[string]any{"tc": 96, "tos": 32, "required": false}))
		Expect(a.succeed("ADD").logged("WARN")).To(ContainElement(ContainSubstring("traffic class")))
		Expect(tos(vfDevice(0), 1)).To(Equal([]string{"32"}))
		a.succeed("DEL")
		expectHome(0)
	})

	It("fails without configfs, and says how to get it", func() {
		run("umount", "/sys/kernel/config")
		DeferCleanup(run, "mount", "-t", "configfs", "none", "/sys/kernel/config")
		e := vfAttachment(p, 0).with("rdmaQoS", qos(map[string]any{"tos": 1})).fail("ADD")
		Expect(e.Msg).To(And(ContainSubstring("configfs"), ContainSubstring("rdma_cm")))
		expectHome(0)
		Expect(records()).To(BeEmpty())
	})

	DescribeTable("is refused if it is no such value", func(value any, says string) {
		e := vfAttachment(p, 0).with("rdmaQoS", value).fail("ADD")
		Expect(e.Code).To(Equal(7))
		Expect(e.Msg).To(And(ContainSubstring("rdmaQoS"), ContainSubstring(says)))
		expectHome(0)
	},
		Entry("above 255", map[string]any{"tos": 256}, "256"),
		Entry("negative", map[string]any{"tc": -1}, "-1"),
		Entry("broken", map[string]any{"tos": 1.5}, "1.5"),
		Entry("text", map[string]any{"tos": "high"}, "high"),
		Entry("no object", 7, "object"),
	)
})

var _ = Describe("several devices on one function", func() {
	var p pod
	BeforeEach(func() {
		p = newPod()
		sim("add name=second parent=pci:%s", vfs[0])
		DeferCleanup(sim, "del second")
	})

	It("go into the pod and come home together", func() {
		p.takeNetdev(0)
		a := vfAttachment(p, 0).with("devices", "all").with("rdmaDeviceName", "rail{index}")
		a.succeed("ADD")
		Expect(rdmaNames(p.path)).To(ConsistOf("rail0", "rail1"))
		Expect(rdmaNames(hostNetns)).NotTo(ContainElements(vfDevice(0), "second"))
		a.succeed("CHECK")
		a.succeed("DEL")
		Expect(rdmaNames(hostNetns)).To(ContainElements(vfDevice(0), "second"))
	})

	It("come home together when the second cannot go", func() {
		sim("fault %s enable-errno=12", vfDevice(0)) // "second" sorts before "sim0" and goes first
		e := vfAttachment(p, 0).with("devices", "all").fail("ADD")
		Expect(e.Msg).To(ContainSubstring("ENOMEM"))
		Expect(rdmaNames(hostNetns)).To(ContainElements(vfDevice(0), "second"))
		Expect(rdmaNames(p.path)).To(BeEmpty())
		Expect(records()).To(BeEmpty())
	})

	It("come home together when the pod has moved one of them on", func() {
		third := newPod()
		a := vfAttachment(p, 0).with("devices", "all")
		a.succeed("ADD")
		run("ip", "netns", "exec", p.name, "rdma", "dev", "set", "second", "netns", third.name)
		a.succeed("DEL")
		Expect(rdmaNames(hostNetns)).To(ContainElements(vfDevice(0), "second"))
	})

	It("are not taken from a pod that still has one of them", func() {
		thief := newPod()
		owner := vfAttachment(p, 0).with("devices", "all")
		owner.succeed("ADD")
		run("ip", "netns", "exec", p.name, "rdma", "dev", "set", "second", "netns", hostName)
		for _, devices := range []string{"one", "all"} {
			e := vfAttachment(thief, 0).with("devices", devices).fail("ADD")
			Expect(e.Code).To(Equal(11))
			Expect(e.Msg).To(And(ContainSubstring(p.id), ContainSubstring(p.path)))
		}
		Expect(rdmaNames(p.path)).To(ConsistOf(vfDevice(0)))
		owner.succeed("DEL")
		Expect(rdmaNames(hostNetns)).To(ContainElements(vfDevice(0), "second"))
	})

	It("come home together when the record is damaged", func() {
		a := vfAttachment(p, 0).with("devices", "all")
		a.succeed("ADD")
		Expect(os.Truncate(recordOf(a, 0), 0)).To(Succeed())
		a.succeed("DEL")
		Expect(rdmaNames(hostNetns)).To(ContainElements(vfDevice(0), "second"))
		Expect(records()).To(BeEmpty())
	})

	It("cannot have one name", func() {
		e := vfAttachment(p, 0).with("devices", "all").with("rdmaDeviceName", "rail").fail("ADD")
		Expect(e.Code).To(Equal(105))
		Expect(e.Msg).To(ContainSubstring("{index}"))
		Expect(rdmaNames(hostNetns)).To(ContainElements(vfDevice(0), "second"))
	})
})

var _ = Describe("a device with several ports", func() {
	It("has the character devices of each, and the GIDs of its netdev", func() {
		p := newPod()
		replaceDevice(0, "ports=3")
		conf := chain("1.0.0", vfs[0])
		conf["plugins"].([]any)[1].(map[string]any)["waitForGID"] = "10s"
		n := newNetwork(conf)
		_, err := n.cnitool("add", p)
		Expect(err).NotTo(HaveOccurred())
		data, err := os.ReadFile(filepath.Join(stateDir, records()[0]))
		Expect(err).NotTo(HaveOccurred())
		var record struct {
			Devices []struct{ CharDevices, CharDevicesInPod []string }
		}
		Expect(json.Unmarshal(data, &record)).To(Succeed())
		umads := 0
		for _, name := range record.Devices[0].CharDevicesInPod {
			if strings.HasPrefix(name, "umad") {
				umads++
			}
		}
		Expect(umads).To(Equal(3), "one for each port: %s", data)
		Expect(record.Devices[0].CharDevicesInPod).To(HaveExactElements(record.Devices[0].CharDevices))
		Expect(roceV2GIDs(p, vfDevice(0))).To(ContainElement(HavePrefix("192.168.7.")))
		_, err = n.cnitool("del", p)
		Expect(err).NotTo(HaveOccurred())
		expectHome(0)
	})
})

var _ = Describe("a scalable function", func() {
	It("goes through the whole chain, and its ports' netdev and GIDs with it", func() {
		p := newPod()
		sim("add name=sf%%d parent=aux:rdmasim.sf.%%d netdev=1 ports=2")
		DeferCleanup(sim, "del sf0")
		const function = "rdmasim.sf.0"
		netdev := dirNames("/sys/bus/auxiliary/devices/" + function + "/net")
		Expect(netdev).To(HaveLen(1))
		conf := chain("1.0.0", "")
		host := conf["plugins"].([]any)[0].(map[string]any)
		delete(host, "pciBusID")
		host["device"] = netdev[0]
		rdma := conf["plugins"].([]any)[1].(map[string]any)
		rdma["deviceID"] = function
		n := newNetwork(conf)
		for range 2 {
			_, err := n.cnitool("add", p)
			Expect(err).NotTo(HaveOccurred())
			Expect(rdmaNames(p.path)).To(ConsistOf("sf0"))
			Eventually(func() []string { return roceV2GIDs(p, "sf0") }, patience).Should(ContainElement(HavePrefix("192.168.7.")))
			_, err = n.cnitool("check", p)
			Expect(err).NotTo(HaveOccurred())
			_, err = n.cnitool("del", p)
			Expect(err).NotTo(HaveOccurred())
			Expect(rdmaNames(hostNetns)).To(ContainElement("sf0"))
			// The second time without deviceID: the interface leads to it.
			delete(rdma, "deviceID")
			n = newNetwork(conf)
		}
	})
})

var _ = Describe("the DeviceInfo file", func() {
	var p pod
	var path string
	BeforeEach(func() {
		p = newPod()
		path = filepath.Join(GinkgoT().TempDir(), "info")
	})
	attach := func() attachment {
		return vfAttachment(p, 0).with("rdmaDeviceName", "rail0").with("runtimeConfig", map[string]any{"CNIDeviceInfoFile": path})
	}

	It("gets the name inside the pod and keeps everything else", func() {
		info := map[string]any{
			"type": "pci", "version": "1.1.0", "vendor": []any{1.0},
			"pci": map[string]any{"pci-address": vfs[0], "rdma-device": vfDevice(0), "vhost-net": "/dev/vhost-net"},
		}
		data, err := json.Marshal(info)
		Expect(err).NotTo(HaveOccurred())
		Expect(os.WriteFile(path, data, 0o444)).To(Succeed())
		a := attach()
		a.succeed("ADD")
		want := maps.Clone(info)
		want["pci"] = maps.Clone(info["pci"].(map[string]any))
		want["pci"].(map[string]any)["rdma-device"] = "rail0"
		wantData, err := json.Marshal(want)
		Expect(err).NotTo(HaveOccurred())
		got, err := os.ReadFile(path)
		Expect(err).NotTo(HaveOccurred())
		Expect(got).To(MatchJSON(wantData))
		stat, err := os.Stat(path)
		Expect(err).NotTo(HaveOccurred())
		Expect(stat.Mode().Perm()).To(Equal(os.FileMode(0o444)))
		Expect(dirNames(filepath.Dir(path))).To(HaveLen(1))
		a.succeed("DEL")
	})

	DescribeTable("never fails ADD", func(prepare func()) {
		prepare()
		a := attach()
		Expect(a.succeed("ADD").logged("WARN")).To(ContainElement(ContainSubstring("DeviceInfo")))
		a.succeed("DEL")
	},
		Entry("when it is missing", func() {}),
		Entry("when it is broken", func() { Expect(os.WriteFile(path, []byte("{"), 0o600)).To(Succeed()) }),
		Entry("when it describes no PCI device", func() { Expect(os.WriteFile(path, []byte(`{"type":"memif"}`), 0o600)).To(Succeed()) }),
		Entry("when it is a directory", func() { Expect(os.Mkdir(path, 0o700)).To(Succeed()) }),
		Entry("when it is a symbolic link", func() { Expect(os.Symlink("/etc/passwd", path)).To(Succeed()) }),
	)
})

var _ = Describe("a function that cannot have an RDMA device", func() {
	const plain = "0000:01:11.0" // a VF without simulated device; igbvf has no RDMA

	It("fails unless the configuration says that it is optional", func() {
		p := newPod()
		Expect(vfAttachment(p, 0).with("deviceID", plain).fail("ADD").Msg).To(ContainSubstring("igbvf"))
		a := vfAttachment(p, 0).with("deviceID", plain).with("optional", true)
		got := a.succeed("ADD")
		Expect(got.stdout).To(ContainSubstring("net1"))
		Expect(got.logged("WARN")).To(ContainElement(ContainSubstring("no RDMA device is attached")))
		a.succeed("CHECK")
		a.succeed("ADD")
		a.succeed("DEL")
		Expect(records()).To(BeEmpty())
	})

	// vfio-pci itself wants an IOMMU, which the guest does not have, and
	// Debian's kernels are built without its no-IOMMU mode.
	It("is optional too when a driver hands it to user space", func() {
		p := newPod()
		run("modprobe", "uio_pci_generic")
		device := "/sys/bus/pci/devices/" + plain
		bind := func(driver string) {
			run("sh", "-c", "echo "+driver+" > "+device+"/driver_override && echo "+plain+" > "+device+"/driver/unbind && echo "+plain+" > /sys/bus/pci/drivers_probe")
			Expect(filepath.Base(readlink(device + "/driver"))).To(Equal(driver))
		}
		bind("uio_pci_generic")
		DeferCleanup(func() {
			bind("igbvf")
			Eventually(func() []string { return dirNames(device + "/net") }, patience).Should(HaveLen(1))
		})
		Expect(vfAttachment(p, 0).with("deviceID", plain).fail("ADD").Msg).To(And(ContainSubstring("uio_pci_generic"), ContainSubstring(plain)))
		a := vfAttachment(p, 0).with("deviceID", plain).with("optional", true)
		Expect(a.succeed("ADD").logged("WARN")).To(ContainElement(ContainSubstring("uio_pci_generic")))
		a.succeed("CHECK")
		a.succeed("DEL")
	})

	It("fails even then if a driver is missing: that is a fault of the node", func() {
		p := newPod()
		run("sh", "-c", "echo "+plain+" > /sys/bus/pci/drivers/igbvf/unbind")
		Expect(vfAttachment(p, 0).with("deviceID", plain).with("optional", true).fail("ADD").Msg).To(ContainSubstring("no driver"))
		run("sh", "-c", "echo "+plain+" > /sys/bus/pci/drivers/igbvf/bind")
		Eventually(func() []string { return dirNames("/sys/bus/pci/devices/" + plain + "/net") }, patience).Should(HaveLen(1))
	})
})

var _ = Describe("a device with the node GUID 0", func() {
	It("is attached with a warning, or refused, and the message says what to do", func() {
		p := newPod()
		replaceDevice(0, "guid=zero")
		a := vfAttachment(p, 0)
		Expect(a.succeed("ADD").logged("WARN")).To(ContainElement(And(ContainSubstring("GUID 0"), ContainSubstring("administrative MAC"))))
		a.succeed("DEL")
		e := a.with("zeroGUID", "fail").fail("ADD")
		Expect(e.Code).To(Equal(102))
		Expect(e.Msg).To(And(ContainSubstring(vfDevice(0)), ContainSubstring("administrative MAC")))
		expectHome(0)
	})
})

var _ = Describe("waitForGID", func() {
	It("returns when the GIDs of the pod's addresses exist", func() {
		p := newPod()
		conf := chain("1.0.0", vfs[0])
		conf["plugins"].([]any)[1].(map[string]any)["waitForGID"] = "10s"
		n := newNetwork(conf)
		_, err := n.cnitool("add", p)
		Expect(err).NotTo(HaveOccurred())
		Expect(roceV2GIDs(p, vfDevice(0))).To(ContainElement(HavePrefix("192.168.7.")))
		_, err = n.cnitool("del", p)
		Expect(err).NotTo(HaveOccurred())
		expectHome(0)
	})

	It("fails naming the one that is missing, and undoes the attachment", func() {
		p := newPod()
		a := vfAttachment(p, 0).with("waitForGID", "200ms")
		a.conf["prevResult"].(map[string]any)["ips"] = []any{map[string]any{"address": "192.168.9.9/24", "interface": 0}}
		e := a.fail("ADD")
		Expect(e.Code).To(Equal(105))
		Expect(e.Msg).To(ContainSubstring("192.168.9.9"))
		expectHome(0)
		Expect(rdmaNames(p.path)).To(BeEmpty())
		Expect(records()).To(BeEmpty())
	})

	It("is refused if it is no duration", func() {
		Expect(vfAttachment(newPod(), 0).with("waitForGID", "soon").fail("ADD").Msg).To(And(ContainSubstring("waitForGID"), ContainSubstring("soon")))
	})
})

var _ = Describe("onSharedMode: skip", Ordered, func() {
	BeforeAll(func() { setMode("shared") })
	AfterAll(func() { setMode("exclusive") })

	It("passes prevResult through on a node in shared mode, and CHECK and DEL agree", func() {
		p := newPod()
		a := vfAttachment(p, 0).with("onSharedMode", "skip")
		got := a.succeed("ADD")
		Expect(got.stdout).To(ContainSubstring("net1"))
		Expect(got.logged("WARN")).To(ContainElement(And(ContainSubstring("no RDMA device is attached"), ContainSubstring("shared"))))
		Expect(records()).To(HaveLen(1))
		a.succeed("CHECK")
		a.succeed("DEL")
		Expect(records()).To(BeEmpty())
		p.remove() // the mode changes before what DeferCleanup has
	})

	It("is ready, and says what it would do", func() {
		status := attachment{conf: map[string]any{"cniVersion": "1.1.0", "name": "rail", "type": "rdma", "onSharedMode": "skip"}}
		Expect(status.succeed("STATUS").logged("WARN")).To(ContainElement(ContainSubstring("shared")))
	})
})
