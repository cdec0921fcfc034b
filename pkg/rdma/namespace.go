package rdma

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// NamespaceID identifies a network namespace among those that live: the device
// and inode numbers of its file on nsfs. A path does not: it is reused, and a
// namespace outlives it. The kernel gives the numbers of a dead namespace to
// later ones.
type NamespaceID struct {
	Dev   uint64 `json:"dev"`
	Inode uint64 `json:"inode"`
}

// String writes an id as the links in /proc/PID/ns do, without the device,
// which is the same for all.
func (id NamespaceID) String() string { return fmt.Sprintf("net:[%d]", id.Inode) }

// A Namespace is an open network namespace. While it is open the namespace
// lives.
type Namespace struct {
	fd   int
	id   NamespaceID
	conn *Conn // nil before it is needed
}

// OpenNamespace opens the network namespace at path. A missing path is an
// os.ErrNotExist; a file that is no network namespace, such as one whose bind
// mount is gone, is ErrNotNamespace.
func OpenNamespace(path string) (*Namespace, error) {
	// O_NONBLOCK: a FIFO or a device under the name must not block us.
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, unix.ENOTDIR):
		return nil, &os.PathError{Op: "open network namespace", Path: path, Err: unix.ENOENT}
	case errors.Is(err, unix.ENXIO), errors.Is(err, unix.ELOOP):
		return nil, fmt.Errorf("%s: %w", path, ErrNotNamespace)
	case err != nil:
		return nil, &os.PathError{Op: "open network namespace", Path: path, Err: err}
	}
	id, err := identify(fd)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), unix.Close(fd))
	}
	return &Namespace{fd: fd, id: id}, nil
}

// OwnNamespace opens the network namespace of the calling thread.
func OwnNamespace() (*Namespace, error) { return OpenNamespace("/proc/thread-self/ns/net") }

// identify tells a network namespace from everything else that can be opened.
func identify(fd int) (NamespaceID, error) {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return NamespaceID{}, os.NewSyscallError("fstatfs", err)
	}
	if fs.Type != unix.NSFS_MAGIC {
		return NamespaceID{}, fmt.Errorf("%w (filesystem type %#x)", ErrNotNamespace, fs.Type)
	}
	kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE)
	if err != nil {
		return NamespaceID{}, os.NewSyscallError("ask for the namespace's type", err)
	}
	if kind != unix.CLONE_NEWNET {
		return NamespaceID{}, fmt.Errorf("%w but a namespace of another type (%#x)", ErrNotNamespace, kind)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return NamespaceID{}, os.NewSyscallError("fstat", err)
	}
	return NamespaceID{Dev: st.Dev, Inode: st.Ino}, nil
}

// ID identifies the namespace.
func (ns *Namespace) ID() NamespaceID { return ns.id }

// FD is the open file, for requests that name a namespace by one.
func (ns *Namespace) FD() int { return ns.fd }

// Close closes the file and the Conn; the namespace goes when nothing else holds
// it.
func (ns *Namespace) Close() error {
	err := os.NewSyscallError("close", unix.Close(ns.fd))
	ns.fd = -1 // its number will be another file's
	if ns.conn != nil {
		err = errors.Join(err, ns.conn.Close())
	}
	return err
}

// Conn gives the namespace's Conn, to look at its devices. To change them use
// Do.
func (ns *Namespace) Conn() (*Conn, error) {
	if ns.conn == nil {
		if err := ns.Do(func(*Conn) error { return nil }); err != nil {
			return nil, err
		}
	}
	return ns.conn, nil
}

// Do calls fn on a thread that is inside the namespace, with the namespace's
// Conn. This is the one way to change devices of another namespace.
func (ns *Namespace) Do(fn func(*Conn) error) error {
	return ns.Run(func() (err error) {
		if ns.conn == nil {
			if ns.conn, err = Open(); err != nil {
				return err
			}
		}
		return fn(ns.conn)
	})
}

// Run calls fn while the calling goroutine's thread is inside the namespace. fn
// must not start goroutines that count on being there.
func (ns *Namespace) Run(fn func() error) (err error) {
	runtime.LockOSThread()
	own, err := OwnNamespace()
	if err == nil {
		if err = unix.Setns(ns.fd, unix.CLONE_NEWNET); err != nil {
			err = errors.Join(fmt.Errorf("enter network namespace %s: %w", ns.id, err), own.Close())
		}
	}
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	// Deferred, so that a panic of fn leaves the namespace too.
	defer func() {
		if back := unix.Setns(own.fd, unix.CLONE_NEWNET); back != nil {
			// Whatever this goroutine did next it would do in the pod.
			panic(fmt.Sprintf("return from network namespace %s: %v", ns.id, back))
		}
		if closeErr := own.Close(); closeErr != nil {
			err = errors.Join(err, closeErr)
		}
		runtime.UnlockOSThread()
	}()
	return fn()
}

// PrepareThreads makes the runtime start the helper thread that it wants before
// the first locked one, so that the first Run need not wait for it.
func PrepareThreads() {
	runtime.LockOSThread()
	runtime.UnlockOSThread()
}

// NewNamespace makes a network namespace. It has no path: it goes, and the
// kernel takes its RDMA devices home, when it is closed or the process ends.
func NewNamespace() (ns *Namespace, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	own, err := OwnNamespace()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, own.Close()) }()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return nil, os.NewSyscallError("make a network namespace", err)
	}
	ns, err = OwnNamespace()
	if back := unix.Setns(own.fd, unix.CLONE_NEWNET); back != nil {
		// Whatever this goroutine did next it would do in the new one.
		panic(fmt.Sprintf("return from a new network namespace: %v", back))
	}
	return ns, err
}
