package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/test/vm/wire"
)

// port is the agent's end of the virtio-serial port.
type port struct {
	fd int
	mu sync.Mutex // one frame at a time
}

// Read waits out the moments when no runner is connected, which the driver
// reports as end of file.
func (p *port) Read(b []byte) (int, error) {
	for {
		n, err := unix.Read(p.fd, b)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return 0, err
		case n > 0:
			return n, nil
		default:
			time.Sleep(5 * time.Millisecond)
		}
	}
}

func (p *port) Write(b []byte) (int, error) {
	for done := 0; done < len(b); {
		n, err := unix.Write(p.fd, b[done:])
		if err != nil && err != unix.EINTR {
			return done, err
		}
		done += max(n, 0)
	}
	return len(b), nil
}

func (p *port) send(kind byte, payload []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return wire.Write(p, kind, payload)
}

// stream is a command's stdout or stderr.
type stream struct {
	port *port
	kind byte
}

func (s stream) Write(b []byte) (int, error) {
	return len(b), s.port.send(s.kind, b)
}

func agent() error {
	p, err := openPort()
	if err != nil {
		return err
	}
	vfs, err := saveVFs()
	if err != nil {
		return err
	}
	// The image is saved after this frame and before the next read returns.
	if err := p.send(wire.Ready, nil); err != nil {
		return err
	}
	for {
		kind, payload, err := wire.Read(p)
		if err != nil {
			return err
		}
		switch kind {
		case wire.Start:
			var job wire.Job
			if err := json.Unmarshal(payload, &job); err != nil {
				return err
			}
			if err := wakeProcessors(); err != nil {
				return err
			}
			go func() { fail("report", report(p, run(p, vfs, job))) }()
		case wire.Blocked:
			if err := printBlocked(); err != nil {
				return err
			}
			go unix.Sync() // what the command wrote to the share so far
		default:
			return fmt.Errorf("frame of kind %q", kind)
		}
	}
}

// wakeProcessors has each processor run something. One of a hundred resumed
// guests has a processor that sleeps without the timer that was to wake it:
// what waits for that timer, such as the end of an RCU grace period, waits until
// somebody else wakes the processor, which sets its timer again.
func wakeProcessors() error {
	for cpu := range runtime.NumCPU() {
		done := make(chan error)
		go func() {
			runtime.LockOSThread() // and never unlocked: the thread ends here
			var set unix.CPUSet
			set.Set(cpu)
			done <- os.NewSyscallError("sched_setaffinity", unix.SchedSetaffinity(0, &set)) // comes back on that processor
		}()
		if err := <-done; err != nil {
			return err
		}
	}
	return nil
}

// printBlocked has the kernel print its uninterruptible tasks, which it does at
// a level that the console leaves out otherwise.
func printBlocked() error {
	return errors.Join(write("/proc/sys/kernel/printk", "8"), write("/proc/sysrq-trigger", "w"))
}

func openPort() (*port, error) {
	names, err := filepath.Glob("/sys/class/virtio-ports/*/name")
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		if strings.TrimSpace(string(text)) != wire.PortName {
			continue
		}
		fd, err := unix.Open("/dev/"+filepath.Base(filepath.Dir(name)), unix.O_RDWR|unix.O_CLOEXEC, 0)
		return &port{fd: fd}, err
	}
	return nil, fmt.Errorf("no virtio-serial port named %q", wire.PortName)
}

func report(w *port, result wire.Result) error {
	payload, err := json.Marshal(result)
	if err != nil {
		return err
	}
	return w.send(wire.Exit, payload)
}

// run makes the resumed guest current, mounts the share and runs the command.
func run(p *port, vfs vfConfigs, job wire.Job) wire.Result {
	if err := errors.Join(vfs.restore(), prepare(job)); err != nil {
		return wire.Result{Err: err.Error()}
	}
	cmd := exec.Command(job.Args[0], job.Args[1:]...)
	cmd.Dir = job.Dir
	cmd.Env = append(append(cmd.Env, environment...), job.Env...)
	cmd.Stdout = stream{p, wire.Stdout}
	cmd.Stderr = stream{p, wire.Stderr}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	// A daemon that the command left behind may keep its output open.
	cmd.WaitDelay = 200 * time.Millisecond

	start := time.Now()
	err := cmd.Run()
	result := wire.Result{Seconds: time.Since(start).Seconds()}
	var exit *exec.ExitError
	switch {
	case err == nil, errors.Is(err, exec.ErrWaitDelay):
	case errors.As(err, &exit):
		result.Code = exit.ExitCode()
		if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
			result.Code = 128 + int(status.Signal())
		}
	default:
		result.Err = err.Error()
	}
	unix.Sync() // the share's files are the host's now
	return result
}

func prepare(job wire.Job) error {
	// The agent's own PATH finds the command; a job's PATH may change it.
	for _, kv := range append(append([]string{}, environment...), job.Env...) {
		if k, v, ok := strings.Cut(kv, "="); ok {
			os.Setenv(k, v)
		}
	}
	now := unix.NsecToTimeval(job.Now)
	if err := unix.Settimeofday(&now); err != nil {
		return fmt.Errorf("set the clock: %w", err)
	}
	if err := seed(job.Seed); err != nil {
		return fmt.Errorf("seed the random generator: %w", err)
	}
	if err := os.MkdirAll(wire.ShareDir, 0o755); err != nil {
		return err
	}
	// Loose: what the guest has read stays in its cache, since a page fault that
	// crosses 9p is slow. The guest sees no later change that the host makes.
	const options = "trans=virtio,version=9p2000.L,msize=512000,cache=loose"
	if err := unix.Mount(wire.ShareTag, wire.ShareDir, "9p", 0, options); err != nil {
		return fmt.Errorf("mount the share: %w", err)
	}
	return nil
}

// seed gives the kernel entropy that counts and makes it use it at once: every
// guest resumed from one image has the same generator state otherwise.
func seed(bytesOfEntropy []byte) error {
	f, err := os.OpenFile("/dev/random", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	// struct rand_pool_info: entropy in bits, size in bytes, the bytes.
	var info struct {
		bits, size int32
		buf        [64]byte
	}
	info.size = int32(copy(info.buf[:], bytesOfEntropy))
	info.bits = info.size * 8
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), unix.RNDADDENTROPY, uintptr(unsafe.Pointer(&info))); errno != 0 {
		return errno
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), unix.RNDRESEEDCRNG, 0); errno != 0 {
		return errno
	}
	_, err = io.Copy(io.Discard, io.LimitReader(f, 1))
	return err
}
