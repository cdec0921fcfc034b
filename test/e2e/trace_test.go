package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
)

// A point of a plugin's run is the moment before or after a system call by
// which it changes something: files, the lock, devices, its namespace, its
// answer.
type point struct {
	call  string
	after bool
}

func (p point) String() string {
	if p.after {
		return "after " + p.call
	}
	return "before " + p.call
}

// killed is the exit status of a plugin that was killed.
const killed = -1

// traced runs a verb and calls at for each point in turn, with the plugin
// standing still. If at returns true the plugin is killed there: a system call
// that it stands before is then not executed.
//
// A system call that is in neither of the two lists below fails the spec, so
// that none which changes something is overlooked.
func (a attachment) traced(command string, at func(point) (kill bool)) answer {
	GinkgoHelper()
	dir, err := os.MkdirTemp("", "traced")
	Expect(err).NotTo(HaveOccurred())
	defer func() { Expect(os.RemoveAll(dir)).To(Succeed()) }()
	Expect(os.WriteFile(filepath.Join(dir, "stdin"), a.stdin(), 0o600)).To(Succeed())
	t := tracer{at: at, inside: map[int]string{}}
	done := make(chan any)
	go func() {
		defer func() { done <- recover() }()
		// The kernel ties a traced process to the thread that started it.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err = t.run(a.command(command, nil).Env, dir)
	}()
	if r := <-done; r != nil {
		panic(r)
	}
	Expect(err).NotTo(HaveOccurred(), "trace %s", command)
	stdout, err := os.ReadFile(filepath.Join(dir, "stdout"))
	Expect(err).NotTo(HaveOccurred())
	stderr, err := os.ReadFile(filepath.Join(dir, "stderr"))
	Expect(err).NotTo(HaveOccurred())
	return answer{exit: t.exit, stdout: string(stdout), stderr: string(stderr)}
}

// tracer follows one plugin through its system calls with ptrace(2).
type tracer struct {
	at     func(point) bool
	pid    int
	inside map[int]string // by thread: the changing call that it is in, "" if none
	dead   bool
	exit   int
}

func (t *tracer) run(env []string, dir string) error {
	var files []uintptr
	for _, f := range []struct {
		name  string
		flags int
	}{{"stdin", unix.O_RDONLY}, {"stdout", unix.O_CREAT | unix.O_WRONLY}, {"stderr", unix.O_CREAT | unix.O_WRONLY}} {
		fd, err := unix.Open(filepath.Join(dir, f.name), f.flags|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return fmt.Errorf("open %s: %w", f.name, err)
		}
		defer unix.Close(fd)
		files = append(files, uintptr(fd))
	}
	plugin := filepath.Join(binDir, "rdma")
	pid, err := syscall.ForkExec(plugin, []string{plugin}, &syscall.ProcAttr{Env: env, Files: files, Sys: &syscall.SysProcAttr{Ptrace: true, Setpgid: true}})
	if err != nil {
		return fmt.Errorf("start the plugin: %w", err)
	}
	t.pid = pid
	ended := false
	defer func() {
		if !ended { // an error or a failed expectation leaves no process behind
			_ = unix.Kill(pid, unix.SIGKILL)
			for e := error(nil); e == nil || errors.Is(e, unix.EINTR); {
				_, e = unix.Wait4(-pid, nil, unix.WALL, nil)
			}
		}
	}()
	err = t.follow()
	ended = err == nil
	return err
}

// follow waits for each stop of each thread and lets it go on, to the end of
// the process.
func (t *tracer) follow() error {
	known := map[int]bool{}
	for {
		var status unix.WaitStatus
		// The plugin has a process group of its own: others have other waiters.
		tid, err := unix.Wait4(-t.pid, &status, unix.WALL, nil)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("wait for the plugin: %w", err)
		case status.Exited() || status.Signaled():
			if tid == t.pid { // comes after all other threads
				t.exit = killed
				if status.Exited() {
					t.exit = status.ExitStatus()
				}
				return nil
			}
			continue
		}
		deliver := 0
		switch signal := status.StopSignal(); {
		case !known[tid] && tid == t.pid: // the stop at its exec
			const exitKill = 0x100000 // PTRACE_O_EXITKILL
			if err := unix.PtraceSetOptions(tid, unix.PTRACE_O_TRACESYSGOOD|unix.PTRACE_O_TRACECLONE|exitKill); err != nil {
				return fmt.Errorf("set the options of ptrace: %w", err)
			}
		case !known[tid] && signal == unix.SIGSTOP: // a new thread
		case signal == unix.SIGTRAP|0x80:
			if err := t.syscallStop(tid); err != nil {
				return err
			}
		case signal == unix.SIGTRAP: // the clone that made a thread
		default:
			deliver = int(signal)
		}
		known[tid] = true
		// A killed thread cannot be sent on; its end is reported above.
		if err := unix.PtraceSyscall(tid, deliver); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("let thread %d go on: %w", tid, err)
		}
	}
}

