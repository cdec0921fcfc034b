package rdma

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
)

// makeNamespace makes a network namespace that lives as long as it is open.
func makeNamespace() (ns *Namespace, err error) {
	done := make(chan struct{})
	var enter func()
	enter = func() {
		runtime.LockOSThread() // and never unlocked: the thread ends in there
		if unix.Gettid() == os.Getpid() {
			// All but the first one, which the runtime keeps: that is held
			// here until another has done it.
			defer runtime.UnlockOSThread()
			go enter()
			<-done
			return
		}
		defer close(done)
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			ns, err = OwnNamespace()
		}
	}
	go enter()
	<-done
	return ns, err
}

func newNamespace() *Namespace {
	GinkgoHelper()
	ns, err := makeNamespace()
	if errors.Is(err, unix.EPERM) {
		Skip("needs CAP_SYS_ADMIN to make network namespaces")
	}
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(ns.Close)
	return ns
}

// firstThread enters a namespace from many goroutines at once and then looks
// where the first thread of the process is.
func firstThread() error {
	home := here()
	ns, err := makeNamespace()
	if err != nil {
		return err
	}
	for range 20 {
		var group sync.WaitGroup
		for range 16 { // enough to need all threads there are
			group.Go(func() {
				_ = ns.Run(func() error {
					time.Sleep(time.Millisecond)
					return nil
				})
			})
		}
		group.Wait()
	}
	now, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return err
	}
	if now != home {
		return fmt.Errorf("the first thread is in %s instead of %s", now, home)
	}
	return ns.Close()
}

func ownNamespace() *Namespace {
	GinkgoHelper()
	ns, err := OwnNamespace()
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(ns.Close)
	return ns
}

// here tells which network namespace the calling thread is in.
func here() string {
	link, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return err.Error()
	}
	return link
}

// threadNamespaces lists the network namespaces of all threads of this process.
func threadNamespaces() []string {
	tasks, _ := filepath.Glob("/proc/self/task/[0-9]*/ns/net")
	var links []string
	for _, task := range tasks {
		if link, err := os.Readlink(task); err == nil { // a thread can end meanwhile
			links = append(links, link)
		}
	}
	return links
}

func openFiles() int {
	GinkgoHelper()
	files, err := os.ReadDir("/proc/self/fd")
	Expect(err).NotTo(HaveOccurred())
	return len(files)
}

var _ = Describe("OpenNamespace", func() {
	It("identifies the own namespace as the kernel does", func() {
		ns := ownNamespace()
		Expect(ns.ID().String()).To(Equal(here()))
		var st unix.Stat_t
		Expect(unix.Stat("/proc/thread-self/ns/net", &st)).To(Succeed())
		Expect(ns.ID()).To(Equal(NamespaceID{Dev: st.Dev, Inode: st.Ino}))
	})

	It("gives the same identity by every path, and another to another namespace", func() {
		link := filepath.Join(GinkgoT().TempDir(), "link")
		Expect(os.Symlink("/proc/thread-self/ns/net", link)).To(Succeed())
		ns, err := OpenNamespace(link)
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(ns.Close)
		Expect(ns.ID()).To(Equal(ownNamespace().ID()))
		Expect(newNamespace().ID()).NotTo(Equal(ns.ID()))
	})

	It("opens nothing that an executed program would inherit", func() {
		flags, err := unix.FcntlInt(uintptr(ownNamespace().fd), unix.F_GETFD, 0)
		Expect(err).NotTo(HaveOccurred())
		Expect(flags & unix.FD_CLOEXEC).NotTo(BeZero())
	})

	DescribeTable("says that there is none", func(path func(dir string) string) {
		_, err := OpenNamespace(path(GinkgoT().TempDir()))
		Expect(err).To(MatchError(os.ErrNotExist))
		Expect(err).NotTo(MatchError(ErrNotNamespace))
		var pathErr *os.PathError
		Expect(errors.As(err, &pathErr)).To(BeTrue())
	},
		Entry("at no path", func(string) string { return "" }),
		Entry("at a missing path", func(dir string) string { return dir + "/missing" }),
		Entry("behind a link to nowhere", func(dir string) string {
			Expect(os.Symlink(dir+"/missing", dir+"/link")).To(Succeed())
			return dir + "/link"
		}),
		Entry("at a path through a file (ENOTDIR)", func(dir string) string {
			Expect(os.WriteFile(dir+"/file", nil, 0o600)).To(Succeed())
			return dir + "/file/net"
		}),
		Entry("of a process that has ended", func(string) string { return "/proc/4194304/ns/net" }),
	)

	DescribeTable("says that it is something else", func(path func(dir string) string) {
		p := path(GinkgoT().TempDir())
		_, err := OpenNamespace(p)
		Expect(err).To(MatchError(ErrNotNamespace))
		Expect(err).To(MatchError(ContainSubstring(p)))
		Expect(err).NotTo(MatchError(os.ErrNotExist), "a DEL must not take it for gone by this")
	},
		Entry("a directory", func(dir string) string { return dir }),
		Entry("an empty file, as is left of a bind mount", func(dir string) string {
			Expect(os.WriteFile(dir+"/net", nil, 0o600)).To(Succeed())
			return dir + "/net"
		}),
		Entry("a FIFO, which must not block", func(dir string) string {
			Expect(unix.Mkfifo(dir+"/net", 0o600)).To(Succeed())
			return dir + "/net"
		}),
		Entry("a socket", func(dir string) string {
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			Expect(err).NotTo(HaveOccurred())
			DeferCleanup(unix.Close, fd)
			Expect(unix.Bind(fd, &unix.SockaddrUnix{Name: dir + "/net"})).To(Succeed())
			return dir + "/net"
		}),
		Entry("a device", func(string) string { return "/dev/null" }),
		Entry("a loop of links", func(dir string) string {
			Expect(os.Symlink("net", dir+"/net")).To(Succeed())
			return dir + "/net"
		}),
		Entry("a mount namespace", func(string) string { return "/proc/self/ns/mnt" }),
		Entry("a user namespace", func(string) string { return "/proc/self/ns/user" }),
	)

	It("names the type of a namespace that is none of the network", func() {
		_, err := OpenNamespace("/proc/self/ns/mnt")
		Expect(err).To(MatchError(ContainSubstring("another type (0x20000)")))
	})

	It("passes on what else stops it", func() {
		_, err := OpenNamespace("/" + strings.Repeat("a", 300))
		Expect(err).To(MatchError(unix.ENAMETOOLONG))
		_, err = OpenNamespace("/proc/self\x00/ns/net")
		Expect(err).To(MatchError(unix.EINVAL))
	})

	It("leaks no file over a thousand times, successful or not", func() {
		before := openFiles()
		for range 1000 {
			ns, err := OwnNamespace()
			Expect(err).NotTo(HaveOccurred())
			Expect(ns.Close()).To(Succeed())
			for _, path := range []string{"/proc/self/ns/mnt", "/proc/self/status", "/missing"} {
				_, err := OpenNamespace(path)
				Expect(err).To(HaveOccurred())
			}
		}
		Expect(openFiles()).To(Equal(before))
	})
})

