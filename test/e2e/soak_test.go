package e2e

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
)

// soakLabel selects the soak, see make soak.
const soakLabel = "soak"

// soaker works on one device of the soak, in parallel with the others. What
// happens to the device is drawn from its own generator, so that a seed repeats
// it; how the devices' rounds interleave is the scheduler's.
type soaker struct {
	device   string // its name at home
	function string
	random   *rand.Rand
	late     []attachment // over, but their DEL may come again
	fault    string       // of the present round
	faults   map[string]int
}

func (s *soaker) attach(p pod) attachment { return vfAttachment(p, 0).with("deviceID", s.function) }

// atHome looks at sysfs, since a dump can miss a device while others move.
func (s *soaker) atHome() bool {
	return len(dirNames(filepath.Join("/sys/bus/auxiliary/devices", s.function, "infiniband"))) == 1
}

func (s *soaker) nameAtHome() string {
	names := dirNames(filepath.Join("/sys/bus/auxiliary/devices", s.function, "infiniband"))
	return strings.Join(names, ",")
}

// prepare gives the device a fault for its next move, which must not be one
// that the kernel is still making for an earlier pod.
func (s *soaker) prepare(fault string, value int) {
	GinkgoHelper()
	Eventually(s.atHome, patience).Should(BeTrue())
	devices, err := os.ReadFile(simControl)
	Expect(err).NotTo(HaveOccurred())
	for line := range strings.Lines(string(devices)) {
		if fields := strings.Fields(line); slices.Contains(fields, "parent=aux:"+s.function) {
			sim("fault %s %s=%d", strings.TrimPrefix(fields[0], "id="), fault, value)
			return
		}
	}
	Fail("the test driver does not list " + s.function)
}

// converge calls a verb until it succeeds, as runtimes do. Only an answer that
// asks for another try may come before.
func (s *soaker) converge(a attachment, command string) {
	GinkgoHelper()
	Eventually(func() string {
		got := a.call(command)
		if got.exit == 0 {
			return ""
		}
		e := got.failure()
		Expect(e.Code).To(Equal(11), "%s of %s: %s", command, s.device, e.Msg)
		return e.Msg
	}, time.Minute).Should(BeEmpty())
}

