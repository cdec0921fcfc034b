// Package attachment is the transaction by which a function's RDMA device goes
// into a pod's network namespace and comes home: Attach, Detach, Verify,
// Collect. The CNI verbs and the command line are thin callers of it.
//
// Home is the network namespace of the calling process. A device is at home or
// attached to exactly one pod, and a record says so from before its first move
// until after its last.
package attachment

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// Node is the machine whose devices are attached.
type Node struct {
	State    *state.Store
	Upstream state.Upstream
	Sysfs    sysfs.FS
	CM       rdma.CMConfig
	// IBSriovLock is the file of ib-sriov's lock, "" if it is not to be taken.
	IBSriovLock string
}

// DefaultNode is the machine we run on.
func DefaultNode() *Node {
	return &Node{
		State:    state.NewStore(state.DefaultDir),
		Upstream: state.Upstream{Dir: state.UpstreamDir},
		Sysfs:    sysfs.Default,
		CM:       rdma.DefaultCMConfig,

		IBSriovLock: state.IBSriovLock,
	}
}

// Request asks for an attachment.
type Request struct {
	state.Key
	Network string
	Pod     state.Pod
	Netns   string // path of the pod's network namespace
	// Function is the address of the function; "" finds the one behind the
	// interface IfName in the pod, or last by MAC, the address that an earlier
	// plugin reported for that interface.
	Function string
	MAC      string
	Options
}

// Report tells what was done, for the log.
type Report struct {
	Function string
	Devices  []state.Device
	Warnings []string // worth knowing; nothing failed
	Errors   []string // something is wrong, but nothing that a failure would cure
	// HardwareAddr is that of the interface in the pod if the move has changed
	// it, as it does to an IPoIB interface.
	HardwareAddr string
}

func (r *Report) warn(format string, args ...any) {
	r.Warnings = append(r.Warnings, fmt.Sprintf(format, args...))
}

func (r *Report) fault(format string, args ...any) {
	r.Errors = append(r.Errors, fmt.Sprintf(format, args...))
}

// Bounds of the waits. A runtime gives an ADD some minutes and a DEL one, for
// all networks of the pod together.
const (
	// lockWait is what a node full of pods that begin or end at once may take:
	// 64 moves of 300 ms.
	lockWait = 20 * time.Second
	// returnWait is how long a device may take to come back from a dying
	// namespace: 40 to 70 ms when the kernel is idle, more in a crowd.
	returnWait = 4 * time.Second
	// settleWait is how long a function whose driver is bound may show no
	// RDMA device while the kernel moves it.
	settleWait = 500 * time.Millisecond
	pollStep   = 5 * time.Millisecond
)

// ModeError: the node's RDMA namespace mode does not allow attachments.
type ModeError struct{ Mode rdma.Mode }

func (e *ModeError) Error() string {
	return fmt.Sprintf("the RDMA namespace mode of this node is %s, but an RDMA device can go into a pod only in mode exclusive; "+
		"'rdma-cni mode set exclusive --persist' sets it now and for good, or says what is in the way; by hand: 'rdma system set netns exclusive' (refused with EBUSY while any other network namespace exists: pods, containers, systemd services with PrivateNetwork), "+
		"and 'options ib_core netns_mode=0' in a file in /etc/modprobe.d, which must be in the initramfs too if ib_core is loaded from there (update-initramfs -u or dracut -f), and a reboot", e.Mode)
}

// NetnsError: the pod's network namespace cannot be used.
type NetnsError struct {
	Path string
	Err  error
}

func (e *NetnsError) Error() string {
	return fmt.Sprintf("the pod's network namespace %q: %v", e.Path, e.Err)
}

// Unwrap gives the cause.
func (e *NetnsError) Unwrap() error { return e.Err }

// FunctionError: the function, or the RDMA device on it, is not one that can
// be attached.
type FunctionError struct{ Err error }

func (e *FunctionError) Error() string { return e.Err.Error() }

// Unwrap gives the cause.
func (e *FunctionError) Unwrap() error { return e.Err }

// BusyError: the function's RDMA device is somebody else's at the moment.
type BusyError struct {
	Function string
	Where    string // where it is and whose it is
}

func (e *BusyError) Error() string {
	return fmt.Sprintf("the RDMA device of %s is %s", e.Function, e.Where)
}

// MoveError: the kernel refused to move a device.
type MoveError struct {
	Device, Driver, Hint string
	Err                  error
}

