package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// kernel is one row of the table: where a stock kernel comes from and what
// belongs into its guest.
type kernel struct {
	name    string
	suite   string
	load    []string // modules loaded at boot, with dependencies; "name param=value"
	carry   []string // modules in the guest's /lib/modules for modprobe
	rdmasim bool
	libc    string // suite whose C library the packaged build tools need, if not the machine's
}

var base = []string{
	"virtio_pci", "virtio_console", "9pnet_virtio", "9p", "configfs",
	"igb", "igbvf", "veth", "dummy numdummies=0", "bridge", "macvlan",
	"ib_core netns_mode=0", "ib_uverbs", "ib_umad", "rdma_ucm",
}

// extra is for tests that ask for it: IPoIB, a driver for user space, and soft-RoCE, which before
// 7.3 is a stock driver that refuses to move.
var extra = []string{"ib_ipoib", "uio_pci_generic", "rdma_rxe", "crc32_generic"}

// The first one is the default.
var kernels = []kernel{
	{name: "6.1", suite: stable, load: base, carry: extra, rdmasim: true},
	{name: "6.12", suite: "bookworm-backports", load: base, carry: extra, rdmasim: true},
	{name: "7.3", suite: "trixie-backports", load: base, carry: []string{"ib_ipoib", "uio_pci_generic", "rdma_rxe", "8021q"}, rdmasim: true, libc: "trixie"},
}

func findKernel(name string) (kernel, error) {
	var names []string
	for _, k := range kernels {
		if k.name == name {
			return k, nil
		}
		names = append(names, k.name)
	}
	return kernel{}, fmt.Errorf("no kernel %q; there are %s", name, strings.Join(names, ", "))
}

// tree is a kernel's packages extracted into a folder.
type tree struct {
	dir      string // the folder; below it root/ has the packages' files
	Version  string // as uname -r
	Packages []string
	Format   int
}

// treeFormat is raised when what is done to a tree changes.
const treeFormat = 1

func (t tree) root() string    { return filepath.Join(t.dir, "root") }
func (t tree) modules() string { return filepath.Join(t.root(), "lib/modules", t.Version) }
func (t tree) headers() string {
	return filepath.Join(t.root(), "usr/src/linux-headers-"+t.Version)
}

// image prefers the uncompressed kernel: unpacking it under emulation takes seconds.
func (t tree) image() string {
	if vmlinux := filepath.Join(t.dir, "vmlinux"); exists(vmlinux) {
		return vmlinux
	}
	return t.bzImage()
}

// bzImage lies beside the modules from 7.3 on.
func (t tree) bzImage() string {
	if file := filepath.Join(t.modules(), "vmlinuz"); exists(file) {
		return file
	}
	return filepath.Join(t.root(), "boot/vmlinuz-"+t.Version)
}

// loadTree reads a finished tree; ErrNotExist if there is none.
func loadTree(dir string) (tree, error) {
	t := tree{dir: dir}
	text, err := os.ReadFile(filepath.Join(dir, "tree.json"))
	if err != nil {
		return t, err
	}
	if err := json.Unmarshal(text, &t); err != nil {
		return t, err
	}
	// The headers name their folder: a tree that was moved is made again.
	makefile, err := os.ReadFile(filepath.Join(t.headers(), "Makefile"))
	if err != nil {
		return t, err
	}
	if t.Format != treeFormat || !bytes.Contains(makefile, []byte(t.root()+"/")) {
		return t, fs.ErrNotExist
	}
	return t, nil
}

// fetchTree downloads and extracts; nothing is installed on the machine. A
// folder made is pinned to its version until it is removed.
func (k kernel) fetchTree(a apt, dir string) (tree, error) {
	t := tree{dir: dir, Format: treeFormat}
	if err := os.RemoveAll(dir); err != nil {
		return t, err
	}
	debs := filepath.Join(dir, "debs")
	if err := os.MkdirAll(debs, 0o755); err != nil {
		return t, err
	}
	version, packages, err := k.resolve(a)
	if err != nil {
		return t, err
	}
	t.Version, t.Packages = version, packages
	if err := a.download(debs, packages...); err != nil {
		return t, err
	}
	files, err := filepath.Glob(debs + "/*.deb")
	if err != nil {
		return t, err
	}
	for _, deb := range files {
		if err := run("", "dpkg-deb", "-x", deb, t.root()); err != nil {
			return t, err
		}
	}
	if err := os.RemoveAll(debs); err != nil {
		return t, err
	}
	if err := t.finish(); err != nil {
		return t, err
	}
	if k.libc != "" {
		if err := t.wrapBuildTools(a, k.libc); err != nil {
			return t, err
		}
	}
	text, err := json.MarshalIndent(t, "", "\t")
	if err != nil {
		return t, err
	}
	return t, os.WriteFile(filepath.Join(dir, "tree.json"), text, 0o644)
}

