package e2e

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

var _ = Describe("containerd", Label(withContainerd), Ordered, func() {
	var c *containerd
	BeforeAll(func() {
		setUpContainerd()
		c = startContainerd()
		importPause()
		DeferCleanup(func() {
			c.kill()
			_ = os.RemoveAll("/opt/cni")
		})
	})
	BeforeEach(func() {
		DeferCleanup(func(ctx SpecContext) {
			if CurrentSpecReport().Failed() {
				GinkgoWriter.Println(c.log)
			}
			c.removeAll(ctx)
			_ = os.RemoveAll("/var/lib/cni")
		})
	})
	// nextPod makes sure that a device that has come home serves another pod.
	nextPod := func(ctx context.Context, i int) {
		GinkgoHelper()
		p := c.runPod(ctx, "next", i)
		expectIn(p, i)
		c.stop(ctx, p.id)
		c.remove(ctx, p.id)
		expectHome(i)
		Expect(records()).To(BeEmpty())
	}

	It("gives a pod the RDMA device; StopPodSandbox brings it home, once and again", func(ctx SpecContext) {
		chars := charDevices()
		p := c.runPod(ctx, "worker", 0)
		expectIn(p, 0)
		Expect(rdmaNames(p.path)).To(ConsistOf(vfDevice(0)))
		Expect(netdevs(p.path)).To(ConsistOf("lo", "eth0"))
		Expect(charDevices()).To(Equal(chars))
		r := listOne("--pod", "jobs/worker")
		Expect(r.Holder).To(And(HaveField("Place", "pod"), HaveField("IfName", "eth0"), HaveField("Network", rail(0)), HaveField("ContainerID", p.id)))

		c.stop(ctx, p.id)
		expectHome(0)
		Expect(records()).To(BeEmpty())
		c.stop(ctx, p.id)
		c.remove(ctx, p.id)
		expectHome(0)
		c.remove(ctx, p.id)
		nextPod(ctx, 0)
	})

	It("tells who has the device to whom it cannot be given, and leaves nothing of that pod", func(ctx SpecContext) {
		netdev := netdevOf(vfs[1])
		first := c.runPod(ctx, "first", 0)
		_, err := c.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: sandboxConfig("second"), RuntimeHandler: crossed})
		Expect(err).To(MatchError(And(ContainSubstring(first.id), ContainSubstring("jobs/first"))))
		expectIn(first, 0)
		expectHome(1)
		Expect(netdevOf(vfs[1])).To(Equal(netdev))
		Expect(namespaces()).To(ConsistOf(first.name))
		Expect(records()).To(ConsistOf(HavePrefix(first.id + "@")))
	})

	It("gives four pods at once a device each, and takes them back at once", func(ctx SpecContext) {
		chars := charDevices()
		each := func(do func(i int) error) {
			GinkgoHelper()
			errs := make(chan error, len(vfs))
			for i := range vfs {
				go func() { errs <- do(i) }()
			}
			for range vfs {
				Expect(<-errs).To(Succeed())
			}
		}
		ids := make([]string, len(vfs))
		each(func(i int) (err error) {
			ids[i], err = c.tryRunPod(ctx, fmt.Sprintf("worker%d", i), i)
			return err
		})
		for i, id := range ids {
			expectIn(c.sandbox(ctx, id), i)
		}
		Expect(charDevices()).To(Equal(chars))
		each(func(i int) error {
			_, err := c.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: ids[i]})
			return err
		})
		for i, id := range ids {
			expectHome(i)
			c.remove(ctx, id)
		}
		Expect(charDevices()).To(Equal(chars))
	})

	It("calls the plugin as docs/testing.md says", func(ctx SpecContext) {
		calls := spyOnPlugin()
		_, err := c.Status(ctx, &runtimeapi.StatusRequest{})
		Expect(err).NotTo(HaveOccurred())
		p := c.runPod(ctx, "worker", 0)
		c.stop(ctx, p.id)
		c.stop(ctx, p.id)
		c.remove(ctx, p.id)
		// A second and later DEL comes without namespace and prevResult.
		type seen struct {
			command, netns string
			prevResult     bool
		}
		var got []seen
		status := 0
		for _, call := range calls() {
			Expect(call.conf).To(And(HaveKeyWithValue("cniVersion", cniVersion()), HaveKeyWithValue("name", rail(0)), HaveKeyWithValue("deviceID", vfs[0])))
			Expect(call.conf).NotTo(HaveKey("runtimeConfig"))
			Expect(call.env).To(HaveKeyWithValue("CNI_PATH", cniBin))
			if call.env["CNI_COMMAND"] == "STATUS" {
				status++
				continue
			}
			Expect(call.env).To(And(HaveKeyWithValue("CNI_CONTAINERID", p.id), HaveKeyWithValue("CNI_IFNAME", "eth0")))
			Expect(strings.Split(call.env["CNI_ARGS"], ";")).To(ConsistOf("IgnoreUnknown=1", "K8S_POD_NAMESPACE=jobs",
				"K8S_POD_NAME=worker", "K8S_POD_UID=worker-uid", "K8S_POD_INFRA_CONTAINER_ID="+p.id))
			_, prevResult := call.conf["prevResult"]
			got = append(got, seen{call.env["CNI_COMMAND"], call.env["CNI_NETNS"], prevResult})
		}
		Expect(got).To(Equal([]seen{{"ADD", p.path, true}, {"DEL", p.path, true}, {"DEL", "", false}, {"DEL", "", false}}))
		if cniVersion() == "1.1.0" {
			Expect(status).To(BeNumerically(">", 0), "each CRI Status is a STATUS")
		} else {
			Expect(status).To(BeZero())
		}
	})

	It("survives containerd's death while its pods run", func(ctx SpecContext) {
		p := c.runPod(ctx, "worker", 0)
		c.kill()
		expectIn(p, 0)
		c = startContainerd()
		Expect(c.sandboxes(ctx)).To(HaveKey(p.id))
		expectIn(p, 0)
		c.stop(ctx, p.id)
		expectHome(0)
		c.remove(ctx, p.id)
		nextPod(ctx, 0)
	})

	// What dies with containerd. Its unit says KillMode=process, so as a rule
	// the plugin goes on, with nobody to read its result.
	for _, victims := range []string{"alone", "with the plugin"} {
		die := func(plugin int) {
			GinkgoHelper()
			if victims != "alone" {
				Expect(unix.Kill(plugin, unix.SIGKILL)).To(Succeed())
			}
			c.kill()
			Expect(threadStates(plugin)).To(ContainSubstring("D"), "the move must still go on")
			// Of a process that is being killed its folder goes last.
			Eventually(fmt.Sprintf("/proc/%d", plugin), patience).ShouldNot(BeADirectory())
		}

		It("that dies "+victims+" in the middle of RunPodSandbox leaves nothing that a later pod could not have", func(ctx SpecContext) {
			inMove := slowMove(0)
			done := make(chan error)
			go func() {
				_, err := c.tryRunPod(ctx, "worker", 0)
				done <- err
			}()
			die(inMove())
			Expect(<-done).To(HaveOccurred())
			if victims == "alone" {
				By("the plugin could not give its result to anybody, and has undone the attachment")
				expectHome(0)
				Expect(records()).To(BeEmpty())
			} else {
				By("the device is in the pod, and there is a record of it")
				Expect(rdmaNames(hostNetns)).NotTo(ContainElement(vfDevice(0)))
				Expect(records()).To(HaveLen(1))
			}
			c = startContainerd()
			Expect(c.sandboxes(ctx)).To(ConsistOf(HaveField("State", runtimeapi.PodSandboxState_SANDBOX_NOTREADY)))
			c.removeAll(ctx)
			expectHome(0)
			Expect(records()).To(BeEmpty())
			Expect(namespaces()).To(BeEmpty())
			nextPod(ctx, 0)
		})

		It("that dies "+victims+" in the middle of StopPodSandbox stops it at the next try", func(ctx SpecContext) {
			p := c.runPod(ctx, "worker", 0)
			inMove := slowMove(0)
			done := make(chan error)
			go func() {
				_, err := c.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: p.id})
				done <- err
			}()
			die(inMove())
			Expect(<-done).To(HaveOccurred())
			expectHome(0)
			c = startContainerd()
			Expect(c.sandboxes(ctx)).To(HaveKey(p.id))
			c.stop(ctx, p.id)
			c.stop(ctx, p.id)
			c.remove(ctx, p.id)
			nextPod(ctx, 0)
		})
	}

	It("works for containers that ctr runs and cnitool gives their network", func() {
		ctr := func(args ...string) string {
			GinkgoHelper()
			return run("ctr", append([]string{"-n", "k8s.io"}, args...)...)
		}
		before, chars := rdmaNames(hostNetns), charDevices()
		nodes := []string{"uverbs0", "umad0", "rdma_cm"}
		ctr("run", "-d", "--no-pivot", "--snapshotter", "native", "--device", "/dev/infiniband/"+nodes[0],
			"--device", "/dev/infiniband/"+nodes[1], "--device", "/dev/infiniband/"+nodes[2], pauseImage, "worker", "/bin/busybox", "sleep", "1000000")
		fields := strings.Fields(ctr("tasks", "ls"))
		pid := fields[slices.Index(fields, "worker")+1]
		netns := "/proc/" + pid + "/ns/net"
		DeferCleanup(func() {
			ctr("tasks", "kill", "-s", "SIGKILL", "worker")
			Eventually(func() string { return ctr("tasks", "ls") }, patience).Should(ContainSubstring("STOPPED"))
			ctr("tasks", "rm", "worker")
			ctr("containers", "rm", "worker")
		})

		n := network{name: rail(0), dir: railDir(0)}
		out, err := n.cnitool("add", pod{path: netns})
		Expect(err).NotTo(HaveOccurred(), out)
		inside := func(args ...string) []string {
			GinkgoHelper()
			return strings.Fields(ctr(append([]string{"tasks", "exec", "--exec-id", "look", "worker", "/bin/busybox"}, args...)...))
		}
		Expect(inside("ls", "/sys/class/infiniband")).To(ConsistOf(vfDevice(0)))
		Expect(inside("ls", "/dev/infiniband")).To(ConsistOf(nodes))
		Expect(rdmaNames(hostNetns)).NotTo(ContainElement(vfDevice(0)))
		var findings []finding
		Eventually(func() string { return companion("doctor", "--pid", pid, "--show-pass").stdout }, patience).Should(ContainSubstring("every address has its GID"))
		companionJSON(&findings, 0, "doctor", "--pid", pid, "--show-pass")
		Expect(findings).To(ContainElements(check("device", "PASS", Not(BeEmpty())), check("nodes", "PASS", Not(BeEmpty()))))

		out, err = n.cnitool("del", pod{path: netns})
		Expect(err).NotTo(HaveOccurred(), out)
		Expect(rdmaNames(hostNetns)).To(Equal(before))
		Expect(charDevices()).To(Equal(chars))
		Expect(records()).To(BeEmpty())
	})

	It("stops pods that the upstream plugin has attached before it was replaced", func(ctx SpecContext) {
		upstreamPlugin()
		p := c.runPod(ctx, "old", 0)
		expectIn(p, 0)
		record := upstreamRecord(p.id, 0)
		Expect(record).To(BeAnExistingFile())
		Expect(records()).To(BeEmpty())

		By("the upgrade")
		run("sh", "-c", "cp "+binDir+"/rdma "+cniBin+"/.new && mv "+cniBin+"/.new "+cniBin+"/rdma")
		q := c.runPod(ctx, "new", 1)
		expectIn(q, 1)
		c.stop(ctx, p.id)
		expectHome(0)
		Expect(record).NotTo(BeAnExistingFile())
		c.remove(ctx, p.id)
		expectIn(q, 1)
		c.stop(ctx, q.id)
		c.remove(ctx, q.id)
		expectHome(1)
		nextPod(ctx, 0)
	})
})

