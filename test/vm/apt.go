package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// source is one entry of the machine's apt sources.
type source struct {
	uri, suite, signedBy string
	components           []string
}

// stable is the suite of the machine itself. Its updates and security suites
// count as the same: no -t, which would prefer the suite of exactly that name.
const stable = "bookworm"

// stableSuites are not -backports: each row of the kernel table asks for its own.
var stableSuites = []string{stable, stable + "-updates", stable + "-security"}

func target(suite string) []string {
	if suite == stable {
		return nil
	}
	return []string{"-t", suite}
}

// apt runs apt-get with sources, lists and cache of its own, so that the
// backports it needs never become part of the machine's configuration. The
// package database is the machine's.
type apt struct {
	dir string
}

func (a apt) options() []string {
	return append([]string{"-q", "-y", "--no-install-recommends"}, a.private()...)
}

func (a apt) private() []string {
	return []string{
		"-o", "Dir::Etc::SourceList=" + a.dir + "/sources.list",
		"-o", "Dir::Etc::SourceParts=/dev/null",
		"-o", "Dir::State::Lists=" + a.dir + "/lists",
		"-o", "Dir::Cache=" + a.dir,
		"-o", "APT::Sandbox::User=root", // the folder may be closed to _apt
	}
}

// update fetches the lists of the machine's own suites and of those named.
func (a apt) update(suites []string) error {
	own, mirror, err := debianSources()
	if err != nil {
		return err
	}
	for _, suite := range suites {
		own = append(own, source{uri: mirror.uri, suite: suite, signedBy: mirror.signedBy})
	}
	return a.fetchLists(own)
}

// updateOnly fetches the lists of one suite of the machine's mirror and no other.
func (a apt) updateOnly(suite string) error {
	_, mirror, err := debianSources()
	if err != nil {
		return err
	}
	mirror.suite = suite
	return a.fetchLists([]source{mirror})
}

func (a apt) fetchLists(sources []source) error {
	for _, d := range []string{"lists/partial", "archives/partial"} {
		if err := os.MkdirAll(filepath.Join(a.dir, d), 0o755); err != nil {
			return err
		}
	}
	var list bytes.Buffer
	for _, s := range sources {
		options := ""
		if s.signedBy != "" {
			options = "[signed-by=" + s.signedBy + "] "
		}
		fmt.Fprintf(&list, "deb %s%s %s main\n", options, s.uri, s.suite)
	}
	if err := os.WriteFile(filepath.Join(a.dir, "sources.list"), list.Bytes(), 0o644); err != nil {
		return err
	}
	return run("", append(append([]string{"apt-get"}, a.options()...), "update")...)
}

// install installs packages on the machine, from the suite if it has them.
func (a apt) install(suite string, packages ...string) error {
	logf("installing on this machine: %s", strings.Join(packages, " "))
	args := slices.Concat([]string{"DEBIAN_FRONTEND=noninteractive", "apt-get"}, a.options(), target(suite), []string{"install"}, packages)
	return run("", asRoot("env", args...)...)
}

// download fetches packages into dir without installing them.
func (a apt) download(dir string, packages ...string) error {
	logf("fetching %s", strings.Join(packages, " "))
	return run(dir, slices.Concat([]string{"apt-get"}, a.options(), []string{"download"}, packages)...)
}

// release is one version of a package and what it depends on.
type release struct {
	version string
	depends []string
}

// releases lists a package's versions in all suites, apt's preferred ones first.
func (a apt) releases(pkg string) ([]release, error) {
	text, err := exec.Command("apt-cache", append(a.private(), "show", pkg)...).Output()
	if err != nil {
		return nil, fmt.Errorf("apt-cache show %s: %w; is this machine's Debian mirror complete?", pkg, err)
	}
	var all []release
	for stanza := range strings.SplitSeq(string(text), "\n\n") {
		var r release
		for line := range strings.Lines(stanza) {
			key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
			switch key {
			case "Version":
				r.version = value
			case "Depends":
				r.depends = packageNames(value)
			}
		}
		if r.version != "" {
			all = append(all, r)
		}
	}
	return all, nil
}

