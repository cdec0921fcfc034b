// Package sysfs reads what the kernel says in /sys about the functions that
// carry RDMA devices: PCI functions and auxiliary devices.
//
// A sysfs mount shows the RDMA devices of the network namespace whose process
// mounted it. The character device classes have no namespace: from the host
// they show the nodes of devices inside pods too. Both facts together tell "at
// home" from "in another namespace" from "no RDMA device".
package sysfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// FS is a mounted sysfs. Tests read a tree of their own; rdmamap keeps its
// paths in package variables, which they point to the same tree.
type FS string

// Default is where sysfs is mounted.
const Default FS = "/sys"

func (fs FS) path(elem ...string) string {
	return filepath.Join(append([]string{string(fs)}, elem...)...)
}

// ErrNoFunction: no bus has a device of that address. It is an os.ErrNotExist.
var ErrNoFunction = fmt.Errorf("no such PCI function or auxiliary device: %w", os.ErrNotExist)

// ValidateAddress refuses what cannot be the address of a function, before it
// becomes part of a path.
func ValidateAddress(address string) error {
	if address == "" {
		return errors.New("the address of a function cannot be empty")
	}
	if len(address) > 64 {
		return fmt.Errorf("%.70q is too long for the address of a function", address)
	}
	if strings.Contains(address, "..") || address == "." {
		return fmt.Errorf("%q is not the address of a function", address)
	}
	for _, r := range address {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune(".:_-", r) {
			continue
		}
		return fmt.Errorf("%q is not the address of a function: it contains %q", address, r)
	}
	return nil
}

// Function finds the function of an address: a PCI function such as
// 0000:3b:00.2 (a domain can have more digits; upper case is accepted) or an
// auxiliary device such as mlx5_core.sf.4. What exists decides which it is.
func (fs FS) Function(address string) (Function, error) {
	if err := ValidateAddress(address); err != nil {
		return Function{}, err
	}
	for _, f := range []Function{
		{fs: fs, Bus: PCI, Address: strings.ToLower(address)},
		{fs: fs, Bus: Auxiliary, Address: address},
	} {
		_, err := os.Stat(f.path())
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, os.ErrNotExist) {
			return Function{}, fmt.Errorf("look up function %s: %w", address, err)
		}
	}
	return Function{}, fmt.Errorf("%s: %w", address, ErrNoFunction)
}

// VirtualFunction gives the address of VF number n of the PF behind a network
// interface (the link "device/virtfnN").
func (fs FS) VirtualFunction(netdev string, n int) (string, error) {
	target, err := os.Readlink(fs.path("class/net", netdev, "device", fmt.Sprintf("virtfn%d", n)))
	if err != nil {
		return "", fmt.Errorf("VF %d of %s: %w", n, netdev, err)
	}
	return filepath.Base(target), nil
}

// ModuleLoaded tells whether a kernel module is loaded (/sys/module/NAME). A
// driver built into the kernel without parameters has no such entry.
func (fs FS) ModuleLoaded(name string) bool {
	_, err := os.Stat(fs.path("module", strings.ReplaceAll(name, "-", "_")))
	return err == nil
}
