package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

// companion runs rdma-cni.
func companion(args ...string) answer {
	GinkgoHelper()
	c := &call{Cmd: exec.Command(filepath.Join(binDir, "rdma-cni"), args...)}
	c.Cmd.Stdout, c.Cmd.Stderr = &c.stdout, &c.stderr
	return c.finish()
}

// companionJSON runs it with -o json, expects an exit code, and reads what it
// says.
func companionJSON(into any, exit int, args ...string) answer {
	GinkgoHelper()
	got := companion(append(args, "-o", "json")...)
	Expect(got.exit).To(Equal(exit), "%v: stdout %s stderr %s", args, got.stdout, got.stderr)
	Expect(json.Unmarshal([]byte(got.stdout), into)).To(Succeed(), "%v: stdout %s stderr %s", args, got.stdout, got.stderr)
	return got
}

// inPod starts a process inside a pod's namespace; it ends with the spec.
func inPod(p pod) *exec.Cmd {
	GinkgoHelper()
	cmd := exec.Command("ip", "netns", "exec", p.name, "sleep", "1000")
	Expect(cmd.Start()).To(Succeed())
	DeferCleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	Eventually(func() string {
		link, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", cmd.Process.Pid))
		return link
	}, patience).ShouldNot(Equal(readlink(hostNetns)))
	return cmd
}

// listed is what the specs look at in list's output.
type listed struct {
	Address, Bus, Type, PF, Driver, LinkLayer, Device, NodeGUID, Absence string
	VF                                                                   *int
	Index                                                                *uint32
	Netdevs                                                              []string
	Ports                                                                []struct {
		Port          int
		State, Netdev string
	}
	CharDevices []struct {
		Name         string
		Major, Minor uint32
	}
	Holder struct {
		Place, PodNamespace, PodName, ContainerID, IfName, Network, Netns, Command string
		NetnsInode                                                                 uint64
		Recorded                                                                   bool
		PID                                                                        int
		Since                                                                      time.Time
	}
}

func listOne(args ...string) listed {
	GinkgoHelper()
	var rows []listed
	companionJSON(&rows, 0, append([]string{"list"}, args...)...)
	Expect(rows).To(HaveLen(1))
	return rows[0]
}

