package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
)

// rdmaSocket opens an RDMA netlink socket in the namespace of the calling
// thread. It keeps that alive without showing a path to it.
func rdmaSocket() int {
	GinkgoHelper()
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	Expect(err).NotTo(HaveOccurred())
	return fd
}

func closeSocket(fd int) { _ = unix.Close(fd) }

// safeBuffer takes the output of a process that still runs.
type safeBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *safeBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

type finding struct{ Check, Severity, Device, Message, Meaning, Fix string }

func check(name, severity string, message any) any {
	return And(HaveField("Check", name), HaveField("Severity", severity), HaveField("Message", message))
}

// installPlugin puts the plugin where runtimes look for it.
func installPlugin() {
	GinkgoHelper()
	run("mkdir", "-p", "/opt/cni/bin")
	run("cp", filepath.Join(binDir, "rdma"), "/opt/cni/bin/rdma")
	DeferCleanup(os.RemoveAll, "/opt/cni")
}

var _ = Describe("rdma-cni doctor", func() {
	doctor := func(exit int, args ...string) []finding {
		GinkgoHelper()
		var findings []finding
		companionJSON(&findings, exit, append([]string{"doctor", "--show-pass"}, args...)...)
		return findings
	}

	It("finds a good node good", func() {
		installPlugin()
		findings := doctor(0)
		Expect(findings).NotTo(ContainElement(HaveField("Severity", "FAIL")))
		Expect(findings).To(ContainElements(
			check("subsystem", "PASS", Not(BeEmpty())),
			check("mode", "PASS", ContainSubstring("exclusive")),
			check("devices", "PASS", "4 RDMA devices"),
			check("admin-mac", "PASS", ContainSubstring("02:be:d0:00:00:01")),
			check("numbering", "PASS", Not(BeEmpty())),
			check("char-devices", "PASS", ContainSubstring("kernel's numbers")),
			check("records", "PASS", Not(BeEmpty())),
			check("plugin", "PASS", ContainSubstring("rdma-cni cni version")),
			check("kernel", "PASS", Not(BeEmpty())),
		))
	})

	It("finds holes, wrong nodes, zero GUIDs, stale records and strangers", func() {
		p := newPod()
		sim("del %s", vfDevice(0))
		sim("add name=zero parent=pci:%s guid=zero", vfs[0])
		run("rdma", "dev", "set", vfDevice(2), "netns", p.name)
		run("mv", "/dev/infiniband/rdma_cm", "/dev/infiniband/rdma_cm.away")
		DeferCleanup(func() {
			run("mv", "/dev/infiniband/rdma_cm.away", "/dev/infiniband/rdma_cm")
			p.remove()
			sim("del *")
			addVFDevices()
		})
		findings := doctor(1)
		Expect(findings).To(ContainElements(
			check("node-guid", "WARN", ContainSubstring("zero")),
			check("stranded", "WARN", ContainSubstring(p.path)),
			check("char-devices", "FAIL", ContainSubstring("rdma_cm")),
			check("plugin", "WARN", ContainSubstring("not installed")),
		))
	})

	It("finds a hole in the numbering", func() {
		sim("del %s", vfDevice(0))
		Expect(doctor(0)).To(ContainElement(check("numbering", "WARN", ContainSubstring("uverbs0"))))
		sim("del *")
		addVFDevices()
	})

	It("finds a stale record, and gc cures it", func() {
		p := newPod()
		vfAttachment(p, 0).succeed("ADD")
		Expect(doctor(0)).To(ContainElement(check("records", "PASS", ContainSubstring("1 records"))))
		p.remove()
		Eventually(func() []string { return rdmaNames(hostNetns) }, patience).Should(ContainElement(vfDevice(0)))
		Expect(doctor(0)).To(ContainElement(check("records", "WARN", ContainSubstring(p.id))))
		Expect(companion("doctor", "--strict").exit).To(Equal(1))
		Expect(companion("gc").exit).To(BeZero())
		Expect(doctor(0)).To(ContainElement(check("records", "PASS", Not(BeEmpty()))))
	})

	It("tells a driver that cannot release its devices", func() {
		// The test driver's devices bear the driver ID of rdma_rxe, which takes
		// them for its own at events of their interfaces.
		sim("del *")
		DeferCleanup(addVFDevices)
		_ = exec.Command("modprobe", "crc32_generic").Run() // gone in 7.3
		run("modprobe", "rdma_rxe")
		run("ip", "link", "add", "soft0", "type", "dummy")
		run("ip", "link", "set", "soft0", "up")
		run("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "soft0")
		DeferCleanup(func() {
			run("ip", "link", "del", "soft0")
			Eventually(func() error { return exec.Command("rmmod", "rdma_rxe").Run() }, patience).Should(Succeed())
		})
		movable := "WARN"
		if !kernelIsBefore(7, 3) {
			movable = "PASS"
		}
		Expect(doctor(0)).To(ContainElement(And(HaveField("Check", "driver"), HaveField("Severity", movable), HaveField("Device", "rxe0"),
			HaveField("Message", ContainSubstring("rdma_rxe")))))
		Expect(listOne("--device", "rxe0")).To(And(HaveField("Type", "software"), HaveField("Holder.Place", "home")))
	})

	It("judges a network's configuration", func() {
		dir := GinkgoT().TempDir()
		file := filepath.Join(dir, "rail.conflist")
		Expect(os.WriteFile(file, []byte(`{"name":"rail","cniVersion":"1.0.0","plugins":[{"type":"rdma"},{"type":"sriov"}]}`), 0o600)).To(Succeed())
		Expect(doctor(1, "--config", file)).To(ContainElement(check("config", "FAIL", ContainSubstring("rdma comes before"))))
		Expect(os.WriteFile(file, []byte(`{"name":"rail","cniVersion":"1.0.0","plugins":[{"type":"sriov"},{"type":"rdma"}]}`), 0o600)).To(Succeed())
		Expect(doctor(0, "--config", file)).To(ContainElement(check("config", "PASS", ContainSubstring("sriov, rdma"))))
	})

	Describe("of a pod", func() {
		It("finds a good pod good, by name, namespace and process", func() {
			p := newPod()
			p.takeNetdev(0)
			run("ip", "-n", p.name, "addr", "add", "192.168.9.1/24", "dev", "net1")
			run("ip", "-n", p.name, "link", "set", "net1", "up")
			a := vfAttachment(p, 0)
			a.args = "IgnoreUnknown=true;K8S_POD_NAMESPACE=training;K8S_POD_NAME=worker-0"
			a.succeed("ADD")
			proc := inPod(p)
			run("mkdir", "-p", "/sys/fs/cgroup/pod")
			DeferCleanup(func() {
				_ = proc.Process.Kill()
				_ = proc.Wait()
				Eventually(func() error { return os.Remove("/sys/fs/cgroup/pod") }, patience).Should(Succeed())
			})
			Expect(os.WriteFile("/sys/fs/cgroup/pod/cgroup.procs", fmt.Append(nil, proc.Process.Pid), 0)).To(Succeed())
			for _, args := range [][]string{{"--pod", "training/worker-0"}, {"--netns", p.path}, {"--pid", fmt.Sprint(proc.Process.Pid)}} {
				var findings []finding
				Eventually(func(g Gomega) { // the kernel makes the GID in its own time
					got := companion(append([]string{"doctor", "--show-pass", "-o", "json"}, args...)...)
					g.Expect(got.stdout).To(ContainSubstring("every address has its GID"), got.stdout+got.stderr)
				}, patience).Should(Succeed())
				companionJSON(&findings, 0, append([]string{"doctor", "--show-pass"}, args...)...)
				Expect(findings).To(ContainElements(
					check("device", "PASS", Not(BeEmpty())),
					check("foreign-devices", "PASS", Not(BeEmpty())),
					check("netdev", "PASS", Not(BeEmpty())),
					check("access", "PASS", ContainSubstring("nodes can be opened")),
					check("connection-manager", "PASS", Not(BeEmpty())),
					check("sysfs", "PASS", Not(BeEmpty())), // ip netns exec mounts one
				), "%v", args)
			}
			a.succeed("DEL")
		})

		It("finds what is wrong in a pod", func() {
			p := newPod()
			a := vfAttachment(p, 0)
			a.succeed("ADD")
			proc := inPod(p)
			run("rdma", "dev", "set", vfDevice(3), "netns", p.name)
			var findings []finding
			companionJSON(&findings, 1, "doctor", "--pid", fmt.Sprint(proc.Process.Pid))
			Expect(findings).To(ContainElements(
				check("foreign-devices", "WARN", Not(BeEmpty())),
				check("netdev", "FAIL", Not(BeEmpty())), // nobody moved it
			))
			run("ip", "netns", "exec", p.name, "rdma", "dev", "set", vfDevice(0), "netns", hostName)
			companionJSON(&findings, 1, "doctor", "--netns", p.path)
			Expect(findings).To(ContainElement(check("device", "FAIL", ContainSubstring("not in the pod"))))
			a.succeed("DEL")
			_ = proc.Process.Kill()
			_ = proc.Wait()
			p.remove()
			Eventually(func() []string { return rdmaNames(hostNetns) }, patience).Should(ContainElement(vfDevice(3)))
		})

		It("finds a container whose control group denies the device", func() {
			p := newPod()
			a := vfAttachment(p, 0)
			a.succeed("ADD")
			proc := inPod(p)
			run("mkdir", "-p", "/sys/fs/cgroup/denied")
			DeferCleanup(func() {
				_ = proc.Process.Kill()
				_ = proc.Wait()
				Eventually(func() error { return os.Remove("/sys/fs/cgroup/denied") }, patience).Should(Succeed())
			})
			denyDevices("/sys/fs/cgroup/denied")
			Expect(os.WriteFile("/sys/fs/cgroup/denied/cgroup.procs", fmt.Append(nil, proc.Process.Pid), 0)).To(Succeed())
			var findings []finding
			companionJSON(&findings, 1, "doctor", "--pid", fmt.Sprint(proc.Process.Pid))
			Expect(findings).To(ContainElement(check("access", "FAIL", ContainSubstring("EPERM"))))
			a.succeed("DEL")
		})

		It("says when a pod is not there", func() {
			got := companion("doctor", "--pod", "nobody/nowhere")
			Expect(got.exit).To(Equal(1))
			Expect(got.stderr).To(And(ContainSubstring("nobody/nowhere"), ContainSubstring("not on this node")))
		})
	})

	Describe("--probe", func() {
		It("moves an idle device out and back", func() {
			var r struct {
				Device        string
				OutMs, BackMs float64
				Before, After []string
				SameNumbers   bool
			}
			companionJSON(&r, 0, "doctor", "--probe", vfDevice(1))
			Expect(r.SameNumbers).To(BeTrue())
			Expect(r.OutMs).To(BeNumerically(">", 0))
			Expect(r.BackMs).To(BeNumerically(">", 0))
			Expect(r.Before).To(ContainElement("uverbs1"))
			expectHome(1)
		})

		It("shows how a hole changes the numbers", func() {
			sim("del %s", vfDevice(0))
			got := companion("doctor", "--probe", vfDevice(3))
			Expect(got.exit).To(BeZero())
			Expect(got.stdout).To(And(ContainSubstring("uverbs3"), ContainSubstring("uverbs0")))
			Expect(got.stderr).To(ContainSubstring("numbers changed"))
			sim("del *")
			addVFDevices()
		})

		It("refuses a device in use, an attached one, and a driver that cannot", func() {
			f, err := os.OpenFile("/dev/infiniband/uverbs2", os.O_RDWR, 0)
			Expect(err).NotTo(HaveOccurred())
			DeferCleanup(f.Close)
			allocContext(f)
			got := companion("doctor", "--probe", vfDevice(2))
			Expect(got.exit).To(Equal(1))
			Expect(got.stderr).To(ContainSubstring("in use"))
			p := newPod()
			vfAttachment(p, 0).succeed("ADD")
			Expect(companion("doctor", "--probe", vfDevice(0)).exit).To(Equal(1))
			vfAttachment(p, 0).succeed("DEL")
			sim("del %s", vfDevice(1))
			sim("add name=%s parent=pci:%s movable=0", vfDevice(1), vfs[1])
			Expect(companion("doctor", "--probe", vfDevice(1)).stderr).To(ContainSubstring("disassociate_ucontext"))
			expectHome(1)
		})
	})
})

var _ = Describe("rdma-cni mode", func() {
	type result struct {
		Live, AtBoot, Outcome, Written, Wanted string
		Changed                                bool
		Steps                                  []string
		Blockers                               []struct {
			Namespace string
			Mounts    []string
			Processes []struct {
				PID     int
				Command string
			}
		}
	}
	forget := func() { _ = os.RemoveAll("/etc/modprobe.d") }
	BeforeEach(func() { forget(); DeferCleanup(forget) })

	It("changes nothing where the mode is as asked, and persists once", func() {
		var r result
		companionJSON(&r, 0, "mode", "set", "exclusive")
		Expect(r).To(And(HaveField("Outcome", "ok"), HaveField("Changed", false), HaveField("Written", "")))
		companionJSON(&r, 0, "mode", "set", "exclusive", "--persist", "--dry-run")
		Expect(r.Written).NotTo(BeEmpty())
		Expect("/etc/modprobe.d").NotTo(BeADirectory())
		companionJSON(&r, 0, "mode", "set", "exclusive", "--persist")
		Expect(r).To(And(HaveField("Outcome", "ok"), HaveField("AtBoot", "exclusive")))
		written, err := os.ReadFile(r.Written)
		Expect(err).NotTo(HaveOccurred())
		Expect(string(written)).To(ContainSubstring("options ib_core netns_mode=0"))
		r = result{}
		companionJSON(&r, 0, "mode", "set", "exclusive", "--persist")
		Expect(r.Written).To(BeEmpty(), "a second run writes nothing")
	})

	It("says what blocks a change, and persists for the next boot", func() {
		p := newPod()
		proc := inPod(p)
		for _, args := range [][]string{{"--dry-run"}, nil} {
			var r result
			got := companionJSON(&r, 4, append([]string{"mode", "set", "shared"}, args...)...)
			Expect(r.Outcome).To(Equal("impossible"))
			Expect(r.Blockers).To(ContainElement(And(HaveField("Mounts", ContainElement(p.path)),
				HaveField("Processes", ContainElement(And(HaveField("PID", proc.Process.Pid), HaveField("Command", "sleep")))))))
			Expect(got.stderr).To(ContainSubstring("cannot be set to shared now"))
		}
		Expect(os.MkdirAll("/etc/modprobe.d", 0o755)).To(Succeed())
		Expect(os.WriteFile("/etc/modprobe.d/ib_core.conf", []byte("options ib_core netns_mode=0\n"), 0o644)).To(Succeed())
		var r result
		companionJSON(&r, 3, "mode", "set", "shared", "--persist")
		Expect(r).To(And(HaveField("Outcome", "reboot needed"), HaveField("Live", "exclusive"), HaveField("AtBoot", "shared")))
		Expect(r.Steps).To(ContainElement(ContainSubstring("reboot")))
	})

	It("changes the mode of a node without other namespaces, and back", func() {
		var r result
		companionJSON(&r, 0, "mode", "set", "shared")
		Expect(r).To(And(HaveField("Live", "shared"), HaveField("Changed", true)))
		Expect(run("rdma", "system")).To(ContainSubstring("shared"))
		var s struct{ Live string }
		companionJSON(&s, 0, "mode")
		Expect(s.Live).To(Equal("shared"))
		var findings []finding
		companionJSON(&findings, 1, "doctor")
		Expect(findings).To(ContainElement(check("mode", "FAIL", ContainSubstring("shared"))))
		Eventually(func() int { return companion("mode", "set", "exclusive").exit }, patience).Should(BeZero())
		Expect(run("rdma", "system")).To(ContainSubstring("exclusive"))
	})
})

var _ = Describe("rdma-cni cdi", func() {
	It("writes specs with the nodes that a container has after ADD", func() {
		dir := GinkgoT().TempDir()
		var rows []struct {
			Path, Kind, Problem string
			Devices, Nodes      []string
		}
		companionJSON(&rows, 0, "cdi", "generate", "--all", "--output-dir", dir)
		Expect(rows).To(HaveLen(len(vfs)))
		Expect(rows[1].Path).To(Equal(filepath.Join(dir, "rdma-cdi_rdma_pci-0000-01-10-2.yaml")))
		Expect(rows[1].Devices).To(ConsistOf("rdma/pci-0000-01-10-2=0000:01:10.2"))
		Expect(rows[1].Nodes).To(ContainElements("/dev/infiniband/uverbs1", "/dev/infiniband/umad1", "/dev/infiniband/rdma_cm"))
		p := newPod()
		vfAttachment(p, 1).succeed("ADD")
		companionJSON(&rows, 0, "cdi", "list", "--output-dir", dir)
		Expect(rows).To(HaveEach(HaveField("Problem", "")))
		vfAttachment(p, 1).succeed("DEL")
		sim("del %s", vfDevice(1))
		rows = nil
		companionJSON(&rows, 0, "cdi", "list", "--output-dir", dir)
		Expect(rows[1].Problem).To(ContainSubstring("no RDMA device now"))
		got := companion("cdi", "generate", "--pci", vfs[2], "--output-dir", dir)
		Expect(got.exit).To(BeZero())
		Expect(got.stderr).To(ContainSubstring("uverbs2"), "a hole is below it")
		Expect(companion("cdi", "cleanup", "--output-dir", dir, "--dry-run").stdout).To(ContainSubstring("Would remove"))
		Expect(dirNames(dir)).To(HaveLen(len(vfs)))
		Expect(companion("cdi", "cleanup", "--output-dir", dir).exit).To(BeZero())
		Expect(dirNames(dir)).To(BeEmpty())
		sim("del *")
		addVFDevices()
	})
})

// The mode of a module that is not loaded is what modprobe.d says, from a real
// modprobe.
var _ = Describe("rdma-cni mode without the RDMA subsystem", Label(alone), func() {
	loaded := []string{"rdmasim", "rdma_ucm", "rdma_cm", "iw_cm", "ib_cm", "ib_umad", "ib_uverbs", "ib_core"}

	It("persists for the next load of ib_core, and tells of an initramfs that would win over it", func() {
		DeferCleanup(func() {
			Expect(os.RemoveAll("/etc/modprobe.d")).To(Succeed())
			Expect(os.RemoveAll("/boot")).To(Succeed())
		})
		for _, m := range loaded {
			_ = exec.Command("rmmod", m).Run() // another spec may have unloaded it
		}
		Expect("/sys/module/ib_core").NotTo(BeADirectory())
		type result struct {
			Live, AtBoot, Outcome string
			Steps                 []string
		}
		var r result
		companionJSON(&r, 0, "mode", "set", "exclusive", "--persist")
		Expect(r).To(And(HaveField("AtBoot", "exclusive"), HaveField("Outcome", "ok"), HaveField("Steps", ContainElement(ContainSubstring("ib_core is not loaded")))))

		By("loading it, with modprobe.d alone to say the mode")
		run("modprobe", "-a", "ib_uverbs", "ib_umad", "rdma_ucm", "rdmasim")
		Expect(run("rdma", "system")).To(ContainSubstring("netns exclusive"))

		By("an initramfs that loads ib_core with the old mode")
		image := filepath.Join("/boot", "initrd.img-"+release())
		Expect(os.MkdirAll("/boot", 0o755)).To(Succeed())
		run("sh", "-c", `set -e; cd "$(mktemp -d)"; mkdir -p etc/modprobe.d lib/modules/`+release()+`
			cp /lib/modules/`+release()+`/ib_core.ko lib/modules/`+release()+`/
			echo options ib_core netns_mode=1 >etc/modprobe.d/old.conf
			find . | busybox cpio -o -H newc | gzip >`+image)
		r = result{}
		companionJSON(&r, 3, "mode", "set", "exclusive", "--persist")
		Expect(r).To(And(HaveField("Outcome", "reboot needed"), HaveField("Live", "exclusive"), HaveField("Steps", ContainElement(ContainSubstring("update-initramfs")))))
		var findings []finding
		_ = companionJSON(&findings, 1, "doctor")
		Expect(findings).To(ContainElement(check("initramfs", "FAIL", ContainSubstring("it holds ib_core"))))
	})
})
