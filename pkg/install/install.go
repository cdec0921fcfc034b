// Package install puts the CNI plugin into the directory from which a node's
// container runtime starts plugins, and takes it out again. It is for the
// installer in the image; a package manager does the same in its own way.
package install

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// mode of an installed plugin: runtimes run it as root, so nobody else may
// change it.
const mode = 0o755

// Action is what was done with the file.
type Action string

// The actions.
const (
	Installed Action = "installed"
	Unchanged Action = "unchanged" // it was there already
	Removed   Action = "removed"
	Absent    Action = "absent" // there was nothing to remove
)

// Result is what became of the plugin. Its fields are a stable schema.
type Result struct {
	File        string   `json:"file"`
	Action      Action   `json:"action"`
	SHA256      string   `json:"sha256,omitempty"`
	CNIVersions []string `json:"cniVersions,omitempty"` // that it supports, by its own answer
}

// Plugin is a program file and the directory that it belongs in.
type Plugin struct {
	Source string
	Dir    string
}

// Target is the installed file. It has the name of the source, which is the
// type in a network's configuration.
func (p Plugin) Target() string { return filepath.Join(p.Dir, filepath.Base(p.Source)) }

// Install makes the target a copy of the source. At each moment the target is
// the old program or the new one, whole and executable; a copy that runs is not
// disturbed. A program that does not run here never gets there. What is there
// already is left alone.
func (p Plugin) Install(ctx context.Context) (Result, error) {
	r, data, err := p.source()
	if err != nil {
		return r, err
	}
	dir, err := openDir(ctx, p.Dir)
	if err != nil {
		return r, err
	}
	defer dir.close()
	name := filepath.Base(p.Source)
	if err := dir.removeTemps(name); err != nil {
		return r, err
	}
	if err := p.compare(data); err == nil {
		r.Action = Unchanged
		r.CNIVersions, err = askVersion(ctx, p.Target())
		return r, err
	}
	temp, err := dir.write(name, data)
	if err != nil {
		return r, err
	}
	if r.CNIVersions, err = askVersion(ctx, temp); err == nil {
		err = dir.rename(temp, p.Target())
	}
	if err != nil {
		return r, errors.Join(err, os.Remove(temp))
	}
	r.Action = Installed
	return r, dir.sync()
}

// Check tells whether the target is what Install would make it, and runs.
func (p Plugin) Check(ctx context.Context) (Result, error) {
	r, data, err := p.source()
	if err != nil {
		return r, err
	}
	if err := p.compare(data); err != nil {
		return r, err
	}
	r.Action = Unchanged
	r.CNIVersions, err = askVersion(ctx, p.Target())
	return r, err
}

// source reads the program and makes sure that it is one for this machine.
func (p Plugin) source() (Result, []byte, error) {
	r := Result{File: p.Target()}
	data, err := os.ReadFile(p.Source)
	if err != nil {
		return r, nil, fmt.Errorf("read the plugin to install: %w", err)
	}
	arch, err := archOf(bytes.NewReader(data))
	if err != nil {
		return r, nil, fmt.Errorf("the plugin to install, %s, is no ELF program: %w", p.Source, err)
	}
	own, err := HostArch()
	if err != nil {
		return r, nil, err
	}
	if arch != own {
		return r, nil, fmt.Errorf("the plugin to install, %s, is built for %s, this node is %s; nothing was changed. Use the image or the archive for this node's architecture", p.Source, arch, own)
	}
	sum := sha256.Sum256(data)
	r.SHA256 = hex.EncodeToString(sum[:])
	return r, data, nil
}

// compare tells how the target differs from what it should be, nil if it does
// not.
func (p Plugin) compare(data []byte) error {
	target := p.Target()
	var st unix.Stat_t
	err := unix.Lstat(target, &st)
	switch {
	case err != nil:
		return fmt.Errorf("the plugin is not installed: %w", &os.PathError{Op: "lstat", Path: target, Err: err})
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return fmt.Errorf("%s is no regular file (mode %#o)", target, st.Mode)
	case st.Mode&0o7777 != mode:
		return fmt.Errorf("%s has mode %#o instead of %#o", target, st.Mode&0o7777, mode)
	case int(st.Uid) != os.Geteuid():
		return fmt.Errorf("%s belongs to user %d instead of %d", target, st.Uid, os.Geteuid())
	}
	there, err := os.ReadFile(target)
	if err != nil {
		return fmt.Errorf("compare the installed plugin: %w", err)
	}
	if !bytes.Equal(there, data) {
		return fmt.Errorf("%s is another program than %s: it was replaced after the installation, or not installed from this image", target, p.Source)
	}
	return nil
}
