package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// cpio writes an initramfs in the kernel's "newc" format.
type cpio struct {
	w    *bufio.Writer
	seen map[string]bool
	ino  int
	err  error
}

func newCpio(w io.Writer) *cpio {
	return &cpio{w: bufio.NewWriter(w), seen: map[string]bool{}}
}

func (c *cpio) entry(name string, mode uint32, body []byte) {
	if name = strings.TrimPrefix(name, "/"); c.seen[name] {
		return
	}
	c.seen[name] = true
	c.ino++
	head := fmt.Sprintf("070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00",
		c.ino, mode, 0, 0, 1, 0, len(body), 0, 0, 0, 0, len(name)+1, 0, name)
	c.write([]byte(head))
	c.pad(len(head))
	c.write(body)
	c.pad(len(body))
}

func (c *cpio) write(b []byte) {
	if c.err == nil {
		_, c.err = c.w.Write(b)
	}
}

func (c *cpio) pad(n int) {
	c.write(make([]byte, -n&3))
}

func (c *cpio) dir(name string) {
	if parent := path.Dir(name); parent != "/" && parent != "." {
		c.dir(parent)
	}
	c.entry(name, 0o040755, nil)
}

func (c *cpio) file(name string, mode uint32, body []byte) {
	c.dir(path.Dir(name))
	c.entry(name, 0o100000|mode, body)
}

func (c *cpio) symlink(name, target string) {
	c.dir(path.Dir(name))
	c.entry(name, 0o120777, []byte(target))
}

// host copies a file of this machine under the same or another name.
func (c *cpio) host(name, file string) {
	body, err := os.ReadFile(file)
	if err != nil && c.err == nil {
		c.err = err
		return
	}
	c.file(name, 0o755, body)
}

func (c *cpio) close() error {
	c.entry("TRAILER!!!", 0, nil)
	if c.err != nil {
		return c.err
	}
	return c.w.Flush()
}

// guestTools are this machine's programs that the guest gets, with their
// shared libraries; everything else is busybox. The shell is not busybox's,
// which would run its own ip instead of the real one.
var guestTools = []string{"ip", "rdma", "dash"}

// writeInitramfs writes the guest's whole file system.
func writeInitramfs(file string, t tree, k kernel, init, rdmasim string) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	c := newCpio(f)
	for _, d := range []string{"/dev", "/proc", "/sys", "/run", "/tmp", "/root", "/etc", "/var/lib", "/opt", "/mnt", "/bin"} {
		c.dir(d)
	}
	for _, d := range []string{"/sbin", "/usr/bin", "/usr/sbin"} {
		c.symlink(d, "/bin")
	}
	c.symlink("/var/run", "/run")
	c.file("/etc/passwd", 0o644, []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"))
	c.file("/etc/group", 0o644, []byte("root:x:0:\nnogroup:x:65534:\n"))
	c.file("/etc/hosts", 0o644, []byte("127.0.0.1 localhost bed\n::1 localhost\n"))
	c.file("/bin/rdmasim", 0o755, []byte(rdmasimCommand))
	c.host("/init", init)
	if err := addTools(c); err != nil {
		return err
	}
	if err := addModules(c, t, k, rdmasim); err != nil {
		return err
	}
	if err := c.close(); err != nil {
		return err
	}
	return f.Close()
}

// rdmasimCommand sends a command to the module or, without one, lists the
// devices. Busybox's echo names the errno of a failed write; the shell's does not.
const rdmasimCommand = `#!/bin/sh
[ $# = 0 ] && exec cat /dev/rdmasim
exec busybox echo "$*" >/dev/rdmasim
`

func addTools(c *cpio) error {
	for _, tool := range guestTools {
		file, err := exec.LookPath(tool)
		if err != nil {
			return err
		}
		c.host("/bin/"+tool, file)
		libraries, err := sharedLibraries(file)
		if err != nil {
			return err
		}
		for _, l := range libraries {
			c.host(l, l)
		}
	}
	c.symlink("/bin/sh", "dash")
	applets, err := exec.Command("busybox", "--list").Output()
	if err != nil {
		return fmt.Errorf("busybox --list: %w", err)
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return err
	}
	c.host("/bin/busybox", busybox)
	for _, applet := range strings.Fields(string(applets)) {
		c.symlink("/bin/"+applet, "busybox") // skipped where the tool is there already
	}
	return nil
}

