package state

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
)

// process is another process that holds the lock of a store.
type process struct {
	cmd   *exec.Cmd
	stdin io.Closer
}

func (p process) pid() int { return p.cmd.Process.Pid }

// release lets the process let go in good order.
func (p process) release() {
	GinkgoHelper()
	Expect(p.stdin.Close()).To(Succeed())
	Expect(p.cmd.Wait()).To(Succeed())
}

func holdElsewhere(s *Store) process {
	GinkgoHelper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), envDir+"="+s.dir)
	cmd.Stderr = GinkgoWriter
	stdin, err := cmd.StdinPipe()
	Expect(err).NotTo(HaveOccurred())
	stdout, err := cmd.StdoutPipe()
	Expect(err).NotTo(HaveOccurred())
	Expect(cmd.Start()).To(Succeed())
	DeferCleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	Expect(bufio.NewReader(stdout).ReadString('\n')).To(Equal("held\n"))
	return process{cmd, stdin}
}

// lockWithin takes the lock, or fails within the time.
func lockWithin(s *Store, wait time.Duration) (*Lock, error) {
	return s.Lock(context.Background(), wait, "DEL of a test")
}

// Long enough for a busy machine to give a free lock, short enough to wait for
// one that is not.
const (
	soon    = 20 * time.Millisecond
	patient = 30 * time.Second
)

func timeout(s *Store) *LockTimeoutError {
	GinkgoHelper()
	_, err := lockWithin(s, soon)
	var timeout *LockTimeoutError
	Expect(errors.As(err, &timeout)).To(BeTrue(), "%v", err)
	return timeout
}

func openFiles() int {
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return -1
	}
	return len(files)
}

var _ = Describe("the node lock", func() {
	var s *Store

	BeforeEach(func() { s = NewStore(filepath.Join(GinkgoT().TempDir(), "cni", "rdma")) })

	It("makes the directory and its file for one user only", func() {
		l, err := lockWithin(s, patient)
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(l.Release)
		Expect(modeOf(s.dir)).To(Equal(os.ModeDir | 0o700))
		Expect(modeOf(s.path("lock"))).To(Equal(os.FileMode(0o600)))
	})

	It("is for one process at a time", func() {
		const processes, times = 4, 25
		var all []*exec.Cmd
		for range processes {
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), envDir+"="+s.dir, envCount+"="+strconv.Itoa(times))
			cmd.Stderr = GinkgoWriter
			Expect(cmd.Start()).To(Succeed())
			all = append(all, cmd)
		}
		for _, cmd := range all {
			Expect(cmd.Wait()).To(Succeed())
		}
		Expect(os.ReadFile(s.path("counter"))).To(BeEquivalentTo(strconv.Itoa(processes * times)))
	})

	It("is for one holder at a time within a process", func() {
		l, err := lockWithin(s, patient)
		Expect(err).NotTo(HaveOccurred())
		timeout(s)
		Expect(l.Release()).To(Succeed())
		l, err = lockWithin(s, patient)
		Expect(err).NotTo(HaveOccurred())
		Expect(l.Release()).To(Succeed())
	})

	It("is waited for", func() {
		p := holdElsewhere(s)
		taken := make(chan error, 1)
		go func() {
			l, err := lockWithin(s, patient)
			if err == nil {
				err = l.Release()
			}
			taken <- err
		}()
		Consistently(taken, soon).ShouldNot(Receive())
		p.release()
		Eventually(taken, patient).Should(Receive(BeNil()))
	})

	It("is not waited for longer than the context says", func() {
		p := holdElsewhere(s)
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		defer cancel()
		_, err := s.Lock(ctx, time.Hour, "whatever")
		var timeout *LockTimeoutError
		Expect(errors.As(err, &timeout)).To(BeTrue(), "%v", err)
		p.release()
	})

	It("is given at once although the time is over, if it is free", func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		l, err := s.Lock(ctx, time.Hour, "whatever")
		Expect(err).NotTo(HaveOccurred())
		Expect(l.Release()).To(Succeed())
	})

	It("names its holder to those who waited in vain", func() {
		p := holdElsewhere(s)
		err := timeout(s)
		Expect(err.Holder).To(MatchRegexp(`^pid %d: ADD of a test, since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ, in state [A-Z]$`, p.pid()))
		Expect(err.Wait).To(BeNumerically(">=", soon))
		Expect(err.Error()).To(And(ContainSubstring("was not free within"), ContainSubstring(err.Holder)))
	})

	It("tells when its holder is stopped", func() {
		p := holdElsewhere(s)
		Expect(p.cmd.Process.Signal(unix.SIGSTOP)).To(Succeed())
		Eventually(func() string { return processState(p.pid()) }, patient).Should(ContainSubstring("stopped"))
		Expect(timeout(s).Holder).To(And(HavePrefix(fmt.Sprintf("pid %d: ", p.pid())), HaveSuffix("now stopped (continue or kill it)")))
	})

	It("goes with a killed holder", func() {
		p := holdElsewhere(s)
		Expect(p.cmd.Process.Kill()).To(Succeed())
		l, err := lockWithin(s, patient)
		Expect(err).NotTo(HaveOccurred())
		Expect(l.Release()).To(Succeed())
	})

	It("is not kept by those who waited in vain", func() {
		before := openFiles()
		p := holdElsewhere(s)
		for range 5 {
			timeout(s)
		}
		p.release()
		// A waiter's turn comes all the same; it must pass it on by itself.
		for range 5 {
			l, err := lockWithin(s, patient)
			Expect(err).NotTo(HaveOccurred())
			Expect(l.Release()).To(Succeed())
		}
		Eventually(openFiles, patient).Should(Equal(before))
	})

	It("takes away what a process left that was killed while it wrote a record", func() {
		lock, err := lockWithin(s, patient)
		Expect(err).NotTo(HaveOccurred())
		Expect(lock.Release()).To(Succeed())
		Expect(os.WriteFile(s.path(".new"), []byte("{"), 0o600)).To(Succeed())
		lock, err = lockWithin(s, patient)
		Expect(err).NotTo(HaveOccurred())
		Expect(s.path(".new")).NotTo(BeAnExistingFile())
		Expect(lock.Release()).To(Succeed())
	})

	It("leaks no file", func() {
		before := openFiles()
		for range 200 {
			l, err := lockWithin(s, patient)
			Expect(err).NotTo(HaveOccurred())
			Expect(l.Release()).To(Succeed())
		}
		Expect(openFiles()).To(Equal(before))
	})

	It("does not keep words of a longer purpose", func() {
		for _, purpose := range []string{"a long purpose that is written first", "short"} {
			l, err := s.Lock(context.Background(), time.Hour, purpose)
			Expect(err).NotTo(HaveOccurred())
			f, err := os.Open(s.path("lock"))
			Expect(err).NotTo(HaveOccurred())
			text := holder(int(f.Fd()))
			Expect(errors.Join(f.Close(), l.Release())).To(Succeed())
			Expect(text).To(MatchRegexp(`^pid %d: %s, since [^ ]+, in state [A-Z]$`, os.Getpid(), purpose))
		}
	})

	DescribeTable("describes a holder by what is written", func(written, want string) {
		path := filepath.Join(GinkgoT().TempDir(), "lock")
		Expect(os.WriteFile(path, []byte(written), 0o600)).To(Succeed())
		f, err := os.Open(path)
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(f.Close)
		Expect(holder(int(f.Fd()))).To(Equal(want))
	},
		Entry("nothing", "", "a process that did not say who it is"),
		Entry("blanks", "   \n", "a process that did not say who it is"),
		Entry("bytes of something else", "\x00\xff\x01", "a process that did not say who it is"),
		Entry("a number that is none", "pid x: ADD", "pid x: ADD"),
		Entry("a process that has ended", "pid 4194304: ADD of x   \n", "pid 4194304: ADD of x, a process that is gone"),
	)

	DescribeTable("is refused where it would be unsafe or impossible", func(prepare func(), text string) {
		prepare()
		_, err := lockWithin(s, patient)
		Expect(err).To(MatchError(ContainSubstring(text)))
		Expect(err).NotTo(BeAssignableToTypeOf(&LockTimeoutError{}))
	},
		Entry("the directory is a symbolic link", func() {
			target := GinkgoT().TempDir()
			Expect(os.Mkdir(filepath.Dir(s.dir), 0o755)).To(Succeed())
			Expect(os.Symlink(target, s.dir)).To(Succeed())
			DeferCleanup(func() { Expect(os.ReadDir(target)).To(BeEmpty(), "nothing may be made behind the link") })
		}, "is not a directory"),
		Entry("the directory is a file", func() {
			Expect(os.Mkdir(filepath.Dir(s.dir), 0o755)).To(Succeed())
			Expect(os.WriteFile(s.dir, nil, 0o600)).To(Succeed())
		}, "not a directory"),
		Entry("the directory above is a file", func() {
			Expect(os.WriteFile(filepath.Dir(s.dir), nil, 0o600)).To(Succeed())
		}, "not a directory"),
		Entry("the lock is a symbolic link", func() {
			Expect(s.prepare()).To(Succeed())
			Expect(os.Symlink("/dev/null", s.path("lock"))).To(Succeed())
		}, "open the node lock"),
		Entry("the lock is a directory", func() {
			Expect(s.prepare()).To(Succeed())
			Expect(os.Mkdir(s.path("lock"), 0o700)).To(Succeed())
		}, "open the node lock"),
	)
})

