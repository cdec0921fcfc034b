package attachment

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// Action is what Reap does with a record.
type Action string

// The actions.
const (
	// Keep: the attachment is alive, or nothing proves that it is not.
	Keep Action = "keep"
	// Drop: the record is void, since its device is at home or gone.
	Drop Action = "drop"
	// BringHome: the attachment is over and its device not at home yet.
	BringHome Action = "bring home"
)

// Verdict is what Reap found out about one record.
type Verdict struct {
	Name   state.Name
	Record *state.Record // nil: it cannot be read
	Action Action
	Reason string
	Report Report // of what was done
	Err    error  // it was not done
}

// ReapOptions choose what Reap looks at and does.
type ReapOptions struct {
	DryRun bool
	// Device limits it to records of one function, given by its address, or of
	// one RDMA device, given by its name at home; "" is all.
	Device string
	Proc   rdma.Proc
}

// Reap ends attachments that are over without anybody having said so: those
// whose namespace is dead. A namespace is dead when no path leads to it, or
// when the recorded path leads to it no more and no process runs in it, so that
// only a forgotten file keeps it. Records whose device is at home all the same
// are void. Everything else is left, with the reason.
//
// A dry run changes nothing and takes no lock.
func (n *Node) Reap(ctx context.Context, opts ReapOptions) ([]Verdict, error) {
	names, err := n.State.Names()
	if err != nil || len(names) == 0 {
		return nil, err
	}
	s, err := n.openIfLoaded()
	if err != nil {
		return nil, err
	}
	defer s.close()
	var verdicts []Verdict
	for _, name := range names {
		if !opts.concerns(n, name) {
			continue
		}
		v := Verdict{Name: name}
		judge := func() error {
			present, err := s.judge(&v, opts)
			if err != nil || !present {
				return err
			}
			verdicts = append(verdicts, v)
			return nil
		}
		if opts.DryRun {
			err = judge()
		} else {
			err = s.withLock(ctx, "gc of "+name.Function, func() error {
				if err := judge(); err != nil || len(verdicts) == 0 || verdicts[len(verdicts)-1].Name != name {
					return err
				}
				last := &verdicts[len(verdicts)-1]
				last.Err = s.reap(ctx, last)
				return nil
			})
		}
		if err != nil {
			v.Action, v.Err = Keep, err
			verdicts = append(verdicts, v)
		}
	}
	return verdicts, nil
}

// concerns tells whether a record is among those asked for.
func (opts ReapOptions) concerns(n *Node, name state.Name) bool {
	if opts.Device == "" || strings.EqualFold(opts.Device, name.Function) {
		return true
	}
	r, err := n.State.Load(name)
	return err == nil && slices.ContainsFunc(r.Devices, func(d state.Device) bool { return d.Name == opts.Device })
}

// judge finds out what is to be done with a record; false if it is gone.
func (s *session) judge(v *Verdict, opts ReapOptions) (present bool, err error) {
	claims := []claim{{Key: state.Key{ContainerID: v.Name.ContainerID, IfName: v.Name.IfName}, function: v.Name.Function}}
	r, err := s.State.Load(v.Name)
	var damaged *state.DamagedError
	switch {
	case errors.Is(err, os.ErrNotExist):
		return false, nil // its DEL came first
	case errors.As(err, &damaged):
		v.Reason = damaged.Error() + "; "
	case err != nil:
		return false, err
	default:
		v.Record = r
		if len(r.Devices) == 0 {
			return true, s.judgeBare(v, r, opts)
		}
		claims = claimsOf(r)
	}
	p, err := s.placeOf(claims)
	if err != nil {
		return true, err
	}
	ns := namespaceState{}
	if v.Record != nil {
		if ns, err = s.namespaceState(r.Netns, opts.Proc); err != nil {
			return true, err
		}
	} else if p == elsewhere {
		v.Action = Keep
		v.Reason += "the RDMA device of its function is in another namespace, and an unreadable record does not say whether that one's pod is alive; DEL of the pod, or deleting the namespace, brings it home"
		return true, nil
	}
	v.Action, v.Reason = decide(p, ns, v.Record, v.Reason)
	if v.Action == BringHome && v.Record != nil && v.Record.Foreign {
		v.Action, v.Reason = Drop, "another plugin moved its device, and brings it home"
	}
	return true, nil
}