// resolve follows the metapackage to the kernel of the day and names its
// packages. Newer kernels come in several: what the image package depends on.
func (k kernel) resolve(a apt) (version string, packages []string, err error) {
	metas, err := a.releases("linux-image-amd64")
	if err != nil {
		return "", nil, err
	}
	for _, meta := range metas {
		for _, d := range meta.depends {
			if v, ok := strings.CutPrefix(d, "linux-image-"); ok && strings.HasPrefix(v, k.name+".") && version == "" {
				version = v
			}
		}
	}
	if version == "" {
		return "", nil, fmt.Errorf("no linux-image-amd64 of this machine's Debian mirror is a kernel %s", k.name)
	}
	packages = []string{"linux-image-" + version, "linux-headers-" + version}
	for _, p := range packages {
		releases, err := a.releases(p)
		if err != nil {
			return "", nil, err
		}
		for _, d := range releases[0].depends {
			if kernelPackage.MatchString(d) && !slices.Contains(packages, d) {
				packages = append(packages, d)
			}
		}
	}
	return version, packages, nil
}

// kernelPackage tells a kernel's own packages from those it needs of the system.
var kernelPackage = regexp.MustCompile(`^linux-(base|binary|modules|headers|kbuild)-[0-9]`)

// finish makes an extracted tree usable where it lies.
func (t tree) finish() error {
	if lib := filepath.Join(t.root(), "lib"); !exists(lib) {
		if err := os.Symlink("usr/lib", lib); err != nil {
			return err
		}
	}
	makefile := filepath.Join(t.headers(), "Makefile")
	text, err := os.ReadFile(makefile)
	if err != nil {
		return err
	}
	text = bytes.ReplaceAll(text, []byte("/usr/src/"), []byte(t.root()+"/usr/src/"))
	if err := os.WriteFile(makefile, text, 0o644); err != nil {
		return err
	}
	if err := run("", "/sbin/depmod", "-b", t.root(), t.Version); err != nil {
		return err
	}
	if err := t.unpackImage(); err != nil {
		logf("kernel %s stays compressed, the first boot takes longer: %v", t.Version, err)
	}
	return nil
}

// wrapBuildTools makes a newer release's objtool and modpost run on this
// machine: under the C library of their release, which is only unpacked.
func (t tree) wrapBuildTools(a apt, suite string) error {
	// Lists of their own: a whole release in the lists that packages are
	// installed from would upgrade this machine.
	foreign := apt{dir: a.dir + "-" + suite}
	if err := foreign.updateOnly(suite); err != nil {
		return err
	}
	libc := filepath.Join(t.dir, "libc")
	if err := os.MkdirAll(libc, 0o755); err != nil {
		return err
	}
	if err := foreign.download(libc, "libc6"); err != nil {
		return err
	}
	debs, err := filepath.Glob(libc + "/*.deb")
	if err != nil {
		return err
	}
	if err := run("", "dpkg-deb", "-x", debs[0], libc); err != nil {
		return err
	}
	// The tools themselves only choose one of these by architecture.
	var tools []string
	for _, pattern := range []string{"tools/objtool/objtool.real-x86", "scripts/mod/modpost.real-*-lsb-64", "scripts/mod/modpost.real-lsb-64"} {
		found, err := filepath.Glob(filepath.Join(t.root(), "usr/lib/linux-kbuild-*", pattern))
		if err != nil {
			return err
		}
		tools = append(tools, found...)
	}
	lib := filepath.Join(libc, "usr/lib/x86_64-linux-gnu")
	for _, tool := range tools {
		if err := os.Rename(tool, tool+".elf"); err != nil {
			return err
		}
		script := fmt.Sprintf("#!/bin/sh\nexec '%s/ld-linux-x86-64.so.2' --library-path '%s' '%s.elf' \"$@\"\n", lib, lib, tool)
		if err := os.WriteFile(tool, []byte(script), 0o755); err != nil {
			return err
		}
	}
	return nil
}

// unpackImage takes the ELF kernel out of the bzImage. The layout is the boot
// protocol's: setup sectors, then the protected-mode code, which has the
// payload at an offset of its own header.
func (t tree) unpackImage() error {
	b, err := os.ReadFile(t.bzImage())
	if err != nil {
		return err
	}
	if len(b) < 0x260 || string(b[0x202:0x206]) != "HdrS" {
		return errors.New("not a bzImage")
	}
	setup := (int(b[0x1f1]) + 1) * 512
	offset := setup + int(binary.LittleEndian.Uint32(b[0x248:]))
	length := int(binary.LittleEndian.Uint32(b[0x24c:]))
	if offset+length > len(b) {
		return errors.New("payload outside of the image")
	}
	payload := b[offset : offset+length]
	var cmd *exec.Cmd
	switch {
	case bytes.HasPrefix(payload, []byte("\xfd7zXZ")):
		cmd = exec.Command("xz", "-dc", "--single-stream")
	case bytes.HasPrefix(payload, []byte("\x28\xb5\x2f\xfd")):
		cmd = exec.Command("zstd", "-dc")
	default:
		return fmt.Errorf("payload starts with % x", payload[:4])
	}
	// The last four bytes are the unpacked size, not part of the stream.
	cmd.Stdin = bytes.NewReader(payload[:length-4])
	elf, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("%v: %w", cmd.Args, err)
	}
	if !bytes.HasPrefix(elf, []byte("\x7fELF")) {
		return errors.New("payload is no ELF file")
	}
	return os.WriteFile(filepath.Join(t.dir, "vmlinux"), elf, 0o644)
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}
