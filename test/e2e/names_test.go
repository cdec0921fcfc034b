package e2e

import (
	"fmt"
	"os"
	"os/exec"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
)

// loadRXE loads the driver of soft-RoCE for one spec, beside the test driver's
// devices on VFs, which it would take for its own.
func loadRXE() {
	GinkgoHelper()
	if _, err := os.Stat("/sys/module/rdma_rxe"); err == nil {
		return // the first of the spec has done it, and unloads it when all devices are gone
	}
	sim("del *")
	addVFDevices(besideRXE)
	_ = exec.Command("modprobe", "crc32_generic").Run() // gone in 7.3
	run("modprobe", "rdma_rxe")
	DeferCleanup(func() {
		Eventually(func() error { return exec.Command("rmmod", "rdma_rxe").Run() }, patience).Should(Succeed())
	})
}

// softRoCE makes a device of the stock driver rdma_rxe on a netdev of a kind of
// its own (dummy, veth). The plugin has no part in these specs: they pin down
// what its own rest on.
func softRoCE(name, netdev, kind string) {
	GinkgoHelper()
	loadRXE()
	run("ip", "link", "add", netdev, "type", kind)
	// The device goes with its netdev, wherever it is.
	DeferCleanup(run, "ip", "link", "del", netdev)
	run("ip", "link", "set", netdev, "up")
	run("rdma", "link", "add", name, "type", "rxe", "netdev", netdev)
}

func moveInto(p pod, device string) { run("rdma", "dev", "set", device, "netns", p.name) }

