package e2e

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
)

// killedAt runs a verb and kills it at point number n, counted from 0. Without
// such a point it runs to its end.
func (a attachment) killedAt(n int, command string) (at point, got answer) {
	GinkgoHelper()
	i := 0
	got = a.traced(command, func(p point) bool {
		i++
		if i-1 == n {
			at = p
		}
		return i-1 == n
	})
	return at, got
}

// expectLockFree makes sure that nothing holds the node lock.
func expectLockFree() {
	GinkgoHelper()
	lock, err := os.Open(stateDir + "/lock")
	if os.IsNotExist(err) {
		return
	}
	Expect(err).NotTo(HaveOccurred())
	Expect(unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)).To(Succeed(), "the node lock must be free")
	Expect(lock.Close()).To(Succeed())
}

// onlyRecord makes sure that the state directory holds the record of one
// attachment and nothing else.
func onlyRecord(a attachment) {
	GinkgoHelper()
	Expect(records()).To(HaveLen(1))
	Expect(records()[0]).To(HavePrefix(a.id + "@"))
}

// victim is a call that gets killed.
type victim struct {
	command string
	keys    map[string]any              // more of its configuration
	prepare func(old pod, a attachment) // what the call finds
	settle  func(next pod)              // makes the node fit for an ADD again, nil if it is
	calls   []string                    // what it must have been killed at, among others
	labels  Labels
}

var victims = map[string]victim{
	// Up to 7.2 the kernel takes two requests to move a device under another
	// name, and there is a point between them.
	"ADD under another name, on a fresh node": {
		command: "ADD", keys: map[string]any{"rdmaDeviceName": "rail0"}, labels: Label(kernelSpec),
		prepare: func(pod, attachment) { Expect(os.RemoveAll("/run/cni")).To(Succeed()) },
		calls: []string{
			"mkdirat cni", "mkdirat rdma", "openat lock", "flock", "write lock", "openat .new", "write .new", "renameat record",
			"sendto", "setns", "write stdout", "write stderr", "close lock",
		},
	},
	"ADD that finds a dead pod's record and name": {
		command: "ADD",
		prepare: func(pod, attachment) {
			dead := fastPod()
			vfAttachment(dead, 0).succeed("ADD")
			run("ip", "netns", "exec", dead.name, "rdma", "dev", "set", vfDevice(0), "name", "mine")
			dead.kill()
			Eventually(func() []string { return rdmaNames(hostNetns) }, patience).Should(ContainElement("mine"))
		},
		calls: []string{"unlinkat record", "sendto", "renameat record"},
	},
	"ADD whose move fails half-way and is undone": {
		command: "ADD",
		prepare: func(pod, attachment) { sim("fault %s enable-errno=5", vfDevice(0)) },
		settle: func(next pod) { // a fault that was not used up waits for the next move
			for strings.Contains(run("cat", simControl), "enable-errno=5") {
				_ = exec.Command("rdma", "dev", "set", vfDevice(0), "netns", next.name).Run()
				run("ip", "netns", "exec", next.name, "rdma", "dev", "set", vfDevice(0), "netns", hostName)
			}
		},
		calls: []string{"unlinkat record", "sendto", "renameat record", "setns"},
	},
	"DEL of a device under another name": {
		command: "DEL", keys: map[string]any{"rdmaDeviceName": "rail0"}, labels: Label(kernelSpec),
		prepare: func(_ pod, a attachment) { a.succeed("ADD") },
		calls:   []string{"flock", "setns", "sendto", "unlinkat record", "close lock"},
	},
	"DEL of a device that the pod has renamed": {
		command: "DEL",
		prepare: func(old pod, a attachment) {
			a.succeed("ADD")
			run("ip", "netns", "exec", old.name, "rdma", "dev", "set", vfDevice(0), "name", "mine")
		},
		calls: []string{"sendto", "unlinkat record"},
	},
}

// What comes after a death, before the ADD of a new container.
var aftermaths = map[string]func(old pod, a attachment){
	"its DEL comes": func(old pod, a attachment) {
		a.succeed("DEL")
		Expect(rdmaNames(old.path)).To(BeEmpty())
		Expect(dirNames("/sys/bus/pci/devices/" + vfs[0] + "/infiniband")).To(HaveLen(1))
		Expect(records()).NotTo(ContainElement(HavePrefix(a.id + "@")))
		expectLockFree()
		a.succeed("DEL") // runtimes send more than one
		old.kill()
	},
	"only its namespace dies": func(old pod, _ attachment) { old.kill() },
}