// soakFaults are what can happen between a pod's creation and the next pod on
// the same device. Each ends with the pod gone, with or without its DEL.
var soakFaults = map[string]func(s *soaker, p pod, a attachment){
	"none": func(s *soaker, p pod, a attachment) {
		s.converge(a, "ADD")
		Expect(s.atHome()).To(BeFalse())
		netdev := dirNames("/sys/bus/auxiliary/devices/" + s.function + "/net")
		Expect(netdev).To(HaveLen(1))
		run("ip", "link", "set", netdev[0], "netns", p.name, "name", "net1") // the delegate's part, for CHECK
		s.converge(a, "CHECK")
		s.converge(a, "DEL")
		run("ip", "-n", p.name, "link", "set", "net1", "netns", hostName, "name", netdev[0])
		Expect(s.nameAtHome()).To(Equal(s.device))
		p.kill()
	},
	"kill -9 of ADD": func(s *soaker, p pod, a attachment) {
		a.killedAt(s.random.IntN(40), "ADD")
		s.converge(a, "DEL")
		Eventually(s.atHome, patience).Should(BeTrue()) // by its name or that of a pod before
		p.kill()
	},
	"kill -9 of ADD, and no DEL": func(s *soaker, p pod, a attachment) {
		a.killedAt(s.random.IntN(40), "ADD")
		p.kill()
	},
	"kill -9 of DEL": func(s *soaker, p pod, a attachment) {
		s.converge(a, "ADD")
		a.killedAt(s.random.IntN(20), "DEL")
		s.converge(a, "DEL")
		Expect(s.nameAtHome()).To(Equal(s.device))
		p.kill()
	},
	"the namespace dies before DEL": func(s *soaker, p pod, a attachment) {
		s.converge(a, "ADD")
		p.kill()
		s.converge(a, "DEL")
	},
	"the namespace dies, and no DEL": func(s *soaker, p pod, a attachment) {
		s.converge(a, "ADD")
		p.kill()
	},
	"the namespace dies during ADD": func(s *soaker, p pod, a attachment) {
		c := a.start("ADD")
		p.kill()
		c.wait()
		s.converge(a, "DEL")
	},
	"DEL during ADD": func(s *soaker, p pod, a attachment) {
		c := a.start("ADD")
		s.converge(a, "DEL")
		c.wait()
		s.converge(a, "DEL")
		Eventually(s.atHome, patience).Should(BeTrue())
		p.kill()
	},
	"two ADDs": func(s *soaker, p pod, a attachment) {
		q := fastPod()
		b := s.attach(q)
		c := a.start("ADD")
		b.call("ADD")
		c.wait()
		s.converge(a, "DEL")
		s.converge(b, "DEL")
		Eventually(s.atHome, patience).Should(BeTrue())
		p.kill()
		q.kill()
	},
	"the pod renames its device": func(s *soaker, p pod, a attachment) {
		s.converge(a, "ADD")
		run("ip", "netns", "exec", p.name, "rdma", "dev", "set", s.device, "name", "soaked_"+s.device)
		s.converge(a, "DEL")
		Expect(s.nameAtHome()).To(Equal(s.device))
		p.kill()
	},
	"the pod renames its device and dies, and no DEL": func(s *soaker, p pod, a attachment) {
		s.converge(a, "ADD")
		run("ip", "netns", "exec", p.name, "rdma", "dev", "set", s.device, "name", "soaked_"+s.device)
		p.kill()
	},
	"the pod moves its device on": func(s *soaker, p pod, a attachment) {
		s.converge(a, "ADD")
		q := fastPod()
		run("ip", "netns", "exec", p.name, "rdma", "dev", "set", s.device, "netns", q.name)
		s.converge(a, "DEL")
		Expect(s.nameAtHome()).To(Equal(s.device))
		p.kill()
		q.kill()
	},
	"a slow move": func(s *soaker, p pod, a attachment) {
		s.prepare("remove-delay-ms", 1+s.random.IntN(300))
		s.converge(a, "ADD")
		s.converge(a, "DEL")
		p.kill()
	},
	"a move that fails half-way": func(s *soaker, p pod, a attachment) {
		s.prepare("enable-errno", int(unix.EIO))
		for { // the fault is used up by a move, not by a wait for the lock
			if e := a.call("ADD").failure(); e.Code != 11 {
				Expect(e.Msg).To(ContainSubstring("EIO"))
				break
			}
		}
		s.converge(a, "DEL")
		Expect(s.nameAtHome()).To(Equal(s.device))
		p.kill()
	},
	"a damaged record": func(s *soaker, p pod, a attachment) {
		s.converge(a, "ADD")
		path := filepath.Join(stateDir, a.id+"@net1@"+s.function+".json")
		Expect(os.Truncate(path, s.random.Int64N(200))).To(Succeed())
		s.converge(a, "DEL")
		Expect(s.nameAtHome()).To(Equal(s.device))
		p.kill()
	},
	"processes use the device": func(s *soaker, p pod, a attachment) {
		s.converge(a, "ADD")
		nodes := dirNames("/sys/bus/auxiliary/devices/" + s.function + "/infiniband_verbs")
		Expect(nodes).To(HaveLen(1))
		var user *os.File
		var err error
		inNetns(p.path, func() { user, err = os.OpenFile("/dev/infiniband/"+nodes[0], os.O_RDWR, 0) })
		Expect(err).NotTo(HaveOccurred())
		s.converge(a, "DEL")
		Expect(user.Close()).To(Succeed())
		p.kill()
	},
}

func (s *soaker) round() {
	GinkgoHelper()
	names := slices.Sorted(maps.Keys(soakFaults))
	s.fault = names[s.random.IntN(len(names))]
	if s.random.IntN(3) == 0 {
		s.fault = "none"
	}
	p := fastPod()
	a := s.attach(p)
	soakFaults[s.fault](s, p, a)
	if len(s.late) > 0 { // a DEL that comes when nobody expects it any more
		s.converge(s.late[s.random.IntN(len(s.late))], "DEL")
	}
	s.late = append(s.late, a)[max(0, len(s.late)-4):]
	s.faults[s.fault]++
}

