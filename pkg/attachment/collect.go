package attachment

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/rdma-cni/rdma-cni/pkg/state"
)

// Collect ends the attachments of a network that are not among the valid ones,
// except those whose device is in a live namespace: a runtime that calls
// nothing valid can be one that does not know all of the node's pods. Records
// that cannot be read are left, since nothing says which network they are of.
func (n *Node) Collect(ctx context.Context, network string, valid []state.Key) (*Report, error) {
	report := &Report{}
	names, err := n.State.Names()
	if err != nil || len(names) == 0 {
		return report, err
	}
	s, err := n.openIfLoaded()
	if err != nil {
		return report, err
	}
	defer s.close()
	var failures []error
	for _, name := range names {
		isValid := slices.ContainsFunc(valid, name.Is)
		if isValid {
			continue
		}
		err := s.withLock(ctx, "GC of network "+network, func() error {
			return s.collectLocked(ctx, network, name, report)
		})
		if err != nil {
			failures = append(failures, err)
		}
	}
	return report, errors.Join(failures...)
}

func (s *session) collectLocked(ctx context.Context, network string, name state.Name, report *Report) error {
	r, err := s.State.Load(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil // its DEL came first
	}
	if err != nil {
		report.warn("%v; GC leaves it", err)
		return nil
	}
	if r.Network != network {
		return nil
	}
	alive, err := s.holdsAlive(r)
	if err != nil {
		return err
	}
	if alive {
		report.warn("%s is not in the runtime's list, but its network namespace %s is alive and holds its RDMA device; GC leaves it", r.Owner(), r.Netns.Path)
		return nil
	}
	if err := s.end(ctx, r, "", report); err != nil {
		return fmt.Errorf("%s: %w", r.Owner(), err)
	}
	report.warn("the attachment of %s is over; its record is removed", r.Owner())
	return s.State.Delete(name)
}

// holdsAlive tells whether a record's namespace is there and holds one of its
// devices.
func (s *session) holdsAlive(r *state.Record) (bool, error) {
	if s.conn == nil {
		return false, nil
	}
	ns := s.live(r.Netns.Path, r.Netns.ID)
	if ns == nil {
		return false, nil
	}
	defer func() { _ = ns.Close() }()
	if r.Phase == state.Skipped {
		return true, nil // nothing to hold, but the pod lives
	}
	f, err := s.functionOf(r.Function)
	if err != nil {
		return false, nil
	}
	for _, c := range claimsOf(r) {
		if found, err := holds(ns, f, c); err != nil || found {
			return found, err
		}
	}
	return false, nil
}