// ask calls at from another goroutine, which is free to change its thread.
func (t *tracer) ask(p point) (kill bool) {
	done := make(chan any)
	go func() {
		defer func() { done <- recover() }()
		kill = t.at(p)
	}()
	if r := <-done; r != nil {
		panic(r)
	}
	return kill
}

// syscallInfo is struct ptrace_syscall_info of linux/ptrace.h, since 5.3.
type syscallInfo struct {
	op   uint8
	_    [3]uint8
	arch uint32
	ip   uint64
	sp   uint64
	nr   uint64 // entry: the number; exit: the result
	args [6]uint64
	_    [2]uint64
}

func (t *tracer) syscallStop(tid int) error {
	const getSyscallInfo, entry = 0x420e, 1
	var info syscallInfo
	if _, _, errno := unix.Syscall6(unix.SYS_PTRACE, getSyscallInfo, uintptr(tid), unsafe.Sizeof(info), uintptr(unsafe.Pointer(&info)), 0, 0); errno != 0 {
		if errno == unix.ESRCH {
			return nil // killed meanwhile
		}
		return os.NewSyscallError("ptrace", errno)
	}
	call := t.inside[tid]
	if info.op == entry {
		changes, err := t.changing(tid, info)
		if err != nil {
			return err
		}
		call, t.inside[tid] = changes, changes
	}
	if call == "" || t.dead {
		return nil
	}
	if t.ask(point{call, info.op != entry}) {
		t.dead = true
		return os.NewSyscallError("kill", unix.Kill(t.pid, unix.SIGKILL))
	}
	return nil
}

// harmless are the system calls that change nothing outside the process.
var harmless = []uint64{
	unix.SYS_READ, unix.SYS_PREAD64, unix.SYS_FSTAT, unix.SYS_NEWFSTATAT, unix.SYS_STATFS, unix.SYS_FSTATFS, unix.SYS_READLINKAT,
	unix.SYS_GETDENTS64, unix.SYS_LSEEK, unix.SYS_FCNTL, unix.SYS_GETCWD, unix.SYS_FACCESSAT, unix.SYS_UNAME,
	unix.SYS_MMAP, unix.SYS_MUNMAP, unix.SYS_MPROTECT, unix.SYS_MADVISE, unix.SYS_BRK, unix.SYS_MINCORE,
	unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN, unix.SYS_SIGALTSTACK, unix.SYS_TGKILL,
	unix.SYS_FUTEX, unix.SYS_CLONE, unix.SYS_CLONE3, unix.SYS_EXIT, unix.SYS_EXIT_GROUP, unix.SYS_SCHED_GETAFFINITY, unix.SYS_SCHED_YIELD,
	unix.SYS_NANOSLEEP, unix.SYS_CLOCK_NANOSLEEP, unix.SYS_CLOCK_GETTIME, unix.SYS_GETTIMEOFDAY, unix.SYS_GETRANDOM, unix.SYS_RESTART_SYSCALL,
	unix.SYS_EPOLL_CREATE1, unix.SYS_EPOLL_CTL, unix.SYS_EPOLL_PWAIT, unix.SYS_EVENTFD2, unix.SYS_PIPE2,
	unix.SYS_GETPID, unix.SYS_GETTID, unix.SYS_GETUID, unix.SYS_GETEUID, unix.SYS_PRCTL, unix.SYS_PRLIMIT64,
	unix.SYS_SOCKET, unix.SYS_SETSOCKOPT, unix.SYS_GETSOCKOPT, unix.SYS_GETSOCKNAME, unix.SYS_BIND, unix.SYS_RECVFROM, unix.SYS_RECVMSG,
	unix.SYS_FSOPEN, unix.SYS_FSCONFIG, unix.SYS_FSMOUNT, // of a mount that is attached nowhere
	158, // arch_prctl, which only amd64 has
}

