package attachment

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

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
// they had given are taken back, also from what was seen, for
// what follows.
func (a *attach) dropStaleClaims(names []state.Name, seen *sight) error {
	for _, name := range names {
		if !a.isOthers(name) {
			continue
		}
		r, err := a.State.Load(name)
		if err != nil {
			a.report.warn("the device is at home, so this record is void: %v", err)
		} else if err := a.endClaims(r, seen); err != nil {
			return err
		}
		if err := a.State.Delete(name); err != nil {
			return err
		}
	}
	return nil
}

// endClaims puts back what a record of another attachment says was changed.
func (a *attach) endClaims(r *state.Record, seen *sight) error {
	claims := claimsOf(r)
	for _, c := range claims {
		if p, _, err := a.where(a.function, c); err != nil || p == elsewhere {
			return errors.Join(err, fmt.Errorf("%s: %w", a.function, sysfs.ErrElsewhere))
		}
	}
	a.report.warn("the device is at home, so the record of %s is void", r.Owner())
	for _, c := range claims {
		i := slices.IndexFunc(seen.devices, func(d rdma.Device) bool { return d.Index == c.device.Index && d.NodeGUID == c.device.NodeGUID })
		if i < 0 {
			continue
		}
		var err error
		before := seen.devices[i].Name
		if seen.devices[i].Name, err = a.restore(a.function, seen.devices[i], c, a.report); err != nil {
			return err
		}
		for j := range seen.chars { // they know their device by its name
			if seen.chars[j].Device == before {
				seen.chars[j].Device = seen.devices[i].Name
			}
		}
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