// packageNames reads a dependency list; of alternatives it takes the first.
func packageNames(list string) []string {
	var names []string
	for dep := range strings.SplitSeq(list, ",") {
		if f := strings.Fields(dep); len(f) > 0 {
			names = append(names, f[0])
		}
	}
	return names
}

// debianSources finds the machine's own Debian suites among its apt sources, and
// the entry that names its mirror.
func debianSources() (own []source, mirror source, err error) {
	if err := checkDebian(); err != nil {
		return nil, mirror, err
	}
	all, err := machineSources()
	if err != nil {
		return nil, mirror, err
	}
	for _, s := range all {
		if !slices.Contains(s.components, "main") || !slices.Contains(stableSuites, s.suite) {
			continue
		}
		own = append(own, s)
		if s.suite == stable {
			mirror = s
		}
	}
	if mirror.uri == "" {
		return nil, mirror, fmt.Errorf("no apt source of this machine has suite %q with component main; the test bed takes QEMU and kernels from the Debian mirror named there", stable)
	}
	return own, mirror, nil
}

func checkDebian() error {
	text, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return err
	}
	fields := map[string]string{}
	for line := range strings.Lines(string(text)) {
		k, v, _ := strings.Cut(strings.TrimSpace(line), "=")
		fields[k] = strings.Trim(v, `"`)
	}
	if fields["ID"] != "debian" || fields["VERSION_CODENAME"] != stable {
		return fmt.Errorf("the test bed is made for Debian 12 (%s); this is %s", stable, fields["PRETTY_NAME"])
	}
	return nil
}

// machineSources reads the machine's apt sources in both formats.
func machineSources() ([]source, error) {
	var all []source
	lists, _ := filepath.Glob("/etc/apt/sources.list.d/*.list")
	for _, file := range append([]string{"/etc/apt/sources.list"}, lists...) {
		f, err := os.Open(file)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		all = append(all, parseOneLine(f)...)
		f.Close()
	}
	stanzas, _ := filepath.Glob("/etc/apt/sources.list.d/*.sources")
	for _, file := range stanzas {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		all = append(all, parseDeb822(f)...)
		f.Close()
	}
	return all, nil
}

// parseOneLine reads `deb [option=value ...] URI SUITE COMPONENT...`.
func parseOneLine(r io.Reader) []source {
	var all []source
	for scan := bufio.NewScanner(r); scan.Scan(); {
		line, _, _ := strings.Cut(scan.Text(), "#")
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), "deb ")
		if !ok {
			continue
		}
		var s source
		if rest = strings.TrimSpace(rest); strings.HasPrefix(rest, "[") {
			options, after, _ := strings.Cut(rest[1:], "]")
			for _, o := range strings.Fields(options) {
				if v, ok := strings.CutPrefix(o, "signed-by="); ok {
					s.signedBy = v
				}
			}
			rest = after
		}
		f := strings.Fields(rest)
		if len(f) < 3 {
			continue
		}
		s.uri, s.suite, s.components = f[0], f[1], f[2:]
		all = append(all, s)
	}
	return all
}

// parseDeb822 reads stanzas of Types, URIs, Suites, Components, Signed-By. A
// key given inline, over several lines, is left out: apt then uses its keyring.
func parseDeb822(r io.Reader) []source {
	text, err := io.ReadAll(r)
	if err != nil {
		return nil
	}
	var all []source
	for stanza := range strings.SplitSeq(string(text), "\n\n") {
		fields := map[string]string{}
		for line := range strings.Lines(stanza) {
			if strings.HasPrefix(line, "#") || strings.HasPrefix(line, " ") {
				continue
			}
			if k, v, ok := strings.Cut(line, ":"); ok {
				fields[strings.ToLower(k)] = strings.TrimSpace(v)
			}
		}
		if !slices.Contains(strings.Fields(fields["types"]), "deb") || fields["enabled"] == "no" {
			continue
		}
		for _, uri := range strings.Fields(fields["uris"]) {
			for _, suite := range strings.Fields(fields["suites"]) {
				all = append(all, source{uri: uri, suite: suite, signedBy: fields["signed-by"], components: strings.Fields(fields["components"])})
			}
		}
	}
	return all
}