var _ = Describe("rdma-cni list", func() {
	It("shows functions at home with their numbers as the kernel has them", func() {
		r := listOne("--pci", vfs[1])
		Expect(r.Address).To(Equal(vfs[1]))
		Expect(r.Type).To(Equal("vf"))
		Expect(r.PF).To(Equal("0000:01:00.0"))
		Expect(r.VF).To(HaveValue(Equal(1)))
		Expect(r.Driver).To(Equal("igbvf"))
		Expect(r.LinkLayer).To(Equal("Ethernet"))
		Expect(r.Device).To(Equal(vfDevice(1)))
		Expect(*r.Index).To(Equal(rdmaDevices(hostNetns)[vfDevice(1)]))
		Expect(r.Netdevs).To(ConsistOf(netdevOf(vfs[1])))
		Expect(r.NodeGUID).To(Equal(strings.TrimSpace(run("cat", "/sys/class/infiniband/"+vfDevice(1)+"/node_guid"))))
		Expect(r.Holder.Place).To(Equal("home"))
		for _, c := range r.CharDevices {
			var major, minor uint32
			_, err := fmt.Sscanf(run("stat", "-c", "%t %T", "/dev/infiniband/"+c.Name), "%x %x", &major, &minor)
			Expect(err).NotTo(HaveOccurred())
			Expect([]uint32{c.Major, c.Minor}).To(Equal([]uint32{major, minor}), c.Name)
		}
		var all []listed
		companionJSON(&all, 0, "list")
		Expect(all).To(HaveLen(len(vfs)))
	})

	It("names the pod that holds a device, and the record's details", func() {
		p := newPod()
		p.takeNetdev(0)
		a := vfAttachment(p, 0)
		a.args = "IgnoreUnknown=true;K8S_POD_NAMESPACE=training;K8S_POD_NAME=worker-0"
		a.succeed("ADD")
		r := listOne("--pod", "training/worker-0")
		Expect(r.Address).To(Equal(vfs[0]))
		Expect(r.Device).To(Equal(vfDevice(0)))
		Expect(r.Netdevs).To(ConsistOf("net1"))
		Expect(r.Holder.Place).To(Equal("pod"))
		Expect(r.Holder.Recorded).To(BeTrue())
		Expect(r.Holder.ContainerID).To(Equal(p.id))
		Expect(r.Holder.IfName).To(Equal("net1"))
		Expect(r.Holder.Network).To(Equal("rail"))
		Expect(r.Holder.Netns).To(Equal(p.path))
		Expect(r.Holder.Since).To(BeTemporally("~", time.Now(), time.Minute))
		Expect(companion("list", "--device", vfDevice(0)).stdout).To(ContainSubstring("training/worker-0 net1 since"))
		a.succeed("DEL")
		Expect(listOne("--pci", vfs[0]).Holder.Place).To(Equal("home"))
	})

	It("finds a device in a namespace without any record, and who runs there", func() {
		p := newPod()
		holder := inPod(p)
		run("rdma", "dev", "set", vfDevice(2), "netns", p.name)
		r := listOne("--pci", vfs[2])
		Expect(r.Device).To(Equal(vfDevice(2)))
		Expect(r.Holder.Place).To(Equal("namespace"))
		Expect(r.Holder.Recorded).To(BeFalse())
		Expect(r.Holder.Netns).To(Equal(p.path))
		Expect(r.Holder.PID).To(Equal(holder.Process.Pid))
		Expect(r.Holder.Command).To(Equal("sleep"))
		Expect(fmt.Sprintf("net:[%d]", r.Holder.NetnsInode)).To(Equal(readlink(fmt.Sprintf("/proc/%d/ns/net", holder.Process.Pid))))
		_ = holder.Process.Kill()
		_ = holder.Wait()
		p.remove()
		Eventually(func() []string { return rdmaNames(hostNetns) }, patience).Should(ContainElement(vfDevice(2)))
	})

	It("shows a device whose namespace no path leads to as unreachable", func() {
		p := newPod()
		run("rdma", "dev", "set", vfDevice(3), "netns", p.name)
		var socket int
		inNetns(p.path, func() { socket = rdmaSocket() })
		p.remove() // the socket keeps the namespace, and shows no path
		DeferCleanup(func() {
			closeSocket(socket)
			Eventually(func() []string { return rdmaNames(hostNetns) }, patience).Should(ContainElement(vfDevice(3)))
		})
		r := listOne("--pci", vfs[3])
		Expect(r.Holder.Place).To(Equal("unreachable"))
		Expect(r.Device).To(Equal(vfDevice(3)), "the verbs class tells its name all the same")
		var findings []finding
		companionJSON(&findings, 1, "doctor")
		Expect(findings).To(ContainElement(And(HaveField("Check", "stranded"), HaveField("Severity", "FAIL"), HaveField("Device", vfs[3]))))
	})

	It("explains a function that lacks its device, and an auxiliary device", func() {
		sim("del %s", vfDevice(0))
		sim("add name=sf4 parent=aux:rdmasim.sf.4 netdev=0")
		var rows []listed
		companionJSON(&rows, 0, "list")
		Expect(rows).To(ContainElement(And(HaveField("Address", "rdmasim.sf.4"), HaveField("Bus", "auxiliary"), HaveField("Type", "sf"), HaveField("Device", "sf4"))))
		Expect(rows).NotTo(ContainElement(HaveField("Address", vfs[0])), "igbvf is no RDMA driver, so nothing says that it should have one")
		sim("del *")
		addVFDevices()
	})

	It("has a row for each device of a function with several, home or not", func() {
		sim("add name=twin parent=pci:%s", vfs[0])
		var rows []listed
		companionJSON(&rows, 0, "list", "--pci", vfs[0])
		Expect(rows).To(ConsistOf(And(HaveField("Device", vfDevice(0)), HaveField("CharDevices", ContainElement(HaveField("Name", "uverbs0")))),
			And(HaveField("Device", "twin"), HaveField("CharDevices", ContainElement(HaveField("Name", "uverbs4"))))))
		p := newPod()
		a := vfAttachment(p, 0).with("devices", "all")
		a.succeed("ADD")
		companionJSON(&rows, 0, "list", "--pod", p.id)
		Expect(rows).To(HaveLen(2))
		Expect(rows).To(HaveEach(HaveField("Holder.Place", "pod")))
		p.remove()
		Eventually(func() []string { return rdmaNames(hostNetns) }, patience).Should(ContainElements(vfDevice(0), "twin"))
		got := companion("gc")
		Expect(got.exit).To(BeZero())
		Expect(got.stdout).To(And(ContainSubstring("dropped"), ContainSubstring("twin")))
		sim("del twin")
	})

	It("has all formats, and writes nothing but data on stdout", func() {
		Expect(companion("list", "-o", "yaml").stdout).To(ContainSubstring(`- address: "` + vfs[0] + `"`))
		got := companion("discover")
		Expect(got.exit).To(BeZero())
		Expect(got.stdout).To(HavePrefix("ADDRESS"))
		Expect(got.stderr).To(BeEmpty())
	})

	It("watches", func() {
		p := newPod()
		cmd := exec.Command(filepath.Join(binDir, "rdma-cni"), "list", "--watch", "--pci", vfs[0])
		var out safeBuffer
		cmd.Stdout = &out
		Expect(cmd.Start()).To(Succeed())
		DeferCleanup(func() { _ = cmd.Process.Kill() })
		Eventually(out.String, patience).Should(ContainSubstring("home"))
		vfAttachment(p, 0).succeed("ADD")
		Eventually(out.String, patience).Should(ContainSubstring(p.id))
		vfAttachment(p, 0).succeed("DEL")
		Expect(cmd.Process.Signal(os.Interrupt)).To(Succeed())
		Expect(cmd.Wait()).To(Succeed())
	})
})

