package cdi_test

import (
	"os"
	"path/filepath"
	"testing"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	upstream "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/rdma-cni/rdma-cni/pkg/cdi"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

func TestCDI(t *testing.T) {
	RegisterFailHandler(Fail)
	RunSpecs(t, "pkg/cdi")
}

func node(name string, kind sysfs.Kind) sysfs.CharDeviceNode {
	return sysfs.CharDeviceNode{CharDevice: sysfs.CharDevice{Name: name, Kind: kind}}
}

func spec(prefix, format string) cdi.Spec {
	return cdi.Spec{
		Prefix: prefix, Name: "pci-0000-17-00-0", Device: "0000:17:00.0", Format: format,
		Nodes: []string{"/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs3"},
	}
}

var _ = Describe("CDI specs", func() {
	for _, format := range []string{"yaml", "json"} {
		It("are written as rdma-cdi names them, and resolve by the library, as "+format, func() {
			dir := filepath.Join(GinkgoT().TempDir(), "cdi")
			path, err := spec("rdma", format).Write(dir)
			Expect(err).NotTo(HaveOccurred())
			Expect(path).To(Equal(filepath.Join(dir, "rdma-cdi_rdma_pci-0000-17-00-0."+format)))
			info, err := os.Stat(path)
			Expect(err).NotTo(HaveOccurred())
			Expect(info.Mode().Perm()).To(Equal(os.FileMode(0o644)))
			entries, err := os.ReadDir(dir)
			Expect(err).NotTo(HaveOccurred())
			Expect(entries).To(HaveLen(1), "no temporary file is left")

			text, err := os.ReadFile(path)
			Expect(err).NotTo(HaveOccurred())
			want, err := os.ReadFile("testdata/spec." + format)
			Expect(err).NotTo(HaveOccurred())
			Expect(text).To(MatchYAML(want))

			cache, err := upstream.NewCache(upstream.WithSpecDirs(dir))
			Expect(err).NotTo(HaveOccurred())
			device := cache.GetDevice(spec("rdma", format).Qualified())
			Expect(device).NotTo(BeNil())
			Expect(device.ContainerEdits.DeviceNodes).To(HaveLen(2))
		})
	}

	It("replace the one of the other format, which would define the device twice", func() {
		dir := GinkgoT().TempDir()
		_, err := spec("rdma", "json").Write(dir)
		Expect(err).NotTo(HaveOccurred())
		_, err = spec("rdma", "yaml").Write(dir)
		Expect(err).NotTo(HaveOccurred())
		list, err := cdi.List(dir, "rdma")
		Expect(err).NotTo(HaveOccurred())
		Expect(list).To(HaveLen(1))
	})

	DescribeTable("that no runtime could use are refused", func(change func(s *cdi.Spec)) {
		dir := GinkgoT().TempDir()
		s := spec("rdma", "yaml")
		change(&s)
		_, err := s.Write(dir)
		Expect(err).To(HaveOccurred())
		Expect(os.ReadDir(dir)).To(BeEmpty())
	},
		Entry("a prefix with a slash", func(s *cdi.Spec) { s.Prefix = "a/b" }),
		Entry("an empty prefix", func(s *cdi.Spec) { s.Prefix = "" }),
		Entry("a name with a blank", func(s *cdi.Spec) { s.Name = "a b" }),
		Entry("no node", func(s *cdi.Spec) { s.Nodes = nil }),
	)

	It("are listed and removed by their kind, not by what their names begin with", func() {
		dir := GinkgoT().TempDir()
		for _, prefix := range []string{"rdma", "rdma_x"} {
			_, err := spec(prefix, "yaml").Write(dir)
			Expect(err).NotTo(HaveOccurred())
		}
		for name, text := range map[string]string{
			"rdma-cdi_rdma_broken.json":   "{",
			"rdma-cdi_rdma_x_broken.json": "{",
			"nvidia.yaml":                 "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: []\n",
		} {
			Expect(os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644)).To(Succeed())
		}
		list, err := cdi.List(dir, "rdma")
		Expect(err).NotTo(HaveOccurred())
		Expect(list).To(ConsistOf(
			And(HaveField("Kind", "rdma/pci-0000-17-00-0"), HaveField("Devices", ConsistOf("rdma/pci-0000-17-00-0=0000:17:00.0")), HaveField("Problem", "")),
			And(HaveField("Path", HaveSuffix("rdma-cdi_rdma_broken.json")), HaveField("Problem", Not(BeEmpty()))),
		))
		for _, w := range list {
			Expect(w.Remove()).To(Succeed())
			Expect(w.Remove()).To(Succeed(), "gone is removed")
		}
		entries, err := os.ReadDir(dir)
		Expect(err).NotTo(HaveOccurred())
		Expect(entries).To(HaveLen(3))
	})

	It("are none in a directory that does not exist", func() {
		Expect(cdi.List("/nonexistent", "rdma")).To(BeEmpty())
	})

	It("have the verbs node, all management nodes and the connection manager", func() {
		Expect(cdi.Nodes([]sysfs.CharDeviceNode{node("uverbs2", sysfs.Uverbs), node("umad4", sysfs.Umad), node("umad5", sysfs.Umad)}, true)).
			To(Equal([]string{"/dev/infiniband/rdma_cm", "/dev/infiniband/umad4", "/dev/infiniband/umad5", "/dev/infiniband/uverbs2"}))
		_, err := cdi.Nodes([]sysfs.CharDeviceNode{node("umad4", sysfs.Umad)}, true)
		Expect(err).To(MatchError(ContainSubstring("uverbs")))
	})

	It("are named after addresses and interfaces", func() {
		Expect(cdi.NameOfAddress("0000:17:00.0")).To(Equal("pci-0000-17-00-0"))
		Expect(cdi.NameOfInterface("eth0.5")).To(Equal("eth0-5"))
	})

	It("know which nodes a move renumbers", func() {
		Expect(cdi.Holes([]sysfs.CharDeviceNode{node("uverbs0", sysfs.Uverbs), node("uverbs2", sysfs.Uverbs), node("uverbs3", sysfs.Uverbs), node("umad0", sysfs.Umad), node("issm7", sysfs.Issm)})).
			To(Equal([]string{"uverbs2", "uverbs3"}))
	})
})