// settle makes sure that the device serves a pod, whatever the last round left.
func (s *soaker) settle() {
	GinkgoHelper()
	p := fastPod()
	a := s.attach(p)
	s.converge(a, "ADD")
	Expect(s.atHome()).To(BeFalse())
	s.converge(a, "DEL")
	Expect(s.nameAtHome()).To(Equal(s.device))
	for _, a := range s.late {
		s.converge(a, "DEL")
	}
	p.kill()
}

// leftovers is all that a soak must leave as it was.
type leftovers struct {
	Node   state
	Mounts string
	Files  int // open ones of this process, and so of the namespaces it made
	Nets   []string
}

func takeStock() leftovers {
	GinkgoHelper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	Expect(err).NotTo(HaveOccurred())
	nets := map[string]bool{}
	links, err := filepath.Glob("/proc/[0-9]*/ns/net")
	Expect(err).NotTo(HaveOccurred())
	for _, l := range links {
		if target, err := os.Readlink(l); err == nil {
			nets[target] = true
		}
	}
	// Moves by the kernel, at a namespace's death, can swap device numbers.
	node := snapshot()
	node.Chars = nil
	return leftovers{Node: node, Mounts: string(mounts), Files: len(dirNames("/proc/self/fd")), Nets: slices.Sorted(maps.Keys(nets))}
}

var _ = Describe("soak", Label(soakLabel), func() {
	const devices = 8
	It("leaves nothing over", func() {
		rounds, err := strconv.Atoi(cmp.Or(os.Getenv("SOAK_ROUNDS"), "60"))
		Expect(err).NotTo(HaveOccurred(), "SOAK_ROUNDS")
		seed, err := strconv.ParseUint(cmp.Or(os.Getenv("SOAK_SEED"), strconv.FormatUint(rand.Uint64N(1_000_000), 10)), 10, 64)
		Expect(err).NotTo(HaveOccurred(), "SOAK_SEED")
		fmt.Printf("\nsoak: %d rounds over %d devices, SEED=%d\n", rounds, devices, seed)

		sim("del *")
		DeferCleanup(func() {
			sim("del *")
			addVFDevices()
		})
		var soakers []*soaker
		sim("add name=par%%d parent=aux:rdmasim.sf.%%d netdev=1 count=%d", devices)
		for i := range devices {
			function := fmt.Sprintf("rdmasim.sf.%d", i)
			soakers = append(soakers, &soaker{
				device: fmt.Sprintf("par%d", i), function: function,
				random: rand.New(rand.NewPCG(seed, uint64(i))), faults: map[string]int{},
			})
		}
		for _, s := range soakers { // the first use of everything opens files for good
			s.settle()
		}
		before := takeStock()
		begin := time.Now()
		var all sync.WaitGroup
		for i, s := range soakers {
			all.Go(func() {
				defer GinkgoRecover()
				round := i
				defer func() {
					if r := recover(); r != nil {
						fmt.Printf("soak: SEED=%d: device %d failed in round %d, fault %q\n", seed, i, round, s.fault)
						panic(r)
					}
				}()
				for ; round < rounds; round += devices {
					s.round()
				}
				s.fault = "settle"
				s.settle()
			})
		}
		all.Wait()
		duration := time.Since(begin)
		Eventually(takeStock, patience).Should(Equal(before), "what is left over")
		expectLockFree()

		total := map[string]int{}
		for _, s := range soakers {
			for fault, n := range s.faults {
				total[fault] += n
			}
		}
		fmt.Printf("soak: %d rounds in %s, SEED=%d\n", rounds, duration.Round(time.Second), seed)
		for _, fault := range slices.Sorted(maps.Keys(total)) {
			fmt.Printf("soak: %5d %s\n", total[fault], fault)
		}
	})
})
