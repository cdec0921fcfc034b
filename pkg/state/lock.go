package state

import (
	"bytes"
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
type Lock struct{ fd int }

// LockTimeoutError says that a lock was not free in time.
type LockTimeoutError struct {
	Path   string // of another plugin's lock; "" is the node lock
	Wait   time.Duration
	Holder string // what the holder wrote about itself, and how it is doing
}

func (e *LockTimeoutError) Error() string {
	lock := "the node lock of RDMA moves"
	if e.Path != "" {
		lock = "the lock " + e.Path
	}
	return fmt.Sprintf("%s was not free within %s; it is held by %s", lock, e.Wait.Round(time.Millisecond), e.Holder)
}

// Lock takes the node lock and makes the directory if need be. Within wait, or
// before ctx ends, it has it, or gives a *LockTimeoutError that names the
// holder. purpose tells others what for.
func (s *Store) Lock(ctx context.Context, wait time.Duration, purpose string) (*Lock, error) {
	fd, err := s.openLock()
	if err != nil {
		return nil, err
	}
	start := time.Now()
	if err := flockWithin(ctx, wait, fd); err != nil {
		if !errors.Is(err, errLockWait) {
			return nil, errors.Join(fmt.Errorf("take the node lock %s: %w", s.path(lockFile), err), unix.Close(fd))
		}
		return nil, &LockTimeoutError{Wait: time.Since(start), Holder: holder(fd)}
	}
	// Whoever was writing a record without holding the lock was killed at it.
	_ = removeIfThere(s.path(tempFile))
	// Told for the sake of others' error messages: a disk that cannot take it
	// does not make the lock worse.
	_, _ = unix.Pwrite(fd, holderText(purpose, start), 0)
	return &Lock{fd: fd}, nil
}

// holderText says who holds the lock. It is always as long, so that nothing of
// an older one shows behind it.
func holderText(purpose string, since time.Time) []byte {
	const length = 400
	text := append([]byte("pid "), strconv.Itoa(os.Getpid())...)
	text = append(text, ": "...)
	text = append(text, purpose[:min(len(purpose), length-100)]...)
	text = append(text, ", since "...)
	text = since.UTC().AppendFormat(text, time.RFC3339)
	return append(append(text, bytes.Repeat([]byte{' '}, length-len(text))...), '\n')
}

func (s *Store) openLock() (int, error) {
	const flags = unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC
	path := s.path(lockFile)
	if err := s.prepare(); err != nil {
		return -1, err
	}
	fd, err := open(path, unix.O_RDWR|unix.O_CREAT|flags, fileMode)
	if errors.Is(err, unix.EROFS) {
		// flock needs no more than a file that is there.
		if readable, readErr := open(path, unix.O_RDONLY|flags, 0); readErr == nil {
			fd, err = readable, nil
		}
	}
	if err != nil {
		return -1, fmt.Errorf("open the node lock: %w", err)
	}
	return fd, nil
}

// flockWithin waits for the lock in the kernel's queue. If the time is over or
// ctx ends first, the wait goes on in the background until the holder lets go,
// and what it gets is let go at once by closing the file.
func flockWithin(ctx context.Context, wait time.Duration, fd int) error {
	if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
		return err
	}
	timeout := time.NewTimer(wait)
	defer timeout.Stop()
	taken := make(chan error, 1)
	go func() { taken <- flock(fd) }()
	select {
	case err := <-taken:
		return err
	case <-ctx.Done():
	case <-timeout.C:
	}
	go func() {
		<-taken
		_ = unix.Close(fd)
	}()
	return errLockWait
}

var errLockWait = errors.New("the wait for the lock has ended")

func flock(fd int) error {
	for {
		if err := unix.Flock(fd, unix.LOCK_EX); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// Release lets go of the lock.
func (l *Lock) Release() error { return os.NewSyscallError("close the node lock", unix.Close(l.fd)) }

// holder reads what the holder wrote, and adds the state of its process: T is
// stopped, D is waiting inside the kernel, as for a move that does not end.
func holder(fd int) string {
	buf := make([]byte, 512)
	n, _ := unix.Pread(fd, buf, 0)
	text := strings.TrimSpace(string(buf[:max(n, 0)]))
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
