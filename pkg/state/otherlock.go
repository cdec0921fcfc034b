package state

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// IBSriovLock is the lock that the plugin ib-sriov holds while it moves an RDMA
// device or looks for its interface (config.CniFileLockDir in its source).
const IBSriovLock = "/var/run/cni/ib-sriov/cni.lock"

// LockOther takes the lock of another plugin, nil if there is no directory for
// it: then that plugin has not run since boot. Within wait, or before ctx ends,
// it has it, or gives a *LockTimeoutError. It is taken after the node lock,
// never before.
func LockOther(ctx context.Context, wait time.Duration, path string) (*Lock, error) {
	fd, err := open(path, unix.O_RDWR|unix.O_CREAT|unix.O_NONBLOCK, fileMode)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the lock of another plugin: %w", err)
	}
	start := time.Now()
	if err := flockWithin(ctx, wait, fd); err != nil {
		if !errors.Is(err, errLockWait) {
			return nil, errors.Join(fmt.Errorf("take the lock %s: %w", path, err), unix.Close(fd))
		}
		return nil, &LockTimeoutError{Path: path, Wait: time.Since(start), Holder: "the plugin " + filepath.Base(filepath.Dir(path))}
	}
	return &Lock{fd: fd}, nil
}