var _ = Describe("rdma-cni gc", func() {
	type reaped struct {
		Function, ContainerID, IfName, Action, Reason, Error string
		Devices                                              []string
		Done                                                 bool
	}
	gc := func(exit int, args ...string) []reaped {
		GinkgoHelper()
		var rows []reaped
		companionJSON(&rows, exit, append([]string{"gc"}, args...)...)
		return rows
	}

	It("has nothing to do on a clean node", func() {
		Expect(gc(0)).To(BeEmpty())
	})

	It("leaves a live attachment, dry or not", func() {
		p := newPod()
		vfAttachment(p, 0).succeed("ADD")
		for _, args := range [][]string{{"--dry-run"}, nil} {
			Expect(gc(0, args...)).To(ConsistOf(And(HaveField("Action", "keep"), HaveField("Reason", ContainSubstring(p.path)), HaveField("Done", false))))
			expectIn(p, 0)
			Expect(records()).To(HaveLen(1))
		}
		vfAttachment(p, 0).succeed("DEL")
	})

	It("drops the record of a pod that died without DEL", func() {
		p := newPod()
		vfAttachment(p, 0).succeed("ADD")
		p.remove()
		Eventually(func() []string { return rdmaNames(hostNetns) }, patience).Should(ContainElement(vfDevice(0)))
		Expect(gc(0, "--dry-run")).To(ConsistOf(And(HaveField("Action", "drop"), HaveField("Done", false))))
		Expect(records()).To(HaveLen(1), "a dry run changes nothing")
		Expect(gc(0)).To(ConsistOf(And(HaveField("Action", "drop"), HaveField("Done", true), HaveField("ContainerID", p.id), HaveField("Devices", ConsistOf(vfDevice(0))))))
		Expect(records()).To(BeEmpty())
		expectHome(0)
	})

	It("brings a device home that only a forgotten file keeps away", func() {
		p := newPod()
		vfAttachment(p, 0).succeed("ADD")
		leak, err := os.Open(p.path)
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(leak.Close)
		p.remove()
		Expect(gc(0, "--dry-run")).To(ConsistOf(And(HaveField("Action", "bring home"),
			HaveField("Reason", ContainSubstring(fmt.Sprintf("process %d", os.Getpid()))))))
		Expect(rdmaNames(hostNetns)).NotTo(ContainElement(vfDevice(0)))
		Expect(gc(0)).To(ConsistOf(And(HaveField("Action", "bring home"), HaveField("Done", true))))
		expectHome(0)
		Expect(records()).To(BeEmpty())
	})

	It("leaves a device in a namespace in which a process runs, though its path is gone", func() {
		p := newPod()
		vfAttachment(p, 0).succeed("ADD")
		holder := inPod(p)
		p.remove()
		Expect(gc(0)).To(ConsistOf(And(HaveField("Action", "keep"), HaveField("Reason", ContainSubstring(fmt.Sprintf("process %d (sleep)", holder.Process.Pid))))))
		Expect(records()).To(HaveLen(1))
		_ = holder.Process.Kill()
		_ = holder.Wait()
		Eventually(func() []string { return rdmaNames(hostNetns) }, patience).Should(ContainElement(vfDevice(0)))
		Expect(gc(0)).To(ConsistOf(And(HaveField("Action", "drop"), HaveField("Done", true))))
	})

	It("takes only the device asked for", func() {
		a, b := newPod(), newPod()
		vfAttachment(a, 0).succeed("ADD")
		vfAttachment(b, 1).succeed("ADD")
		a.remove()
		b.remove()
		Eventually(func() []string { return rdmaNames(hostNetns) }, patience).Should(ContainElements(vfDevice(0), vfDevice(1)))
		Expect(gc(0, "--device", vfs[0])).To(ConsistOf(And(HaveField("Function", vfs[0]), HaveField("Done", true))))
		Expect(records()).To(HaveLen(1))
		Expect(gc(0, "--device", vfDevice(1))).To(ConsistOf(And(HaveField("Function", vfs[1]), HaveField("Done", true))))
		Expect(records()).To(BeEmpty())
	})

	It("drops a damaged record whose device is at home, and leaves one whose device is not", func() {
		p := newPod()
		vfAttachment(p, 0).succeed("ADD")
		file := filepath.Join(stateDir, records()[0])
		good, err := os.ReadFile(file)
		Expect(err).NotTo(HaveOccurred())
		Expect(os.WriteFile(file, good[:20], 0o600)).To(Succeed())
		Expect(gc(0)).To(ConsistOf(And(HaveField("Action", "keep"), HaveField("Reason", ContainSubstring("unusable")))))
		expectIn(p, 0)
		p.remove()
		Eventually(func() []string { return rdmaNames(hostNetns) }, patience).Should(ContainElement(vfDevice(0)))
		Expect(gc(0)).To(ConsistOf(And(HaveField("Action", "drop"), HaveField("Done", true))))
		Expect(records()).To(BeEmpty())
	})

	It("keeps the record of a live pod that has lost its device", func() {
		p := newPod()
		vfAttachment(p, 0).succeed("ADD")
		run("ip", "netns", "exec", p.name, "rdma", "dev", "set", vfDevice(0), "netns", hostName)
		Expect(gc(0)).To(ConsistOf(And(HaveField("Action", "keep"), HaveField("Reason", ContainSubstring("has lost its device")))))
		vfAttachment(p, 0).succeed("DEL")
	})

	It("does not wait for ever for the node lock, and names the holder", func() {
		p := newPod()
		vfAttachment(p, 0).succeed("ADD")
		p.remove()
		Eventually(func() []string { return rdmaNames(hostNetns) }, patience).Should(ContainElement(vfDevice(0)))
		unlock := holdLock()
		Expect(gc(0, "--dry-run")).To(HaveLen(1), "a dry run needs no lock")
		Expect(gc(1)).To(ConsistOf(And(HaveField("Error", ContainSubstring("node lock")), HaveField("Done", false))))
		unlock()
		Expect(gc(0)).To(ConsistOf(HaveField("Done", true)))
	})
})
