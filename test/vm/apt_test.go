package main

import (
	"reflect"
	"strings"
	"testing"
)

func TestParseOneLine(t *testing.T) {
	const text = `# deb http://commented/ bookworm main
deb http://mirror/debian bookworm main contrib # mine
deb [arch=amd64 signed-by=/k.gpg] http://mirror/debian bookworm-updates main
deb-src http://mirror/debian bookworm main
deb http://flat/ ./
`
	want := []source{
		{uri: "http://mirror/debian", suite: "bookworm", components: []string{"main", "contrib"}},
		{uri: "http://mirror/debian", suite: "bookworm-updates", signedBy: "/k.gpg", components: []string{"main"}},
	}
	if got := parseOneLine(strings.NewReader(text)); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestParseDeb822(t *testing.T) {
	const text = `Types: deb deb-src
# a comment
URIs: http://mirror/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /k.gpg

Types: deb
URIs: http://off/
Suites: bookworm
Components: main
Enabled: no

Types: deb-src
URIs: http://src/
Suites: bookworm
Components: main
`
	want := []source{
		{uri: "http://mirror/debian", suite: "bookworm", signedBy: "/k.gpg", components: []string{"main"}},
		{uri: "http://mirror/debian", suite: "bookworm-updates", signedBy: "/k.gpg", components: []string{"main"}},
	}
	if got := parseDeb822(strings.NewReader(text)); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestPackageNames(t *testing.T) {
	got := packageNames("linux-base, dracut | initramfs-tools (>= 0.120), linux-modules-7.3 (= 7.3.4-1)")
	want := []string{"linux-base", "dracut", "linux-modules-7.3"}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
