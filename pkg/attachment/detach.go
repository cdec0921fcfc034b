package attachment

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// Detach ends an attachment: its device is at home under its old name, and its
// record is gone. It may be called at any time and any number of times; what
// the record says decides, and without one there is nothing to do. netnsPath is
// where the pod's namespace was last known to be, "" if nowhere. An error means
// that another try can help.
func (n *Node) Detach(ctx context.Context, network string, key state.Key, netnsPath string) (*Report, error) {
	report := &Report{}
	upstream, err := n.Upstream.Load(network, key)
	if err != nil {
		report.warn("%v", err)
	}
	if upstream == nil {
		if _, err := os.Stat(n.State.Dir()); errors.Is(err, os.ErrNotExist) {
			return report, nil
		}
	}
	s, err := n.openIfLoaded()
	if err != nil {
		return report, err
	}
	defer s.close()
	s.lookAhead(key, netnsPath)
	// The lock also waits for an ADD of the same attachment that its caller
	// has given up.
	err = s.withLock(ctx, fmt.Sprintf("DEL of %s", key), func() error {
		return s.detachLocked(ctx, key, upstream, netnsPath, report)
	})
	return report, err
}

func (s *session) detachLocked(ctx context.Context, key state.Key, upstream *state.UpstreamRecord, netnsPath string, report *Report) error {
	names, err := s.State.Names()
	if err != nil {
		return err
	}
	var failures []error
	for _, name := range names {
		if name.Is(key) {
			failures = append(failures, s.detachRecord(ctx, key, name, netnsPath, report))
		}
	}
	if upstream != nil {
		failures = append(failures, s.detachUpstream(ctx, key, upstream, netnsPath, report))
	}
	return errors.Join(failures...)
}

// detachRecord brings the device of one record home and removes the record. A
// damaged one still names its function.
func (s *session) detachRecord(ctx context.Context, key state.Key, name state.Name, netnsPath string, report *Report) error {
	report.Function = name.Function
	r, err := s.load(name)
	var damaged *state.DamagedError
	switch {
	case errors.As(err, &damaged):
		report.fault("%v; going by its function %s", damaged, name.Function)
		err = s.endDamaged(ctx, key, name.Function, netnsPath, report)
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err == nil:
		report.Devices = r.Devices
		err = s.end(ctx, r, netnsPath, report)
	}
	if err != nil {
		return err
	}
	return s.State.Delete(name)
}

// endDamaged ends an attachment of which only the function is known. What its
// IPoIB interfaces are the pod shows, as long as its device is there.
func (s *session) endDamaged(ctx context.Context, key state.Key, function, netnsPath string, report *Report) error {
	r := &state.Record{Key: key, Function: function, Netns: state.Netns{Path: netnsPath}}
	if pod := s.live(netnsPath, rdma.NamespaceID{}); pod != nil && s.conn != nil {
		if f, err := s.Sysfs.Function(function); err == nil {
			if r.Interfaces, err = s.interfaces(pod, f); err != nil {
				report.fault("%v", err)
			}
		}
		_ = pod.Close()
	}
	if err := s.bringHome(ctx, claim{Key: key, function: function}, netnsPath, report); err != nil {
		return err
	}
	return s.giveBack(ctx, r, netnsPath, report)
}

// bringAllHome undoes an attachment's moves, the last one first. One that
// fails keeps none of the others.
func (s *session) bringAllHome(ctx context.Context, claims []claim, netnsPath string, report *Report) error {
	var failures []error
	for _, c := range slices.Backward(claims) {
		failures = append(failures, s.bringHome(ctx, c, netnsPath, report))
	}
	return errors.Join(failures...)
}

func (s *session) detachUpstream(ctx context.Context, key state.Key, u *state.UpstreamRecord, netnsPath string, report *Report) error {
	report.Function = u.DeviceID
	report.warn("attached by another rdma plugin, which left the record %s", u.Path())
	c := claim{Key: key, function: u.DeviceID, homeName: u.HomeName}
	if err := s.bringHome(ctx, c, netnsPath, report); err != nil {
		return err
	}
	return u.Delete()
}

