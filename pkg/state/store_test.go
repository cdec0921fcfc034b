package state

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

func modeOf(path string) os.FileMode {
	GinkgoHelper()
	info, err := os.Lstat(path)
	Expect(err).NotTo(HaveOccurred())
	return info.Mode()
}

var _ = Describe("a store", func() {
	var s *Store

	BeforeEach(func() {
		s = NewStore(filepath.Join(GinkgoT().TempDir(), "cni", "rdma"))
	})

	It("is nothing before its first use", func() {
		Expect(s.Names()).To(BeEmpty())
		Expect(s.Load(record().Name())).Error().To(MatchError(os.ErrNotExist))
		Expect(s.Delete(record().Name())).To(Succeed())
		Expect(s.dir).NotTo(BeADirectory(), "looking makes nothing")
	})

	It("makes its directory for one user only, and that above it for all", func() {
		old := unix.Umask(0)
		DeferCleanup(unix.Umask, old)
		Expect(s.Writable()).To(Succeed())
		Expect(modeOf(s.dir)).To(Equal(os.ModeDir | 0o700))
		Expect(modeOf(filepath.Dir(s.dir))).To(Equal(os.ModeDir | 0o755))
		Expect(s.Dir()).To(Equal(s.dir))
	})

	It("leaves nothing behind when asked whether it is writable", func() {
		for range 3 {
			Expect(s.Writable()).To(Succeed())
		}
		Expect(os.ReadDir(s.dir)).To(BeEmpty())
	})

	DescribeTable("restricts a directory that others could use", func(mode os.FileMode) {
		Expect(os.MkdirAll(s.dir, 0o700)).To(Succeed())
		Expect(os.Chmod(s.dir, mode)).To(Succeed())
		Expect(s.Writable()).To(Succeed())
		Expect(modeOf(s.dir)).To(Equal(os.ModeDir | 0o700))
	},
		Entry("to read", os.FileMode(0o755)),
		Entry("to write", os.FileMode(0o777)),
		Entry("in a group", os.FileMode(0o770)),
	)

	DescribeTable("refuses a directory that is not its own", func(prepare func(), text string) {
		Expect(os.Mkdir(filepath.Dir(s.dir), 0o755)).To(Succeed())
		prepare()
		Expect(s.Writable()).To(MatchError(And(ContainSubstring(text), ContainSubstring(s.dir))))
	},
		Entry("a symbolic link", func() {
			target := GinkgoT().TempDir()
			Expect(os.Symlink(target, s.dir)).To(Succeed())
		}, "is not a directory"),
		Entry("a link to nowhere", func() { Expect(os.Symlink("/missing", s.dir)).To(Succeed()) }, "is not a directory"),
		Entry("a file", func() { Expect(os.WriteFile(s.dir, nil, 0o600)).To(Succeed()) }, "is not a directory"),
		Entry("a directory of another user", func() {
			if os.Geteuid() != 0 {
				Skip("needs root to give a directory away")
			}
			Expect(os.Mkdir(s.dir, 0o700)).To(Succeed())
			Expect(os.Chown(s.dir, 65534, 65534)).To(Succeed())
		}, "belongs to user 65534 instead of 0"),
	)

	It("is not writable below a file", func() {
		Expect(os.WriteFile(filepath.Dir(s.dir), nil, 0o600)).To(Succeed())
		Expect(s.Writable()).To(MatchError(unix.ENOTDIR))
		Expect(s.Save(record())).To(MatchError(unix.ENOTDIR))
	})

	It("is not writable below a directory that is read-only", func() {
		if os.Geteuid() == 0 {
			Skip("needs an ordinary user: root can write everywhere")
		}
		Expect(os.Mkdir(filepath.Dir(s.dir), 0o555)).To(Succeed())
		Expect(s.Writable()).To(MatchError(os.ErrPermission))
		Expect(lockWithin(s, patient)).Error().To(MatchError(os.ErrPermission))
	})

	Context("with a directory", func() {
		BeforeEach(func() { Expect(s.prepare()).To(Succeed()) })

		It("gives back what was saved, of this version", func() {
			r := record()
			Expect(s.Save(r)).To(Succeed())
			Expect(r.Version).To(Equal(Version))
			Expect(s.Load(r.Name())).To(Equal(r))
			Expect(s.Names()).To(Equal([]Name{r.Name()}))
			Expect(modeOf(s.path("c1@net1@0000:3b:00.2.json"))).To(Equal(os.FileMode(0o600)))
		})

		It("gives back records with the barest content", func() {
			r := &Record{Phase: Attached, Key: Key{"c", "i"}, Bus: "auxiliary", Function: "a.sf.1", Devices: []Device{{Name: "x", NameInPod: "x"}}}
			Expect(s.Save(r)).To(Succeed())
			Expect(s.Load(r.Name())).To(Equal(r))
		})

		It("gives back the record of a software device that is not made yet", func() {
			for _, bus := range []sysfs.Bus{sysfs.Netdev, sysfs.RXE} {
				f := sysfs.Default.InterfaceFunction(bus, sysfs.Interface{Netns: 4026532345, Index: 3})
				r := &Record{Phase: Intended, Key: Key{"c", "i"}, Bus: f.Bus, Function: f.Address, Devices: []Device{{Index: NoIndex, Name: "x", NameInPod: "x"}}}
				Expect(s.Save(r)).To(Succeed())
				Expect(s.Load(r.Name())).To(Equal(r))
			}
		})

		It("replaces a record by its next phase, whatever the length", func() {
			r := record()
			r.Pod.Name = strings.Repeat("p", 200)
			Expect(s.Save(r)).To(Succeed())
			r.Phase, r.Pod.Name = Attached, "p"
			Expect(s.Save(r)).To(Succeed())
			Expect(s.Load(r.Name())).To(Equal(r))
			Expect(s.Names()).To(HaveLen(1))
		})

		It("keeps the records of attachments apart", func() {
			a, b := record(), record()
			a.Key, b.Key = Key{"a-b", "c"}, Key{"a", "b-c"}
			Expect(s.Save(a)).To(Succeed())
			Expect(s.Save(b)).To(Succeed())
			Expect(s.Delete(a.Name())).To(Succeed())
			Expect(s.Load(a.Name())).Error().To(MatchError(os.ErrNotExist))
			Expect(s.Load(b.Name())).To(Equal(b))
			Expect(s.Delete(a.Name())).To(Succeed(), "a second time is no error")
		})

		It("never accepts a record that it could not read", func() {
			r := record()
			r.Pod.Name = strings.Repeat("p", maxRecordSize)
			if err := s.Save(r); err == nil {
				Expect(s.Load(r.Name())).Error().NotTo(HaveOccurred())
			}
		})

		It("writes over what a killed process left", func() {
			Expect(os.WriteFile(s.path(".new"), []byte(strings.Repeat(`{"version":`, 1000)), 0o600)).To(Succeed())
			r := record()
			Expect(s.Save(r)).To(Succeed())
			Expect(s.Load(r.Name())).To(Equal(r))
			Expect(s.path(".new")).NotTo(BeAnExistingFile())
		})

		It("does not write through a link in the place of its temporary file", func() {
			victim := filepath.Join(GinkgoT().TempDir(), "victim")
			Expect(os.WriteFile(victim, []byte("precious"), 0o600)).To(Succeed())
			Expect(os.Symlink(victim, s.path(".new"))).To(Succeed())
			Expect(s.Save(record())).To(MatchError(unix.ELOOP))
			Expect(os.ReadFile(victim)).To(BeEquivalentTo("precious"))
			Expect(s.Save(record())).To(Succeed(), "the next try finds the link removed")
		})

		It("leaves the old record and no temporary file when it cannot write the new one", func() {
			r := record()
			// Something that a rename cannot replace.
			Expect(os.MkdirAll(s.path(r.Name().file())+"/x", 0o700)).To(Succeed())
			Expect(s.Save(r)).To(MatchError(ContainSubstring("write record")))
			Expect(s.path(".new")).NotTo(BeAnExistingFile())
		})

		It("lists records only", func() {
			Expect(s.Save(record())).To(Succeed())
			for _, file := range []string{"lock", ".new", ".probe-1", "README", "x.json", "c1@net1.json"} {
				Expect(os.WriteFile(s.path(file), nil, 0o600)).To(Succeed())
			}
			Expect(s.Names()).To(Equal([]Name{record().Name()}))
		})

		It("says when its directory cannot be listed", func() {
			Expect(NewStore(s.path("file")).Names()).To(BeEmpty())
			Expect(os.WriteFile(s.path("file"), nil, 0o600)).To(Succeed())
			Expect(NewStore(s.path("file")).Names()).Error().To(MatchError(unix.ENOTDIR))
		})

		It("says when a record cannot be removed", func() {
			n := record().Name()
			Expect(os.MkdirAll(s.path(n.file())+"/x", 0o700)).To(Succeed())
			Expect(s.Delete(n)).To(MatchError(ContainSubstring("remove record")))
		})

		DescribeTable("never takes a damaged record for a missing one", func(damage func(path string), text string) {
			r := record()
			Expect(s.Save(r)).To(Succeed())
			path := s.path(r.Name().file())
			damage(path)
			_, err := s.Load(r.Name())
			var damaged *DamagedError
			Expect(errors.As(err, &damaged)).To(BeTrue(), "%v", err)
			Expect(damaged.Name).To(Equal(r.Name()), "from which the function is known")
			Expect(damaged.Path).To(Equal(path))
			Expect(err).NotTo(MatchError(os.ErrNotExist))
			Expect(err).To(MatchError(And(ContainSubstring(path), ContainSubstring(text))))
			Expect(s.Names()).To(Equal([]Name{r.Name()}))
		},
			Entry("empty", contents(""), "unexpected end"),
			Entry("truncated", func(path string) { Expect(os.Truncate(path, 100)).To(Succeed()) }, "unexpected end"),
			Entry("less its last brace", func(path string) {
				info, err := os.Stat(path)
				Expect(err).NotTo(HaveOccurred())
				Expect(os.Truncate(path, info.Size()-2)).To(Succeed())
			}, "unexpected end"),
			Entry("zeros, as after a power failure", contents(strings.Repeat("\x00", 300)), "invalid character"),
			Entry("binary", contents("\x7fELF\x02\x01\xff\xfe"), "invalid character"),
			Entry("null", contents("null"), "version"),
			Entry("a list", contents("[]"), "no JSON object"),
			Entry("two documents", func(path string) {
				data, err := os.ReadFile(path)
				Expect(err).NotTo(HaveOccurred())
				Expect(os.WriteFile(path, append(data, data...), 0o600)).To(Succeed())
			}, "after top-level value"),
			Entry("with a number for a name", edited(`"name":"mlx5_3"`, `"name":2`), "key name must be a string, not 2"),
			Entry("with a negative index", edited(`"index":3`, `"index":-4`), "key index must be"),
			Entry("with an index that is too large", edited(`"index":3`, `"index":4294967296`), "not 4294967296"),
			Entry("with half an inode", edited(`"inode":4026532281`, `"inode":1.5`), "key inode must be"),
			Entry("with a device that is none", edited(`"devices":[{`, `"devices":[1,{`), "key devices must be a list of objects, not [1"),
			Entry("with a node that has no name", edited(`"charDevices":["`, `"charDevices":[null,"`), "key charDevices must be a list of strings"),
			Entry("another attachment's", func(path string) {
				other := record()
				other.ContainerID = "c2"
				Expect(s.Save(other)).To(Succeed())
				Expect(os.Rename(s.path(other.Name().file()), path)).To(Succeed())
			}, "it describes container c2"),
			Entry("of a newer format", contents(`{"version":"3.0"}`), `version is "3.0"`),
			Entry("huge", contents(strings.Repeat(" ", maxRecordSize+1)), "longer than 65536 bytes"),
			Entry("so huge that it would not fit into memory", func(path string) { Expect(os.Truncate(path, 1<<40)).To(Succeed()) }, "longer than"),
			Entry("a symbolic link to a good one", func(path string) {
				Expect(os.Rename(path, s.path("real"))).To(Succeed())
				Expect(os.Symlink("real", path)).To(Succeed())
			}, "symbolic links"),
			Entry("a symbolic link to nowhere", func(path string) {
				Expect(os.Remove(path)).To(Succeed())
				Expect(os.Symlink("nowhere", path)).To(Succeed())
			}, "symbolic links"),
			Entry("a directory", func(path string) {
				Expect(os.Remove(path)).To(Succeed())
				Expect(os.Mkdir(path, 0o700)).To(Succeed())
			}, "no regular file"),
			Entry("a FIFO, which must not block", func(path string) {
				Expect(os.Remove(path)).To(Succeed())
				Expect(unix.Mkfifo(path, 0o600)).To(Succeed())
			}, "no regular file"),
			Entry("unreadable", func(path string) {
				if os.Geteuid() == 0 {
					Skip("needs an ordinary user: root can read everything")
				}
				Expect(os.Chmod(path, 0)).To(Succeed())
			}, "permission denied"),
		)
	})
})

func contents(text string) func(path string) {
	return func(path string) {
		GinkgoHelper()
		Expect(os.WriteFile(path, []byte(text), 0o600)).To(Succeed())
	}
}

// edited replaces a part of a record, which must be in it.
func edited(old, replacement string) func(path string) {
	return func(path string) {
		GinkgoHelper()
		data, err := os.ReadFile(path)
		Expect(err).NotTo(HaveOccurred())
		Expect(string(data)).To(ContainSubstring(old))
		Expect(os.WriteFile(path, []byte(strings.Replace(string(data), old, replacement, 1)), 0o600)).To(Succeed())
	}
}
