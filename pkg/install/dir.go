package install

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// tempPrefix begins the names of our temporary files. No other program's begin
// so, and a leading dot is no type that a network could name.
const tempPrefix = ".rdma-cni-install."

// Waiting for another installation.
const (
	dirWait = time.Minute
	dirStep = 20 * time.Millisecond
)

// dir is a CNI directory while one installation has it to itself. The lock is
// the directory's own, so no file is left behind, and the kernel drops it with
// the process.
type dir struct{ f *os.File }

func openDir(ctx context.Context, path string) (dir, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return dir{}, explainDir(path, fmt.Errorf("open the directory of CNI plugins: %w", err))
	}
	ctx, cancel := context.WithTimeout(ctx, dirWait)
	defer cancel()
	tick := time.NewTicker(dirStep)
	defer tick.Stop()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return dir{f}, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return dir{}, errors.Join(fmt.Errorf("lock %s against other installations: %w", path, err), f.Close())
		}
		select {
		case <-ctx.Done():
			return dir{}, errors.Join(fmt.Errorf("another installation is at work in %s and did not end: %w", path, ctx.Err()), f.Close())
		case <-tick.C:
		}
	}
}

func (d dir) close() { _ = d.f.Close() }

// removeTemps removes what installations of this file left that were killed.
// The lock is held, so none of them is at work.
func (d dir) removeTemps(name string) error {
	list, err := d.f.ReadDir(-1)
	if err != nil {
		return fmt.Errorf("read the directory of CNI plugins: %w", err)
	}
	for _, e := range list {
		if !strings.HasPrefix(e.Name(), tempPrefix+name+".") || !e.Type().IsRegular() {
			continue
		}
		path := filepath.Join(d.f.Name(), e.Name())
		if err := os.Remove(path); err != nil {
			return explainDir(d.f.Name(), fmt.Errorf("remove what an earlier installation left: %w", err))
		}
	}
	return nil
}

// write makes a temporary file in the directory, so that the rename stays in
// its file system and the file gets the directory's SELinux label. The file is
// closed: one that is open for writing cannot be executed.
func (d dir) write(name string, data []byte) (path string, err error) {
	f, err := os.CreateTemp(d.f.Name(), tempPrefix+name+".")
	if err != nil {
		return "", explainDir(d.f.Name(), fmt.Errorf("write the plugin: %w", err))
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err == nil {
		err = f.Sync() // or a crash after the rename could leave an empty plugin
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return "", errors.Join(explainDir(d.f.Name(), fmt.Errorf("write the plugin: %w", err)), os.Remove(f.Name()))
	}
	return f.Name(), nil
}

func (d dir) rename(temp, target string) error {
	if err := os.Rename(temp, target); err != nil {
		return explainDir(d.f.Name(), fmt.Errorf("put the plugin in its place: %w", err))
	}
	return nil
}

func (d dir) sync() error {
	if err := d.f.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", d.f.Name(), err)
	}
	return nil
}

// explainDir adds what to do about a directory that cannot be used.
func explainDir(path string, err error) error {
	hint := ""
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		hint = "mount the node's CNI directory at " + path + ", or name the place where it is mounted with --cni-bin-dir. Most nodes have /opt/cni/bin, OpenShift has /var/lib/cni/bin; the runtime's configuration says which"
	case errors.Is(err, unix.EROFS):
		hint = path + " is read-only: if that is its mount in the container, take readOnly away; if it is so on the node, the runtime of this system has a writable CNI directory elsewhere (its configuration says where): mount that one"
	case errors.Is(err, os.ErrPermission):
		hint = "run the installer as root; on nodes with SELinux the container has to be privileged, since others may not write there"
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		hint = "the file system of " + path + " is full"
	case errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENOTEMPTY), errors.Is(err, os.ErrExist):
		hint = "a directory has the plugin's name; remove it"
	default:
		return err
	}
	return fmt.Errorf("%w; %s", err, hint)
}
