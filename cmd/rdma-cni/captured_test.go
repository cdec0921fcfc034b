package main

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/Mellanox/rdmamap"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/tools/txtar"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
)

// unpack makes the tree that capture.sh has taken from a node.
func unpack(archive, dir string) {
	GinkgoHelper()
	a, err := txtar.ParseFile(archive)
	Expect(err).NotTo(HaveOccurred())
	for _, f := range a.Files {
		switch f.Name {
		case "links":
			for line := range strings.Lines(string(f.Data)) {
				name, target, ok := strings.Cut(strings.TrimSpace(line), " -> ")
				Expect(ok).To(BeTrue(), line)
				Expect(os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o755)).To(Succeed())
				Expect(os.Symlink(target, filepath.Join(dir, name))).To(Succeed())
			}
		case "directories":
			for line := range strings.Lines(string(f.Data)) {
				Expect(os.MkdirAll(filepath.Join(dir, strings.TrimSpace(line)), 0o755)).To(Succeed())
			}
		default:
			Expect(os.MkdirAll(filepath.Join(dir, filepath.Dir(f.Name)), 0o755)).To(Succeed())
			Expect(os.WriteFile(filepath.Join(dir, f.Name), f.Data, 0o600)).To(Succeed())
		}
	}
}

// What a node's files tell, without its netlink: the answers of list and doctor
// about a node that was captured in the test bed.
var _ = Describe("a captured node", func() {
	var t *testApp

	BeforeEach(func() {
		if c, err := rdma.Open(); err == nil {
			_ = c.Close()
			Skip("this machine has RDMA of its own, which would be listed with the captured node's")
		}
		t = newTestApp()
		t.proc = rdma.Proc(filepath.Join(t.dir, "proc"))
		unpack("testdata/node.txtar", t.dir)
		for variable, dir := range map[*string]string{&rdmamap.PciDevDir: "pci", &rdmamap.AuxDevDir: "auxiliary"} {
			old := *variable
			*variable = filepath.Join(t.dir, "sys/bus", dir, "devices")
			DeferCleanup(func() { *variable = old })
		}
		state := filepath.Join(t.dir, "run/cni/rdma")
		if _, err := os.Stat(state); err == nil {
			Expect(os.Chmod(state, 0o700)).To(Succeed())
		}
	})

	for format, file := range map[string]string{"table": "captured-list.txt", "json": "captured-list.json", "yaml": "captured-list.yaml"} {
		It("is listed as "+format, func() {
			Expect(t.exec("list", "-o", format)).To(BeZero(), t.err.String())
			golden("testdata/"+file, t.out.String())
		})
	}

	for format, file := range map[string]string{"table": "captured-doctor.txt", "json": "captured-doctor.json"} {
		It("is examined as "+format, func() {
			if os.Geteuid() != 0 {
				Skip("to another user than root doctor says more, that it sees less")
			}
			Expect(t.exec("doctor", "--show-pass", "-o", format)).To(Equal(codeProblem), t.err.String())
			golden("testdata/"+file, strings.ReplaceAll(t.out.String(), t.dir, ""))
		})
	}
})
