package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// bed is one kind of guest: a kernel and its hardware, with where its files lie.
type bed struct {
	kernel kernel
	pfs    int
	icount bool   // the clock counts instructions
	repo   string // the module's root
	cache  string
}

func newBed(kernelName string, pfs int, icount bool) (bed, error) {
	k, err := findKernel(kernelName)
	if err != nil {
		return bed{}, err
	}
	if pfs < 1 || pfs > 8 {
		return bed{}, fmt.Errorf("-pfs %d: 1 to 8 are possible", pfs)
	}
	repo, err := moduleRoot()
	return bed{kernel: k, pfs: pfs, icount: icount, repo: repo, cache: filepath.Join(repo, ".cache", "vm")}, err
}

func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if exists(filepath.Join(dir, "go.mod")) && exists(filepath.Join(dir, "test/rdmasim/Kbuild")) {
			return dir, nil
		}
	}
	return "", errors.New("run this inside the repository: no go.mod beside test/rdmasim above the current folder")
}

// image is a guest ready to be resumed.
type image struct {
	dir         string
	BootSeconds float64
}

func (i image) file(name string) string { return filepath.Join(i.dir, name) }

// lock keeps one preparation at a time away from the others and from runs
// that are starting. The lock is the process's, released with the returned func.
func (b bed) lock(how int) (func(), error) {
	if err := os.MkdirAll(b.cache, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(b.cache, "lock"), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	for {
		err = syscall.Flock(int(f.Fd()), how)
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return func() { f.Close() }, nil
}

// prepared returns the image of the present sources, made if it is not there,
// and a shared lock under which nobody removes it.
func (b bed) prepared() (image, func(), error) {
	for {
		unlock, err := b.lock(syscall.LOCK_SH)
		if err != nil {
			return image{}, nil, err
		}
		img, err := b.loadImage()
		if !errors.Is(err, fs.ErrNotExist) {
			if err != nil {
				unlock()
			}
			return img, unlock, err
		}
		unlock()
		if err := b.prepare(); err != nil {
			return image{}, nil, err
		}
	}
}

// prepare brings everything up to date: packages, kernel, module, initramfs,
// saved guest. What is up to date already is left alone.
func (b bed) prepare() error {
	unlock, err := b.lock(syscall.LOCK_EX)
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := b.loadImage(); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	a := apt{dir: filepath.Join(b.cache, "apt")}
	if err := b.installTools(a); err != nil {
		return err
	}
	t, err := b.kernelTree(a)
	if err != nil {
		return err
	}
	key, err := b.imageKey(t)
	if err != nil {
		return err
	}
	return b.buildImage(t, b.imageDir(key))
}

// tools are programs and the packages that have them.
var tools = []struct{ program, pkg string }{
	{"depmod", "kmod"},
	{"busybox", "busybox-static"},
	{"xz", "xz-utils"},
	{"gcc-12", "gcc-12"},
	{"make", "make"},
	{"rdma", "iproute2"},
	{"ld", "binutils"},
}

// qemuSuite has a QEMU with the igb device; that of stable is too old.
const qemuSuite = "bookworm-backports"

func (b bed) suites() []string {
	suites := []string{qemuSuite}
	for _, k := range kernels {
		if !slices.Contains(suites, k.suite) && k.suite != stable {
			suites = append(suites, k.suite)
		}
	}
	return suites
}

func (b bed) installTools(a apt) error {
	var missing []string
	for _, t := range tools {
		if _, err := lookPath(t.program); err != nil {
			missing = append(missing, t.pkg)
		}
	}
	qemuOK := exec.Command(qemuBinary, "-device", "igb,help").Run() == nil
	if qemuOK && len(missing) == 0 {
		return nil
	}
	if err := a.update(b.suites()); err != nil {
		return err
	}
	if len(missing) > 0 {
		if err := a.install(stable, missing...); err != nil {
			return err
		}
	}
	if !qemuOK {
		return a.install(qemuSuite, "qemu-system-x86")
	}
	return nil
}

// lookPath looks into sbin too, which is not in everyone's PATH.
func lookPath(program string) (string, error) {
	if file, err := exec.LookPath(program); err == nil {
		return file, nil
	}
	return exec.LookPath("/sbin/" + program)
}

func (b bed) kernelTree(a apt) (tree, error) {
	dir := filepath.Join(b.cache, "kernel-"+b.kernel.name)
	t, err := loadTree(dir)
	if !errors.Is(err, fs.ErrNotExist) {
		return t, err
	}
	if err := a.update(b.suites()); err != nil {
		return t, err
	}
	return b.kernel.fetchTree(a, dir)
}

func (b bed) imageDir(key string) string {
	hardware := fmt.Sprintf("%s-%dpf", b.kernel.name, b.pfs)
	if b.icount {
		hardware += "icount"
	}
	return filepath.Join(b.cache, "images", hardware+"-"+key)
}

// loadImage finds the image of the present sources; ErrNotExist if it, or what
// it is made from, is not there.
func (b bed) loadImage() (image, error) {
	t, err := loadTree(filepath.Join(b.cache, "kernel-"+b.kernel.name))
	if err != nil {
		return image{}, err
	}
	key, err := b.imageKey(t)
	if err != nil {
		return image{}, err
	}
	img := image{dir: b.imageDir(key)}
	text, err := os.ReadFile(img.file("image.json"))
	if err != nil {
		return img, err
	}
	return img, json.Unmarshal(text, &img)
}

// imageKey covers all that decides what is in a saved guest: our sources, the
// kernel's version, and the programs of this machine that go into it or run it.
func (b bed) imageKey(t tree) (string, error) {
	h := sha256.New()
	fmt.Fprintln(h, t.Version, t.dir, b.pfs, b.icount)
	for _, dir := range []string{"test/rdmasim", "test/vm"} {
		err := filepath.WalkDir(filepath.Join(b.repo, dir), func(file string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !isSource(file) {
				return err
			}
			text, err := os.ReadFile(file)
			fmt.Fprintf(h, "%s %d\n%s", file, len(text), text)
			return err
		})
		if err != nil {
			return "", err
		}
	}
	for _, program := range append([]string{qemuBinary, "busybox"}, guestTools...) {
		file, err := exec.LookPath(program)
		if err != nil {
			return "", fs.ErrNotExist
		}
		info, err := os.Stat(file)
		if err != nil {
			return "", err
		}
		fmt.Fprintln(h, file, info.Size(), info.ModTime().UnixNano())
	}
	return hex.EncodeToString(h.Sum(nil)[:6]), nil
}

// isSource tells what changes a guest from tests, scripts and documents.
func isSource(file string) bool {
	ext := filepath.Ext(file)
	return (ext == ".go" && !strings.HasSuffix(file, "_test.go")) || ext == ".c" || ext == ".h" || filepath.Base(file) == "Kbuild"
}

func (b bed) buildImage(t tree, dir string) error {
	b.removeStale(dir)
	work := dir + ".new"
	if err := os.RemoveAll(work); err != nil {
		return err
	}
	if err := os.MkdirAll(work, 0o755); err != nil {
		return err
	}
	img := image{dir: work}
	module, err := b.buildRdmasim(t, filepath.Join(work, "rdmasim"))
	if err != nil {
		return err
	}
	logf("building the guest of kernel %s", t.Version)
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", img.file("init"), "./test/vm/guest")
	cmd.Dir = b.repo
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64", "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the guest's init: %w\n%s", err, out)
	}
	if err := writeInitramfs(img.file("initramfs"), t, b.kernel, img.file("init"), module); err != nil {
		return fmt.Errorf("initramfs: %w", err)
	}
	start := time.Now()
	if err := b.save(t, img); err != nil {
		return fmt.Errorf("%w\n%s", err, consoleTail(img.file("boot.log")))
	}
	img.BootSeconds = time.Since(start).Seconds()
	logf("booted and saved in %.1f s", img.BootSeconds)
	text, err := json.Marshal(img)
	if err != nil {
		return err
	}
	if err := os.WriteFile(img.file("image.json"), text, 0o644); err != nil {
		return err
	}
	return os.Rename(work, dir)
}

// removeStale removes the images of older sources. A run that uses one has its
// files open and does not notice.
func (b bed) removeStale(keep string) {
	old, _ := filepath.Glob(b.imageDir("*"))
	for _, dir := range old {
		if dir != keep {
			if err := os.RemoveAll(dir); err != nil {
				logf("%v", err)
			}
		}
	}
}

// buildRdmasim compiles the module in a copy: the kernel's build writes beside its sources.
func (b bed) buildRdmasim(t tree, dir string) (string, error) {
	if !b.kernel.rdmasim {
		return "", nil
	}
	logf("building rdmasim for kernel %s", t.Version)
	if err := os.CopyFS(dir, os.DirFS(filepath.Join(b.repo, "test/rdmasim"))); err != nil {
		return "", err
	}
	// Without type information, which nothing here reads and which needs pahole,
	// and without a flag that gcc 12 does not know, for functions nobody patches.
	err := run("", "make", "-j2", "-C", t.headers(), "M="+dir, "CC=gcc-12", "CONFIG_DEBUG_INFO_BTF_MODULES=", "CONFIG_CC_HAS_MIN_FUNCTION_ALIGNMENT=", "modules")
	if err != nil {
		return "", err
	}
	module := filepath.Join(dir, "rdmasim.ko")
	return module, run("", "strip", "--strip-debug", module)
}