// Steps of the wait for a device that is in neither namespace where it should
// be: the kernel normally returns it within firstWait, so it is worth a walk
// over all namespaces only after that.
const firstWait = 300 * time.Millisecond

// bringHome is the undo of Attach, from whatever point that had come to. It
// returns nil when there is nothing left outside home.
func (s *session) bringHome(ctx context.Context, c claim, netnsPath string, report *Report) error {
	if s.conn == nil {
		report.warn("the RDMA subsystem is not loaded, so there is no device to bring home")
		return nil
	}
	if err := sysfs.ValidateAddress(c.function); err != nil {
		report.warn("there is no device to bring home: %v", err) // an upstream record can say anything
		return nil
	}
	f, err := s.functionOf(c.function)
	if f.Soft() && c.device == nil {
		c, err = s.identify(c, netnsPath)
	}
	if errors.Is(err, sysfs.ErrNoFunction) {
		report.warn("function %s is gone, and its RDMA device with it", c.function)
		return nil
	}
	if err != nil {
		return err
	}
	for _, path := range slices.Compact([]string{netnsPath, c.netns.Path}) {
		done, err := s.fetchFrom(path, f, c, report)
		if err != nil {
			return err
		}
		if done && c.device == nil {
			// Known by its function only, of which there may be more.
			return s.bringHome(ctx, c, netnsPath, report)
		}
		if done {
			return nil
		}
	}
	p, d, err := s.where(f, c)
	if err == nil && (p == elsewhere || p == absent && mayAppear(f)) {
		p, d, err = s.awaitHome(ctx, firstWait, f, c)
	}
	if err != nil {
		return err
	}
	if p == elsewhere {
		if newer := s.supersededBy(c); newer != "" {
			report.warn("%s now belongs to %s", f, newer)
			return nil
		}
		done, err := s.fetchAnywhere(f, c, report)
		if err != nil || done {
			return err
		}
		if p, d, err = s.awaitHome(ctx, returnWait, f, c); err != nil {
			return err
		}
	}
	return s.settle(p, f, d, c, report)
}

// mayAppear tells whether a function without RDMA device can get one by
// waiting: while the kernel moves a device, its function seems to have none.
func mayAppear(f sysfs.Function) bool {
	a, err := f.Absence()
	return err == nil && !a.NoDriver && !a.Userspace
}

// fetchFrom moves the device home out of the namespace at path, if that is the
// claimed one and holds it.
func (s *session) fetchFrom(path string, f sysfs.Function, c claim, report *Report) (done bool, err error) {
	ns := s.live(path, c.netns.ID)
	if ns == nil {
		return false, nil
	}
	defer func() { _ = ns.Close() }()
	return s.fetch(ns, f, c, report)
}

// fetchAnywhere moves the device home from wherever the pod has put it.
func (s *session) fetchAnywhere(f sysfs.Function, c claim, report *Report) (done bool, err error) {
	_, err = s.search(f, c, func(path string, ns *rdma.Namespace) error {
		report.fault("the device was in network namespace %s at %s, which is not at the pod's path; it is taken from there", ns.ID(), path)
		done, err = s.fetch(ns, f, c, report)
		return err
	})
	return done, err
}

// fetch moves the device home out of ns.
func (s *session) fetch(ns *rdma.Namespace, f sysfs.Function, c claim, report *Report) (done bool, err error) {
	err = ns.Do(func(conn *rdma.Conn) error {
		d, err := findIn(conn, f, c)
		if err != nil || d == nil {
			return err
		}
		if c.device != nil && d.Name != c.device.NameInPod {
			report.warn("the pod has renamed RDMA device %s to %s", c.device.NameInPod, d.Name)
		}
		done = true
		if f.Bus == sysfs.RXE {
			return s.removeLink(conn, *d, c)
		}
		if err := s.moveHome(conn, *d, c); err != nil {
			return fmt.Errorf("bring RDMA device %s of %s home from network namespace %s: %w", d.Name, f, ns.ID(), err)
		}
		return nil
	})
	if !done || f.Bus == sysfs.RXE || err == nil && c.device == nil {
		return done, err // one that is known by its function is settled when there are no more
	}
	// The kernel can fail after the device has changed its namespace, and an
	// old one answers without moving.
	p, d, whereErr := s.where(f, c)
	if whereErr != nil {
		return true, errors.Join(err, whereErr)
	}
	if p != atHome && err != nil {
		return true, err
	}
	if err != nil {
		report.fault("%v; it is at home all the same, but incomplete until its next move", err)
	}
	return true, s.settle(p, f, d, c, report)
}

