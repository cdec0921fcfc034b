package e2e

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
)

var _ = Describe("a state directory", func() {
	var p pod
	var a attachment
	BeforeEach(func() {
		p = newPod()
		a = vfAttachment(p, 0)
	})
	// ofItsOwn mounts a file system on the state directory.
	ofItsOwn := func(options string) {
		Expect(os.MkdirAll(stateDir, 0o700)).To(Succeed())
		run("mount", "-t", "tmpfs", "-o", "mode=700,"+options, "state", stateDir)
		DeferCleanup(run, "umount", "-l", stateDir)
	}
	remount := func(options string) { run("mount", "-o", "remount,"+options, stateDir) }
	// refused makes sure that ADD fails because of the directory before it has
	// touched the device.
	refused := func(says string) {
		GinkgoHelper()
		before := snapshot()
		e := a.fail("ADD")
		Expect(e.Code).To(Equal(5), e.Msg)
		Expect(e.Msg).To(And(ContainSubstring(stateDir), ContainSubstring(says)))
		Expect(rdmaNames(p.path)).To(BeEmpty())
		expectHome(0)
		Expect(snapshot()).To(Equal(before))
	}

	It("that is read-only refuses ADD before the move", func() {
		ofItsOwn("ro")
		refused("read-only file system")
	})

	It("that has become read-only lets DEL bring the device home, and end once it can be written again", func() {
		ofItsOwn("rw")
		a.succeed("ADD")
		remount("ro")
		e := a.fail("DEL")
		Expect(e.Code).To(Equal(5), e.Msg)
		Expect(e.Msg).To(And(ContainSubstring(stateDir), ContainSubstring("read-only file system")))
		expectHome(0)
		remount("rw")
		a.succeed("DEL")
		expectHome(0)
		Expect(records()).To(BeEmpty())
	})

	// fill leaves no room for as much as a byte.
	fill := func() {
		junk, err := os.Create(filepath.Join(stateDir, "junk"))
		Expect(err).NotTo(HaveOccurred())
		for err == nil {
			_, err = junk.Write(bytes.Repeat([]byte{1}, 4096))
		}
		Expect(err).To(MatchError(unix.ENOSPC))
		Expect(junk.Close()).To(Succeed())
	}

	It("that is full refuses ADD before the move, and works again when there is room", func() {
		ofItsOwn("size=16k")
		fill()
		refused("no space left")
		Expect(os.Remove(filepath.Join(stateDir, "junk"))).To(Succeed())
		a.succeed("ADD")
		a.succeed("DEL")
		expectHome(0)
	})

	It("that has become full hinders no DEL", func() {
		ofItsOwn("size=16k")
		a.succeed("ADD")
		fill()
		a.succeed("DEL")
		expectHome(0)
		Expect(records()).To(Equal([]string{"junk"}))
		Expect(os.Remove(filepath.Join(stateDir, "junk"))).To(Succeed())
	})

	It("that becomes full during ADD, at any point, leaves the attachment whole or undone", func() {
		ofItsOwn("size=16k")
		outcomes := map[int]int{}
		var q pod
		interleaved("ADD", func() attachment {
			q = fastPod()
			a = vfAttachment(q, 0)
			return a
		}, fill, func(got answer) {
			outcomes[got.exit]++
			if got.exit == 0 {
				expectIn(q, 0)
			} else {
				Expect(got.failure().Msg).To(ContainSubstring("no space left"))
				expectHome(0)
				Expect(records()).To(Equal([]string{"junk"}))
			}
			a.succeed("DEL")
			expectHome(0)
			Expect(os.Remove(filepath.Join(stateDir, "junk"))).To(Succeed())
			Expect(records()).To(BeEmpty())
			q.kill()
		})
		Expect(outcomes).To(And(HaveKey(0), HaveKey(1)), "both ends are met")
	})

	It("that others may write is closed to them", func() {
		Expect(os.MkdirAll(stateDir, 0o700)).To(Succeed())
		a.succeed("ADD")
		Expect(os.Chmod(stateDir, 0o777)).To(Succeed())
		a.succeed("DEL")
		info, err := os.Stat(stateDir)
		Expect(err).NotTo(HaveOccurred())
		Expect(info.Mode().Perm()).To(Equal(os.FileMode(0o700)))
		expectHome(0)
	})

	It("that is a symbolic link is refused", func() {
		elsewhere := GinkgoT().TempDir()
		Expect(os.RemoveAll(stateDir)).To(Succeed())
		Expect(os.MkdirAll(filepath.Dir(stateDir), 0o755)).To(Succeed())
		Expect(os.Symlink(elsewhere, stateDir)).To(Succeed())
		DeferCleanup(os.Remove, stateDir)
		e := a.fail("ADD")
		Expect(e.Msg).To(And(ContainSubstring(stateDir), ContainSubstring("not a directory")))
		expectHome(0)
		Expect(dirNames(elsewhere)).To(BeEmpty())
	})

	It("that somebody has removed takes the records with it: DEL has nothing to go by, the namespace's death brings the device home", func() {
		a.succeed("ADD")
		Expect(os.RemoveAll(stateDir)).To(Succeed())
		a.succeed("DEL")
		expectIn(p, 0)
		p.remove()
		q := newPod()
		b := vfAttachment(q, 0)
		b.succeed("ADD")
		expectIn(q, 0)
		b.succeed("DEL")
		expectHome(0)
	})
})