// sharedLibraries are the files that ldd finds for a program, its loader included.
func sharedLibraries(file string) ([]string, error) {
	out, err := exec.Command("ldd", file).Output()
	if err != nil {
		return nil, fmt.Errorf("ldd %s: %w", file, err)
	}
	var files []string
	for line := range strings.Lines(string(out)) {
		for _, f := range strings.Fields(line) {
			if strings.HasPrefix(f, "/") {
				files = append(files, f)
			}
		}
	}
	return files, nil
}

// addModules puts the modules with their dependencies into the guest's flat
// /lib/modules, unpacked, with a modules.dep for modprobe and the boot's list.
func addModules(c *cpio, t tree, k kernel, rdmasim string) error {
	deps, err := readModulesDep(t)
	if err != nil {
		return err
	}
	dir := "/lib/modules/" + t.Version
	var files, load, depLines []string
	visit := func(spec string, boot bool) error {
		name, params, _ := strings.Cut(spec, " ")
		order, err := deps.order(name)
		if err != nil {
			return err
		}
		for _, m := range order {
			file := dir + "/" + moduleName(m) + ".ko"
			if boot && !slices.ContainsFunc(load, func(l string) bool { return strings.HasPrefix(l, file) }) {
				line := file
				if moduleName(m) == moduleName(name) {
					line = strings.TrimSpace(file + " " + params)
				}
				load = append(load, line)
			}
			files = append(files, m)
		}
		return nil
	}
	for _, spec := range k.load {
		if err := visit(spec, true); err != nil {
			return err
		}
	}
	for _, spec := range k.carry {
		if err := visit(spec, false); err != nil {
			return err
		}
	}
	slices.Sort(files)
	for _, m := range slices.Compact(files) {
		body, err := readModule(filepath.Join(t.modules(), m))
		if err != nil {
			return err
		}
		c.file(dir+"/"+moduleName(m)+".ko", 0o644, body)
		line := moduleName(m) + ".ko:"
		for _, d := range deps[moduleName(m)].needs {
			line += " " + moduleName(d) + ".ko"
		}
		depLines = append(depLines, line)
	}
	if rdmasim != "" {
		body, err := os.ReadFile(rdmasim)
		if err != nil {
			return err
		}
		c.file(dir+"/rdmasim.ko", 0o644, body)
		load = append(load, dir+"/rdmasim.ko")
		depLines = append(depLines, "rdmasim.ko: ib_uverbs.ko ib_core.ko")
	}
	c.file(dir+"/modules.dep", 0o644, []byte(strings.Join(depLines, "\n")+"\n"))
	c.file("/etc/bed-modules", 0o644, []byte(strings.Join(load, "\n")+"\n"))
	return nil
}

// moduleDeps is modules.dep: a module's file and the files it needs.
type moduleDeps map[string]struct {
	file  string
	needs []string
}

func readModulesDep(t tree) (moduleDeps, error) {
	text, err := os.ReadFile(filepath.Join(t.modules(), "modules.dep"))
	if err != nil {
		return nil, err
	}
	deps := moduleDeps{}
	for line := range strings.Lines(string(text)) {
		file, needs, _ := strings.Cut(line, ":")
		d := deps[moduleName(file)]
		d.file, d.needs = file, strings.Fields(needs)
		deps[moduleName(file)] = d
	}
	// Built-in modules need no file, and asking for one is no mistake.
	builtin, err := os.ReadFile(filepath.Join(t.modules(), "modules.builtin"))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(builtin)) {
		deps[moduleName(line)] = deps[""]
	}
	return deps, nil
}

// order lists the files to load for a module, the module last.
func (d moduleDeps) order(name string) ([]string, error) {
	m, ok := d[moduleName(name)]
	if !ok {
		return nil, fmt.Errorf("this kernel has no module %s", name)
	}
	if m.file == "" {
		return nil, nil
	}
	order := slices.Clone(m.needs)
	slices.Reverse(order) // modules.dep lists the innermost last
	return append(order, m.file), nil
}

// moduleName is the kernel's name of a module: dashes are underscores.
func moduleName(file string) string {
	name, _, _ := strings.Cut(path.Base(strings.TrimSpace(file)), ".ko")
	if name == "." {
		return ""
	}
	return strings.ReplaceAll(name, "-", "_")
}

func readModule(file string) ([]byte, error) {
	if !strings.HasSuffix(file, ".xz") {
		return os.ReadFile(file)
	}
	var stderr bytes.Buffer
	cmd := exec.Command("xz", "-dc", file)
	cmd.Stderr = &stderr
	body, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("xz -dc %s: %w: %s", file, err, stderr.Bytes())
	}
	return body, nil
}
