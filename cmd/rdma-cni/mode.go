package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/doctor"
	"github.com/rdma-cni/rdma-cni/pkg/rdma"
)

// modeFile is the one file that is ever written. Its name sorts last, so that
// it counts against whatever others say.
const modeFile = "/etc/modprobe.d/zz-rdma-cni.conf"

func (a *app) modeCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "mode",
		Short: "Show or set the node's RDMA namespace mode",
		Long: `mode shows how RDMA devices relate to network namespaces: "exclusive" (a device is
in one namespace, and can be moved into a pod) or "shared" (all devices are usable
everywhere, and none can be moved). It shows the live mode, what decides it at the
next boot, and what keeps it from being changed now: the kernel changes it only
while no network namespace but the initial one exists.
` + exitCodes,
	}
	cmd.AddCommand(a.modeSetCommand())
	return a.does(cmd, func(*cobra.Command, []string) error {
		s, err := a.modeStatus()
		if err != nil {
			return err
		}
		return a.print(s, func(w io.Writer) { a.modeTable(w, s) })
	})
}

// modeStatus is the schema of mode's output.
type modeStatus struct {
	Live      string           `json:"live"` // exclusive, shared, or "" if there is none
	Problem   string           `json:"problem,omitempty"`
	AtBoot    string           `json:"atBoot"`
	AtBootBy  string           `json:"atBootBy"` // the setting that decides, or "kernel default"
	Persisted doctor.Persisted `json:"persisted"`
	Blockers  []doctor.Blocker `json:"blockers"` // of a change
}

func (a *app) modeStatus() (modeStatus, error) {
	var s modeStatus
	mode, err := liveMode()
	switch {
	case errors.Is(err, rdma.ErrNoSubsystem), errors.Is(err, unix.EINVAL):
		s.Problem = err.Error()
	case err != nil:
		return s, err
	default:
		s.Live = mode.String()
	}
	s.Persisted, err = a.persisted()
	if err != nil {
		return s, err
	}
	boot, by := s.Persisted.AtBoot()
	s.AtBoot, s.AtBootBy = boot.String(), decidedBy(by)
	s.Blockers, err = doctor.Blockers(a.proc)
	return s, err
}

func decidedBy(by *doctor.Setting) string {
	if by == nil {
		return "kernel default"
	}
	return by.String()
}

func liveMode() (rdma.Mode, error) {
	conn, err := rdma.Open()
	if err != nil {
		return 0, err
	}
	mode, err := conn.Mode()
	return mode, errors.Join(err, conn.Close())
}

func (a *app) persisted() (doctor.Persisted, error) {
	release, err := doctor.KernelRelease(a.proc)
	if err != nil {
		return doctor.Persisted{}, err
	}
	cmdline, err := os.ReadFile(filepath.Join(string(a.proc), "cmdline"))
	if err != nil {
		return doctor.Persisted{}, err
	}
	return doctor.ReadPersisted(a.root, release, string(cmdline)), nil
}

func (a *app) modeTable(w io.Writer, s modeStatus) {
	live := s.Live
	if live == "" {
		live = "none: " + s.Problem
	}
	_, _ = fmt.Fprintf(w, "live mode:     %s\n", live)
	_, _ = fmt.Fprintf(w, "at next boot:  %s (%s)\n", s.AtBoot, s.AtBootBy)
	if disk, by := s.Persisted.OnDisk(); disk.String() != s.AtBoot {
		_, _ = fmt.Fprintf(w, "on disk:       %s (%s), but ib_core is in the initramfs %s without that option: %s\n",
			disk, decidedBy(by), s.Persisted.Initramfs.Path, doctor.RebuildInitramfs)
	}
	if s.Persisted.Initramfs.Problem != "" {
		_, _ = fmt.Fprintf(w, "initramfs:     not examined: %s\n", s.Persisted.Initramfs.Problem)
	}
	if len(s.Blockers) == 0 {
		_, _ = fmt.Fprintln(w, "change now:    possible, no other network namespace is in sight")
		return
	}
	_, _ = fmt.Fprintf(w, "change now:    blocked by %d network namespaces\n", len(s.Blockers))
	for _, b := range s.Blockers {
		_, _ = fmt.Fprintf(w, "  %s\n", b)
	}
}

