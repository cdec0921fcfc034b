package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
)

// interleaved runs a verb once for each of its points, and lets do begin
// something else while the plugin stands there; both go on together. prepare
// makes what a round needs, check looks at its end.
func interleaved(command string, prepare func() attachment, do func(), check func(answer)) {
	GinkgoHelper()
	rounds := 0
	for reached := true; reached; rounds++ {
		a := prepare()
		i := 0
		reached = false
		var at point
		got := a.traced(command, func(p point) bool {
			// Nothing happens between the end of one call and the next one.
			if !p.after {
				if i == rounds {
					reached, at = true, p
					do()
				}
				i++
			}
			return false
		})
		By(fmt.Sprintf("%d, %s", rounds, at))
		if !reached {
			do() // when all is over
		}
		check(got)
	}
	Expect(rounds).To(BeNumerically(">", 5), "points of %s", command)
}

var _ = Describe("a race", func() {
	var p pod // of the round
	var a attachment
	fresh := func() attachment {
		p = fastPod()
		a = vfAttachment(p, 0)
		return a
	}
	home := func() {
		GinkgoHelper()
		a.succeed("DEL")
		expectHome(0)
		Expect(records()).To(BeEmpty())
	}

	It("of ADD with the DEL of the same attachment", func() {
		var del *call
		interleaved("ADD", fresh, func() { del = a.start("DEL") }, func(got answer) {
			Expect(got.exit).To(BeZero(), got.stdout)
			Expect(del.wait().exit).To(BeZero(), del.stdout.String())
			// The DEL came first and found nothing, or it undid the ADD.
			if in := rdmaNames(p.path); len(in) > 0 {
				expectIn(p, 0)
				onlyRecord(a)
			} else {
				expectHome(0)
				Expect(records()).To(BeEmpty())
			}
			home()
			p.kill()
		})
	})

	It("of ADD with another one for the same device: one wins, the other is told of it", func() {
		var rival *call
		var other pod
		var b attachment
		interleaved("ADD", fresh, func() {
			other = fastPod()
			b = vfAttachment(other, 0)
			rival = b.start("ADD")
		}, func(got answer) {
			second := rival.wait()
			winner, winnersPod, loser, lost := a, p, b, second
			if got.exit != 0 {
				winner, winnersPod, loser, lost = b, other, a, got
				Expect(second.exit).To(BeZero(), second.stdout)
			}
			e := lost.failure()
			Expect(e.Code).To(Equal(11))
			Expect(e.Msg).To(ContainSubstring(winner.id))
			expectIn(winnersPod, 0)
			onlyRecord(winner)
			loser.succeed("DEL")
			expectIn(winnersPod, 0)
			winner.succeed("DEL")
			home()
			p.kill()
			other.kill()
		})
	})

	// A DEL looks before it has the lock at what it is going to do.
	DescribeTable("of a DEL that waits for the lock with", func(change func()) {
		fresh().succeed("ADD")
		unlock := holdLock()
		del := a.start("DEL")
		Eventually(lockWaiters, patience).Should(ContainElement(del.Process.Pid))
		change()
		unlock()
		Expect(del.wait().exit).To(BeZero(), del.stdout.String())
		expectHome(0)
		Expect(records()).To(BeEmpty())
		if _, err := os.Stat(p.path); err == nil {
			p.kill()
		}
	},
		Entry("another DEL", func() {
			run("ip", "netns", "exec", p.name, "rdma", "dev", "set", vfDevice(0), "netns", hostName)
			Expect(os.Remove(filepath.Join(stateDir, records()[0]))).To(Succeed())
		}),
		Entry("a move by hand", func() { run("ip", "netns", "exec", p.name, "rdma", "dev", "set", vfDevice(0), "netns", hostName) }),
		Entry("a pod that renames the device", func() { run("ip", "netns", "exec", p.name, "rdma", "dev", "set", vfDevice(0), "name", "mine") }),
		Entry("a pod that hides the device in another namespace", func() {
			hidden := fastPod()
			DeferCleanup(hidden.kill)
			run("ip", "netns", "exec", p.name, "rdma", "dev", "set", vfDevice(0), "netns", hidden.name)
		}),
		Entry("the end of the pod's path", func() { p.kill() }),
		Entry("a damage to the record", func() {
			Expect(os.WriteFile(filepath.Join(stateDir, records()[0]), []byte("{"), 0o600)).To(Succeed())
		}),
		Entry("an ADD after another DEL, of a device that was registered anew", func() {
			index := rdmaDevices(p.path)[vfDevice(0)]
			sim("del %s", vfDevice(0))
			sim("add name=%s parent=pci:%s", vfDevice(0), vfs[0])
			anew := rdmaDevices(hostNetns)[vfDevice(0)]
			Expect(anew).NotTo(Equal(index))
			run("rdma", "dev", "set", vfDevice(0), "netns", p.name)
			file := filepath.Join(stateDir, records()[0])
			record, err := os.ReadFile(file)
			Expect(err).NotTo(HaveOccurred())
			old := fmt.Sprintf(`"index":%d,`, index)
			Expect(string(record)).To(ContainSubstring(old))
			Expect(os.WriteFile(file, []byte(strings.Replace(string(record), old, fmt.Sprintf(`"index":%d,`, anew), 1)), 0o600)).To(Succeed())
		}),
		Entry("a driver that registers the device anew", func() {
			sim("del %s", vfDevice(0))
			sim("add name=%s parent=pci:%s", vfDevice(0), vfs[0])
		}),
	)

	It("of ADD with the late DEL of a dead container", func() {
		var late *call
		var dead attachment
		interleaved("ADD", func() attachment {
			old := fastPod()
			dead = vfAttachment(old, 0)
			dead.succeed("ADD")
			old.kill()
			return fresh()
		}, func() { late = dead.start("DEL") }, func(got answer) {
			Expect(got.exit).To(BeZero(), got.stdout)
			Expect(late.wait().exit).To(BeZero(), late.stdout.String())
			expectIn(p, 0)
			onlyRecord(a)
			home()
			p.kill()
		})
	})

	It("of ADD with the death of its pod's namespace", func() {
		interleaved("ADD", fresh, func() { p.kill() }, func(got answer) {
			// At its first point it holds the namespace open, which keeps it
			// alive to the end of the call.
			Expect(got.exit).To(BeZero(), got.stdout)
			home()
		})
	})

	It("of ADD with a GC that knows of no attachment", func() {
		var gc *call
		interleaved("ADD", fresh, func() {
			gc = attachment{conf: map[string]any{"cniVersion": "1.1.0", "name": "rail", "type": "rdma", "cni.dev/valid-attachments": []any{}}}.start("GC")
		}, func(got answer) {
			Expect(got.exit).To(BeZero(), got.stdout)
			Expect(gc.wait().exit).To(BeZero(), gc.stdout.String())
			expectIn(p, 0)
			onlyRecord(a)
			home()
			p.kill()
		})
	})

	It("of ADD with the death of the old pod's namespace, which takes its time", Label(kernelSpec), func() {
		// Without a delay the ADD looks for the device at each stage of its
		// way, which differs from round to round.
		for _, delay := range []int{0, 0, 0, 1, 1, 1, 20, 20, 20, 400, 1500} {
			old := fastPod()
			vfAttachment(old, 0).succeed("ADD")
			if delay > 0 {
				sim("fault %s remove-delay-ms=%d", vfDevice(0), delay)
			}
			old.kill()
			fresh().succeed("ADD")
			expectIn(p, 0)
			onlyRecord(a)
			home()
			p.kill()
		}
	})

	It("of DEL with processes that use the device: they lose it, and DEL does not wait for them", Label(kernelSpec), func() {
		fresh().succeed("ADD")
		var contexts []*os.File
		for range 8 {
			contexts = append(contexts, openVerbs(p, vfs[0]))
		}
		home()
		for _, c := range contexts {
			Expect(queryDevice(c)).To(MatchError(unix.EIO), "the context is dead")
			Expect(c.Close()).To(Succeed())
		}
		p.kill()
	})

	const crowd = 64
	It(fmt.Sprintf("of %d processes for %d devices", crowd, crowd), func() {
		sim("del *")
		addresses := scalableFunctions(crowd)
		crowdPods := make([]pod, crowd)
		for i := range crowdPods {
			crowdPods[i] = fastPod()
		}
		chars := charDevices()
		for _, command := range []string{"ADD", "DEL"} {
			pending := map[int]attachment{}
			for i, address := range addresses {
				pending[i] = vfAttachment(crowdPods[i], 0).with("deviceID", address)
			}
			// Who waits for the lock in vain is to try again, as its caller
			// does; that is all that may go wrong. Each round settles some.
			for round := 0; len(pending) > 0; round++ {
				var calls []*call
				var order []int
				for i, a := range pending {
					calls, order = append(calls, a.command(command, a.stdin())), append(order, i)
				}
				before := len(pending)
				for n, got := range atOnce(calls) {
					if got.exit == 0 {
						delete(pending, order[n])
						continue
					}
					e := got.failure()
					Expect(e.Code).To(Equal(11), e.Msg)
					Expect(e.Msg).To(And(ContainSubstring("node lock"), ContainSubstring("held by pid")))
				}
				Expect(len(pending)).To(BeNumerically("<", before), "round %d of %s", round, command)
			}
			Expect(charDevices()).To(Equal(chars), "after %s", command)
			for i := range crowdPods {
				Expect(rdmaNames(crowdPods[i].path)).To(HaveLen(map[string]int{"ADD": 1, "DEL": 0}[command]), "after %s", command)
			}
		}
		Expect(rdmaNames(hostNetns)).To(HaveLen(crowd))
		for _, p := range crowdPods {
			p.kill()
		}
		sim("del *")
		addVFDevices()
	})
})