var _ = Describe("a damaged record", func() {
	DescribeTable("of a dead pod does not hinder the next one", func(content func(whole []byte) []byte) {
		old, next := newPod(), newPod()
		a, b := vfAttachment(old, 0), vfAttachment(next, 0)
		a.succeed("ADD")
		whole, err := os.ReadFile(recordOf(a, 0))
		Expect(err).NotTo(HaveOccurred())
		Expect(os.WriteFile(recordOf(a, 0), content(whole), 0o600)).To(Succeed())
		By("while the pod lives, its device is not given away")
		e := b.fail("ADD")
		Expect(e.Code).To(Equal(11))
		Expect(e.Msg).To(ContainSubstring(old.path))
		expectIn(old, 0)
		By("afterwards the record is void")
		old.remove()
		Expect(b.succeed("ADD").logged("WARN")).To(ContainElement(ContainSubstring("void")))
		expectIn(next, 0)
		onlyRecord(b)
		b.succeed("DEL")
		a.succeed("DEL")
		expectHome(0)
	},
		Entry("empty", func([]byte) []byte { return nil }),
		Entry("cut short", func(whole []byte) []byte { return whole[:len(whole)/2] }),
		Entry("binary", func([]byte) []byte { return bytes.Repeat([]byte{0, 0xff, 0x80, '\n'}, 1000) }),
		Entry("of a newer major version", func(whole []byte) []byte { return bytes.Replace(whole, []byte(`"2.`), []byte(`"3.`), 1) }),
		Entry("of another attachment", func(whole []byte) []byte {
			return bytes.Replace(whole, []byte(`"ifName":"net1"`), []byte(`"ifName":"net2"`), 1)
		}),
	)
})

var _ = Describe("the node lock", func() {
	// inMove starts an ADD of VF 0 whose move takes its time, and returns when
	// the plugin is inside the kernel, with the lock.
	inMove := func(p pod, ms int) *call {
		GinkgoHelper()
		sim("fault %s remove-delay-ms=%d", vfDevice(0), ms)
		c := vfAttachment(p, 0).start("ADD")
		Eventually(func() string { return threadStates(c.Process.Pid) }, patience).Should(ContainSubstring("D"), "the plugin is inside the move")
		return c
	}
	status := attachment{conf: map[string]any{"cniVersion": "1.1.0", "name": "rail", "type": "rdma"}}

	It("held by a stopped process is waited for, not for ever, and its holder is named", func() {
		p, q, r := newPod(), newPod(), newPod()
		held := inMove(p, 2000)
		pid := held.Process.Pid
		Expect(unix.Kill(pid, unix.SIGSTOP)).To(Succeed())
		Eventually(func() string { return threadStates(pid) }, patience).Should(MatchRegexp("^T+$"))
		add, del := vfAttachment(q, 1).start("ADD"), vfAttachment(r, 2).start("DEL")
		for _, c := range []*call{add, del} {
			e := c.wait().failure()
			Expect(e.Code).To(Equal(11), e.Msg)
			Expect(e.Msg).To(And(ContainSubstring(fmt.Sprintf("pid %d", pid)), ContainSubstring(p.id), ContainSubstring("stopped")))
		}
		expectHome(1)
		status.succeed("STATUS")
		Expect(unix.Kill(pid, unix.SIGCONT)).To(Succeed())
		got := held.wait()
		Expect(got.exit).To(BeZero(), got.stdout)
		expectIn(p, 0)
		vfAttachment(q, 1).succeed("ADD")
		expectIn(q, 1)
		vfAttachment(q, 1).succeed("DEL")
		vfAttachment(p, 0).succeed("DEL")
		expectHome(0)
	})

	It("held through a move of 20 s lets another device's ADD in afterwards or tells it who holds it", func() {
		p, q := newPod(), newPod()
		a, b := vfAttachment(p, 0), vfAttachment(q, 1)
		slow := inMove(p, 20000)
		waiting := b.start("ADD")
		status.succeed("STATUS")
		got := waiting.wait()
		first := slow.wait()
		Expect(first.exit).To(BeZero(), first.stdout)
		expectIn(p, 0)
		if got.exit == 0 {
			expectIn(q, 1)
			Expect(records()).To(HaveLen(2))
		} else {
			e := got.failure()
			Expect(e.Code).To(Equal(11), e.Msg)
			Expect(e.Msg).To(And(ContainSubstring(fmt.Sprintf("pid %d", slow.Process.Pid)), ContainSubstring(p.id)))
			expectHome(1)
			onlyRecord(a)
		}
		a.succeed("DEL")
		b.succeed("DEL")
		expectHome(0)
		expectHome(1)
	})
})

