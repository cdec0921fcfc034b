package attachment

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// Attach moves the RDMA device of the requested function into the pod's
// network namespace. If it fails, node and pod are as they were before.
// Repeated for an attachment that exists, it verifies that.
func (n *Node) Attach(ctx context.Context, req Request) (report *Report, err error) {
	s, err := n.open()
	if err != nil {
		return nil, err
	}
	defer s.close()
	if err := s.requireExclusive(); err != nil {
		return nil, err
	}
	pod, err := s.openPod(req.Netns)
	if err != nil {
		return nil, err
	}
	defer func() { _ = pod.Close() }()
	f, err := s.function(req, pod)
	if err != nil {
		return nil, err
	}
	a := &attach{session: s, req: req, pod: pod, function: f, report: &Report{Function: f.Address}}
	return a.report, a.run(ctx)
}

// attach is one Attach under way.
type attach struct {
	*session
	req      Request
	pod      *rdma.Namespace
	function sysfs.Function
	report   *Report
}

// run tries under the lock, and if the device is not at home waits without the
// lock for the kernel to bring it, then tries once more.
func (a *attach) run(ctx context.Context) error {
	try := func() error {
		return a.withLock(ctx, attachLockWait, fmt.Sprintf("ADD of %s to %s", a.function, a.req.Key), func() error {
			return a.locked(ctx)
		})
	}
	err := try()
	wait := time.Duration(0)
	switch {
	case errors.Is(err, sysfs.ErrElsewhere):
		wait = returnWait
	case errors.Is(err, sysfs.ErrNoRDMADevice) && mayAppear(a.function):
		wait = settleWait
	}
	if wait > 0 {
		_, waitErr := poll(ctx, wait, func() (bool, error) {
			_, err := a.function.RDMADevices()
			return err == nil, nil
		})
		err = errors.Join(waitErr, try())
	}
	switch {
	case errors.Is(err, sysfs.ErrElsewhere):
		return a.explainElsewhere()
	case errors.Is(err, sysfs.ErrNoRDMADevice):
		absence, absenceErr := a.function.Absence()
		if absenceErr != nil {
			return errors.Join(err, absenceErr)
		}
		return &FunctionError{absence}
	}
	return err
}

// locked does the work while the node lock is held.
func (a *attach) locked(ctx context.Context) error {
	done, err := a.resume(ctx)
	if err != nil || done {
		return err
	}
	device, err := a.oneDevice(a.function)
	if err != nil {
		return a.refuseIfOwned(err)
	}
	if err := a.dropStaleClaims(device); err != nil {
		return err
	}
	// Dropping a stale claim can have renamed the device.
	if device, err = a.conn.Device(device.Index); err != nil {
		return err
	}
	chars, err := charNames(a.function)
	if err != nil {
		return err
	}
	record := &state.Record{
		Phase: state.Intended, Key: a.req.Key, Network: a.req.Network, Pod: a.req.Pod,
		Netns: state.Netns{Path: a.req.Netns, ID: a.pod.ID()},
		Bus:   a.function.Bus, Function: a.function.Address,
		Device: &state.Device{Index: device.Index, Name: device.Name, NodeGUID: device.NodeGUID, CharDevices: chars},
		Since:  time.Now().UTC(),
	}
	if err := a.State.Save(record); err != nil {
		return err
	}
	err = a.move(record)
	if err == nil {
		err = a.finish(record)
	}
	if err != nil {
		return errors.Join(err, a.rollBack(ctx, record))
	}
	return nil
}

// resume settles what an earlier ADD of the same attachment left. It reports
// true if that had done the move: then the attachment is complete.
func (a *attach) resume(ctx context.Context) (done bool, err error) {
	names, err := a.State.Names()
	if err != nil {
		return false, err
	}
	for _, name := range names {
		if !name.Is(a.req.Key) {
			continue
		}
		if done, err = a.completes(name); err != nil || done {
			return done, err
		}
		a.report.warn("an earlier ADD of this attachment left a record; undoing it first")
		if err := a.detachRecord(ctx, a.req.Key, name, a.req.Netns, a.report); err != nil {
			return false, fmt.Errorf("undo what an earlier ADD of this attachment left: %w", err)
		}
	}
	return false, nil
}

// completes finishes an earlier ADD of the same attachment if its device is
// already where this one wants it.
func (a *attach) completes(name state.Name) (bool, error) {
	r, err := a.State.Load(name)
	if err != nil || r.Function != a.function.Address || r.Netns.ID != a.pod.ID() {
		return false, nil // unusable for this; the undo deals with it
	}
	found, err := holds(a.pod, a.function, claimOf(r))
	if err != nil || !found {
		return false, err
	}
	a.report.warn("the device is in the pod already, by an earlier ADD of this attachment")
	return true, a.finish(r)
}

// refuseIfOwned turns "not at home" into a refusal when the device is known to
// be in a live pod.
func (a *attach) refuseIfOwned(err error) error {
	if !errors.Is(err, sysfs.ErrElsewhere) {
		return err
	}
	claims, namesErr := a.otherClaims()
	if namesErr != nil {
		return errors.Join(err, namesErr)
	}
	for _, r := range claims {
		c := claimOf(r)
		ns := a.live(r.Netns.Path, r.Netns.ID)
		if ns == nil {
			continue
		}
		found, holdsErr := holds(ns, a.function, c)
		_ = ns.Close()
		if holdsErr != nil {
			return errors.Join(err, holdsErr)
		}
		if found {
			return &BusyError{Function: a.function.String(), Where: fmt.Sprintf("attached to %s, whose network namespace %s is alive",
				r.Owner(), r.Netns.Path)}
		}
	}
	return err
}

