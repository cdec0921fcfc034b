package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
)

// Blocker is a network namespace that keeps the mode from being changed.
type Blocker struct {
	Namespace string         `json:"namespace"` // as net:[INODE]
	Processes []rdma.Process `json:"processes,omitempty"`
	Mounts    []string       `json:"mounts,omitempty"`
	Files     []rdma.Process `json:"files,omitempty"` // processes that hold it open
}

// Blockers lists the network namespaces besides the caller's.
func Blockers(proc rdma.Proc) ([]Blocker, error) {
	holders, _, err := proc.NamespaceHolders()
	if err != nil {
		return nil, fmt.Errorf("look for network namespaces: %w", err)
	}
	list := []Blocker{}
	for _, h := range holders {
		list = append(list, Blocker{Namespace: h.ID.String(), Processes: h.Processes, Mounts: h.Mounts, Files: h.Files})
	}
	return list, nil
}

// shown is how many holders of one kind a line names.
const shown = 3

// String names what holds the namespace, in one line.
func (b Blocker) String() string {
	var parts []string
	if n := len(b.Processes); n > 0 {
		parts = append(parts, listed(n, func(i int) string { return describe(b.Processes[i]) }))
	}
	if n := len(b.Mounts); n > 0 {
		parts = append(parts, "mount "+listed(n, func(i int) string { return b.Mounts[i] }))
	}
	if n := len(b.Files); n > 0 {
		parts = append(parts, "held open by "+listed(n, func(i int) string { return describe(b.Files[i]) }))
	}
	return b.Namespace + ": " + strings.Join(parts, "; ")
}

// listed joins the first few of n things.
func listed(n int, thing func(i int) string) string {
	var parts []string
	for i := range min(n, shown) {
		parts = append(parts, thing(i))
	}
	if n > shown {
		parts = append(parts, fmt.Sprintf("and %d more", n-shown))
	}
	return strings.Join(parts, ", ")
}

// describe names a process and what it belongs to.
func describe(p rdma.Process) string {
	s := fmt.Sprintf("process %d (%s)", p.PID, p.Command)
	containerID, podUID := p.Container()
	switch base := filepath.Base(p.Cgroup); {
	case podUID != "":
		s += " of pod " + podUID
	case containerID != "":
		s += " of container " + containerID[:12]
	case strings.HasSuffix(base, ".service"):
		s += " of " + base
	}
	return s
}

// KernelRelease is the running kernel's, as uname -r gives it
// (/proc/sys/kernel/osrelease).
func KernelRelease(proc rdma.Proc) (string, error) {
	release, err := os.ReadFile(filepath.Join(string(proc), "sys/kernel/osrelease"))
	if err != nil {
		return "", fmt.Errorf("kernel release: %w", err)
	}
	return strings.TrimSpace(string(release)), nil
}

// RebuildInitramfs is how to put modprobe.d into the initramfs.
const RebuildInitramfs = "rebuild it (update-initramfs -u, dracut -f or mkinitcpio -P)"