var _ = Describe("a function that is taken away under a pod", Label(kernelSpec), func() {
	var p pod
	var a attachment
	BeforeEach(func() {
		sim("del %s", vfDevice(0))
		sim("add name=%s parent=pci:%s rebind=1", vfDevice(0), vfs[0])
		DeferCleanup(func() {
			sim("del %s", vfDevice(0))
			sim("add name=%s parent=pci:%s", vfDevice(0), vfs[0])
		})
		p = newPod()
		a = vfAttachment(p, 0)
		a.succeed("ADD")
	})
	// nextPod makes sure that the device that is back serves another pod.
	nextPod := func() {
		GinkgoHelper()
		q := newPod()
		b := vfAttachment(q, 0)
		b.succeed("ADD")
		expectIn(q, 0)
		b.succeed("DEL")
		expectHome(0)
		Expect(records()).To(BeEmpty())
	}
	driver := func(file string) {
		GinkgoHelper()
		Expect(os.WriteFile("/sys/bus/pci/drivers/igbvf/"+file, []byte(vfs[0]), 0)).To(Succeed())
	}
	netdevBack := func() {
		GinkgoHelper()
		Eventually(func() []string { return dirNames("/sys/bus/pci/devices/" + vfs[0] + "/net") }, patience).Should(HaveLen(1))
	}

	It("by its driver's unbinding: CHECK says so, DEL converges, ADD says so", func() {
		driver("unbind")
		Expect(rdmaNames(p.path)).To(BeEmpty())
		Expect(a.fail("CHECK").Code).To(Equal(104))
		a.succeed("DEL")
		Expect(records()).To(BeEmpty())
		Expect(vfAttachment(newPod(), 0).fail("ADD").Msg).To(ContainSubstring("no driver"))
		driver("bind")
		netdevBack()
		expectHome(0)
		nextPod()
	})

	It("and given back at home with a new index: CHECK says so, DEL converges", func() {
		index := rdmaDevices(p.path)[vfDevice(0)]
		driver("unbind")
		driver("bind")
		netdevBack()
		Expect(rdmaDevices(hostNetns)[vfDevice(0)]).NotTo(Equal(index))
		e := a.fail("CHECK")
		Expect(e.Code).To(Equal(104))
		Expect(e.Msg).To(ContainSubstring("at home"))
		a.succeed("DEL")
		expectHome(0)
		nextPod()
	})

	It("and given back while the record of the dead pod is there: the next ADD drops it", func() {
		driver("unbind")
		driver("bind")
		netdevBack()
		p.remove()
		nextPod()
		a.succeed("DEL")
	})

	It("by the removal of all VFs: CHECK and ADD say so, DEL converges", func() {
		pf, err := filepath.EvalSymlinks("/sys/bus/pci/devices/" + vfs[0] + "/physfn")
		Expect(err).NotTo(HaveOccurred())
		write := func(file, text string) {
			GinkgoHelper()
			Expect(os.WriteFile(filepath.Join(pf, file), []byte(text), 0)).To(Succeed())
		}
		netdev := dirNames(filepath.Join(pf, "net"))[0]
		macs := strings.Fields(run("sh", "-c", "ip link show "+netdev+" | sed -n 's/.*vf [0-9].*link.ether \\([0-9a-f:]*\\).*/\\1/p'"))
		functions, err := filepath.Glob(filepath.Join(pf, "virtfn*"))
		Expect(err).NotTo(HaveOccurred())
		Expect(macs).To(HaveLen(len(functions)))

		write("sriov_numvfs", "0")
		Expect(rdmaNames(p.path)).To(BeEmpty())
		Expect(a.fail("CHECK").Msg).To(ContainSubstring("disappeared"))
		Expect(vfAttachment(newPod(), 0).fail("ADD").Code).To(Equal(102))
		a.succeed("DEL")
		Expect(records()).To(BeEmpty())

		By("the node's operator makes them again, in the order of an SR-IOV operator")
		write("sriov_drivers_autoprobe", "0")
		write("sriov_numvfs", fmt.Sprint(len(functions)))
		for i, mac := range macs {
			run("ip", "link", "set", netdev, "vf", fmt.Sprint(i), "mac", mac)
		}
		write("sriov_drivers_autoprobe", "1")
		for i := range macs {
			vf, err := filepath.EvalSymlinks(filepath.Join(pf, fmt.Sprintf("virtfn%d", i)))
			Expect(err).NotTo(HaveOccurred())
			Expect(os.WriteFile("/sys/bus/pci/drivers_probe", []byte(filepath.Base(vf)), 0)).To(Succeed())
			Eventually(func() []string { return dirNames(vf + "/net") }, patience).Should(HaveLen(1))
		}
		sim("del *")
		addVFDevices()
		nextPod()
	})
})