var _ = Describe("Namespace.Run", func() {
	It("refuses to call anything where it cannot enter", func() {
		if os.Geteuid() == 0 {
			Skip("needs an ordinary user: root can enter any namespace")
		}
		err := ownNamespace().Run(func() error {
			Fail("called outside the namespace")
			return nil
		})
		Expect(err).To(MatchError(unix.EPERM))
		Expect(err).To(MatchError(ContainSubstring("enter network namespace net:[")))
	})

	It("refuses to call anything when the namespace is closed", func() {
		ns, err := OwnNamespace()
		Expect(err).NotTo(HaveOccurred())
		Expect(ns.Close()).To(Succeed())
		called := false
		Expect(ns.Run(func() error { called = true; return nil })).To(MatchError(unix.EBADF))
		Expect(called).To(BeFalse())
	})

	It("calls inside, and leaves the caller where it is", func() {
		ns, home := newNamespace(), here()
		var inside string
		Expect(ns.Run(func() error { inside = here(); return nil })).To(Succeed())
		Expect(inside).To(Equal(ns.ID().String()))
		Expect(inside).NotTo(Equal(home))
		Expect(here()).To(Equal(home))
	})

	It("nests", func() {
		a, b := newNamespace(), newNamespace()
		Expect(a.Run(func() error {
			if err := b.Run(func() error { return expectHere(b) }); err != nil {
				return err
			}
			return expectHere(a)
		})).To(Succeed())
	})

	It("returns the error as it is", func() {
		ns := newNamespace()
		err := errors.New("of the callee")
		Expect(ns.Run(func() error { return err })).To(BeIdenticalTo(err))
	})

	It("lets a panic go on in the caller, and works afterwards", func() {
		ns, home := newNamespace(), here()
		cause := errors.New("cause")
		Expect(func() { _ = ns.Run(func() error { panic(cause) }) }).To(PanicWith(cause))
		Expect(here()).To(Equal(home))
		Expect(ns.Run(func() error { return expectHere(ns) })).To(Succeed())
	})

	It("shows each of 64 goroutines its own namespace", func() {
		namespaces := make([]*Namespace, 64)
		for i := range namespaces {
			namespaces[i] = newNamespace()
		}
		home := here()
		errs := make([]error, len(namespaces))
		var group sync.WaitGroup
		for i, ns := range namespaces {
			group.Go(func() {
				for range 5 {
					errs[i] = errors.Join(errs[i], ns.Run(func() error {
						err := expectHere(ns)
						runtime.Gosched() // others get the chance to disturb
						return errors.Join(err, expectHere(ns))
					}))
					if now := here(); now != home {
						errs[i] = errors.Join(errs[i], errors.New("the caller is in "+now))
					}
				}
			})
		}
		group.Wait()
		Expect(errors.Join(errs...)).To(Succeed())
	})

	It("leaves no thread behind in the namespace", func() {
		ns := newNamespace()
		for range 20 {
			Expect(ns.Run(func() error { return nil })).To(Succeed())
			func() {
				defer func() { _ = recover() }()
				_ = ns.Run(func() error { panic("whatever") })
			}()
		}
		// The runtime ends a thread some time after its goroutine.
		Eventually(threadNamespaces, 30*time.Second).ShouldNot(ContainElement(ns.ID().String()))
	})

	It("takes every thread back, the first one of the process too", func() {
		// One that stayed would keep the pod's namespace alive, and the first
		// one would make /proc/PID/ns/net take this process for one of the
		// pod's. Whether the runtime chooses that thread depends on what else
		// the process does, so another one that does nothing else shows it.
		newNamespace() // skips where none can be made
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), envFirstThread+"=1")
		out, err := cmd.CombinedOutput()
		Expect(err).NotTo(HaveOccurred(), string(out))
	})

	It("leaks no file", func() {
		ns := newNamespace()
		before := openFiles()
		for range 100 {
			Expect(ns.Run(func() error { return nil })).To(Succeed())
		}
		Expect(openFiles()).To(Equal(before))
	})
})

