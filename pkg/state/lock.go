package state

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const lockFile = "lock"

// Lock is the node lock. While it is held no other process moves an RDMA
// device by way of this project, so character device numbers stay what they
// are. The kernel drops it with the process.
type Lock struct{ f *os.File }

// LockTimeoutError says that the node lock was not free in time.
type LockTimeoutError struct {
	Wait   time.Duration
	Holder string // what the holder wrote about itself, and how it is doing
}

func (e *LockTimeoutError) Error() string {
	return fmt.Sprintf("the node lock of RDMA moves was not free within %s; it is held by %s", e.Wait.Round(time.Millisecond), e.Holder)
}

// Lock takes the node lock and makes the directory if need be. Before ctx ends
// it has it, or gives a *LockTimeoutError that names the holder. purpose tells
// others what for.
func (s *Store) Lock(ctx context.Context, purpose string) (*Lock, error) {
	f, err := s.openLock()
	if err != nil {
		return nil, err
	}
	start := time.Now()
	if err := flockContext(ctx, f); err != nil {
		if !errors.Is(err, errLockWait) {
			return nil, errors.Join(fmt.Errorf("take the node lock %s: %w", f.Name(), err), f.Close())
		}
		return nil, &LockTimeoutError{Wait: time.Since(start), Holder: holder(f)}
	}
	l := &Lock{f: f}
	// Whoever was writing a record without holding the lock was killed at it.
	_ = removeIfThere(s.path(tempFile))
	// Told for the sake of others' error messages: a disk that cannot take it
	// does not make the lock worse.
	_, _ = f.WriteAt(fmt.Appendf(nil, "%-400.400s\n", fmt.Sprintf("pid %d: %s, since %s",
		os.Getpid(), purpose, start.UTC().Format(time.RFC3339))), 0)
	return l, nil
}

func (s *Store) openLock() (*os.File, error) {
	const flags = unix.O_NOFOLLOW | unix.O_NONBLOCK
	path := s.path(lockFile)
	if err := s.prepare(); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|flags, fileMode)
	if errors.Is(err, unix.EROFS) {
		// flock needs no more than a file that is there.
		if readable, readErr := os.OpenFile(path, os.O_RDONLY|flags, 0); readErr == nil {
			f, err = readable, nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open the node lock: %w", err)
	}
	return f, nil
}

// flockContext waits for the lock in the kernel's queue. If ctx ends first,
// the wait goes on in the background until the holder lets go, and what it
// gets is let go at once by closing the file.
func flockContext(ctx context.Context, f *os.File) error {
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
		return err
	}
	taken := make(chan error, 1)
	go func() { taken <- flock(f) }()
	select {
	case err := <-taken:
		return err
	case <-ctx.Done():
		go func() {
			<-taken
			_ = f.Close()
		}()
		return errLockWait
	}
}

var errLockWait = errors.New("the wait for the lock has ended")

func flock(f *os.File) error {
	for {
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// Release lets go of the lock.
func (l *Lock) Release() error { return l.f.Close() }

// holder reads what the holder wrote, and adds the state of its process: T is
// stopped, D is waiting inside the kernel, as for a move that does not end.
func holder(f *os.File) string {
	buf := make([]byte, 512)
	n, _ := f.ReadAt(buf, 0)
	text := strings.TrimSpace(string(buf[:n]))
	rest, ok := strings.CutPrefix(text, "pid ")
	if !ok {
		return "a process that did not say who it is"
	}
	digits, _, _ := strings.Cut(rest, ":")
	pid, err := strconv.Atoi(digits)
	if err != nil {
		return text
	}
	return text + ", " + processState(pid)
}

func processState(pid int) string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "a process that is gone"
	}
	// The state follows the command, which is in parentheses and may contain
	// some itself.
	fields := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))
	if len(fields) == 0 {
		return "in an unknown state"
	}
	switch fields[0] {
	case "T", "t":
		return "now stopped (continue or kill it)"
	case "D":
		return "now waiting inside the kernel (see the kernel log for hung tasks)"
	default:
		return "in state " + fields[0]
	}
}
