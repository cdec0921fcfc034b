// Package cdi writes CDI specs for RDMA devices, by which runtimes outside
// Kubernetes (Podman, nerdctl, Docker) give a container the character devices
// of a function. File names and kinds are those of the tool rdma-cdi.
package cdi

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	cdi "tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// Defaults of rdma-cdi.
const (
	DefaultDir    = cdi.DefaultStaticDir
	DefaultPrefix = "rdma"
)

// filePrefix begins the names of our files.
const filePrefix = "rdma-cdi_"

// Extensions that CDI knows, each a format.
var extensions = []string{"yaml", "json"}

// Spec is one spec with one device.
type Spec struct {
	Prefix, Name string // the kind is PREFIX/NAME
	Device       string // the function's address, or a software device's name
	Nodes        []string
	Format       string // yaml or json
}

// Kind is the spec's kind.
func (s Spec) Kind() string { return s.Prefix + "/" + s.Name }

// Qualified is how a runtime refers to the device.
func (s Spec) Qualified() string { return s.Kind() + "=" + s.Device }

// File is the name of the spec's file.
func (s Spec) File() string { return fileName(s.Prefix, s.Name, s.Format) }

func fileName(prefix, name, format string) string {
	return filePrefix + strings.ReplaceAll(prefix, "/", "_") + "_" + name + "." + format
}

// NameOfAddress is the name of the spec of a function that is given by its
// address.
func NameOfAddress(address string) string { return "pci-" + dashed(address) }

// NameOfInterface is the name of one that is given by its interface.
func NameOfInterface(ifname string) string { return dashed(ifname) }

func dashed(s string) string { return strings.NewReplacer(":", "-", "/", "-", ".", "-").Replace(s) }

// Nodes are the paths of a function's nodes, with that of the connection
// manager if the kernel has it. They are an error if there is no verbs node:
// then the function has no RDMA device.
func Nodes(chars []sysfs.CharDeviceNode, connectionManager bool) ([]string, error) {
	var paths []string
	verbs := false
	for _, c := range chars {
		verbs = verbs || c.Kind == sysfs.Uverbs
		paths = append(paths, "/dev/infiniband/"+c.Name)
	}
	if !verbs {
		return nil, errors.New("it has no verbs node (uverbsN): load ib_uverbs, and see rdma-cni doctor")
	}
	if connectionManager {
		paths = append(paths, "/dev/infiniband/rdma_cm")
	}
	slices.Sort(paths)
	return paths, nil
}

// Write validates the spec and writes it into dir, whole or not at all. It
// gives the path.
func (s Spec) Write(dir string) (string, error) {
	raw := &specs.Spec{Kind: s.Kind(), Devices: []specs.Device{{Name: s.Device}}}
	for _, n := range s.Nodes {
		raw.Devices[0].ContainerEdits.DeviceNodes = append(raw.Devices[0].ContainerEdits.DeviceNodes,
			&specs.DeviceNode{Path: n, HostPath: n, Permissions: "rw"})
	}
	// The oldest version that has all that is used: runtimes refuse versions
	// that are newer than they are.
	var err error
	if raw.Version, err = specs.MinimumRequiredVersion(raw); err != nil {
		return "", fmt.Errorf("CDI spec %s: %w", s.Kind(), err)
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	if err != nil {
		return "", fmt.Errorf("open CDI directory %s: %w", dir, err)
	}
	path := filepath.Join(dir, s.File())
	if err := cache.WriteSpec(raw, s.File()); err != nil {
		return "", fmt.Errorf("write CDI spec %s: %w", path, err)
	}
	// The library leaves the mode of a temporary file, which only root reads.
	if err := os.Chmod(path, 0o644); err != nil {
		return "", fmt.Errorf("write CDI spec %s: %w", path, err)
	}
	// The same spec in the other format would define the device twice, which
	// makes runtimes refuse it.
	for _, format := range extensions {
		if format != s.Format {
			if err := removeIfThere(filepath.Join(dir, fileName(s.Prefix, s.Name, format))); err != nil {
				return "", err
			}
		}
	}
	return path, nil
}

func removeIfThere(path string) error {
	err := os.Remove(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// Written is a spec of ours in a directory.
type Written struct {
	Path    string
	Kind    string
	Devices []string // qualified names
	Nodes   []string
	Problem string // why it cannot be used
}

// List reads the specs of a prefix in dir. The kind inside decides whose one it
// is, so that prefix rdma does not take the files of prefix rdma_x; of a file
// that cannot be read its name decides.
func List(dir, prefix string) ([]Written, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list CDI specs: %w", err)
	}
	var list []Written
	for _, e := range entries {
		format := strings.TrimPrefix(filepath.Ext(e.Name()), ".")
		if !strings.HasPrefix(e.Name(), filePrefix) || !slices.Contains(extensions, format) {
			continue
		}
		w := Written{Path: filepath.Join(dir, e.Name())}
		spec, err := cdi.ReadSpec(w.Path, 0)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			w.Problem = err.Error()
			name, ok := strings.CutPrefix(strings.TrimSuffix(e.Name(), "."+format), filePrefix+strings.ReplaceAll(prefix, "/", "_")+"_")
			if ok && name != "" && !strings.Contains(name, "_") {
				list = append(list, w)
			}
			continue
		}
		if spec.GetVendor() != prefix {
			continue
		}
		w.Kind = spec.Kind
		for _, d := range spec.Devices {
			w.Devices = append(w.Devices, spec.Kind+"="+d.Name)
			for _, n := range d.ContainerEdits.DeviceNodes {
				w.Nodes = append(w.Nodes, n.Path)
			}
		}
		list = append(list, w)
	}
	return list, nil
}

// Remove removes a spec.
func (w Written) Remove() error {
	if err := removeIfThere(w.Path); err != nil {
		return fmt.Errorf("remove CDI spec: %w", err)
	}
	return nil
}

// Holes are the nodes of which a lower number is free: the next move of their
// device takes that number, and a spec with the old one is wrong then.
func Holes(all []sysfs.CharDeviceNode) []string {
	next := map[sysfs.Kind]int{}
	var list []string
	for _, c := range all { // by kind and number
		if c.Kind == sysfs.Issm {
			continue
		}
		if c.CharDevice.Number() > next[c.Kind] {
			list = append(list, c.Name)
			continue
		}
		next[c.Kind]++
	}
	return list
}
