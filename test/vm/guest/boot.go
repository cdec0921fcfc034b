package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// vfsPerPF is what QEMU's igb can have at most; its eighth queue pair is the PF's.
const vfsPerPF = 7

func boot() error {
	for _, step := range []struct {
		name string
		run  func() error
	}{
		{"mounts", mountBase},
		{"modules", loadModules},
		{"late mounts", mountLate},
		{"network", network},
		{"settings", settings},
	} {
		if err := step.run(); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return nil
}

type mount struct{ source, target, fstype, data string }

func mountAll(mounts []mount) error {
	for _, m := range mounts {
		if err := os.MkdirAll(m.target, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.source, m.target, m.fstype, 0, m.data); err != nil {
			return fmt.Errorf("mount %s on %s: %w", m.fstype, m.target, err)
		}
	}
	return nil
}

func mountBase() error {
	return mountAll([]mount{
		{"dev", "/dev", "devtmpfs", "mode=0755"},
		{"proc", "/proc", "proc", ""},
		{"sys", "/sys", "sysfs", ""},
		{"run", "/run", "tmpfs", "mode=0755"},
		{"tmp", "/tmp", "tmpfs", "mode=1777"},
		{"pts", "/dev/pts", "devpts", "ptmxmode=0666"},
		{"shm", "/dev/shm", "tmpfs", "mode=1777"},
		{"cgroup", "/sys/fs/cgroup", "cgroup2", ""},
	})
}

// mountLate mounts what exists only once modules are loaded.
func mountLate() error {
	return mountAll([]mount{
		{"config", "/sys/kernel/config", "configfs", ""},
		{"debug", "/sys/kernel/debug", "debugfs", ""},
	})
}

// loadModules loads /etc/bed-modules: a file and its parameters a line, in
// dependency order.
func loadModules() error {
	list, err := os.ReadFile("/etc/bed-modules")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(list)) {
		file, params, _ := strings.Cut(strings.TrimSpace(line), " ")
		f, err := os.Open(file)
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), params, 0)
		f.Close()
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("load %s: %w", file, err)
		}
	}
	return nil
}

func network() error {
	if err := ip("link", "set", "lo", "up"); err != nil {
		return err
	}
	pfs, err := filepath.Glob("/sys/bus/pci/drivers/igb/0000:*")
	if err != nil {
		return err
	}
	if len(pfs) == 0 {
		return errors.New("no igb function: does this QEMU have the igb device?")
	}
	sort.Strings(pfs)
	for n, pf := range pfs {
		if err := createVFs(n, pf); err != nil {
			return fmt.Errorf("%s: %w", filepath.Base(pf), err)
		}
	}
	return nil
}

// createVFs follows the order of an SR-IOV operator: PF up (a VF set up before
// that never gets a carrier), VFs made without a driver, administrative
// addresses set, and only then the driver bound, which takes the address over.
func createVFs(n int, pf string) error {
	netdev, err := waitNetdev(pf)
	if err != nil {
		return err
	}
	if err := ip("link", "set", netdev, "up"); err != nil {
		return err
	}
	if err := wait("carrier on "+netdev, func() bool {
		text, err := os.ReadFile("/sys/class/net/" + netdev + "/carrier")
		return err == nil && text[0] == '1'
	}); err != nil {
		return err
	}
	if err := write(pf+"/sriov_drivers_autoprobe", "0"); err != nil {
		return err
	}
	if err := write(pf+"/sriov_numvfs", fmt.Sprint(vfsPerPF)); err != nil {
		return err
	}
	for vf := range vfsPerPF {
		mac := fmt.Sprintf("02:be:d0:00:%02x:%02x", n, vf+1)
		if err := ip("link", "set", netdev, "vf", fmt.Sprint(vf), "mac", mac); err != nil {
			return err
		}
	}
	if err := write(pf+"/sriov_drivers_autoprobe", "1"); err != nil {
		return err
	}
	for vf := range vfsPerPF {
		function, err := filepath.EvalSymlinks(fmt.Sprintf("%s/virtfn%d", pf, vf))
		if err != nil {
			return err
		}
		if err := write("/sys/bus/pci/drivers_probe", filepath.Base(function)); err != nil {
			return err
		}
		if _, err := waitNetdev(function); err != nil {
			return err
		}
	}
	return nil
}

// waitNetdev waits for the function's netdev and returns its name.
func waitNetdev(function string) (name string, err error) {
	err = wait("netdev on "+filepath.Base(function), func() bool {
		entries, err := os.ReadDir(function + "/net")
		if err != nil || len(entries) == 0 {
			return false
		}
		name = entries[0].Name()
		return true
	})
	return name, err
}

func wait(what string, there func() bool) error {
	for deadline := time.Now().Add(20 * time.Second); !there(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			return fmt.Errorf("no %s within 20 s", what)
		}
	}
	return nil
}

func settings() error {
	if err := unix.Sethostname([]byte("bed")); err != nil {
		return err
	}
	// Warnings reach the console, so the runner sees them; notices don't.
	if err := write("/proc/sys/kernel/printk", "5"); err != nil {
		return err
	}
	// ip netns needs a shared mount to hand namespaces from one process to the next.
	return unix.Mount("", "/", "", unix.MS_SHARED|unix.MS_REC, "")
}

func ip(args ...string) error {
	cmd := exec.Command("/bin/ip", args...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

func write(file, text string) error {
	return os.WriteFile(file, []byte(text), 0)
}
