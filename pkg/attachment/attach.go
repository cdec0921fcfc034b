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
	a := &attach{session: s, req: req, report: &Report{Function: req.Function}}
	if a.pod, err = s.openPod(req.Netns); err != nil {
		return a.report, err
	}
	defer func() { _ = a.pod.Close() }()
	if err := s.requireExclusive(); err != nil {
		return a.report, a.skipShared(ctx, err)
	}
	if a.function, err = s.function(req, a.pod); err != nil {
		return a.report, err
	}
	a.report.Function = a.function.Address
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
	err := a.underLock(ctx, a.locked)
	wait := time.Duration(0)
	switch {
	case errors.Is(err, sysfs.ErrElsewhere):
		wait = returnWait
	case errors.Is(err, sysfs.ErrNoRDMADevice) && mayAppear(a.function):
		wait = settleWait
	}
	if wait > 0 {
		// Netlink decides: sysfs shows a device before it is there.
		_, waitErr := poll(ctx, wait, func() (bool, error) {
			_, err := a.devicesAtHome(nil)
			return !errors.Is(err, sysfs.ErrElsewhere) && !errors.Is(err, sysfs.ErrNoRDMADevice), nil
		})
		err = errors.Join(waitErr, a.underLock(ctx, a.locked))
	}
	switch {
	case errors.Is(err, sysfs.ErrElsewhere):
		return a.explainElsewhere()
	case errors.Is(err, sysfs.ErrNoRDMADevice):
		return a.withoutDevice(ctx, err)
	case err != nil:
		return err
	}
	return a.awaitGIDs(ctx)
}

func (a *attach) underLock(ctx context.Context, fn func(ctx context.Context) error) error {
	return a.withLock(ctx, fmt.Sprintf("ADD of %s to %s", a.report.Function, a.req.Key), func() error {
		return fn(ctx)
	})
}

// locked does the work while the node lock is held.
func (a *attach) locked(ctx context.Context) error {
	names, err := a.State.Names()
	if err != nil {
		return err
	}
	if done, err := a.resume(ctx, names); err != nil || done {
		return err
	}
	devices, chars, err := a.complete(ctx)
	if err != nil {
		return a.refuseIfOwned(names, err)
	}
	if err := a.dropStaleClaims(names, devices, chars); err != nil {
		return a.refuseIfOwned(names, err)
	}
	record, err := a.plan(devices, chars)
	if err != nil {
		return err
	}
	if err := a.State.Save(record); err != nil {
		return err
	}
	for i := range record.Devices {
		if err = a.move(&record.Devices[i]); err != nil {
			break
		}
	}
	if err == nil {
		err = a.finish(record)
	}
	if err != nil {
		return errors.Join(err, a.rollBack(ctx, record))
	}
	return nil
}

// devicesAtHome gives the function's RDMA devices: one, or all if the request
// says so. The errors it makes of absence wrap sysfs.ErrElsewhere or
// sysfs.ErrNoRDMADevice.
func (a *attach) devicesAtHome(chars []sysfs.CharDevice) ([]rdma.Device, error) {
	names, err := a.function.RDMADevices()
	if err != nil {
		return nil, err
	}
	if len(names) > 1 && !a.req.AllDevices {
		return nil, &FunctionError{fmt.Errorf("%s has %d RDMA devices (%s) and the configuration asks for one; set \"devices\": \"all\" to attach them together",
			a.function, len(names), strings.Join(names, ", "))}
	}
	if a.req.AllDevices && countDevices(chars) > len(names) {
		return nil, fmt.Errorf("%s: %w", a.function, sysfs.ErrElsewhere)
	}
	devices := make([]rdma.Device, 0, len(names))
	for _, name := range names {
		d, err := a.deviceByName(name, chars)
		if errors.Is(err, rdma.ErrDeviceNotFound) {
			// It left between the two looks.
			return nil, fmt.Errorf("%s: %w", a.function, sysfs.ErrElsewhere)
		}
		if err != nil {
			return nil, err
		}
		devices = append(devices, d)
	}
	return devices, nil
}

// deviceByName looks a device up by the number of its verbs node first: that is
// most often the device's index, since the kernel gives out both lowest first,
// and a single look-up does not grow with the node as a dump does.
func (a *attach) deviceByName(name string, chars []sysfs.CharDevice) (rdma.Device, error) {
	for _, c := range chars {
		if c.Kind != sysfs.Uverbs || c.Device != name {
			continue
		}
		if d, err := a.conn.Device(uint32(c.Number())); err == nil && d.Name == name {
			return d, nil
		}
	}
	return a.conn.DeviceByName(name)
}

