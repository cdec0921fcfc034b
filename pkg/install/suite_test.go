package install

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

func TestInstall(t *testing.T) {
	RegisterFailHandler(Fail)
	RunSpecs(t, "pkg/install")
}

// plugins are two versions of the plugin, each called rdma.
var plugins [2]string

var _ = BeforeSuite(func() {
	for i, version := range []string{"v1.0.0", "v2.0.0"} {
		plugins[i] = filepath.Join(GinkgoT().TempDir(), "rdma")
		build := exec.Command("go", "build", "-o", plugins[i], "-ldflags", "-X main.version="+version, "github.com/rdma-cni/rdma-cni/cmd/rdma")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		out, err := build.CombinedOutput()
		Expect(err).NotTo(HaveOccurred(), string(out))
	}
})
