package rdma

import (
	"os"
	"path/filepath"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/vishvananda/netlink/nl"
)

// procTree builds a procfs: "a -> b" is a link, "a = b" a file a with the text b.
func procTree(items ...string) Proc {
	GinkgoHelper()
	root := GinkgoT().TempDir()
	for _, item := range items {
		if path, target, ok := strings.Cut(item, " -> "); ok {
			path = filepath.Join(root, path)
			Expect(os.MkdirAll(filepath.Dir(path), 0o755)).To(Succeed())
			Expect(os.Symlink(target, path)).To(Succeed())
			continue
		}
		path, text, _ := strings.Cut(item, " = ")
		path = filepath.Join(root, path)
		Expect(os.MkdirAll(filepath.Dir(path), 0o755)).To(Succeed())
		Expect(os.WriteFile(path, []byte(text), 0o644)).To(Succeed())
	}
	return Proc(root)
}

var _ = Describe("the holders of network namespaces", func() {
	It("are found in a procfs: processes and mounts, not the caller's own namespace", func() {
		proc := procTree(
			"thread-self/ns/net -> net:[1]", "self/ns/pid -> pid:[4026531836]",
			"1/comm = systemd\n", "1/ns/net -> net:[1]",
			"20/comm = pause\n", "20/ns/net -> net:[7]", "20/cgroup = 0::/kubepods.slice/kubepods-pod8d4f8a36_0b6c_4a3b_9d2e_1f2a3b4c5d6e.slice/cri-containerd-"+strings.Repeat("ab", 32)+".scope\n",
			"3/comm = redis\n", "3/ns/net -> net:[7]",
			"5/comm = gone\n",
			"self/mountinfo = 34 33 0:4 net:[7] /run/netns/a rw - nsfs nsfs rw\n35 33 0:4 net:[8] /run/netns/b\\040c rw - nsfs nsfs rw\n36 33 0:4 net:[1] /run/netns/host rw - nsfs nsfs rw\n37 33 0:4 mnt:[9] /x rw - nsfs nsfs rw\n",
			"version = x")
		list, hidden, err := proc.NamespaceHolders()
		Expect(err).NotTo(HaveOccurred())
		Expect(hidden).To(BeZero())
		Expect(list).To(HaveLen(2))
		Expect(list[0].ID.Inode).To(Equal(uint64(7)))
		Expect(list[0].Mounts).To(ConsistOf("/run/netns/a"))
		Expect(list[0].Processes).To(HaveExactElements(HaveField("Command", "redis"), HaveField("Command", "pause")))
		Expect(list[1]).To(And(HaveField("ID.Inode", uint64(8)), HaveField("Mounts", ConsistOf("/run/netns/b c")), HaveField("Processes", BeEmpty())))
		container, pod := list[0].Processes[1].Container()
		Expect(container).To(Equal(strings.Repeat("ab", 32)))
		Expect(pod).To(Equal("8d4f8a36-0b6c-4a3b-9d2e-1f2a3b4c5d6e"))
		Expect(proc.SeesAll()).To(BeTrue())
		Expect(procTree("self/ns/pid -> pid:[5]").SeesAll()).To(BeFalse())
	})

	It("are told of a real namespace that only we hold open", func() {
		ns := newNamespace()
		list, _, err := DefaultProc.NamespaceHolders()
		Expect(err).NotTo(HaveOccurred())
		Expect(list).To(ContainElement(And(HaveField("ID", ns.ID()), HaveField("Processes", BeEmpty()),
			HaveField("Files", ContainElement(HaveField("PID", os.Getpid()))))))
	})

	It("need a procfs", func() {
		_, _, err := procTree().NamespaceHolders()
		Expect(err).To(MatchError(os.ErrNotExist))
	})

	DescribeTable("name containers by their control groups", func(cgroup, container, pod string) {
		gotContainer, gotPod := Process{Cgroup: cgroup}.Container()
		Expect(gotContainer).To(Equal(container))
		Expect(gotPod).To(Equal(pod))
	},
		Entry("docker", "/system.slice/docker-"+strings.Repeat("1", 64)+".scope", strings.Repeat("1", 64), ""),
		Entry("podman", "/machine.slice/libpod-"+strings.Repeat("2", 64)+".scope/container", strings.Repeat("2", 64), ""),
		Entry("cgroupfs", "/kubepods/burstable/pod8d4f8a36-0b6c-4a3b-9d2e-1f2a3b4c5d6e/"+strings.Repeat("3", 64), strings.Repeat("3", 64), "8d4f8a36-0b6c-4a3b-9d2e-1f2a3b4c5d6e"),
		Entry("cri-o", "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod8d4f8a36_0b6c_4a3b_9d2e_1f2a3b4c5d6e.slice/crio-"+strings.Repeat("4", 64)+".scope", strings.Repeat("4", 64), "8d4f8a36-0b6c-4a3b-9d2e-1f2a3b4c5d6e"),
		Entry("a service", "/system.slice/podman.service", "", ""),
		Entry("none", "", "", ""),
	)

	DescribeTable("have the control group that tells most", func(text, want string) {
		Expect(parseCgroup(text)).To(Equal(want))
	},
		Entry("of version 2", "0::/a/b\n", "/a/b"),
		Entry("of version 1", "12:cpu,cpuacct:/x\n11:devices:/d\n0::/v2\n", "/d"),
		Entry("the root", "0::/\n", ""),
	)
})

