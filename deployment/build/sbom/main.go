// Command sbom writes a software bill of materials (CycloneDX JSON) of Go
// programs, from what the linker wrote into them:
//
//	sbom NAME VERSION EPOCH PROGRAM... >FILE
//
// NAME and VERSION are those of the release that contains the programs, EPOCH
// is its time in seconds. The same programs give the same bytes.
package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/CycloneDX/cyclonedx-go"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintf(os.Stderr, "sbom: %v\n", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	if len(args) < 4 {
		return fmt.Errorf("usage: sbom NAME VERSION EPOCH PROGRAM")
	}
	epoch, err := strconv.ParseInt(args[2], 10, 64)
	if err != nil {
		return fmt.Errorf("the time of the release: %w", err)
	}
	bom := cyclonedx.NewBOM()
	release := cyclonedx.Component{BOMRef: args[0], Type: cyclonedx.ComponentTypeApplication, Name: args[0], Version: args[1]}
	bom.Metadata = &cyclonedx.Metadata{Timestamp: time.Unix(epoch, 0).UTC().Format(time.RFC3339), Component: &release}

	var programs []cyclonedx.Component
	var names []string
	modules := map[string]cyclonedx.Component{}
	var dependencies []cyclonedx.Dependency
	for _, path := range args[3:] {
		program, used, err := examine(path, args[1])
		if err != nil {
			return err
		}
		programs = append(programs, program)
		names = append(names, program.BOMRef)
		refs := slices.Sorted(maps.Keys(used))
		dependencies = append(dependencies, cyclonedx.Dependency{Ref: program.BOMRef, Dependencies: &refs})
		maps.Copy(modules, used)
	}
	components := programs
	for _, ref := range slices.Sorted(maps.Keys(modules)) {
		components = append(components, modules[ref])
	}
	dependencies = append([]cyclonedx.Dependency{{Ref: release.BOMRef, Dependencies: &names}}, dependencies...)
	bom.Components, bom.Dependencies = &components, &dependencies
	return cyclonedx.NewBOMEncoder(out, cyclonedx.BOMFileFormatJSON).SetPretty(true).Encode(bom)
}

// examine describes a program and the modules in it, by reference.
func examine(path, version string) (cyclonedx.Component, map[string]cyclonedx.Component, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return cyclonedx.Component{}, nil, err
	}
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return cyclonedx.Component{}, nil, fmt.Errorf("%s: %w", path, err)
	}
	sum := sha256.Sum256(data)
	program := cyclonedx.Component{
		BOMRef: "program:" + filepath.Base(path), Type: cyclonedx.ComponentTypeApplication, Name: filepath.Base(path), Version: version,
		Hashes: hashes(hex.EncodeToString(sum[:])),
	}
	used := map[string]cyclonedx.Component{}
	for _, m := range append(info.Deps, &debug.Module{Path: "std", Version: strings.TrimPrefix(info.GoVersion, "go")}) {
		if m.Replace != nil {
			m = m.Replace
		}
		c, err := component(m)
		if err != nil {
			return program, nil, fmt.Errorf("%s: %w", path, err)
		}
		used[c.BOMRef] = c
	}
	return program, used, nil
}

func component(m *debug.Module) (cyclonedx.Component, error) {
	purl := "pkg:golang/" + m.Path + "@" + m.Version
	c := cyclonedx.Component{BOMRef: purl, Type: cyclonedx.ComponentTypeLibrary, Name: m.Path, Version: m.Version, PackageURL: purl}
	if sum, ok := strings.CutPrefix(m.Sum, "h1:"); ok { // SHA-256 over the module's files
		raw, err := base64.StdEncoding.DecodeString(sum)
		if err != nil {
			return c, fmt.Errorf("the sum of module %s: %w", m.Path, err)
		}
		c.Hashes = hashes(hex.EncodeToString(raw))
	}
	return c, nil
}

func hashes(sha256 string) *[]cyclonedx.Hash {
	return &[]cyclonedx.Hash{{Algorithm: cyclonedx.HashAlgoSHA256, Value: sha256}}
}
