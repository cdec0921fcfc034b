package attachment

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// claim is what a record says about a device, whichever kind of record it is.
type claim struct {
	state.Key
	function string        // address of the parent function
	device   *state.Device // nil: known by its function only
	homeName string        // "" if not known
	netns    state.Netns   // its ID is zero if not known
	since    time.Time
}

// claimsOf lists a record's claims, one for each device.
func claimsOf(r *state.Record) []claim {
	claims := make([]claim, 0, len(r.Devices))
	for i := range r.Devices {
		claims = append(claims, claim{
			Key: r.Key, function: r.Function, device: &r.Devices[i], homeName: r.Devices[i].Name,
			netns: r.Netns, since: r.Since,
		})
	}
	return claims
}

// place is where a device is, seen from home.
type place int

const (
	elsewhere place = iota // in another namespace
	atHome                 // where it belongs
	replaced               // the driver registered a new device, which is at home
	absent                 // the function has no RDMA device now
)

// where looks for a claimed device from home. The device is told only if it is
// at home.
func (s *session) where(f sysfs.Function, c claim) (place, rdma.Device, error) {
	if f.Soft() {
		return s.whereSoft(f, c)
	}
	if c.device != nil {
		if d, err := findIn(s.conn, f, c); err != nil {
			return 0, rdma.Device{}, err
		} else if d != nil {
			return atHome, *d, nil
		}
	}
	names, err := f.RDMADevices()
	switch {
	case errors.Is(err, sysfs.ErrElsewhere):
		return elsewhere, rdma.Device{}, nil
	case errors.Is(err, sysfs.ErrNoRDMADevice):
		return absent, rdma.Device{}, nil
	case err != nil:
		return 0, rdma.Device{}, err
	}
	// The function's devices at home are others: either this one is away, or
	// there is none besides them.
	chars, err := f.CharDevices()
	if err != nil {
		return 0, rdma.Device{}, err
	}
	if countDevices(chars) > len(names) {
		return elsewhere, rdma.Device{}, nil
	}
	// A device that the kernel is bringing home is in sysfs before netlink
	// knows it.
	if c.device != nil {
		for _, name := range names {
			if _, err := s.conn.DeviceByName(name); errors.Is(err, rdma.ErrDeviceNotFound) {
				return elsewhere, rdma.Device{}, nil
			} else if err != nil {
				return 0, rdma.Device{}, err
			}
		}
		return replaced, rdma.Device{}, nil
	}
	d, err := s.conn.DeviceByName(names[0])
	if errors.Is(err, rdma.ErrDeviceNotFound) {
		return elsewhere, d, nil
	}
	return atHome, d, err
}

// countDevices counts the RDMA devices that have these character devices, in
// whichever namespace.
func countDevices(chars []sysfs.CharDevice) int {
	n := 0
	for _, c := range chars {
		if c.Kind == sysfs.Uverbs {
			n++
		}
	}
	return n
}

// findIn looks for a claimed device in the namespace of conn, nil if it is not
// there. A device is the claimed one if index, node GUID and parent function
// agree: an index alone is given again when a driver registers anew.
func findIn(conn *rdma.Conn, f sysfs.Function, c claim) (*rdma.Device, error) {
	if f.Soft() {
		return findSoft(conn, c)
	}
	if c.device == nil {
		return findByFunction(conn, f)
	}
	d, err := conn.Device(c.device.Index)
	if errors.Is(err, rdma.ErrDeviceNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if d.NodeGUID != c.device.NodeGUID {
		return nil, nil
	}
	if node, own, err := verbsNode(conn, f, d.Index, c.device); err != nil || node != "" && !own {
		return nil, err
	}
	return &d, nil
}

func findByFunction(conn *rdma.Conn, f sysfs.Function) (*rdma.Device, error) {
	devices, err := conn.Devices()
	if err != nil {
		return nil, err
	}
	for _, d := range devices {
		_, own, err := verbsNode(conn, f, d.Index, nil)
		if err != nil {
			return nil, err
		}
		if own {
			return &d, nil
		}
	}
	return nil, nil
}

// live opens the namespace of a claim, nil if its path leads to none or to
// another one.
func (s *session) live(path string, id rdma.NamespaceID) *rdma.Namespace {
	if path == "" {
		return nil
	}
	if ns := s.ahead.take(path, id); ns != nil {
		return ns
	}
	ns, err := rdma.OpenNamespace(path)
	if err != nil {
		return nil
	}
	if ns.ID() == s.home.ID() || id != (rdma.NamespaceID{}) && ns.ID() != id {
		_ = ns.Close()
		return nil
	}
	return ns
}

// holds tells whether a claimed device is in a namespace.
func holds(ns *rdma.Namespace, f sysfs.Function, c claim) (found bool, err error) {
	err = ns.Do(func(conn *rdma.Conn) error {
		d, err := findIn(conn, f, c)
		found = d != nil
		return err
	})
	return found, err
}

// search walks all reachable namespaces for a claimed device and calls fn in
// the one that holds it, with what leads there.
func (s *session) search(f sysfs.Function, c claim, fn func(path string, ns *rdma.Namespace) error) (found bool, err error) {
	rdma.Reachable(func(path string, ns *rdma.Namespace) bool {
		if ns.ID() == s.home.ID() {
			return false
		}
		// A namespace that cannot be entered or asked is passed over: others
		// are still worth a look.
		if ok, err := holds(ns, f, c); err != nil || !ok {
			return false
		}
		found, err = true, fn(describePath(path), ns)
		return true
	})
	return found, err
}

// describePath adds the command of the process whose file leads to a
// namespace.
func describePath(path string) string {
	rest, ok := strings.CutPrefix(path, "/proc/")
	if !ok {
		return path
	}
	pid, _, _ := strings.Cut(rest, "/")
	if _, err := strconv.Atoi(pid); err != nil {
		return path
	}
	comm, err := os.ReadFile("/proc/" + pid + "/comm")
	if err != nil {
		return path
	}
	return fmt.Sprintf("%s (process %s)", path, strings.TrimSpace(string(comm)))
}

// awaitHome waits, bounded, for a device that the kernel is bringing home.
func (s *session) awaitHome(ctx context.Context, wait time.Duration, f sysfs.Function, c claim) (p place, d rdma.Device, err error) {
	_, err = poll(ctx, wait, func() (bool, error) {
		p, d, err = s.where(f, c)
		return p == atHome || p == replaced, err
	})
	return p, d, err
}

// records loads all records that can be read.
func (n *Node) records() ([]*state.Record, error) {
	names, err := n.State.Names()
	if err != nil {
		return nil, err
	}
	records := make([]*state.Record, 0, len(names))
	for _, name := range names {
		if r, err := n.State.Load(name); err == nil {
			records = append(records, r)
		}
	}
	return records, nil
}
