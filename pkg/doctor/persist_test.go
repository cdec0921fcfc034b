package doctor

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/klauspost/compress/zstd"
	"github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/ulikunitz/xz"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
)

// cpio writes an archive in the "newc" format, with its end.
func cpio(files ...string) []byte {
	var out bytes.Buffer
	for i := 0; i <= len(files); i += 2 {
		name, text := "TRAILER!!!", ""
		if i < len(files) {
			name, text = files[i], files[i+1]
		}
		fmt.Fprintf(&out, "070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X", i, 0o100644, 0, 0, 1, 0, len(text), 0, 0, 0, 0, len(name)+1, 0)
		out.WriteString(name + "\x00")
		out.Write(make([]byte, padding(int64(cpioHeader+len(name)+1))))
		out.WriteString(text)
		out.Write(make([]byte, padding(int64(len(text)))))
	}
	return out.Bytes()
}

func compress(data []byte, open func(w io.Writer) (io.WriteCloser, error)) []byte {
	GinkgoHelper()
	var out bytes.Buffer
	w, err := open(&out)
	Expect(err).NotTo(HaveOccurred())
	_, err = w.Write(data)
	Expect(err).NotTo(HaveOccurred())
	Expect(w.Close()).To(Succeed())
	return out.Bytes()
}

var _ = Describe("an initramfs", func() {
	main := cpio("lib/modules/6.1/kernel/drivers/infiniband/core/ib_core.ko.xz", "\x7fELF", "etc/modprobe.d/ib.conf", "options ib_core netns_mode=0\n", "init", "#!/bin/sh\n")
	microcode := append(cpio("kernel/x86/microcode/GenuineIntel.bin", "code"), make([]byte, 512)...)
	for name, open := range map[string]func(w io.Writer) (io.WriteCloser, error){
		"gzip": func(w io.Writer) (io.WriteCloser, error) { return gzip.NewWriter(w), nil },
		"zstd": func(w io.Writer) (io.WriteCloser, error) { return zstd.NewWriter(w) },
		"xz":   func(w io.Writer) (io.WriteCloser, error) { return xz.NewWriter(w) },
	} {
		It("is read behind the microcode, compressed with "+name, func() {
			i := parseInitramfs(bytes.NewReader(append(bytes.Clone(microcode), compress(main, open)...)))
			Expect(i.Problem).To(BeEmpty())
			Expect(i.IBCore).To(BeTrue())
			Expect(i.Options).To(ConsistOf(Setting{Source: "/etc/modprobe.d/ib.conf", Line: 1, Mode: rdma.Exclusive}))
		})
	}

	It("is read uncompressed, and has no module where there is none", func() {
		i := parseInitramfs(bytes.NewReader(cpio("init", "x", "lib/modules/ib_core.kox", "")))
		Expect(i).To(Equal(Initramfs{}))
	})

	DescribeTable("that cannot be read says why", func(image []byte, says string) {
		Expect(parseInitramfs(bytes.NewReader(image)).Problem).To(ContainSubstring(says))
	},
		Entry("lz4", []byte{0x02, 0x21, 0x4c, 0x18, 0, 0, 0, 0}, "lz4"),
		Entry("lzo", []byte{0x89, 'L', 'Z', 'O', 0, 1, 2}, "lzo"),
		Entry("noise", []byte("nonsense"), "unknown bytes"),
		Entry("an archive that is cut short", main[:200], "unexpected EOF"),
		Entry("a short end", append(bytes.Clone(main), "ab"...), "in the middle"),
		Entry("a header that is none", append([]byte("070701"), bytes.Repeat([]byte("x"), 200)...), "header"),
	)

	It("is missing, which is told", func() {
		Expect(readInitramfs(ginkgo.GinkgoT().TempDir(), "6.1.0").Problem).To(ContainSubstring("no image"))
	})
})

var _ = Describe("the persisted mode", func() {
	read := func(cmdline string, files ...string) Persisted {
		root := ginkgo.GinkgoT().TempDir()
		for i := 0; i < len(files); i += 2 {
			path := filepath.Join(root, files[i])
			Expect(os.MkdirAll(filepath.Dir(path), 0o755)).To(Succeed())
			Expect(os.WriteFile(path, []byte(files[i+1]), 0o644)).To(Succeed())
		}
		return ReadPersisted(root, "6.1.0", cmdline)
	}
	DescribeTable("is read", func(mode rdma.Mode, by, cmdline string, files ...string) {
		got, setting := read(cmdline, files...).OnDisk()
		Expect(got).To(Equal(mode))
		if by == "" {
			Expect(setting).To(BeNil())
			return
		}
		Expect(setting.String()).To(Equal(by))
	},
		Entry("by default", rdma.Shared, "", "quiet"),
		Entry("of a file", rdma.Exclusive, "/etc/modprobe.d/a.conf:2", "", "etc/modprobe.d/a.conf", "# mode\noptions ib_core netns_mode=0\n"),
		Entry("with other options and a continued line", rdma.Exclusive, "/etc/modprobe.d/a.conf:1", "", "etc/modprobe.d/a.conf", "options ib-core recv_queue_size=9 \\\n netns_mode=N"),
		Entry("of the last file", rdma.Shared, "/etc/modprobe.d/b.conf:1", "", "etc/modprobe.d/a.conf", "options ib_core netns_mode=0", "etc/modprobe.d/b.conf", "options ib_core netns_mode=1"),
		Entry("of the administrator's file of two with one name", rdma.Exclusive, "/etc/modprobe.d/a.conf:1", "", "etc/modprobe.d/a.conf", "options ib_core netns_mode=0", "usr/lib/modprobe.d/a.conf", "options ib_core netns_mode=1"),
		Entry("not of other modules, comments and other files", rdma.Shared, "", "", "etc/modprobe.d/a.conf", "options mlx5_core netns_mode=0\n#options ib_core netns_mode=0\n", "etc/modprobe.d/README", "options ib_core netns_mode=0"),
		Entry("of the kernel command line", rdma.Exclusive, "kernel command line", "quiet ib_core.netns_mode=0"),
		Entry("of the command line, if the module is built in", rdma.Exclusive, "kernel command line", "ib_core.netns_mode=n", "etc/modprobe.d/a.conf", "options ib_core netns_mode=1", "lib/modules/6.1.0/modules.builtin", "kernel/drivers/infiniband/core/ib_core.ko\n"),
	)

	It("at boot is that of the initramfs, if the module is in there", func() {
		p := read("", "etc/modprobe.d/a.conf", "options ib_core netns_mode=0",
			"boot/initrd.img-6.1.0", string(cpio("usr/lib/modules/6.1.0/ib_core.ko", "")))
		disk, _ := p.OnDisk()
		boot, by := p.AtBoot()
		Expect(disk).To(Equal(rdma.Exclusive))
		Expect(boot).To(Equal(rdma.Shared))
		Expect(by).To(BeNil())
	})
})

