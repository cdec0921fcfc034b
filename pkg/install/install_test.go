package install

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

func read(path string) []byte {
	GinkgoHelper()
	data, err := os.ReadFile(path)
	Expect(err).NotTo(HaveOccurred())
	return data
}

func names(dir string) []string {
	GinkgoHelper()
	list, err := os.ReadDir(dir)
	Expect(err).NotTo(HaveOccurred())
	all := []string{}
	for _, e := range list {
		all = append(all, e.Name())
	}
	return all
}

func inode(path string) uint64 {
	GinkgoHelper()
	var st unix.Stat_t
	Expect(unix.Lstat(path, &st)).To(Succeed())
	return st.Ino
}

// failure is what an installation that must not succeed says.
func failure(r Result, err error) error {
	GinkgoHelper()
	Expect(err).To(HaveOccurred(), "%+v", r)
	return err
}

// foreign makes a copy of a program whose header names another machine.
func foreign(program string, machine elf.Machine) string {
	GinkgoHelper()
	data := read(program)
	binary.NativeEndian.PutUint16(data[18:], uint16(machine)) // e_machine
	path := filepath.Join(GinkgoT().TempDir(), filepath.Base(program))
	Expect(os.WriteFile(path, data, 0o755)).To(Succeed())
	return path
}