func (e *MoveError) Error() string {
	s := fmt.Sprintf("move RDMA device %s (driver %s) into the pod: %v", e.Device, e.Driver, e.Err)
	if e.Hint != "" {
		s += "; " + e.Hint
	}
	return s
}

// Unwrap gives the cause.
func (e *MoveError) Unwrap() error { return e.Err }

// MismatchError: an attachment is not what it should be.
type MismatchError struct{ Err error }

func (e *MismatchError) Error() string { return e.Err.Error() }

// Unwrap gives the cause.
func (e *MismatchError) Unwrap() error { return e.Err }

func mismatch(format string, args ...any) error {
	return &MismatchError{fmt.Errorf(format, args...)}
}

// session is the home side of one operation.
type session struct {
	*Node
	home *rdma.Namespace
	conn *rdma.Conn // at home; nil without the RDMA subsystem
	// ibLocked: the lock of ib-sriov is held.
	ibLocked bool
	// lost are the IPoIB interfaces that could not be given back, and why.
	lost []error
	// ahead is what a DEL has found out before it had the lock.
	ahead ahead
}

// open begins an operation. rdma.ErrNoSubsystem: this kernel has no RDMA.
func (n *Node) open() (_ *session, err error) {
	rdma.PrepareThreads() // better now than when others wait for the node lock
	home, err := rdma.OwnNamespace()
	if err != nil {
		return nil, err
	}
	conn, err := rdma.Open()
	if err != nil {
		return nil, errors.Join(err, home.Close())
	}
	return &session{Node: n, home: home, conn: conn}, nil
}

// openIfLoaded begins an operation that ends attachments. Without the RDMA
// subsystem there is no device that could be missing, and no conn.
func (n *Node) openIfLoaded() (*session, error) {
	s, err := n.open()
	if errors.Is(err, rdma.ErrNoSubsystem) {
		return &session{Node: n}, nil
	}
	return s, err
}

func (s *session) close() {
	s.ahead.close()
	if s.conn != nil {
		_ = errors.Join(s.conn.Close(), s.home.Close())
	}
}

// Ready tells whether Attach could work on this node now. It takes no lock and
// enters no namespace.
func (n *Node) Ready() error {
	conn, err := rdma.Open()
	if err != nil {
		return err
	}
	mode, err := conn.Mode()
	if err = errors.Join(err, conn.Close()); err != nil {
		return err
	}
	if mode != rdma.Exclusive {
		return &ModeError{Mode: mode}
	}
	return n.State.Writable()
}

func (s *session) requireExclusive() error {
	mode, err := s.conn.Mode()
	if err != nil {
		return err
	}
	if mode != rdma.Exclusive {
		return &ModeError{Mode: mode}
	}
	return nil
}

// openPod opens the pod's namespace and makes sure that it is not home.
func (s *session) openPod(path string) (*rdma.Namespace, error) {
	pod, err := rdma.OpenNamespace(path)
	if err != nil {
		return nil, &NetnsError{Path: path, Err: err}
	}
	if pod.ID() == s.home.ID() {
		err := errors.New("it is the namespace that this plugin runs in, so there is nothing to isolate")
		return nil, errors.Join(&NetnsError{Path: path, Err: err}, pod.Close())
	}
	return pod, nil
}

// withLock runs fn while the node lock is held.
func (s *session) withLock(ctx context.Context, purpose string, fn func() error) error {
	lock, err := s.State.Lock(ctx, within(ctx, lockWait), purpose)
	if err != nil {
		return err
	}
	return errors.Join(fn(), lock.Release())
}

// within shortens a wait to what the deadline of ctx leaves of it. All waits go
// by it, so a context that has no timer is as good as one that has.
func within(ctx context.Context, wait time.Duration) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return min(wait, time.Until(deadline))
	}
	return wait
}

// poll asks until done says so, at most for wait.
func poll(ctx context.Context, wait time.Duration, done func() (bool, error)) (bool, error) {
	// What is so already needs no timer.
	if ok, err := done(); ok || err != nil {
		return ok, err
	}
	timeout := time.NewTimer(within(ctx, wait))
	defer timeout.Stop()
	tick := time.NewTicker(pollStep)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return false, nil
		case <-timeout.C:
			return false, nil
		case <-tick.C:
		}
		if ok, err := done(); ok || err != nil {
			return ok, err
		}
	}
}
