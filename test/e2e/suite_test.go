// Package e2e holds the tests that run on a real kernel, inside the guest of
// test/vm: the real plugin binary, real VFs, real RDMA devices of the test
// driver. Each spec asks the kernel for its state and not only the plugin for
// its answer; after each, nothing may be left over.
package e2e

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

// binDir holds the plugins, cnitool and this binary, on the guest's tmpfs: run
// from the shared folder each page of them would cross the 9p link.
var binDir string

func TestE2E(t *testing.T) {
	if _, err := os.Stat(simControl); err != nil {
		t.Fatalf("these tests run in the guest of test/vm (make test-e2e): %v", err)
	}
	RegisterFailHandler(Fail)
	RunSpecs(t, "rdma-cni on a real kernel")
}

var _ = BeforeSuite(func() {
	self, err := os.Executable()
	Expect(err).NotTo(HaveOccurred())
	binDir = filepath.Dir(self)
	for _, name := range []string{"rdma", "cnitool", "host-device", "host-local", "ib-sriov"} {
		Expect(filepath.Join(binDir, name)).To(BeAnExistingFile())
	}
	run("ip", "netns", "attach", hostName, "1")
	Expect(onKernel(matrix()...)).To(BeTrue(), "kernel %s is none of %s=%q, set by make test-e2e", release(), matrixVariable, os.Getenv(matrixVariable))
})

// alone labels specs that leave the guest unfit for others.
const alone = "alone"

// A spec finds a node with one RDMA device for each of the first VFs, and has
// to leave it as it was.
var _ = BeforeEach(func() {
	if slices.Contains(CurrentSpecReport().Labels(), alone) {
		return
	}
	DeferCleanup(sim, "del *")
	DeferCleanup(expectNothingLeft)
	if slices.Contains(CurrentSpecReport().Labels(), withSoftRoCE) {
		addVFDevices(besideRXE)
	} else {
		addVFDevices()
	}
	before := snapshot()
	DeferCleanup(func() {
		Eventually(snapshot, patience).Should(Equal(before), "the node must be as it was before the spec")
	})
})

// The slowest specs are told, since they are what a run takes its time for.
var _ = ReportAfterSuite("slowest specs", func(report Report) {
	specs := slices.SortedFunc(slices.Values(report.SpecReports), func(a, b SpecReport) int { return cmp.Compare(b.RunTime, a.RunTime) })
	for _, spec := range specs[:min(len(specs), 12)] {
		if spec.RunTime > time.Second {
			fmt.Printf("%5.0f s  %s\n", spec.RunTime.Seconds(), spec.FullText())
		}
	}
})