// openVerbs opens the verbs node of a function's device from inside a pod and
// makes a context, as every user of the device does.
func openVerbs(p pod, function string) *os.File {
	GinkgoHelper()
	nodes := dirNames("/sys/bus/pci/devices/" + function + "/infiniband_verbs")
	Expect(nodes).To(HaveLen(1))
	var f *os.File
	var err error
	inNetns(p.path, func() { f, err = os.OpenFile("/dev/infiniband/"+nodes[0], os.O_RDWR, 0) })
	Expect(err).NotTo(HaveOccurred())
	Expect(verbsCommand(f, 0, 8)).To(Succeed(), "IB_USER_VERBS_CMD_GET_CONTEXT")
	Expect(queryDevice(f)).To(Succeed())
	return f
}

func queryDevice(f *os.File) error {
	return verbsCommand(f, 1, 176) // IB_USER_VERBS_CMD_QUERY_DEVICE
}

// lockWaiters lists the processes that wait for the lock of a file.
func lockWaiters() (pids []int) {
	GinkgoHelper()
	locks, err := os.ReadFile("/proc/locks")
	Expect(err).NotTo(HaveOccurred())
	for line := range strings.Lines(string(locks)) {
		if f := strings.Fields(line); f[1] == "->" {
			pid, err := strconv.Atoi(f[5])
			Expect(err).NotTo(HaveOccurred(), line)
			pids = append(pids, pid)
		}
	}
	return pids
}