// rebootTar carries what is on disk from one guest to the next.
const rebootTar = "/bed/reboot.tar"

// A node that reboots while its pods run: the first guest ends with pods alive,
// the second one has its disk and nothing of its memory.
var _ = Describe("containerd on a node that reboots", Ordered, func() {
	It("has pods alive", Label(withContainerd, alone, "before-reboot"), func(ctx SpecContext) {
		addVFDevices()
		setUpContainerd()
		c := startContainerd()
		importPause()
		for i, name := range []string{"first", "second"} {
			expectIn(c.runPod(ctx, name, i), i)
		}
		upstreamPlugin()
		p := c.runPod(ctx, "old", 2)
		expectIn(p, 2)
		Expect(upstreamRecord(p.id, 2)).To(BeAnExistingFile())
		Expect(records()).To(HaveLen(2))
		c.kill()
		run("tar", "-c", "-C", "/", "-f", rebootTar, "var/lib/containerd", "var/lib/cni")
	})

	It("stops each pod of before at the first try, and gives their devices to new ones", Label(withContainerd, alone, "after-reboot"), func(ctx SpecContext) {
		run("tar", "-x", "-C", "/", "-f", rebootTar)
		addVFDevices()
		setUpContainerd()
		c := startContainerd()
		ids := map[string]string{}
		for id, s := range c.sandboxes(ctx) {
			Expect(s.State).To(Equal(runtimeapi.PodSandboxState_SANDBOX_NOTREADY))
			ids[s.Metadata.Name] = id
		}
		Expect(ids).To(And(HaveLen(3), HaveKey("first"), HaveKey("second"), HaveKey("old")))

		By("a pod that is stopped before its successor starts")
		calls := spyOnPlugin()
		c.stop(ctx, ids["first"])
		var netns []string
		for _, call := range calls() {
			if call.env["CNI_COMMAND"] == "DEL" {
				netns = append(netns, call.env["CNI_NETNS"])
			}
		}
		Expect(netns).To(Equal([]string{""}), "the namespace is gone, and containerd knows it")
		c.remove(ctx, ids["first"])
		p := c.runPod(ctx, "first", 0)
		expectIn(p, 0)

		By("a pod that is stopped when its device is in another one already")
		q := c.runPod(ctx, "third", 1)
		expectIn(q, 1)
		c.stop(ctx, ids["second"])
		c.remove(ctx, ids["second"])
		expectIn(q, 1)

		By("a pod of the upstream plugin, whose record has outlived the reboot")
		Expect(upstreamRecord(ids["old"], 2)).To(BeAnExistingFile())
		c.stop(ctx, ids["old"])
		c.remove(ctx, ids["old"])
		Expect(upstreamRecord(ids["old"], 2)).NotTo(BeAnExistingFile())
		r := c.runPod(ctx, "new", 2)
		expectIn(r, 2)

		c.removeAll(ctx)
		for i := range vfs {
			expectHome(i)
		}
		Expect(records()).To(BeEmpty())
		Expect(namespaces()).To(BeEmpty())
		Expect(dirNames("/var/lib/cni/rdma")).To(BeEmpty())
	})
})