var _ = Describe("other namespaces", func() {
	It("can be made", func() {
		newNamespace() // skips where we may not
		ns, err := NewNamespace()
		Expect(err).NotTo(HaveOccurred())
		defer func() { _ = ns.Close() }()
		own, err := OwnNamespace()
		Expect(err).NotTo(HaveOccurred())
		defer func() { _ = own.Close() }()
		Expect(ns.ID()).NotTo(Equal(own.ID()))
	})
})

var _ = Describe("nested attributes", func() {
	It("can repeat a number", func() {
		entry := func(name string, n uint64) []byte {
			return attr(nl.RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY, append(attr(nl.RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_NAME, []byte(name+"\x00")), attr(nl.RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_CURR, u64(n))...))
		}
		counts, err := resourceCounts(append(entry("qp", 1), entry("ctx", 3)...))
		Expect(err).NotTo(HaveOccurred())
		Expect(counts).To(Equal(map[string]uint64{"qp": 1, "ctx": 3}))
		_, err = resourceCounts(entry("qp", 1)[:9])
		Expect(err).To(HaveOccurred())
	})
})

var _ = Describe("queue pairs", func() {
	It("are looked through for that of general services", func() {
		entry := func(kind byte) []byte {
			return attr(attrResQP+1, append(attr(21, u32(1)), attr(attrResType, []byte{kind})...))
		}
		Expect(listsGSI(append(entry(2), entry(queuePairOfGSI)...))).To(BeTrue())
		Expect(listsGSI(append(entry(2), entry(0)...))).To(BeFalse())
		Expect(listsGSI(nil)).To(BeFalse())
		_, err := listsGSI(entry(1)[:7])
		Expect(err).To(HaveOccurred())
	})
})

var _ = Describe("names", func() {
	It("are those of the InfiniBand specification and of sysfs", func() {
		Expect(Port{State: 4}.StateName()).To(Equal("ACTIVE"))
		Expect(Port{State: 4}.Active()).To(BeTrue())
		Expect(Port{State: 1}.StateName()).To(Equal("DOWN"))
		Expect(Port{State: 9}.StateName()).To(Equal("state 9"))
		Expect(Device{Protocol: "roce"}.LinkLayer()).To(Equal("Ethernet"))
		Expect(Device{Protocol: "ib"}.LinkLayer()).To(Equal("InfiniBand"))
		Expect(Device{}.LinkLayer()).To(BeEmpty())
		for _, m := range []Mode{Exclusive, Shared} {
			got, err := ParseMode(m.String())
			Expect(err).NotTo(HaveOccurred())
			Expect(got).To(Equal(m))
		}
		_, err := ParseMode("both")
		Expect(err).To(HaveOccurred())
	})
})
