package doctor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
)

// Setting is one place that sets the option netns_mode of ib_core.
type Setting struct {
	Source string    `json:"source"` // the file, or "kernel command line"
	Line   int       `json:"line,omitempty"`
	Mode   rdma.Mode `json:"mode"`
}

func (s Setting) String() string {
	if s.Line == 0 {
		return s.Source
	}
	return fmt.Sprintf("%s:%d", s.Source, s.Line)
}

// Persisted is what decides the mode at the next load of ib_core.
type Persisted struct {
	// Files are the settings in modprobe.d in the order that modprobe takes
	// them: the last one counts.
	Files   []Setting `json:"files,omitempty"`
	CmdLine *Setting  `json:"cmdline,omitempty"`
	// BuiltIn: ib_core is part of the kernel and takes options from the kernel
	// command line only.
	BuiltIn   bool      `json:"builtIn"`
	Initramfs Initramfs `json:"initramfs"`
	// Problem says which configuration could not be read.
	Problem string `json:"problem,omitempty"`
}

// kernelDefault is the mode of ib_core without an option.
const kernelDefault = rdma.Shared

// OnDisk is the mode that the files of the root file system and the kernel
// command line ask for, and where; the setting is nil for the kernel's default.
func (p Persisted) OnDisk() (rdma.Mode, *Setting) {
	if n := len(p.Files); n > 0 && !p.BuiltIn {
		return p.Files[n-1].Mode, &p.Files[n-1]
	}
	if p.CmdLine != nil {
		return p.CmdLine.Mode, p.CmdLine
	}
	return kernelDefault, nil
}

// AtBoot is the mode that ib_core gets at the next boot as far as can be told:
// in the initramfs, if it is loaded from there, only the image's own options
// and the kernel command line count.
func (p Persisted) AtBoot() (rdma.Mode, *Setting) {
	if !p.Initramfs.IBCore || p.BuiltIn {
		return p.OnDisk()
	}
	return Persisted{Files: p.Initramfs.Options, CmdLine: p.CmdLine}.OnDisk()
}

// modprobeDirs are where modprobe looks, the first one first: a file there
// hides files of its name in the others.
var modprobeDirs = []string{"etc/modprobe.d", "run/modprobe.d", "usr/local/lib/modprobe.d", "usr/lib/modprobe.d", "lib/modprobe.d"}

// configFile is a file of modprobe.d.
type configFile struct{ path, text string }

// ReadPersisted reads what decides the mode, below root ("" is /), for a
// release of the kernel. cmdline is the kernel's command line.
func ReadPersisted(root, release, cmdline string) Persisted {
	p := Persisted{CmdLine: parseCmdLine(cmdline), Initramfs: readInitramfs(root, release)}
	var files []configFile
	var failures []error
	for _, dir := range modprobeDirs {
		list, err := os.ReadDir(filepath.Join("/", root, dir))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			failures = append(failures, err)
		}
		for _, e := range list {
			path := filepath.Join("/", dir, e.Name())
			if !strings.HasSuffix(path, ".conf") {
				continue
			}
			text, err := os.ReadFile(filepath.Join("/", root, path))
			if err != nil {
				failures = append(failures, err)
				continue
			}
			files = append(files, configFile{path: path, text: string(text)})
		}
	}
	p.Files = settingsOf(files)
	if builtin, err := os.ReadFile(filepath.Join("/", root, "lib/modules", release, "modules.builtin")); err == nil {
		for line := range strings.Lines(string(builtin)) {
			p.BuiltIn = p.BuiltIn || isIBCore(strings.TrimSpace(line))
		}
	}
	if err := errors.Join(failures...); err != nil {
		p.Problem = err.Error()
	}
	return p
}

// settingsOf reads files in modprobe's order: by their base names, of which the
// first directory's counts.
func settingsOf(files []configFile) []Setting {
	seen := map[string]bool{}
	files = slices.DeleteFunc(slices.Clone(files), func(f configFile) bool {
		base := filepath.Base(f.path)
		hidden := seen[base]
		seen[base] = true
		return hidden
	})
	slices.SortFunc(files, func(a, b configFile) int {
		return strings.Compare(filepath.Base(a.path), filepath.Base(b.path))
	})
	var settings []Setting
	for _, f := range files {
		settings = append(settings, parseModprobe(f.path, f.text)...)
	}
	return settings
}

// parseModprobe reads the lines "options ib_core ... netns_mode=V ..." of a
// file in modprobe.d(5). A line can go on after a backslash.
func parseModprobe(path, text string) []Setting {
	var settings []Setting
	joined, start := "", 1
	for i, line := range strings.Split(text, "\n") {
		if joined == "" {
			start = i + 1
		}
		if rest, ok := strings.CutSuffix(line, "\\"); ok {
			joined += rest + " "
			continue
		}
		words := strings.Fields(joined + line)
		joined = ""
		if len(words) < 3 || words[0] != "options" || strings.ReplaceAll(words[1], "-", "_") != "ib_core" {
			continue
		}
		for _, w := range words[2:] {
			if mode, ok := parseOption(w, "netns_mode="); ok {
				settings = append(settings, Setting{Source: path, Line: start, Mode: mode})
			}
		}
	}
	return settings
}

func parseCmdLine(cmdline string) *Setting {
	var found *Setting
	for _, w := range strings.Fields(cmdline) {
		name, _, _ := strings.Cut(w, ".")
		rest := strings.TrimPrefix(w, name+".")
		if strings.ReplaceAll(name, "-", "_") != "ib_core" {
			continue
		}
		if mode, ok := parseOption(rest, "netns_mode="); ok {
			found = &Setting{Source: "kernel command line", Mode: mode}
		}
	}
	return found
}

// parseOption reads a value as the kernel reads a bool: its first letter
// counts, true is shared.
func parseOption(word, name string) (rdma.Mode, bool) {
	value, ok := strings.CutPrefix(strings.ReplaceAll(word, "-", "_"), name)
	if !ok || value == "" {
		return 0, false
	}
	switch {
	case strings.ContainsRune("yYtT1", rune(value[0])), strings.EqualFold(value, "on"):
		return rdma.Shared, true
	case strings.ContainsRune("nNfF0", rune(value[0])), strings.EqualFold(value, "off"):
		return rdma.Exclusive, true
	}
	return 0, false
}