// judgeBare deals with a record that names no device: there is nothing to bring
// home, only a namespace that lives or not.
func (s *session) judgeBare(v *Verdict, r *state.Record, opts ReapOptions) error {
	ns, err := s.namespaceState(r.Netns, opts.Proc)
	if err != nil {
		return err
	}
	v.Action, v.Reason = Drop, "it names no device, and its namespace is dead"
	if ns.alive {
		v.Action, v.Reason = Keep, "its namespace is alive: "+ns.why
	}
	return nil
}

// decide is the table behind judge.
func decide(p place, ns namespaceState, r *state.Record, prefix string) (Action, string) {
	unfinished := r == nil || r.Phase == state.Intended
	switch {
	case ns.alive && !(unfinished && p != elsewhere):
		switch p {
		case atHome, replaced, absent:
			return Keep, prefix + "the pod is alive but has lost its device (" + ns.why + "); delete the pod so that it gets a new one"
		}
		return Keep, prefix + "the pod is alive: " + ns.why
	case p == atHome:
		return Drop, prefix + "the device is at home"
	case p == replaced:
		return Drop, prefix + "the driver has made a new device, which is at home"
	case p == absent:
		return Drop, prefix + "the function has no RDMA device now"
	default:
		return BringHome, prefix + "the namespace is dead: " + ns.why
	}
}

// placeOf is where the devices of an attachment are, also if there is no
// function or no subsystem any more: elsewhere as long as one of them is.
func (s *session) placeOf(claims []claim) (place, error) {
	if s.conn == nil {
		return absent, nil
	}
	f, err := s.functionOf(claims[0].function)
	if errors.Is(err, sysfs.ErrNoFunction) {
		return absent, nil
	}
	if err != nil {
		return 0, err
	}
	least := absent
	for _, c := range claims {
		p, _, err := s.where(f, c)
		if err != nil {
			return 0, err
		}
		least = min(least, p)
	}
	return least, nil
}

// namespaceState says whether a record's namespace lives, and how we know.
type namespaceState struct {
	alive bool
	why   string
}

func (s *session) namespaceState(ns state.Netns, proc rdma.Proc) (namespaceState, error) {
	there, err := rdma.OpenNamespace(ns.Path)
	if err == nil {
		id := there.ID()
		_ = there.Close()
		if id == ns.ID {
			return namespaceState{alive: true, why: "its namespace is at " + ns.Path}, nil
		}
	} else if !errors.Is(err, os.ErrNotExist) && !errors.Is(err, rdma.ErrNotNamespace) {
		return namespaceState{}, err // not being let in proves nothing
	}
	holders, hidden, err := proc.NamespaceHolders()
	if err != nil {
		return namespaceState{}, err
	}
	for _, h := range holders {
		if h.ID.Inode != ns.ID.Inode {
			continue
		}
		if len(h.Processes) > 0 {
			p := h.Processes[0]
			return namespaceState{alive: true, why: fmt.Sprintf("%s leads to its namespace %s no more, but process %d (%s) still runs in it", ns.Path, ns.ID, p.PID, p.Command)}, nil
		}
		return namespaceState{why: fmt.Sprintf("%s leads to it no more and no process runs in it; it is kept by %s", ns.Path, keepers(h))}, nil
	}
	if hidden > 0 || !proc.SeesAll() {
		return namespaceState{}, fmt.Errorf("not all processes can be looked at, so nothing proves that network namespace %s is dead; run this as root in the host's PID namespace", ns.ID)
	}
	return namespaceState{why: "no path and no process leads to " + ns.ID.String()}, nil
}

func keepers(h rdma.Holders) string {
	var list []string
	for _, m := range h.Mounts {
		list = append(list, "a mount at "+m)
	}
	for _, p := range h.Files {
		list = append(list, fmt.Sprintf("a file of process %d (%s)", p.PID, p.Command))
	}
	return strings.Join(list, ", ")
}

// reap does what the verdict says.
func (s *session) reap(ctx context.Context, v *Verdict) error {
	if v.Action == Keep {
		return nil
	}
	if v.Record != nil && len(v.Record.Devices) == 0 {
		return s.State.Delete(v.Name)
	}
	key := state.Key{ContainerID: v.Name.ContainerID, IfName: v.Name.IfName}
	if v.Record != nil {
		key = v.Record.Key
	}
	return s.detachRecord(ctx, key, v.Name, "", &v.Report)
}
