package main

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"testing"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

var update = flag.Bool("update", false, "write docs/cli.md and the golden files anew")

func TestCompanion(t *testing.T) {
	RegisterFailHandler(Fail)
	RunSpecs(t, "cmd/rdma-cni")
}

// golden compares text with a file.
func golden(path, text string) {
	GinkgoHelper()
	if *update {
		Expect(os.MkdirAll(filepath.Dir(path), 0o755)).To(Succeed())
		Expect(os.WriteFile(path, []byte(text), 0o644)).To(Succeed())
	}
	want, err := os.ReadFile(path)
	Expect(err).NotTo(HaveOccurred())
	Expect(text).To(Equal(string(want)), "%s; go test ./cmd/rdma-cni -update writes it anew", path)
}

// testApp is an app on a node of its own, of which nothing exists but what a
// spec makes.
type testApp struct {
	*app
	out, err bytes.Buffer
	dir      string
}

func newTestApp() *testApp {
	GinkgoHelper()
	t := &testApp{dir: GinkgoT().TempDir()}
	t.app = &app{
		streams: streams{Out: &t.out, Err: &t.err}, root: t.dir, proc: rdma.DefaultProc,
		node: &attachment.Node{
			State:    state.NewStore(filepath.Join(t.dir, "run/cni/rdma")),
			Upstream: state.Upstream{Dir: filepath.Join(t.dir, "var/lib/cni/rdma")},
			Sysfs:    sysfs.FS(filepath.Join(t.dir, "sys")),
		},
	}
	return t
}

// exec runs a command line and gives its exit code.
func (t *testApp) exec(args ...string) int {
	t.out.Reset()
	t.err.Reset()
	t.began = false
	return exitCode(t.execute(args))
}