// settle ends the return of a device that is at p.
func (s *session) settle(p place, f sysfs.Function, d rdma.Device, c claim, report *Report) error {
	switch p {
	case atHome:
		if f.Soft() {
			return s.settleSoft(f, d, c, report)
		}
		if _, err := s.restore(f, d, c, report); err != nil {
			return err
		}
		return s.reportNumbers(f, d, c, report)
	case replaced:
		report.fault("the driver of %s has registered a new RDMA device at home; the attached one is gone", f)
		return nil
	case absent:
		if f.Bus == sysfs.RXE {
			return nil // where it belongs
		}
		report.warn("%s has no RDMA device now, so there is none to bring home", f)
		return nil
	default:
		return &BusyError{Function: f.String(), Where: "in a network namespace that no path leads to; " +
			"it comes home when the last process or socket lets go of that namespace"}
	}
}

// moveHome moves the device home under its old name, so that no udev rule there
// sees another. Somebody else can have that name by now, on the node or, from
// 7.3 on, at home; then any name is better than no return.
func (s *session) moveHome(conn *rdma.Conn, d rdma.Device, c claim) (err error) {
	for _, name := range []string{c.homeName, d.Name, passingName(d.Index)} {
		switch name {
		case "":
			continue
		case d.Name:
			err = conn.Move(d.Index, s.home)
		default:
			err = conn.MoveAs(d.Index, s.home, name)
		}
		if !errors.Is(err, unix.EEXIST) {
			return err
		}
	}
	return err
}

// restore gives the device at home its old name and quality of service again.
// It returns the name that the device then has.
func (s *session) restore(f sysfs.Function, d rdma.Device, c claim, report *Report) (string, error) {
	if c.homeName != "" && d.Name != c.homeName {
		err := s.conn.Rename(d.Index, c.homeName)
		switch {
		case errors.Is(err, unix.EEXIST):
			report.fault("RDMA device %s keeps that name, since its old name %s is taken", d.Name, c.homeName)
		case err != nil:
			return d.Name, fmt.Errorf("restore the name %s of RDMA device %s: %w", c.homeName, d.Name, err)
		default:
			report.warn("RDMA device %s is called %s again", d.Name, c.homeName)
			d.Name = c.homeName
		}
	}
	if err := s.restoreQoS(f, d, c.device); err != nil {
		report.fault("restore the quality of service of RDMA device %s: %v", d.Name, err)
	}
	return d.Name, nil
}

// reportNumbers compares the character devices with those the device had at
// home before.
func (s *session) reportNumbers(f sysfs.Function, d rdma.Device, c claim, report *Report) error {
	if c.device == nil {
		return nil
	}
	now, err := nodes(s.conn, c.device, d)
	if err != nil {
		return err
	}
	compareNumbers(f, now, c, report)
	return nil
}

func compareNumbers(f sysfs.Function, now []string, c claim, report *Report) {
	if c.device.CharDevices != nil && !slices.Equal(now, c.device.CharDevices) {
		report.fault("character devices of %s changed from %s to %s", f,
			strings.Join(c.device.CharDevices, ","), strings.Join(now, ","))
	}
}

// supersededBy names the owner of a later claim on the same function.
func (s *session) supersededBy(c claim) string {
	names, err := s.State.Names()
	if err != nil {
		return ""
	}
	for _, name := range names {
		if name.Function != c.function || name.Is(c.Key) {
			continue
		}
		if r, err := s.State.Load(name); err == nil && r.Since.After(c.since) {
			return r.Owner()
		}
	}
	return ""
}
