package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/rdma-cni/rdma-cni/pkg/state"
)

func TestContract(t *testing.T) {
	RegisterFailHandler(Fail)
	RunSpecs(t, "cmd/rdma")
}

// binary is the plugin as it is shipped.
var binary string

var _ = BeforeSuite(func() {
	// The plugin has no option for its state directory. These specs change
	// nothing in it, but on a machine that could serve an ADD it is made.
	if _, err := os.Stat(state.DefaultDir); os.IsNotExist(err) {
		DeferCleanup(func() {
			_ = os.Remove(filepath.Join(state.DefaultDir, "lock"))
			_ = os.Remove(state.DefaultDir) // not if anything else is in there
			_ = os.Remove(filepath.Dir(state.DefaultDir))
		})
	}
	binary = filepath.Join(GinkgoT().TempDir(), "rdma")
	build := exec.Command("go", "build", "-o", binary, "-ldflags", "-X main.version=v1.2.3 -X main.commit=abc -X main.date=today", ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	Expect(err).NotTo(HaveOccurred(), string(out))
})