var _ = Describe("small readers", func() {
	It("read limits, capabilities, kernel versions and kubelet's checkpoint", func() {
		bytes, unlimited, err := parseMemlock("Limit                     Soft Limit           Hard Limit           Units     \nMax locked memory         8388608              8388608              bytes     \n")
		Expect(err).NotTo(HaveOccurred())
		Expect(bytes).To(Equal(uint64(8 << 20)))
		Expect(unlimited).To(BeFalse())
		_, unlimited, err = parseMemlock("Max locked memory         unlimited            unlimited            bytes\n")
		Expect(err).NotTo(HaveOccurred())
		Expect(unlimited).To(BeTrue())
		_, _, err = parseMemlock("")
		Expect(err).To(HaveOccurred())
		Expect(hasCapability("Name:\tx\nCapEff:\t0000000000004000\n", ipcLock)).To(BeTrue())
		Expect(hasCapability("CapEff:\t0000000000000000\n", ipcLock)).To(BeFalse())
		Expect(stableOf("Linux version 6.1.0-57-amd64 (debian-kernel@lists.debian.org) (gcc-12 (Debian 12.2.0-14) 12.2.0) #1 SMP PREEMPT_DYNAMIC Debian 6.1.192-1 (2026-10-01)")).To(Equal("6.1.192-1"))
		Expect(stableOf("Linux version 6.8.0-45-generic (buildd@x) #45-Ubuntu SMP")).To(BeEmpty())
		Expect(registersShared([]byte(`{"Data":{"RegisteredDevices":{"rdma/hca_shared_devices_a":["0","1"]}}}`))).To(BeTrue())
		Expect(registersShared([]byte(`{"Data":{"RegisteredDevices":{"rdma/vf":["0000:3b:00.2"],"cpu":["0"]}}}`))).To(BeFalse())
		Expect(registersShared([]byte(`{`))).To(BeFalse())
	})

	DescribeTable("read networks", func(text string, want []NetworkFacts, problem string) {
		c := parseConfigFile("f", []byte(text))
		Expect(c.Err).To(ContainSubstring(problem))
		if problem == "" {
			Expect(c.Networks).To(Equal(want))
		}
	},
		Entry("a conflist", `{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"sriov","ipam":{"type":"whereabouts"}},{"type":"rdma"}]}`,
			[]NetworkFacts{{Name: "a", CNIVersion: "1.0.0", Plugins: []PluginConf{{Type: "sriov", HasIPAM: true}, {Type: "rdma"}}}}, ""),
		Entry("a single plugin", `{"name":"a","type":"rdma"}`, []NetworkFacts{{Name: "a", Plugins: []PluginConf{{Type: "rdma"}}}}, ""),
		Entry("a manifest of two objects", strings.Join([]string{"kind: ConfigMap", "---", "kind: NetworkAttachmentDefinition", "metadata:", "  name: rail", "  annotations:", "    k8s.v1.cni.cncf.io/resourceName: x/y", "spec:", "  config: '{\"plugins\":[{\"type\":\"rdma\"}]}'"}, "\n"),
			[]NetworkFacts{{Name: "rail", Manifest: true, ResourceName: "x/y", Plugins: []PluginConf{{Type: "rdma"}}}}, ""),
		Entry("a configuration that is no JSON", "kind: NetworkAttachmentDefinition\nspec: {config: '{'}", []NetworkFacts{{Manifest: true, Err: "unexpected end of JSON input"}}, ""),
		Entry("no YAML", "a: [", nil, "document 1"),
		Entry("something else", "kind: Pod", nil, "no network"),
	)

	It("name who blocks", func() {
		b := Blocker{
			Namespace: "net:[7]", Mounts: []string{"/run/netns/a"}, Files: []rdma.Process{{PID: 3, Command: "agent"}},
			Processes: []rdma.Process{{PID: 1, Command: "a"}, {PID: 2, Command: "b"}, {PID: 3, Command: "c"}, {PID: 4, Command: "d"}},
		}
		Expect(b.String()).To(Equal("net:[7]: process 1 (a), process 2 (b), process 3 (c), and 1 more; mount /run/netns/a; held open by process 3 (agent)"))
	})
})