var _ = Describe("the lock of another plugin", func() {
	var path string
	BeforeEach(func() { path = filepath.Join(GinkgoT().TempDir(), "ib-sriov", "cni.lock") })
	take := func(wait time.Duration) (*Lock, error) {
		ctx, cancel := context.WithTimeout(context.Background(), wait)
		defer cancel()
		return LockOther(ctx, time.Hour, path)
	}

	It("is none where that plugin has no directory, and none is made", func() {
		l, err := take(patient)
		Expect(err).NotTo(HaveOccurred())
		Expect(l).To(BeNil())
		Expect(filepath.Dir(path)).NotTo(BeADirectory())
	})

	It("is waited for, bounded, and nothing is written into its file", func() {
		Expect(os.Mkdir(filepath.Dir(path), 0o755)).To(Succeed())
		first, err := take(patient)
		Expect(err).NotTo(HaveOccurred())
		_, err = take(10 * time.Millisecond)
		var timeout *LockTimeoutError
		Expect(errors.As(err, &timeout)).To(BeTrue(), "%v", err)
		Expect(err).To(MatchError(And(ContainSubstring(path), ContainSubstring("the plugin ib-sriov"))))
		Expect(first.Release()).To(Succeed())
		second, err := take(patient)
		Expect(err).NotTo(HaveOccurred())
		Expect(second.Release()).To(Succeed())
		Expect(os.ReadFile(path)).To(BeEmpty())
	})

	It("that cannot be opened is an error", func() {
		Expect(os.MkdirAll(path, 0o755)).To(Succeed())
		_, err := take(patient)
		Expect(err).To(MatchError(ContainSubstring("open the lock of another plugin")))
	})
})
