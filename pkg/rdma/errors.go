package rdma

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

var (
	// ErrNoSubsystem: the kernel has no RDMA netlink, since ib_core is neither
	// loaded nor loadable.
	ErrNoSubsystem = errors.New("the kernel's RDMA subsystem (module ib_core) is not loaded")

	// ErrDeviceNotFound: the namespace that was asked holds no such device. It
	// is also an os.ErrNotExist.
	ErrDeviceNotFound = fmt.Errorf("no such RDMA device in this namespace: %w", os.ErrNotExist)

	// ErrNotNamespace: the file that should be a network namespace is
	// something else.
	ErrNotNamespace = errors.New("not a network namespace")
)

// Error is a request that the kernel refused. It unwraps to the errno.
type Error struct {
	Op      string     // what was asked for, e.g. "move RDMA device 3"
	Errno   unix.Errno // the kernel's answer
	Message string     // the kernel's own words (extended ACK), often empty
}

func (e *Error) Error() string {
	name := unix.ErrnoName(e.Errno)
	if e.Errno == unix.EOPNOTSUPP {
		name = "EOPNOTSUPP" // and not its other name ENOTSUP
	}
	s := e.Op + ": " + e.Errno.Error() + " (" + name + ")"
	if e.Message != "" {
		s += ", kernel says: " + e.Message
	}
	return s
}

// Unwrap gives the errno, so that errors.Is(err, unix.EBUSY) and
// errors.Is(err, os.ErrPermission) hold.
func (e *Error) Unwrap() error { return e.Errno }