// changing names the system call that a thread enters if it changes something.
func (t *tracer) changing(tid int, info syscallInfo) (string, error) {
	args := info.args
	switch info.nr {
	case unix.SYS_OPENAT:
		flags := int(args[2])
		if flags&(unix.O_CREAT|unix.O_TRUNC) == 0 && flags&unix.O_ACCMODE == unix.O_RDONLY {
			return "", nil
		}
		return t.named("openat", tid, args[1])
	case unix.SYS_OPENAT2:
		return t.named("openat2", tid, args[1])
	case unix.SYS_MKDIRAT:
		return t.named("mkdirat", tid, args[1])
	case unix.SYS_UNLINKAT:
		return t.named("unlinkat", tid, args[1])
	case unix.SYS_FCHMODAT:
		return t.named("fchmodat", tid, args[1])
	case unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2:
		return t.named("renameat", tid, args[3])
	case unix.SYS_WRITE, unix.SYS_PWRITE64:
		file := t.file(args[0])
		if !strings.HasPrefix(file, "/") {
			return "", nil // the Go runtime wakes itself up by an eventfd
		}
		return "write " + filepath.Base(file), nil
	case unix.SYS_FTRUNCATE, unix.SYS_FCHMOD, unix.SYS_FSYNC:
		return fmt.Sprintf("system call %d on %s", info.nr, filepath.Base(t.file(args[0]))), nil
	case unix.SYS_FLOCK:
		return "flock", nil
	case unix.SYS_SETNS:
		return "setns", nil
	case unix.SYS_CLOSE:
		if filepath.Base(t.file(args[0])) == "lock" {
			return "close lock", nil
		}
		return "", nil
	case unix.SYS_SENDTO:
		return request(tid, args[1], args[2])
	case unix.SYS_IOCTL:
		switch args[1] {
		case unix.NS_GET_NSTYPE, unix.SIOCETHTOOL, unix.TCGETS: // of ethtool the driver's name is asked for
			return "", nil
		}
	case unix.SYS_EXECVE:
		return "", nil
	}
	if slices.Contains(harmless, info.nr) {
		return "", nil
	}
	return "", fmt.Errorf("system call %d (arguments %#x) is in no list: does it change anything?", info.nr, args)
}

// request names a netlink request that is no question.
func request(tid int, address, length uint64) (string, error) {
	const header = 6 // up to nlmsg_type
	data := make([]byte, header)
	if length < header {
		return "", fmt.Errorf("a netlink request of %d bytes", length)
	}
	if _, err := unix.PtracePeekData(tid, uintptr(address), data); err != nil {
		return "", fmt.Errorf("read a netlink request: %w", err)
	}
	const nldev = 5 << 10 // RDMA_NL_NLDEV
	switch kind := binary.NativeEndian.Uint16(data[4:]); kind {
	case nldev | 1, nldev | 5, nldev | 6, nldev | 15, // get device, port, mode, char device
		unix.RTM_GETLINK, unix.RTM_GETADDR, unix.RTM_GETROUTE:
		return "", nil
	case nldev | 2:
		return "sendto (change an RDMA device)", nil
	case nldev | 3, nldev | 4:
		return "sendto (make or remove an RDMA device)", nil
	default:
		return fmt.Sprintf("sendto (netlink request %#x)", kind), nil
	}
}

// file is what a descriptor of the plugin leads to.
func (t *tracer) file(fd uint64) string {
	path, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", t.pid, int(fd)))
	return path
}

// named adds the last element of the path that a call is given.
func (t *tracer) named(call string, tid int, address uint64) (string, error) {
	data := make([]byte, unix.PathMax)
	n, err := unix.PtracePeekData(tid, uintptr(address), data)
	if n == 0 && err != nil {
		return "", fmt.Errorf("read the path of %s: %w", call, err)
	}
	name := filepath.Base(unix.ByteSliceToString(data[:n]))
	if strings.HasSuffix(name, ".json") {
		name = "record"
	}
	return call + " " + name, nil
}

// fastPod makes a pod without a program's help, for specs that need hundreds.
// Its namespace has to be removed by the caller.
func fastPod() pod {
	GinkgoHelper()
	n := pods.Add(1)
	p := pod{name: fmt.Sprintf("pod%d", n), id: fmt.Sprintf("container%d", n)}
	p.path = "/run/netns/" + p.name
	var err error
	onOwnThread(func() {
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return
		}
		if err = os.WriteFile(p.path, nil, 0o600); err == nil {
			err = unix.Mount("/proc/thread-self/ns/net", p.path, "", unix.MS_BIND, "")
		}
	})
	Expect(err).NotTo(HaveOccurred(), "make a network namespace")
	return p
}

// kill takes the name of a namespace away, and with it the namespace if nothing
// else holds it.
func (p pod) kill() {
	GinkgoHelper()
	Expect(unix.Unmount(p.path, unix.MNT_DETACH)).To(Succeed())
	Expect(os.Remove(p.path)).To(Succeed())
}