// modeResult is the schema of mode set's output.
type modeResult struct {
	Wanted   string           `json:"wanted"`
	Live     string           `json:"live"`
	Changed  bool             `json:"changed"`           // the live mode, by this call
	Written  string           `json:"written,omitempty"` // the file, by this call
	AtBoot   string           `json:"atBoot"`
	Outcome  string           `json:"outcome"` // ok, reboot needed, impossible
	Steps    []string         `json:"steps,omitempty"`
	Blockers []doctor.Blocker `json:"blockers,omitempty"`
	DryRun   bool             `json:"dryRun"`
}

// Outcomes of mode set.
const (
	outcomeOK         = "ok"
	outcomeReboot     = "reboot needed"
	outcomeImpossible = "impossible"
)

func (a *app) modeSetCommand() *cobra.Command {
	var persist, dryRun bool
	cmd := &cobra.Command{
		Use:   "set exclusive|shared",
		Short: "Set the node's RDMA namespace mode",
		Long: `set changes the live mode if the kernel allows it, and says exactly what blocks it
if not. With --persist it also makes the mode last: it writes ` + modeFile + `
if, and only if, the configuration says otherwise. It never reboots and never
rebuilds an initramfs, but says when that is needed.

Exit codes: 0 the live mode is as asked (and lasts, with --persist), 1 something
failed, 2 the command line is wrong, 3 reboot needed: the mode is persisted, but
holds only after what is listed (a rebuilt initramfs, a reboot), 4 impossible: the
live mode cannot be changed now and was not persisted.`,
		Example: `  rdma-cni mode set exclusive --persist
  rdma-cni mode set exclusive --dry-run`,
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		ValidArgs: []string{rdma.Exclusive.String(), rdma.Shared.String()},
	}
	cmd.Flags().BoolVar(&persist, "persist", false, "make the mode last over reboots")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "change nothing; say what would happen")
	return a.does(cmd, func(_ *cobra.Command, args []string) error {
		want, err := rdma.ParseMode(args[0])
		if err != nil {
			return err
		}
		return a.setMode(want, persist, dryRun)
	})
}

// busyWait is how long a busy answer may be due to namespaces that are being
// torn down, which takes milliseconds.
const busyWait = 2 * time.Second

func (a *app) setMode(want rdma.Mode, persist, dryRun bool) error {
	r := modeResult{Wanted: want.String(), DryRun: dryRun}
	liveErr := a.setLive(want, dryRun, &r)
	impossible := liveErr != nil && (errors.Is(liveErr, unix.EBUSY) || errors.Is(liveErr, rdma.ErrNoSubsystem) || errors.Is(liveErr, unix.EINVAL))
	if liveErr != nil && !impossible {
		return liveErr
	}
	if persist {
		if err := a.persist(want, dryRun, &r); err != nil {
			return err
		}
	}
	p, err := a.persisted()
	if err != nil {
		return err
	}
	boot, _ := p.AtBoot()
	if dryRun && r.Written != "" && !p.Initramfs.IBCore {
		boot = want
	}
	r.AtBoot = boot.String()
	trap := persist && p.Initramfs.IBCore && boot != want
	if trap {
		r.Steps = append(r.Steps, "the initramfs "+p.Initramfs.Path+" holds ib_core without this option: "+doctor.RebuildInitramfs)
	}
	if persist && p.Initramfs.Problem != "" {
		r.Steps = append(r.Steps, "the initramfs could not be examined ("+p.Initramfs.Problem+"); if ib_core is loaded from there: "+doctor.RebuildInitramfs)
	}
	if persist && p.BuiltIn && boot != want {
		r.Steps = append(r.Steps, fmt.Sprintf("ib_core is built into this kernel: put ib_core.netns_mode=%d on the kernel command line", uint8(want)))
	}
	switch {
	case liveErr == nil && persist && boot != want:
		r.Outcome = outcomeReboot
	case liveErr == nil:
		r.Outcome = outcomeOK
	case errors.Is(liveErr, rdma.ErrNoSubsystem) && persist && !trap:
		r.Outcome = outcomeOK
		r.Steps = append(r.Steps, "ib_core is not loaded; the mode holds as soon as it is (modprobe ib_core)")
	case persist && !errors.Is(liveErr, unix.EINVAL):
		r.Outcome = outcomeReboot
		r.Steps = append(r.Steps, "reboot this node")
	default:
		r.Outcome = outcomeImpossible
	}
	if err := a.print(r, func(w io.Writer) { a.modeResultTable(w, r) }); err != nil {
		return err
	}
	switch r.Outcome {
	case outcomeReboot:
		return &exitError{code: codeReboot, told: true, err: errors.Join(errors.New("more is to do before the mode lasts"), liveErr)}
	case outcomeImpossible:
		err := fmt.Errorf("the mode cannot be set to %s now: %w; with --persist it is written down for the next boot", want, liveErr)
		return &exitError{code: codeImpossible, err: err}
	}
	return nil
}

