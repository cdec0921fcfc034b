package install

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/rdma-cni/rdma-cni/pkg/state"
)

// lockWait bounds the wait for the node lock: longer than an ADD may take.
const lockWait = 40 * time.Second

// Records are where attachments are recorded: ours, and those of the plugin
// that this one replaces.
type Records struct {
	State    *state.Store
	Upstream state.Upstream
}

// Uninstall removes the target if it is this project's and no attachment is
// recorded: without the plugin a runtime cannot end the pods that it attached.
// The node lock is held meanwhile, so no ADD is at work.
func (p Plugin) Uninstall(ctx context.Context, records Records) (Result, error) {
	target := p.Target()
	r := Result{File: target}
	dir, err := openDir(ctx, p.Dir)
	if err != nil {
		return r, err
	}
	defer dir.close()
	if err := dir.removeTemps(filepath.Base(p.Source)); err != nil {
		return r, err
	}
	if _, err := os.Lstat(target); errors.Is(err, os.ErrNotExist) {
		r.Action = Absent
		return r, nil
	}
	if !IsOurs(target) {
		return r, fmt.Errorf("%s is not this project's plugin, so it was left; remove it by the means by which it was installed", target)
	}
	err = records.whenNone(ctx, func() error {
		if err := os.Remove(target); err != nil {
			return explainDir(p.Dir, fmt.Errorf("remove the plugin: %w", err))
		}
		return nil
	})
	if err != nil {
		return r, err
	}
	r.Action = Removed
	return r, dir.sync()
}

// whenNone runs fn under the node lock if there is no record.
func (r Records) whenNone(ctx context.Context, fn func() error) (err error) {
	// In a container without the mount it would look as if there were none.
	parent := filepath.Dir(r.State.Dir())
	if _, err := os.Stat(parent); err != nil {
		return fmt.Errorf("see whether attachments are recorded: %w; in a container mount the node's %s there. If no plugin ever ran on this node since it booted, make that directory", err, parent)
	}
	lock, err := r.State.Lock(ctx, lockWait, "uninstall")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Release()) }()
	names, err := r.State.Names()
	if err != nil {
		return err
	}
	if len(names) > 0 {
		return fmt.Errorf("attachments are recorded in %s: %s; the plugin has to stay until their pods are gone. Delete those pods, or let rdma-cni gc end the attachments that are over", r.State.Dir(), r.describe(names))
	}
	files, err := r.Upstream.Paths()
	if err != nil {
		return err
	}
	if len(files) > 0 {
		return fmt.Errorf("records of the plugin that was here before: %s; the plugin has to stay until their pods are gone. That plugin left some for ever: remove those files if none of its pods runs", shorten(files))
	}
	return fn()
}

func (r Records) describe(names []state.Name) string {
	var list []string
	for _, n := range names {
		s := n.Function + " in container " + n.ContainerID
		if record, err := r.State.Load(n); err == nil && record.Pod.Name != "" {
			s = n.Function + " in pod " + record.Pod.Namespace + "/" + record.Pod.Name
		}
		list = append(list, s)
	}
	return shorten(list)
}

func shorten(list []string) string {
	const most = 5
	if len(list) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(list[:most], ", "), len(list)-most)
	}
	return strings.Join(list, ", ")
}