func expectHere(ns *Namespace) error {
	if now := here(); now != ns.ID().String() {
		return errors.New("is in " + now + " instead of " + ns.ID().String())
	}
	return nil
}

var _ = Describe("Namespace.Do", func() {
	It("has a Conn of its namespace, or says that there is no RDMA subsystem", func() {
		ns := newNamespace()
		called := false
		err := ns.Do(func(c *Conn) error {
			called = true
			_, err := c.Mode()
			return err
		})
		if err != nil {
			Expect(err).To(MatchError(ErrNoSubsystem))
			Expect(called).To(BeFalse())
		}
	})
})

var _ = Describe("namespaces that a path leads to", func() {
	It("are the mount points of nsfs files in mountinfo", func() {
		Expect(namespaceMounts(strings.NewReader(strings.Join([]string{
			`22 1 0:21 / /proc rw,nosuid - proc proc rw`,
			`201 25 0:4 net:[4026532281] /run/netns/blue rw shared:1 - nsfs nsfs rw`,
			`202 25 0:4 mnt:[4026532282] /run/mnt/blue rw - nsfs nsfs rw`,
			`203 25 0:4 net:[4026532283] /run/netns/a\040b\011c\012d\134e rw - nsfs nsfs rw`,
			`204 25 0:4 net:[4026532284] /run/netns/literally\134040 rw - nsfs nsfs rw`,
			`205 25 8:1 /net:[1] /mnt/a-file-of-that-name rw - ext4 /dev/sda1 rw`,
			`206 25 0:4 net:[4026532285]`,
			``,
			`junk`,
		}, "\n")))).To(Equal([]string{"/run/netns/blue", "/run/netns/a b\tc\nd\\e", `/run/netns/literally\040`}))
	})

	It("are found behind a line of any length", func() {
		// An overlay mount lists each of its layers.
		layers := strings.Repeat(":/var/lib/containers/storage/overlay/l/ABCDEFGHIJKLMNOPQRSTUVWXYZ", 2000)
		Expect(namespaceMounts(strings.NewReader(
			`30 1 0:30 / /merged rw - overlay overlay rw,lowerdir=` + layers + "\n" +
				`201 25 0:4 net:[4026532281] /run/netns/blue rw shared:1 - nsfs nsfs rw` + "\n",
		))).To(Equal([]string{"/run/netns/blue"}))
	})

	It("include a namespace that only an open file holds, once, and end when told", func() {
		ns := newNamespace()
		var paths []string
		Reachable(func(path string, found *Namespace) bool {
			if found.ID() == ns.ID() {
				paths = append(paths, path)
			}
			return false
		})
		Expect(paths).To(HaveLen(1))
		Expect(paths[0]).To(HavePrefix("/proc/"))

		calls := 0
		Reachable(func(string, *Namespace) bool { calls++; return true })
		Expect(calls).To(Equal(1))
	})

	It("include the own one, for any user", func() {
		own := ownNamespace()
		count := 0
		Reachable(func(_ string, found *Namespace) bool {
			if found.ID() == own.ID() {
				count++
			}
			return false
		})
		Expect(count).To(Equal(1))
	})

	It("leak no file", func() {
		before := openFiles()
		for range 3 {
			Reachable(func(string, *Namespace) bool { return false })
		}
		Expect(openFiles()).To(Equal(before))
	})
})