// otherClaims loads the records of other attachments on the same function.
func (a *attach) otherClaims() ([]*state.Record, error) {
	names, err := a.State.Names()
	if err != nil {
		return nil, err
	}
	var records []*state.Record
	for _, name := range names {
		if name.Function != a.function.Address || name.Is(a.req.Key) {
			continue
		}
		if r, err := a.State.Load(name); err == nil {
			records = append(records, r)
		}
	}
	return records, nil
}

// dropStaleClaims removes the records of other attachments on the function:
// its device is at home, so whatever they claimed has ended. What they had
// changed of the device is put back.
func (a *attach) dropStaleClaims(device rdma.Device) error {
	names, err := a.State.Names()
	if err != nil {
		return err
	}
	for _, name := range names {
		if name.Function != a.function.Address || name.Is(a.req.Key) {
			continue
		}
		r, err := a.State.Load(name)
		if err == nil {
			a.report.warn("the device is at home, so the record of %s is void", r.Owner())
			if r.Device.Index == device.Index && r.Device.NodeGUID == device.NodeGUID {
				if err := restoreName(a.conn, device, claimOf(r), a.report); err != nil {
					return err
				}
			}
		} else {
			a.report.warn("the device is at home, so this record is void: %v", err)
		}
		if err := a.State.Delete(name); err != nil {
			return err
		}
	}
	return nil
}

// move moves the device from home, where this thread is, into the pod.
func (a *attach) move(r *state.Record) error {
	err := a.conn.Move(r.Device.Index, a.pod)
	if err == nil {
		return nil
	}
	driver, _ := a.function.Driver()
	moveErr := &MoveError{Device: r.Device.Name, Driver: driver, Err: err}
	switch {
	case errors.Is(err, unix.EOPNOTSUPP):
		if modeErr := a.requireExclusive(); modeErr != nil {
			return modeErr // it was changed between our look and the move
		}
		moveErr.Hint = "this driver cannot release a device from its users (it has no disassociate_ucontext), so its devices cannot be moved; " +
			"use an adapter and a kernel whose driver can, or leave the rdma plugin out of this network"
	case errors.Is(err, unix.EPERM):
		moveErr.Hint = "the plugin needs CAP_NET_ADMIN in the initial user namespace"
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENODEV):
		moveErr.Hint = "the device left this namespace, or its driver removed it, at the same moment"
	}
	return moveErr
}

// finish verifies the move from inside the pod and completes the record.
func (a *attach) finish(r *state.Record) error {
	seen, err := a.inspect(a.pod, a.function, r)
	if err != nil {
		return err
	}
	if !slices.Contains(seen.netdevs, a.req.IfName) && seen.device.Protocol == "roce" {
		a.report.warn("the device's netdev in the pod is %q, not %s: RoCE works only over its own netdev, so deviceID and the interface do not belong together",
			strings.Join(seen.netdevs, ","), a.req.IfName)
	}
	r.Device.CharDevicesInPod = seen.chars
	if !slices.Equal(seen.chars, r.Device.CharDevices) {
		a.report.fault("%s", renumbered(r))
	}
	r.Phase = state.Attached
	a.report.Device = *r.Device
	return a.State.Save(r)
}

// renumbered is the message about nodes that a container may have been given
// under their old numbers.
func renumbered(r *state.Record) string {
	return fmt.Sprintf("the move changed the character devices of RDMA device %s from %s to %s; "+
		"a container that was given the old ones cannot use the device", r.Device.Name,
		strings.Join(r.Device.CharDevices, ","), strings.Join(r.Device.CharDevicesInPod, ","))
}

// rollBack undoes a failed ADD. The record stays if the device cannot be
// brought home, for DEL to try again.
func (a *attach) rollBack(ctx context.Context, r *state.Record) error {
	// The time limit of the ADD must not cut its undo short.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*returnWait)
	defer cancel()
	if err := a.bringHome(ctx, claimOf(r), r.Netns.Path, a.report); err != nil {
		return fmt.Errorf("undo: %w", err)
	}
	if err := a.State.Delete(r.Name()); err != nil {
		return fmt.Errorf("undo: %w", err)
	}
	return nil
}

// explainElsewhere says where the function's device is and whose it is.
func (a *attach) explainElsewhere() error {
	busy := &BusyError{Function: a.function.String()}
	claims, err := a.otherClaims()
	if err != nil {
		return err
	}
	if len(claims) > 0 {
		busy.Where = "still on its way home from " + claims[0].Owner() + ", whose network namespace is gone"
	} else if paths := a.Upstream.Claimants(a.function.Address); len(paths) > 0 {
		busy.Where = "attached by another rdma plugin (its record: " + strings.Join(paths, ", ") + ")"
	} else {
		busy.Where = "in another network namespace, although no record says so"
	}
	found, err := a.search(a.function, claim{function: a.function.Address}, func(path string, ns *rdma.Namespace) error {
		busy.Where += fmt.Sprintf("; it is in namespace %s, reached by %s", ns.ID(), path)
		return nil
	})
	if err != nil {
		return errors.Join(busy, err)
	}
	if !found {
		busy.Where += "; no path leads to the namespace that holds it, so the kernel returns it when the last user of that namespace ends"
	}
	return busy
}