var _ = Describe("kill -9 at any point", func() {
	for _, name := range slices.Sorted(maps.Keys(victims)) {
		v := victims[name]
		It("of "+name, v.labels, func() {
			covered := map[string]bool{}
			points := 0
			for unharmed := false; !unharmed; points++ {
				for after, follow := range aftermaths {
					old, next := fastPod(), fastPod()
					a, b := vfAttachment(old, 0), vfAttachment(next, 0)
					for key, value := range v.keys {
						a = a.with(key, value)
					}
					v.prepare(old, a)
					at, got := a.killedAt(points, v.command)
					if unharmed = got.exit != killed; unharmed {
						Expect(at.call).To(BeEmpty(), "the plugin outlived its kill")
					} else {
						Expect(at.call).NotTo(BeEmpty(), "the plugin died by itself")
						covered[at.call] = true
					}
					By(fmt.Sprintf("point %d, %s: %s", points, at, after))
					follow(old, a)
					if v.settle != nil {
						v.settle(next)
					}
					b.succeed("ADD")
					a.succeed("DEL") // too late
					expectIn(next, 0)
					onlyRecord(b)
					expectLockFree()
					b.succeed("DEL")
					next.kill()
					expectHome(0)
					Expect(records()).To(BeEmpty())
				}
			}
			points-- // the last round found none
			names := slices.Sorted(maps.Keys(covered))
			for _, call := range v.calls {
				Expect(slices.ContainsFunc(names, func(c string) bool { return strings.HasPrefix(c, call) })).
					To(BeTrue(), "no kill at %q, but at %q", call, names)
			}
			fmt.Printf("\nkill -9 of %s: %d points, at %s\n", name, points, strings.Join(names, "; "))
			Expect(points).To(BeNumerically(">=", 2*len(names)), "each call has a point before and one after it")
		})
	}

	It("in the middle of a move: the kernel ends the move, and until then the lock is held", Label(kernelSpec), func() {
		for after, follow := range aftermaths {
			old, next := fastPod(), fastPod()
			a, b := vfAttachment(old, 0), vfAttachment(next, 0)
			sim("fault %s remove-delay-ms=1000", vfDevice(0))
			c := a.start("ADD")
			Eventually(func() string { return threadStates(c.Process.Pid) }, patience).Should(ContainSubstring("D"), "the plugin is inside the move")
			Expect(c.Process.Kill()).To(Succeed())
			Expect(tryLock()).To(MatchError(unix.EWOULDBLOCK), "a process inside the move holds the lock, though it is dead")
			By(after)
			follow(old, a)
			b.succeed("ADD")
			Expect(c.Wait()).NotTo(Succeed())
			expectIn(next, 0)
			onlyRecord(b)
			b.succeed("DEL")
			next.kill()
			expectHome(0)
		}
	})
})

// start begins a call and leaves it running.
func (a attachment) start(command string) *call {
	GinkgoHelper()
	c := a.command(command, a.stdin())
	Expect(c.Start()).To(Succeed())
	return c
}

// wait waits for the end of a started call.
func (c *call) wait() answer {
	GinkgoHelper()
	if err := c.Wait(); err != nil {
		Expect(err).To(BeAssignableToTypeOf(&exec.ExitError{}))
	}
	return answer{exit: c.ProcessState.ExitCode(), stdout: c.stdout.String(), stderr: c.stderr.String()}
}

// threadStates gives the state letters of a process's threads, see proc(5).
func threadStates(pid int) string {
	var states strings.Builder
	dir := fmt.Sprintf("/proc/%d/task", pid)
	for _, tid := range dirNames(dir) {
		stat, err := os.ReadFile(dir + "/" + tid + "/stat")
		if err != nil {
			continue // it has ended
		}
		rest := stat[strings.LastIndexByte(string(stat), ')')+2:]
		states.WriteByte(rest[0])
	}
	return states.String()
}

// tryLock takes the node lock and gives it back.
func tryLock() error {
	lock, err := os.Open(stateDir + "/lock")
	if err != nil {
		return err
	}
	defer lock.Close()
	return unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
}