var _ = Describe("an installation", func() {
	var (
		ctx  = context.Background()
		dir  string
		p    Plugin
		file string
	)
	BeforeEach(func() {
		dir = GinkgoT().TempDir()
		p = Plugin{Source: plugins[0], Dir: dir}
		file = filepath.Join(dir, "rdma")
	})

	It("puts the plugin in place, leaves it if it is there, and replaces another version", func() {
		r, err := p.Install(ctx)
		Expect(err).NotTo(HaveOccurred())
		Expect(r.Action).To(Equal(Installed))
		Expect(r.File).To(Equal(file))
		Expect(r.CNIVersions).To(ContainElement("1.1.0"))
		Expect(read(file)).To(Equal(read(plugins[0])))
		info, err := os.Stat(file)
		Expect(err).NotTo(HaveOccurred())
		Expect(info.Mode()).To(Equal(os.FileMode(0o755)))
		Expect(names(dir)).To(Equal([]string{"rdma"}))

		before := inode(file)
		r, err = p.Install(ctx)
		Expect(err).NotTo(HaveOccurred())
		Expect(r.Action).To(Equal(Unchanged))
		Expect(inode(file)).To(Equal(before))
		Expect(p.Check(ctx)).To(HaveField("Action", Unchanged))

		old, err := os.Open(file)
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(old.Close)
		newer := Plugin{Source: plugins[1], Dir: dir}
		Expect(failure(newer.Check(ctx))).To(MatchError(ContainSubstring("another program")))
		Expect(newer.Install(ctx)).To(HaveField("Action", Installed))
		Expect(read(file)).To(Equal(read(plugins[1])))
		Expect(failure(p.Check(ctx))).To(MatchError(ContainSubstring("another program")))
		var was bytes.Buffer
		_, err = was.ReadFrom(old)
		Expect(err).NotTo(HaveOccurred())
		Expect(was.Bytes()).To(Equal(read(plugins[0])), "a plugin that runs keeps its file")
	})

	It("has mode 0755 whatever the umask and the source's mode are", func() {
		source := filepath.Join(GinkgoT().TempDir(), "rdma")
		Expect(os.WriteFile(source, read(plugins[0]), 0o400)).To(Succeed())
		old := unix.Umask(0o077)
		DeferCleanup(unix.Umask, old)
		p.Source = source
		Expect(p.Install(ctx)).To(HaveField("Action", Installed))
		Expect(os.Stat(file)).To(HaveField("Mode()", os.FileMode(0o755)))
	})

	DescribeTable("makes good what was spoiled", func(spoil func()) {
		Expect(p.Install(ctx)).To(HaveField("Action", Installed))
		spoil()
		Expect(failure(p.Check(ctx))).To(MatchError(ContainSubstring(file)))
		Expect(p.Install(ctx)).To(HaveField("Action", Installed))
		Expect(p.Check(ctx)).To(HaveField("Action", Unchanged))
		Expect(names(dir)).To(Equal([]string{"rdma"}))
	},
		Entry("the mode", func() { Expect(os.Chmod(file, 0o644)).To(Succeed()) }),
		Entry("writable by all", func() { Expect(os.Chmod(file, 0o777)).To(Succeed()) }),
		Entry("cut off", func() { Expect(os.Truncate(file, 4096)).To(Succeed()) }),
		Entry("gone", func() { Expect(os.Remove(file)).To(Succeed()) }),
		Entry("a link", func() {
			Expect(os.Remove(file)).To(Succeed())
			Expect(os.Symlink(plugins[0], file)).To(Succeed())
		}),
	)

	DescribeTable("never replaces the plugin by what does not run here", func(source func() string, says string) {
		Expect(p.Install(ctx)).To(HaveField("Action", Installed))
		bad := filepath.Join(GinkgoT().TempDir(), "rdma")
		Expect(os.WriteFile(bad, read(source()), 0o755)).To(Succeed())
		Expect(failure(Plugin{Source: bad, Dir: dir}.Install(ctx))).To(MatchError(ContainSubstring(says)))
		Expect(read(file)).To(Equal(read(plugins[0])))
		Expect(names(dir)).To(Equal([]string{"rdma"}))
	},
		Entry("arm64", func() string { return foreign(plugins[1], elf.EM_AARCH64) }, "EM_AARCH64"),
		Entry("s390x", func() string { return foreign(plugins[1], elf.EM_S390) }, "EM_S390"),
		Entry("a program that is no plugin", func() string { return "/bin/true" }, "no CNI plugin"),
		Entry("a program that fails", func() string { return "/bin/false" }, "exit status 1"),
		Entry("a script", func() string { return "suite_test.go" }, "no ELF program"),
	)

	It("says what to do if the source is missing", func() {
		p.Source = filepath.Join(dir, "none")
		Expect(failure(p.Install(ctx))).To(And(MatchError(ContainSubstring(p.Source)), MatchError(os.ErrNotExist)))
	})

	It("removes what its killed predecessors left, and nothing of others", func() {
		other := []string{".rdma-cni-install.other.1", ".rdma.tmp-1", "rdma.temp", "sriov"}
		for _, n := range append(other, ".rdma-cni-install.rdma.1", ".rdma-cni-install.rdma.2") {
			Expect(os.WriteFile(filepath.Join(dir, n), nil, 0o644)).To(Succeed())
		}
		Expect(p.Install(ctx)).To(HaveField("Action", Installed))
		Expect(names(dir)).To(ConsistOf(append(other, "rdma")))
	})

	It("leaves nothing behind when it is ended in the middle", func() {
		ended, cancel := context.WithCancel(ctx)
		cancel()
		Expect(failure(p.Install(ended))).To(MatchError(context.Canceled))
		Expect(names(dir)).To(BeEmpty())
	})

	It("waits for another one, and not for ever", func() {
		held, err := openDir(ctx, dir)
		Expect(err).NotTo(HaveOccurred())
		short, cancel := context.WithTimeout(ctx, 5*dirStep)
		defer cancel()
		Expect(failure(p.Install(short))).To(MatchError(ContainSubstring("another installation is at work in " + dir)))
		done := make(chan error)
		go func() {
			_, err := p.Install(ctx)
			done <- err
		}()
		Consistently(done, 5*dirStep).ShouldNot(Receive())
		held.close()
		Eventually(done, dirWait).Should(Receive(BeNil()))
	})

	DescribeTable("explains what is wrong with the directory", func(err error, says ...string) {
		text := explainDir("/host/opt/cni/bin", fmt.Errorf("write: %w", err)).Error()
		for _, s := range append(says, err.Error()) {
			Expect(text).To(ContainSubstring(s))
		}
	},
		Entry("missing", unix.ENOENT, "mount", "--cni-bin-dir", "/host/opt/cni/bin"),
		Entry("a file", unix.ENOTDIR, "mount", "--cni-bin-dir"),
		Entry("read-only", unix.EROFS, "readOnly", "/host/opt/cni/bin"),
		Entry("forbidden", unix.EACCES, "root", "privileged"),
		Entry("forbidden otherwise", unix.EPERM, "root", "privileged"),
		Entry("full", unix.ENOSPC, "full"),
		Entry("occupied", unix.EISDIR, "remove it"),
		Entry("something else", errors.New("odd"), "write: odd"),
	)

	It("refuses a place where a directory is", func() {
		Expect(os.Mkdir(file, 0o755)).To(Succeed())
		Expect(failure(p.Install(ctx))).To(MatchError(ContainSubstring("a directory has the plugin's name")))
		Expect(names(dir)).To(Equal([]string{"rdma"}))
	})

	Describe("taken back", func() {
		var records Records
		BeforeEach(func() {
			root := GinkgoT().TempDir()
			records = Records{State: state.NewStore(filepath.Join(root, "run/cni/rdma")), Upstream: state.Upstream{Dir: filepath.Join(root, "var/lib/cni/rdma")}}
			Expect(os.MkdirAll(filepath.Join(root, "run/cni"), 0o755)).To(Succeed())
			Expect(p.Install(ctx)).To(HaveField("Action", Installed))
		})
		stays := func(says ...string) {
			GinkgoHelper()
			_, err := p.Uninstall(ctx, records)
			Expect(err).To(HaveOccurred())
			for _, s := range says {
				Expect(err).To(MatchError(ContainSubstring(s)))
			}
			Expect(file).To(BeAnExistingFile())
		}

		It("is gone, also the second time, also when another version is there", func() {
			Expect(Plugin{Source: plugins[1], Dir: dir}.Install(ctx)).To(HaveField("Action", Installed))
			Expect(p.Uninstall(ctx, records)).To(HaveField("Action", Removed))
			Expect(names(dir)).To(BeEmpty())
			Expect(p.Uninstall(ctx, records)).To(HaveField("Action", Absent))
		})

		It("stays as long as there is a record, readable or not", func() {
			r := &state.Record{
				Phase: state.Attached, Key: state.Key{ContainerID: "c1", IfName: "net1"}, Network: "rail",
				Pod:   state.Pod{Namespace: "training", Name: "worker-0", UID: "uid"},
				Netns: state.Netns{Path: "/run/netns/blue", ID: rdma.NamespaceID{Dev: 4, Inode: 4026532281}},
				Bus:   sysfs.PCI, Function: "0000:3b:00.2", Since: time.Now(),
				Devices: []state.Device{{Index: 3, Name: "mlx5_3", NameInPod: "mlx5_3", NodeGUID: 1, TOS: []int{-1}, TrafficClass: []int{-1}}},
			}
			lock, err := records.State.Lock(ctx, time.Minute, "test")
			Expect(err).NotTo(HaveOccurred())
			Expect(records.State.Save(r)).To(Succeed())
			Expect(lock.Release()).To(Succeed())
			stays("0000:3b:00.2 in pod training/worker-0", "rdma-cni gc")
			Expect(os.WriteFile(filepath.Join(records.State.Dir(), "c1@net1@0000:3b:00.2.json"), []byte("{"), 0o600)).To(Succeed())
			stays("0000:3b:00.2 in container c1")
			Expect(records.State.Delete(r.Name())).To(Succeed())
			Expect(p.Uninstall(ctx, records)).To(HaveField("Action", Removed))
		})

		It("stays as long as the plugin that was here before has a record", func() {
			record := filepath.Join(records.Upstream.Dir, "net-c1-net1")
			Expect(os.MkdirAll(records.Upstream.Dir, 0o700)).To(Succeed())
			Expect(os.WriteFile(record, nil, 0o600)).To(Succeed())
			stays(record)
			Expect(os.Remove(record)).To(Succeed())
			Expect(p.Uninstall(ctx, records)).To(HaveField("Action", Removed))
		})

		It("stays if it cannot see the records", func() {
			Expect(os.Remove(filepath.Dir(records.State.Dir()))).To(Succeed())
			stays("mount", filepath.Dir(records.State.Dir()))
			Expect(filepath.Dir(records.State.Dir())).NotTo(BeADirectory(), "it made the place that it missed")
		})

		It("stays while an ADD is at work", func() {
			lock, err := records.State.Lock(ctx, time.Minute, "ADD")
			Expect(err).NotTo(HaveOccurred())
			short, cancel := context.WithTimeout(ctx, 5*dirStep)
			defer cancel()
			Expect(failure(p.Uninstall(short, records))).To(MatchError(ContainSubstring("ADD")))
			Expect(file).To(BeAnExistingFile())
			Expect(lock.Release()).To(Succeed())
		})

		It("is left if it is another project's", func() {
			Expect(os.Remove(file)).To(Succeed())
			Expect(os.WriteFile(file, read("/bin/true"), 0o755)).To(Succeed())
			stays("not this project's plugin")
		})
	})
})

var _ = Describe("an architecture", func() {
	DescribeTable("has a name", func(a Arch, want string) {
		Expect(a.String()).To(Equal(want))
	},
		Entry("amd64", Arch{elf.ELFCLASS64, elf.ELFDATA2LSB, elf.EM_X86_64}, "EM_X86_64"),
		Entry("386", Arch{elf.ELFCLASS32, elf.ELFDATA2LSB, elf.EM_386}, "EM_386 (32 bit)"),
		Entry("ppc64le", Arch{elf.ELFCLASS64, elf.ELFDATA2LSB, elf.EM_PPC64}, "EM_PPC64 (little endian)"),
		Entry("ppc64", Arch{elf.ELFCLASS64, elf.ELFDATA2MSB, elf.EM_PPC64}, "EM_PPC64 (big endian)"),
	)
})
