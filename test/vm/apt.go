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

// update writes the private sources file and fetches the lists.
func (a apt) update(suites []string) error {
	list, err := privateSources(suites)
	if err != nil {
		return err
	}
	for _, d := range []string{"lists/partial", "archives/partial"} {
		if err := os.MkdirAll(filepath.Join(a.dir, d), 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(a.dir, "sources.list"), list, 0o644); err != nil {
		return err
	}
	return run("", asRoot("apt-get", append(a.options(), "update")...)...)
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

// depends names what a package of a suite depends on; the suite picks its version.
func (a apt) depends(suite, pkg string) ([]string, error) {
	version, err := a.candidate(suite, pkg)
	if err != nil {
		return nil, err
	}
	text, err := exec.Command("apt-cache", append(a.private(), "show", pkg+"="+version)...).Output()
	if err != nil {
		return nil, fmt.Errorf("apt-cache show %s=%s: %w", pkg, version, err)
	}
	var names []string
	for line := range strings.Lines(string(text)) {
		list, ok := strings.CutPrefix(line, "Depends:")
		if !ok {
			continue
		}
		for dep := range strings.SplitSeq(list, ",") {
			name, _, _ := strings.Cut(strings.TrimSpace(dep), " ")
			names = append(names, name)
		}
	}
	return names, nil
}

// candidate is the newest version of a package that the suite (or its security
// suite) would install.
func (a apt) candidate(suite, pkg string) (string, error) {
	args := slices.Concat(a.options(), target(suite), []string{"-s", "install", pkg})
	out, err := exec.Command("apt-get", args...).CombinedOutput()
	// Inst NAME [INSTALLED] (VERSION ARCHIVES [ARCH])
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) > 2 && f[0] == "Inst" && f[1] == pkg {
			_, version, _ := strings.Cut(line, "(")
			return strings.Fields(version)[0], nil
		}
	}
	if installed, qerr := exec.Command("dpkg-query", "-W", "-f", "${Version}", pkg).Output(); err == nil && qerr == nil {
		return string(installed), nil
	}
	return "", fmt.Errorf("%s is not in suite %s of this machine's Debian mirror: %w\n%s", pkg, suite, err, out)
}

// privateSources is the machine's own Debian sources plus the suites named, on
// the same mirror with the same key.
func privateSources(suites []string) ([]byte, error) {
	all, err := machineSources()
	if err != nil {
		return nil, err
	}
	codename, err := debianCodename()
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	var mirror *source
	for _, s := range all {
		if !strings.HasPrefix(s.suite, codename) || !slices.Contains(s.components, "main") {
			continue
		}
		if s.suite == codename {
			mirror = &s
		}
		writeSource(&b, s)
	}
	if mirror == nil {
		return nil, fmt.Errorf("no apt source of this machine has suite %q with component main; the test bed takes QEMU and kernels from the Debian mirror named there", codename)
	}
	for _, suite := range suites {
		if !bytes.Contains(b.Bytes(), []byte(" "+suite+" ")) {
			writeSource(&b, source{uri: mirror.uri, suite: suite, signedBy: mirror.signedBy})
		}
	}
	return b.Bytes(), nil
}

func writeSource(w io.Writer, s source) {
	options := ""
	if s.signedBy != "" {
		options = "[signed-by=" + s.signedBy + "] "
	}
	fmt.Fprintf(w, "deb %s%s %s main\n", options, s.uri, s.suite)
}

func debianCodename() (string, error) {
	text, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return "", err
	}
	fields := map[string]string{}
	for line := range strings.Lines(string(text)) {
		k, v, _ := strings.Cut(strings.TrimSpace(line), "=")
		fields[k] = strings.Trim(v, `"`)
	}
	if fields["ID"] != "debian" || fields["VERSION_CODENAME"] != stable {
		return "", fmt.Errorf("the test bed is made for Debian 12 (bookworm); this is %s", fields["PRETTY_NAME"])
	}
	return fields["VERSION_CODENAME"], nil
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