// complete gives the devices at home together with the function's character
// devices. For those of a device that has come home just now it waits, bounded:
// the kernel makes them last. A device whose return failed half-way has none
// before its next move.
func (a *attach) complete(ctx context.Context) (devices []rdma.Device, chars []sysfs.CharDevice, err error) {
	_, err = poll(ctx, settleWait, func() (bool, error) {
		if chars, err = a.function.CharDevices(); err != nil {
			return false, err
		}
		if devices, err = a.devicesAtHome(chars); err != nil {
			return false, err
		}
		for _, d := range devices {
			if !slices.ContainsFunc(chars, func(c sysfs.CharDevice) bool { return c.Kind == sysfs.Uverbs && c.Device == d.Name }) {
				return false, nil
			}
		}
		return true, nil
	})
	return devices, chars, err
}

// plan makes the record of all that is going to be changed, and refuses what
// cannot be. Nothing has been touched yet.
func (a *attach) plan(devices []rdma.Device, chars []sysfs.CharDevice) (*state.Record, error) {
	record := &state.Record{
		Phase: state.Intended, Key: a.req.Key, Network: a.req.Network, Pod: a.req.Pod,
		Netns: state.Netns{Path: a.req.Netns, ID: a.pod.ID()},
		Bus:   a.function.Bus, Function: a.function.Address, Since: time.Now().UTC(),
	}
	for i, d := range devices {
		if err := a.refuseUnfit(d); err != nil {
			return nil, err
		}
		name, err := a.req.nameInPod(a.function, d.Name, i, len(devices))
		if err != nil {
			return nil, err
		}
		planned := state.Device{Index: d.Index, Name: d.Name, NameInPod: name, NodeGUID: d.NodeGUID, CharDevices: charNames(chars, d.Name)}
		if err := a.planQoS(d, &planned); err != nil {
			return nil, err
		}
		record.Devices = append(record.Devices, planned)
	}
	return record, nil
}

// refuseUnfit refuses devices that would not work in the pod.
func (a *attach) refuseUnfit(d rdma.Device) error {
	if d.Protocol == "ib" || d.Protocol == "opa" {
		return &FunctionError{fmt.Errorf("RDMA device %s of %s has an InfiniBand port: its move would destroy the IPoIB interface that the pod has been given, so it is refused; "+
			"let the ib-sriov plugin move the device itself (rdmaIsolation: true) and leave this plugin out of the network", d.Name, a.function)}
	}
	if d.NodeGUID == 0 {
		err := fmt.Errorf("RDMA device %s of %s has the node GUID 0, with which rdma_cm does not work; "+
			"set the VF's administrative MAC (ip link set PF vf N mac ...) and then bind its driver again", d.Name, a.function)
		if a.req.RefuseZeroGUID {
			return &FunctionError{err}
		}
		a.report.warn("%v", err)
	}
	return nil
}

