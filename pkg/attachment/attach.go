package attachment

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

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
	if a.function, err = s.parent(ctx, req, a.pod); err != nil {
		return a.report, err
	}
	a.report.Function = a.function.Address
	if _, err = a.pod.Conn(); err != nil { // better now than under the lock
		return a.report, err
	}
	return a.report, a.run(ctx)
}

// attach is one Attach under way.
type attach struct {
	*session
	req      Request
	pod      *rdma.Namespace
	function sysfs.Function
	report   *Report
	offsets  []int // that only a dump has told
}

// run tries under the lock, and if the device is not at home waits without the
// lock for the kernel to bring it, then tries once more.
func (a *attach) run(ctx context.Context) error {
	// What can be found out without the lock is: others wait for it.
	var before *sight
	if !a.function.Soft() {
		before, _ = a.look()
	}
	err := a.underLock(ctx, func(ctx context.Context) error { return a.locked(ctx, before) })
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
		err = errors.Join(waitErr, a.underLock(ctx, func(ctx context.Context) error { return a.locked(ctx, nil) }))
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

// locked does the work while the node lock is held. before is what was seen of
// the function without it, nil if nothing.
func (a *attach) locked(ctx context.Context, before *sight) error {
	names, err := a.State.Names()
	if err != nil {
		return err
	}
	if done, err := a.resume(ctx, names); err != nil || done {
		return err
	}
	if a.function.Bus == sysfs.RXE {
		return a.attachLink(ctx, names)
	}
	seen, err := a.complete(ctx, before)
	if err != nil {
		return a.adopt(a.refuseIfOwned(names, err))
	}
	if err := a.dropStaleClaims(names, seen); err != nil {
		return a.refuseIfOwned(names, err)
	}
	record, err := a.plan(seen)
	if err != nil {
		return err
	}
	return a.withIBLock(ctx, record, func() error { return a.carryOut(ctx, record) })
}

// carryOut does what the record says, all or nothing.
func (a *attach) carryOut(ctx context.Context, record *state.Record) (err error) {
	if err := a.State.Save(record); err != nil {
		return err
	}
	for i := range record.Devices {
		if err = a.move(&record.Devices[i]); err != nil {
			break
		}
	}
	if err == nil {
		err = a.carry(ctx, record)
	}
	if err == nil {
		err = a.finish(record)
	}
	if err != nil {
		return errors.Join(err, a.rollBack(ctx, record))
	}
	for _, offset := range a.offsets {
		a.State.RememberOffset(offset)
	}
	return nil
}

// devicesAtHome gives the function's RDMA devices: one, or all if the request
// says so. The errors it makes of absence wrap sysfs.ErrElsewhere or
// sysfs.ErrNoRDMADevice.
func (a *attach) devicesAtHome(chars []sysfs.CharDevice) ([]rdma.Device, error) {
	if a.function.Soft() {
		seen, err := a.softToAttach()
		if err != nil {
			return nil, err
		}
		return seen.devices, nil
	}
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

// deviceByName asks for the indexes that the number of the device's verbs node
// suggests before it has the kernel dump all devices, which takes the longer the
// more there are.
func (a *attach) deviceByName(name string, chars []sysfs.CharDevice) (rdma.Device, error) {
	i := slices.IndexFunc(chars, func(c sysfs.CharDevice) bool { return c.Kind == sysfs.Uverbs && c.Device == name })
	if i < 0 {
		return a.conn.DeviceByName(name)
	}
	number := chars[i].Number()
	if d, err := a.conn.Device(uint32(number)); err == nil && d.Name == name {
		return d, nil
	}
	for _, offset := range a.State.Offsets() {
		if d, err := a.conn.Device(uint32(number + offset)); err == nil && d.Name == name {
			return d, nil
		}
	}
	d, err := a.conn.DeviceByName(name)
	if offset := int(d.Index) - number; err == nil && !slices.Contains(a.offsets, offset) {
		a.offsets = append(a.offsets, offset)
	}
	return d, err
}

// sight is what is at home of a function: its RDMA devices, each with its verbs
// node, and its character devices.
type sight struct {
	devices []rdma.Device
	chars   []sysfs.CharDevice
}

// look looks once. It gives nil for a device that has come home just now, whose
// nodes the kernel makes last, and for one whose return failed half-way: that
// has none before its next move.
func (a *attach) look() (*sight, error) {
	chars, err := a.function.CharDevices()
	if err != nil {
		return nil, err
	}
	devices, err := a.devicesAtHome(chars)
	if err != nil {
		return nil, err
	}
	for _, d := range devices {
		if !slices.ContainsFunc(chars, func(c sysfs.CharDevice) bool { return c.Kind == sysfs.Uverbs && c.Device == d.Name }) {
			return nil, nil
		}
	}
	return &sight{devices, chars}, nil
}

// still tells whether the devices are at home as they were seen. A move gives a
// device new nodes, so one that has been away meanwhile shows by its verbs node
// unless that got its old number, and then nothing has changed.
func (a *attach) still(seen *sight) bool {
	for _, d := range seen.devices {
		now, err := a.conn.Device(d.Index)
		if err != nil || now != d {
			return false
		}
		uverbs, err := a.conn.Uverbs(d.Index)
		if err != nil || !slices.Contains(seen.chars, sysfs.CharDevice{Name: uverbs, Kind: sysfs.Uverbs, Device: d.Name}) {
			return false
		}
	}
	return true
}

// complete gives what is at home once that is complete, bounded.
func (a *attach) complete(ctx context.Context, before *sight) (*sight, error) {
	if a.function.Soft() {
		return a.softToAttach()
	}
	if before != nil && a.still(before) {
		return before, nil
	}
	var seen *sight
	_, err := poll(ctx, settleWait, func() (done bool, err error) {
		seen, err = a.look()
		return seen != nil, err
	})
	if err != nil {
		return nil, err
	}
	if seen == nil {
		return a.incomplete()
	}
	return seen, nil
}

// incomplete gives what is at home of a function whose device has no nodes.
func (a *attach) incomplete() (seen *sight, err error) {
	seen = &sight{}
	if seen.chars, err = a.function.CharDevices(); err != nil {
		return nil, err
	}
	seen.devices, err = a.devicesAtHome(seen.chars)
	return seen, err
}

// plan makes the record of all that is going to be changed, and refuses what
// cannot be. Nothing has been touched yet.
func (a *attach) plan(seen *sight) (*state.Record, error) {
	record := a.newRecord()
	for i, d := range seen.devices {
		if err := a.refuseUnfit(d); err != nil {
			return nil, err
		}
		name, err := a.req.nameInPod(a.function, d.Name, i, len(seen.devices))
		if err != nil {
			return nil, err
		}
		planned := state.Device{Index: d.Index, Name: d.Name, NameInPod: name, NodeGUID: d.NodeGUID, CharDevices: charNames(seen.chars, d.Name)}
		if err := a.planQoS(d, &planned); err != nil {
			return nil, err
		}
		record.Devices = append(record.Devices, planned)
	}
	return record, a.planInfiniBand(record, seen.devices)
}

func (a *attach) newRecord() *state.Record {
	return &state.Record{
		Phase: state.Intended, Key: a.req.Key, Network: a.req.Network, Pod: a.req.Pod,
		Netns: state.Netns{Path: a.req.Netns, ID: a.pod.ID()},
		Bus:   a.function.Bus, Function: a.function.Address, Since: time.Now().UTC(),
	}
}

// refuseUnfit refuses devices that would not work in the pod.
func (a *attach) refuseUnfit(d rdma.Device) error {
	if d.Protocol == "opa" {
		return &FunctionError{fmt.Errorf("RDMA device %s of %s has an Omni-Path port: its driver cannot release a device from its users, so the kernel does not move it; "+
			"leave the rdma plugin out of this network", d.Name, a.function)}
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

// finish verifies the move from inside the pod and completes the record.
func (a *attach) finish(r *state.Record) error {
	in, err := a.inspect(a.pod, a.function, r)
	if err != nil {
		return err
	}
	if err := a.checkInfiniBand(a.pod, a.function, r, a.report); err != nil {
		return err
	}
	if a.function.Soft() && !slices.Contains(in.netdevs, a.req.IfName) {
		return mismatch("software RDMA device %s is on interface %q in the pod instead of %s", r.Devices[0].NameInPod, strings.Join(in.netdevs, ","), a.req.IfName)
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
	a.lost = nil
	if err := errors.Join(a.end(ctx, r, r.Netns.Path, a.report), errors.Join(a.lost...)); err != nil {
		return fmt.Errorf("undo: %w", err)
	}
	if err := a.State.Delete(r.Name()); err != nil {
		return fmt.Errorf("undo: %w", err)
	}
	return nil
}