// moveHome is what an administrator does, in one request for the kernel.
func moveHome(p pod, device string) error {
	out, err := exec.Command("ip", "netns", "exec", p.name, "rdma", "dev", "set", device, "netns", hostName).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

func renameIn(p pod, device, name string) {
	GinkgoHelper()
	run("ip", "netns", "exec", p.name, "rdma", "dev", "set", device, "name", name)
}

var _ = Describe("names for each namespace, with the stock driver", Label(kernelSpec), func() {
	BeforeEach(func() { needKernel("up to 7.2 stock soft-RoCE does not move", "7.3") })

	for _, kind := range []string{"dummy", "veth"} {
		It("a device on a "+kind+" netdev moves, comes home, and keeps name and index", func() {
			softRoCE("soft0", "soft", kind)
			p := newPod()
			index := rdmaDevices(hostNetns)["soft0"]
			moveInto(p, "soft0")
			Expect(rdmaDevices(p.path)).To(Equal(map[string]uint32{"soft0": index}))
			Expect(rdmaNames(hostNetns)).NotTo(ContainElement("soft0"))
			Expect(moveHome(p, "soft0")).To(Succeed())
			Expect(rdmaDevices(hostNetns)).To(HaveKeyWithValue("soft0", index))
		})
	}

	It("two pods have devices of one name", func() {
		first, second := newPod(), newPod()
		softRoCE("soft0", "softa", "dummy")
		moveInto(first, "soft0")
		softRoCE("soft0", "softb", "dummy")
		moveInto(second, "soft0")
		Expect(rdmaNames(first.path)).To(ConsistOf("soft0"))
		Expect(rdmaNames(second.path)).To(ConsistOf("soft0"))
		Expect(rdmaDevices(first.path)).NotTo(Equal(rdmaDevices(second.path)))
	})

	It("a name that is taken at home refuses the move; with another one it succeeds", func() {
		p := newPod()
		softRoCE("soft0", "softa", "dummy")
		index := rdmaDevices(hostNetns)["soft0"]
		moveInto(p, "soft0")
		softRoCE("soft0", "softb", "dummy")
		Expect(moveHome(p, "soft0")).To(MatchError(ContainSubstring("File exists")))
		Expect(rdmaDevices(p.path)).To(Equal(map[string]uint32{"soft0": index}), "untouched")

		home, err := rdma.OpenNamespace(hostNetns)
		Expect(err).NotTo(HaveOccurred())
		defer home.Close()
		ns, err := rdma.OpenNamespace(p.path)
		Expect(err).NotTo(HaveOccurred())
		defer ns.Close()
		Expect(ns.Do(func(c *rdma.Conn) error { return c.MoveAs(index, home, "soft1") })).To(Succeed())
		Expect(rdmaDevices(hostNetns)).To(HaveKeyWithValue("soft1", index))
		Expect(rdmaNames(p.path)).To(BeEmpty())
	})

	It("a name that is taken at home becomes ibdevN when the namespace dies", func() {
		p := newPod()
		softRoCE("soft0", "softa", "dummy")
		index := rdmaDevices(hostNetns)["soft0"]
		moveInto(p, "soft0")
		softRoCE("soft0", "softb", "dummy")
		p.remove()
		Eventually(func() map[string]uint32 { return rdmaDevices(hostNetns) }, patience).
			Should(HaveKeyWithValue(fmt.Sprintf("ibdev%d", index), index))
	})
})

var _ = Describe("names for each namespace", Label(kernelSpec), func() {
	BeforeEach(func() { namesPerPod() })

	It("two pods call their devices the same, and both come home under the old names", func() {
		first, second := newPod(), newPod()
		a, b := vfAttachment(first, 0), vfAttachment(second, 1)
		a.succeed("ADD")
		b.succeed("ADD")
		renameIn(first, vfDevice(0), "mlx5_0")
		renameIn(second, vfDevice(1), "mlx5_0")
		a.succeed("DEL")
		b.succeed("DEL")
		expectHome(0)
		expectHome(1)
		Expect(records()).To(BeEmpty())
	})

	// taken attaches VF 0 and gives its name to another device at home.
	taken := func() (p pod, a attachment, index uint32) {
		GinkgoHelper()
		p = newPod()
		a = vfAttachment(p, 0)
		index = rdmaDevices(hostNetns)[vfDevice(0)]
		a.succeed("ADD")
		run("rdma", "dev", "set", vfDevice(3), "name", vfDevice(0))
		DeferCleanup(func() {
			for name, i := range rdmaDevices(hostNetns) {
				if i == index && name != vfDevice(0) {
					run("rdma", "dev", "set", vfDevice(0), "name", vfDevice(3))
					run("rdma", "dev", "set", name, "name", vfDevice(0))
				}
			}
		})
		return p, a, index
	}
	// expectReturned makes sure that the device is usable at home for the next
	// pod, whatever it is called.
	expectReturned := func(index uint32) {
		GinkgoHelper()
		Expect(rdmaDevices(hostNetns)).To(ContainElement(index))
		Expect(records()).To(BeEmpty())
		next := newPod()
		b := vfAttachment(next, 0)
		b.succeed("ADD")
		Expect(rdmaDevices(next.path)).To(ContainElement(index))
		b.succeed("DEL")
		Expect(rdmaDevices(hostNetns)).To(ContainElement(index))
	}

	It("DEL brings the device home under another name if its own is taken, and says so", func() {
		p, a, index := taken()
		Expect(a.succeed("DEL").logged("ERROR")).To(ContainElement(And(ContainSubstring(vfDevice(0)), ContainSubstring("is taken"))))
		Expect(rdmaNames(p.path)).To(BeEmpty())
		expectReturned(index)
	})

	It("DEL is content with the name that the kernel chose when the namespace died", func() {
		p, a, index := taken()
		p.remove()
		name := fmt.Sprintf("ibdev%d", index)
		Eventually(func() map[string]uint32 { return rdmaDevices(hostNetns) }, patience).Should(HaveKeyWithValue(name, index))
		Expect(a.succeed("DEL").logged("ERROR")).To(ContainElement(And(ContainSubstring(name), ContainSubstring("is taken"))))
		expectReturned(index)
	})

	It("ADD gives back the old name that was taken when the namespace died and is free now", func() {
		p, a, index := taken()
		p.remove()
		name := fmt.Sprintf("ibdev%d", index)
		Eventually(func() map[string]uint32 { return rdmaDevices(hostNetns) }, patience).Should(HaveKeyWithValue(name, index))
		run("rdma", "dev", "set", vfDevice(0), "name", vfDevice(3))
		next := newPod()
		b := vfAttachment(next, 0)
		b.succeed("ADD")
		expectIn(next, 0)
		b.succeed("DEL")
		a.succeed("DEL")
		expectHome(0)
	})
})