// resume settles what an earlier ADD of the same attachment left. It reports
// true if that had done the move: then the attachment is complete.
func (a *attach) resume(ctx context.Context, names []state.Name) (done bool, err error) {
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

// completes finishes an earlier ADD of the same attachment if its devices are
// already where this one wants them.
func (a *attach) completes(name state.Name) (bool, error) {
	r, err := a.State.Load(name)
	if err != nil || r.Phase != state.Attached || r.Function != a.function.Address || r.Netns.ID != a.pod.ID() {
		return false, nil // unusable for this; the undo deals with it
	}
	for _, c := range claimsOf(r) {
		if found, err := holds(a.pod, a.function, c); err != nil || !found {
			return false, err
		}
	}
	a.report.warn("the device is in the pod already, by an earlier ADD of this attachment")
	return true, a.finish(r)
}

// refuseIfOwned turns "not at home" into a refusal when the device is known to
// be in a live pod.
func (a *attach) refuseIfOwned(names []state.Name, err error) error {
	if !errors.Is(err, sysfs.ErrElsewhere) {
		return err
	}
	for _, r := range a.otherRecords(names) {
		alive, aliveErr := a.holdsAlive(r)
		if aliveErr != nil {
			return errors.Join(err, aliveErr)
		}
		if alive {
			return &BusyError{Function: a.function.String(), Where: fmt.Sprintf("attached to %s, whose network namespace %s is alive",
				r.Owner(), r.Netns.Path)}
		}
	}
	return err
}

// isOthers tells a record of another attachment on the same function.
func (a *attach) isOthers(n state.Name) bool {
	return n.Function == a.function.Address && !n.Is(a.req.Key)
}

// otherRecords loads those of them that can be read.
func (a *attach) otherRecords(names []state.Name) []*state.Record {
	var records []*state.Record
	for _, name := range names {
		if !a.isOthers(name) {
			continue
		}
		if r, err := a.State.Load(name); err == nil {
			records = append(records, r)
		}
	}
	return records
}

// dropStaleClaims removes the records of other attachments on the function
// whose devices are all at home: whatever they claimed has ended. One whose
// device is not makes an error that wraps sysfs.ErrElsewhere. The names that
// they had given are taken back, also from devices and chars, which is seen in
// what follows.
func (a *attach) dropStaleClaims(names []state.Name, devices []rdma.Device, chars []sysfs.CharDevice) error {
	for _, name := range names {
		if !a.isOthers(name) {
			continue
		}
		r, err := a.State.Load(name)
		if err != nil {
			a.report.warn("the device is at home, so this record is void: %v", err)
		} else if err := a.endClaims(r, devices, chars); err != nil {
			return err
		}
		if err := a.State.Delete(name); err != nil {
			return err
		}
	}
	return nil
}

// endClaims puts back what a record of another attachment says was changed.
func (a *attach) endClaims(r *state.Record, devices []rdma.Device, chars []sysfs.CharDevice) error {
	claims := claimsOf(r)
	for _, c := range claims {
		if p, _, err := a.where(a.function, c); err != nil || p == elsewhere {
			return errors.Join(err, fmt.Errorf("%s: %w", a.function, sysfs.ErrElsewhere))
		}
	}
	a.report.warn("the device is at home, so the record of %s is void", r.Owner())
	for _, c := range claims {
		i := slices.IndexFunc(devices, func(d rdma.Device) bool { return d.Index == c.device.Index && d.NodeGUID == c.device.NodeGUID })
		if i < 0 {
			continue
		}
		var err error
		before := devices[i].Name
		if devices[i].Name, err = a.restore(a.function, devices[i], c, a.report); err != nil {
			return err
		}
		for j := range chars { // they know their device by its name
			if chars[j].Device == before {
				chars[j].Device = devices[i].Name
			}
		}
	}
	return nil
}

// move moves a device from home, where this thread is, into the pod, under the
// name that it shall have there and with the quality of service asked for.
func (a *attach) move(d *state.Device) error {
	if err := a.setTrafficClass(d); err != nil {
		return err
	}
	name := a.nameForMove(d)
	if err := a.moveAs(d.Index, d.Name, name); err != nil {
		return a.explainMove(d, err)
	}
	return a.setTOS(d, name)
}

func (a *attach) moveAs(index uint32, name, newName string) error {
	if name == newName {
		return a.conn.Move(index, a.pod)
	}
	return a.conn.MoveAs(index, a.pod, newName)
}

// explainMove says why the kernel refused a move and what helps.
func (a *attach) explainMove(d *state.Device, err error) error {
	driver, _ := a.function.Driver()
	moveErr := &MoveError{Device: d.Name, Driver: driver, Err: err}
	switch {
	case errors.Is(err, unix.EOPNOTSUPP):
		if modeErr := a.requireExclusive(); modeErr != nil {
			return modeErr // it was changed between our look and the move
		}
		moveErr.Hint = "this driver cannot release a device from its users (it has no disassociate_ucontext), so its devices cannot be moved; " +
			"use an adapter and a kernel whose driver can, or leave the rdma plugin out of this network"
	case errors.Is(err, unix.EEXIST):
		return &SettingError{fmt.Errorf("RDMA device %s of %s cannot be called %s in the pod, since that name is taken by %s; "+
			"up to kernel 7.2 RDMA device names are unique on the whole node", d.Name, a.function, d.NameInPod, a.holderOfName(d.NameInPod))}
	case errors.Is(err, unix.EPERM):
		moveErr.Hint = "the plugin needs CAP_NET_ADMIN in the initial user namespace"
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENODEV):
		moveErr.Hint = "the device left this namespace, or its driver removed it, at the same moment"
	}
	return moveErr
}

// finish verifies the move from inside the pod and completes the record.
func (a *attach) finish(r *state.Record) error {
	in, err := a.inspect(a.pod, a.function, r)
	if err != nil {
		return err
	}
	if in.roce && !slices.Contains(in.netdevs, a.req.IfName) {
		a.report.warn("the device's netdev in the pod is %q, not %s: RoCE works only over its own netdev, so deviceID and the interface do not belong together",
			strings.Join(in.netdevs, ","), a.req.IfName)
	}
	for i := range r.Devices {
		d := &r.Devices[i]
		d.CharDevicesInPod = in.chars[i]
		if !slices.Equal(d.CharDevicesInPod, d.CharDevices) {
			a.report.fault("%s", renumbered(d))
		}
	}
	r.Phase = state.Attached
	a.report.Devices = r.Devices
	return a.State.Save(r)
}

// renumbered is the message about nodes that a container may have been given
// under their old numbers.
func renumbered(d *state.Device) string {
	return fmt.Sprintf("the move changed the character devices of RDMA device %s from %s to %s; "+
		"a container that was given the old ones cannot use the device", d.NameInPod,
		strings.Join(d.CharDevices, ","), strings.Join(d.CharDevicesInPod, ","))
}

// rollBack undoes a failed ADD. The record stays if a device cannot be brought
// home, for DEL to try again.
func (a *attach) rollBack(ctx context.Context, r *state.Record) error {
	// The time limit of the ADD must not cut its undo short.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*returnWait)
	defer cancel()
	if err := a.bringAllHome(ctx, claimsOf(r), r.Netns.Path, a.report); err != nil {
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
	names, err := a.State.Names()
	if err != nil {
		return err
	}
	if records := a.otherRecords(names); len(records) > 0 {
		busy.Where = "still on its way home from " + records[0].Owner() + ", whose network namespace is gone"
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
