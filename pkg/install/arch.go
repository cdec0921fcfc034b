package install

import (
	"debug/buildinfo"
	"debug/elf"
	"fmt"
	"io"
	"os"
)

// module is that of this project's programs.
const module = "github.com/rdma-cni/rdma-cni"

// Arch is what a program is built for, as its ELF header says. ppc64 and
// ppc64le differ in their byte order only.
type Arch struct {
	Class   elf.Class
	Data    elf.Data
	Machine elf.Machine
}

func (a Arch) String() string {
	s := a.Machine.String()
	if a.Class == elf.ELFCLASS32 {
		s += " (32 bit)"
	}
	if a.Machine == elf.EM_PPC64 {
		s += " (" + map[elf.Data]string{elf.ELFDATA2LSB: "little", elf.ELFDATA2MSB: "big"}[a.Data] + " endian)"
	}
	return s
}

// ArchOf reads what a program file is built for.
func ArchOf(path string) (Arch, error) {
	f, err := os.Open(path)
	if err != nil {
		return Arch{}, err
	}
	defer func() { _ = f.Close() }()
	return archOf(f)
}

func archOf(r io.ReaderAt) (Arch, error) {
	f, err := elf.NewFile(r)
	if err != nil {
		return Arch{}, err
	}
	return Arch{f.Class, f.Data, f.Machine}, nil
}

// HostArch is what this program is built for. It runs here, so the plugin has
// to be built for the same.
func HostArch() (Arch, error) {
	a, err := ArchOf("/proc/self/exe")
	if err != nil {
		return a, fmt.Errorf("find out this node's architecture: %w", err)
	}
	return a, nil
}

// IsOurs tells whether a program is one of this project, of any version.
func IsOurs(path string) bool {
	info, err := buildinfo.ReadFile(path)
	return err == nil && info.Main.Path == module
}
