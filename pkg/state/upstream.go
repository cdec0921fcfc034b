package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// UpstreamDir is where k8snetworkplumbingwg/rdma-cni and NVIDIA's fork of it
// keep their records, one file NETWORK-CONTAINERID-IFNAME an attachment.
const UpstreamDir = "/var/lib/cni/rdma"

// Upstream reads the records of the plugin that this one replaces, so that
// pods which it attached are detached properly.
type Upstream struct{ Dir string }

// UpstreamRecord is such a record (format 1.x; the fork adds fields).
type UpstreamRecord struct {
	Version    string `json:"version"`
	DeviceID   string `json:"deviceID"`
	HomeName   string `json:"sandboxRdmaDevName"`   // at home
	NameInside string `json:"containerRdmaDevName"` // inside the pod

	path string
}

// Path is the record's file.
func (r *UpstreamRecord) Path() string { return r.path }

// Load reads the record of an attachment, nil if there is none.
func (u Upstream) Load(network string, key Key) (*UpstreamRecord, error) {
	r, err := u.read(network + "-" + key.ContainerID + "-" + key.IfName)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENAMETOOLONG) {
		return nil, nil
	}
	return r, err
}

func (u Upstream) read(file string) (*UpstreamRecord, error) {
	path := filepath.Join(u.Dir, file)
	data, err := readRegular(path)
	if err != nil {
		return nil, fmt.Errorf("read upstream record %s: %w", path, err)
	}
	r := UpstreamRecord{path: path}
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, fmt.Errorf("decode upstream record %s: %w", path, err)
	}
	if !strings.HasPrefix(r.Version, "1.") {
		return nil, fmt.Errorf("upstream record %s has version %q, known is 1.x", path, r.Version)
	}
	return &r, nil
}

// Claimants lists the record files that claim a function, which is all that
// an error message about its owner needs. Files that cannot be read are
// passed over.
func (u Upstream) Claimants(function string) []string {
	list, err := os.ReadDir(u.Dir)
	if err != nil {
		return nil
	}
	var paths []string
	for _, e := range list {
		if r, err := u.read(e.Name()); err == nil && strings.EqualFold(r.DeviceID, function) {
			paths = append(paths, r.path)
		}
	}
	slices.Sort(paths)
	return paths
}

// Paths lists the record files, readable or not. A directory that does not
// exist has none.
func (u Upstream) Paths() ([]string, error) {
	list, err := os.ReadDir(u.Dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the directory of upstream records: %w", err)
	}
	var paths []string
	for _, e := range list {
		paths = append(paths, filepath.Join(u.Dir, e.Name()))
	}
	return paths, nil
}

// Delete removes the record.
func (r *UpstreamRecord) Delete() error {
	if err := removeIfThere(r.path); err != nil {
		return fmt.Errorf("remove upstream record: %w", err)
	}
	return nil
}

// Attached tells whether a record says that a container was given the device
// of this name.
func (u Upstream) Attached(containerID, device string) bool {
	list, err := os.ReadDir(u.Dir)
	if err != nil {
		return false
	}
	for _, e := range list {
		if !strings.Contains(e.Name(), "-"+containerID+"-") {
			continue
		}
		if r, err := u.read(e.Name()); err == nil && r.NameInside == device {
			return true
		}
	}
	return false
}