var _ = Describe("a change of the RDMA mode", Label(kernelSpec), func() {
	setMode := func(mode string) error {
		out, err := exec.Command("rdma", "system", "set", "netns", mode).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}

	It("is refused by the kernel while a pod is there; after the pod's death DEL works in shared mode", func() {
		p := newPod()
		a := vfAttachment(p, 0)
		a.succeed("ADD")
		Expect(setMode("shared")).To(MatchError(ContainSubstring("busy")))
		p.remove()
		Eventually(func() error { return setMode("shared") }, patience).Should(Succeed())
		DeferCleanup(func() { Eventually(func() error { return setMode("exclusive") }, patience).Should(Succeed()) })
		Expect(records()).To(HaveLen(1))
		a.succeed("DEL")
		expectHome(0)
		Expect(records()).To(BeEmpty())
	})
})

var _ = Describe("a privileged pod", Label(kernelSpec), func() {
	It("that hides its device, renamed, in a namespace that only an open file keeps alive is found by DEL", func() {
		p, third := newPod(), newPod()
		a := vfAttachment(p, 0)
		a.succeed("ADD")
		renameIn(p, vfDevice(0), "mine")
		run("ip", "netns", "exec", p.name, "rdma", "dev", "set", "mine", "netns", third.name)
		leak, err := os.Open(third.path)
		Expect(err).NotTo(HaveOccurred())
		defer leak.Close()
		third.remove()
		p.remove()
		got := a.succeed("DEL")
		Expect(got.logged("ERROR")).To(ContainElement(ContainSubstring("/fd/")))
		expectHome(0)
		Expect(records()).To(BeEmpty())
	})

	It("that renames its device and dies leaves the next pod a device that is known in full", func() {
		p, q := newPod(), newPod()
		vfAttachment(p, 0).succeed("ADD")
		renameIn(p, vfDevice(0), "mine")
		p.remove()
		Eventually(func() []string { return rdmaNames(hostNetns) }, patience).Should(ContainElement("mine"))
		b := vfAttachment(q, 0)
		q.takeNetdev(0)
		Expect(b.succeed("ADD").logged("ERROR")).To(BeEmpty())
		expectIn(q, 0)
		Expect(b.succeed("CHECK").logged("ERROR")).To(BeEmpty())
		b.succeed("DEL")
		expectHome(0)
	})

	It("that hides its device in a namespace which only a socket holds keeps it: DEL says so, and works when the socket is closed", func() {
		p := newPod()
		a := vfAttachment(p, 0)
		a.succeed("ADD")
		var socket int
		var err error
		inNetns(p.path, func() { socket, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0) })
		Expect(err).NotTo(HaveOccurred())
		p.remove()
		e := a.fail("DEL")
		Expect(e.Code).To(Equal(11), e.Msg)
		Expect(e.Msg).To(ContainSubstring("socket"))
		Expect(records()).To(HaveLen(1))
		By("the next pod is refused, with the owner's name")
		refusal := vfAttachment(newPod(), 0).fail("ADD")
		Expect(refusal.Code).To(Equal(11))
		Expect(refusal.Msg).To(ContainSubstring(a.id))
		Expect(unix.Close(socket)).To(Succeed())
		a.succeed("DEL")
		expectHome(0)
	})
})
