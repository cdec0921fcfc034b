package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"sync"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
)

// scalableFunctions makes n auxiliary devices with an RDMA device each, and
// gives their addresses.
func scalableFunctions(n int) []string {
	GinkgoHelper()
	sim("add name=par%%d parent=aux:rdmasim.sf.%%d count=%d", n)
	var addresses []string
	for i := range n {
		addresses = append(addresses, fmt.Sprintf("rdmasim.sf.%d", i))
		Expect(dirNames("/sys/bus/auxiliary/devices/" + addresses[i] + "/infiniband")).To(HaveLen(1))
	}
	return addresses
}

// atOnce runs all calls in processes of their own at the same time.
func atOnce(calls []*call) []answer {
	GinkgoHelper()
	answers := make([]answer, len(calls))
	start := make(chan struct{})
	var all sync.WaitGroup
	for i, c := range calls {
		all.Go(func() {
			defer GinkgoRecover()
			<-start
			answers[i] = c.finish()
		})
	}
	close(start)
	all.Wait()
	return answers
}

var _ = Describe("parallel calls", func() {
	const devices, rounds = 48, 10

	It(fmt.Sprintf("%d processes in %d rounds of ADD and DEL fail never and change no device number", devices, rounds), func() {
		sim("del *")
		addresses := scalableFunctions(devices)
		podOf := make([]pod, devices)
		for i := range podOf {
			podOf[i] = newPod()
		}
		before := charDevices()
		for round := range rounds {
			for _, command := range []string{"ADD", "DEL"} {
				calls := make([]*call, devices)
				for i := range calls {
					a := vfAttachment(podOf[i], 0).with("deviceID", addresses[i])
					stdin, err := json.Marshal(a.conf)
					Expect(err).NotTo(HaveOccurred())
					calls[i] = a.command(command, stdin)
				}
				failed := 0
				for _, got := range atOnce(calls) {
					if got.exit != 0 {
						failed++
						GinkgoWriter.Printf("round %d %s: %s\n%s\n", round, command, got.stdout, got.stderr)
					}
				}
				Expect(failed).To(BeZero(), "round %d: failed calls of %s", round, command)
				Expect(charDevices()).To(Equal(before), "round %d after %s", round, command)
				for i := range podOf {
					want := 1
					if command == "DEL" {
						want = 0
					}
					Expect(rdmaNames(podOf[i].path)).To(HaveLen(want), "round %d after %s", round, command)
				}
			}
		}
		Expect(rdmaNames(hostNetns)).To(HaveLen(devices))
		sim("del *")
		addVFDevices()
	})
})

// holdLock takes the node lock until release is called.
func holdLock() (release func()) {
	GinkgoHelper()
	Expect(os.MkdirAll(stateDir, 0o700)).To(Succeed())
	lock, err := os.OpenFile(stateDir+"/lock", os.O_RDWR|os.O_CREATE, 0o600)
	Expect(err).NotTo(HaveOccurred())
	Expect(unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)).To(Succeed())
	return func() { Expect(lock.Close()).To(Succeed()) }
}
