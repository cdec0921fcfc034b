package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

// withPodman labels specs that need Debian's podman in the guest (make
// test-podman).
const withPodman = "podman"

// setUpPodman configures podman for the CNI backend as docs/outside-kubernetes.md
// says, and makes an image out of busybox, so that no registry is needed.
func setUpPodman() {
	GinkgoHelper()
	for _, dir := range []string{"/opt/cni/bin", "/etc/containers", "/etc/cni/net.d", "/etc/cdi", "/var/tmp"} {
		Expect(os.MkdirAll(dir, 0o755)).To(Succeed())
	}
	for _, name := range []string{"rdma", "rdma-cni", "host-device", "host-local"} {
		run("cp", filepath.Join(binDir, name), "/opt/cni/bin/")
	}
	run("sh", "-c", "rm -f /etc/cni/net.d/*")
	for file, text := range map[string]string{
		// The guest's root file system is an initramfs, which cannot be
		// pivoted away from.
		"/etc/containers/containers.conf": `[network]
network_backend = "cni"
cni_plugin_dirs = ["/opt/cni/bin"]
network_config_dir = "/etc/cni/net.d"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
no_pivot_root = true
`,
		"/etc/containers/storage.conf": `[storage]
driver = "vfs"
graphroot = "/var/lib/containers/storage"
runroot = "/run/containers/storage"
`,
		"/etc/containers/policy.json": `{"default": [{"type": "insecureAcceptAnything"}]}`,
	} {
		Expect(os.WriteFile(file, []byte(text), 0o644)).To(Succeed())
	}
	Expect(os.Setenv("HOME", "/root")).To(Succeed())
	run("sh", "-c", `mkdir -p /tmp/image/bin && cd /tmp/image && cp /bin/busybox bin/ &&
for a in sh ls cat sleep stat ip; do ln -sf busybox bin/$a; done && tar -c . | podman import - busybox`)
}

// podmanNetwork writes the network of a function, [host-device, rdma].
func podmanNetwork(name, function string) {
	GinkgoHelper()
	conf := fmt.Sprintf(`{"cniVersion": "0.4.0", "name": %q, "plugins": [
  {"type": "host-device", "pciBusID": %q, "ipam": {"type": "host-local", "ranges": [[{"subnet": "192.168.7.0/24"}]]}},
  {"type": "rdma", "deviceID": %q}]}`, name, function, function)
	Expect(os.WriteFile("/etc/cni/net.d/"+name+".conflist", []byte(conf), 0o644)).To(Succeed())
}

func podman(args ...string) string {
	GinkgoHelper()
	var stderr strings.Builder
	cmd := exec.Command("podman", args...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	Expect(err).NotTo(HaveOccurred(), "podman %s: %s%s", strings.Join(args, " "), out, stderr.String())
	return string(out)
}

var _ = Describe("podman", Label(withPodman), Ordered, func() {
	BeforeAll(setUpPodman)
	BeforeEach(func() {
		DeferCleanup(func() { _ = os.RemoveAll("/var/lib/cni"); _ = exec.Command("podman", "rm", "-af", "-t", "0").Run() })
	})

	It("gives a container the RDMA device, its nodes, its interface, and no other", func() {
		podmanNetwork("rail0", vfs[1])
		Expect(companion("cdi", "generate", "--pci", vfs[1]).exit).To(BeZero())
		before, chars := rdmaNames(hostNetns), charDevices()
		podman("run", "-d", "--name", "worker", "--network", "rail0", "--device", "rdma/pci-0000-01-10-2="+vfs[1], "busybox", "/bin/sleep", "1000")

		By("inside: exactly that device, its nodes with the kernel's numbers, its interface with the address")
		Expect(strings.Fields(podman("exec", "worker", "/bin/ls", "/sys/class/infiniband"))).To(ConsistOf(vfDevice(1)))
		Expect(strings.Fields(podman("exec", "worker", "/bin/ls", "/sys/class/net"))).To(ConsistOf("lo", "eth0"))
		var nodes []string
		for node, owner := range chars {
			if strings.HasPrefix(owner, vfs[1]) {
				nodes = append(nodes, node)
			}
		}
		Expect(nodes).To(ContainElement("uverbs1"))
		Expect(strings.Fields(podman("exec", "worker", "/bin/ls", "/dev/infiniband"))).To(ConsistOf(append(nodes, "rdma_cm")))
		for _, node := range append(nodes, "rdma_cm") {
			Expect(podman("exec", "worker", "/bin/stat", "-c", "%t:%T", "/dev/infiniband/"+node)).To(Equal(run("stat", "-c", "%t:%T", "/dev/infiniband/"+node)))
		}
		Expect(podman("exec", "worker", "/bin/ip", "addr", "show", "eth0")).To(ContainSubstring("192.168.7."))

		By("outside: the device is gone from the host, and the companion knows who has it")
		Expect(rdmaNames(hostNetns)).NotTo(ContainElement(vfDevice(1)))
		r := listOne("--pod", "worker")
		Expect(r.Holder).To(And(HaveField("Place", "pod"), HaveField("IfName", "eth0"), HaveField("Network", "rail0")))
		pid := strings.TrimSpace(podman("inspect", "-f", "{{.State.Pid}}", "worker"))
		var findings []finding
		Eventually(func() string {
			return companion("doctor", "--pid", pid, "--show-pass").stdout
		}, patience).Should(ContainSubstring("every address has its GID"))
		companionJSON(&findings, 0, "doctor", "--pid", pid, "--show-pass")
		Expect(findings).To(ContainElements(
			check("device", "PASS", Not(BeEmpty())), check("foreign-devices", "PASS", Not(BeEmpty())),
			check("sysfs", "PASS", Not(BeEmpty())), check("nodes", "PASS", Not(BeEmpty())),
			check("access", "PASS", ContainSubstring("3 nodes can be opened")),
			check("connection-manager", "PASS", Not(BeEmpty()))))

		By("afterwards: all is home")
		podman("rm", "-f", "-t", "0", "worker")
		Expect(rdmaNames(hostNetns)).To(Equal(before))
		Expect(charDevices()).To(Equal(chars))
		Expect(netdevOf(vfs[1])).To(Equal("eth2"))
		Expect(records()).To(BeEmpty())
	})

	It("denies the container what CDI did not give it, and the companion says so", func() {
		podmanNetwork("rail0", vfs[1])
		podman("run", "-d", "--name", "bare", "--network", "rail0", "busybox", "/bin/sleep", "1000")
		pid := strings.TrimSpace(podman("inspect", "-f", "{{.State.Pid}}", "bare"))
		var findings []finding
		companionJSON(&findings, 1, "doctor", "--pid", pid)
		Expect(findings).To(ContainElements(
			check("nodes", "FAIL", ContainSubstring("uverbs1")),
			check("connection-manager", "WARN", Not(BeEmpty()))))
		podman("rm", "-f", "-t", "0", "bare")
		expectHome(1)
	})
})