// setLive changes the kernel's mode. In a dry run the namespaces in sight say
// whether that would work.
func (a *app) setLive(want rdma.Mode, dryRun bool, r *modeResult) error {
	conn, err := rdma.Open()
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	mode, err := conn.Mode()
	if err != nil {
		return err
	}
	r.Live = mode.String()
	if mode == want {
		return nil
	}
	if dryRun {
		if r.Blockers, err = doctor.Blockers(a.proc); err != nil || len(r.Blockers) == 0 {
			return err
		}
		return fmt.Errorf("%d other network namespaces exist: %w", len(r.Blockers), unix.EBUSY)
	}
	for end := time.Now().Add(busyWait); ; time.Sleep(20 * time.Millisecond) {
		err = conn.SetMode(want)
		if err == nil || !errors.Is(err, unix.EBUSY) {
			break
		}
		blockers, blockersErr := doctor.Blockers(a.proc)
		if blockersErr != nil {
			return errors.Join(err, blockersErr)
		}
		if r.Blockers = blockers; len(blockers) > 0 || time.Now().After(end) {
			return err
		}
	}
	if err != nil {
		return err
	}
	if mode, err = conn.Mode(); err != nil {
		return err
	}
	if r.Live = mode.String(); mode != want {
		return fmt.Errorf("the kernel accepted the mode %s, but still has %s", want, mode)
	}
	r.Changed, r.Blockers = true, nil
	return nil
}

// persist writes the mode down if the configuration says otherwise.
func (a *app) persist(want rdma.Mode, dryRun bool, r *modeResult) error {
	p, err := a.persisted()
	if err != nil {
		return err
	}
	if p.Problem != "" {
		return fmt.Errorf("not persisted, since the present configuration cannot be read: %s", p.Problem)
	}
	if mode, _ := p.OnDisk(); mode == want || p.BuiltIn {
		return nil
	}
	r.Written = modeFile
	if dryRun {
		return nil
	}
	text := fmt.Sprintf("# Written by rdma-cni mode set %s --persist. Each RDMA device is in one network\n# namespace if 0, usable from all if 1.\noptions ib_core netns_mode=%d\n", want, uint8(want))
	return writeFile(filepath.Join("/", a.root, modeFile), []byte(text))
}

// writeFile writes a configuration file: it is there whole or as it was before.
func writeFile(path string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".rdma-cni-")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(0o644), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", path, err), os.Remove(f.Name()))
	}
	return nil
}

func (a *app) modeResultTable(w io.Writer, r modeResult) {
	would := ""
	if r.DryRun {
		would = "would be "
	}
	live := r.Live
	if live == "" {
		live = "none"
	}
	_, _ = fmt.Fprintf(w, "live mode:     %s\n", live)
	if r.Changed {
		_, _ = fmt.Fprintln(w, "               changed just now")
	}
	if r.Written != "" {
		_, _ = fmt.Fprintf(w, "%swritten: %s\n", would, r.Written)
	}
	_, _ = fmt.Fprintf(w, "at next boot:  %s\n", r.AtBoot)
	_, _ = fmt.Fprintf(w, "outcome:       %s%s\n", would, r.Outcome)
	for _, s := range r.Steps {
		_, _ = fmt.Fprintf(w, "to do:         %s\n", s)
	}
	for _, b := range r.Blockers {
		_, _ = fmt.Fprintf(w, "blocked by:    %s\n", b)
	}
}
