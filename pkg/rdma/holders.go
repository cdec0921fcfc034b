package rdma

import (
	"cmp"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Process is a process as /proc shows it.
type Process struct {
	PID     int    `json:"pid"`
	Command string `json:"command"` // the file "comm", at most 15 characters
	// Cgroup is its control group's path, which names the container and the
	// systemd service that it belongs to.
	Cgroup string `json:"cgroup,omitempty"`
}

// Holders is what keeps a network namespace alive, as far as paths show.
// Sockets and the kernel itself can hold one too; they do not show.
type Holders struct {
	ID        NamespaceID `json:"id"`
	Processes []Process   `json:"processes,omitempty"` // that run in it
	Mounts    []string    `json:"mounts,omitempty"`    // paths that it is bound to
	// Files are the processes that hold it open without running in it.
	Files []Process `json:"files,omitempty"`
}

// Proc is a mounted procfs. Tests read a tree of their own.
type Proc string

// DefaultProc is where procfs is mounted.
const DefaultProc Proc = "/proc"

// NamespaceHolders lists the network namespaces besides that of the caller, by
// their number, each with what holds it. hidden is how many processes could not
// be looked at, which is none for root. Nothing but namespaces is opened,
// so that the look has no effect on anything; a namespace that comes or goes
// meanwhile can be missed.
func (proc Proc) NamespaceHolders() (list []Holders, hidden int, err error) {
	own, err := namespaceLink(proc.path("thread-self/ns/net"))
	if err != nil {
		return nil, 0, err
	}
	processes, err := proc.Processes()
	if err != nil {
		return nil, 0, err
	}
	h := holding{byInode: map[uint64]*Holders{}, own: own}
	var st unix.Stat_t
	if err := unix.Stat(proc.path("thread-self/ns/net"), &st); err == nil {
		h.dev = st.Dev
	}
	if mounts, err := os.Open(proc.path("self/mountinfo")); err == nil {
		for inode, path := range namespaceMountInodes(mounts) {
			for _, p := range path {
				if n := h.of(inode); n != nil {
					n.Mounts = append(n.Mounts, p)
				}
			}
		}
		_ = mounts.Close()
	}
	for _, p := range processes {
		inode, err := namespaceLink(proc.path(strconv.Itoa(p.PID), "ns/net"))
		if err != nil {
			if errors.Is(err, os.ErrPermission) {
				hidden++
			}
			continue
		}
		if n := h.of(inode); n != nil {
			n.Processes = append(n.Processes, p)
		}
		proc.openNamespaces(p, inode, &h)
	}
	for _, n := range h.byInode {
		slices.Sort(n.Mounts)
		n.Mounts = slices.Compact(n.Mounts)
		list = append(list, *n)
	}
	slices.SortFunc(list, func(a, b Holders) int { return cmp.Compare(a.ID.Inode, b.ID.Inode) })
	return list, hidden, nil
}

type holding struct {
	byInode map[uint64]*Holders
	own     uint64
	dev     uint64
}

// of gives the entry of a namespace, nil for the caller's own.
func (h *holding) of(inode uint64) *Holders {
	if inode == h.own {
		return nil
	}
	n := h.byInode[inode]
	if n == nil {
		n = &Holders{ID: NamespaceID{Dev: h.dev, Inode: inode}}
		h.byInode[inode] = n
	}
	return n
}

// openNamespaces notes the network namespaces that a process holds open besides
// the one it runs in. A link's text does not do here: a namespace that was
// opened by way of a bind mount bears that path.
func (proc Proc) openNamespaces(p Process, runsIn uint64, h *holding) {
	dir := proc.path(strconv.Itoa(p.PID), "fd")
	files, err := os.ReadDir(dir)
	if err != nil || h.dev == 0 {
		return
	}
	var seen []uint64
	for _, f := range files {
		path := filepath.Join(dir, f.Name())
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil || st.Dev != h.dev || st.Ino == runsIn || slices.Contains(seen, st.Ino) {
			continue
		}
		seen = append(seen, st.Ino)
		ns, err := OpenNamespace(path) // tells a network namespace from others
		if err != nil {
			continue
		}
		_ = ns.Close()
		if n := h.of(st.Ino); n != nil {
			n.Files = append(n.Files, p)
		}
	}
}

// initialPIDNamespace is what the link of the machine's first PID namespace
// says (include/uapi/linux/nsfs.h, PID_NS_INIT_INO).
const initialPIDNamespace = "pid:[4026531836]"

// SeesAll tells whether /proc shows all processes of the machine. In a
// container with a PID namespace of its own it does not.
func (proc Proc) SeesAll() bool {
	target, err := os.Readlink(proc.path("self/ns/pid"))
	return err == nil && target == initialPIDNamespace
}

func (proc Proc) path(elem ...string) string {
	return filepath.Join(append([]string{string(proc)}, elem...)...)
}

// namespaceLink reads the number out of a link such as net:[4026531840].
func namespaceLink(path string) (uint64, error) {
	target, err := os.Readlink(path)
	if err != nil {
		return 0, err
	}
	inode, ok := namespaceInode(target)
	if !ok {
		return 0, &os.PathError{Op: "read network namespace", Path: path, Err: ErrNotNamespace}
	}
	return inode, nil
}

func namespaceInode(text string) (uint64, bool) {
	digits, ok := strings.CutPrefix(text, "net:[")
	if !ok {
		return 0, false
	}
	inode, err := strconv.ParseUint(strings.TrimSuffix(digits, "]"), 10, 64)
	return inode, err == nil
}

// Processes lists all processes in the order of their numbers.
func (proc Proc) Processes() ([]Process, error) {
	names, err := os.ReadDir(string(proc))
	if err != nil {
		return nil, err
	}
	var list []Process
	for _, e := range names {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		p, err := proc.Process(pid)
		if err != nil {
			continue // it has ended
		}
		list = append(list, p)
	}
	slices.SortFunc(list, func(a, b Process) int { return cmp.Compare(a.PID, b.PID) })
	return list, nil
}

// Process looks at one process.
func (proc Proc) Process(pid int) (Process, error) {
	comm, err := os.ReadFile(proc.path(strconv.Itoa(pid), "comm"))
	if err != nil {
		return Process{}, err
	}
	p := Process{PID: pid, Command: strings.TrimSpace(string(comm))}
	if cgroup, err := os.ReadFile(proc.path(strconv.Itoa(pid), "cgroup")); err == nil {
		p.Cgroup = parseCgroup(string(cgroup))
	}
	return p, nil
}

// parseCgroup picks the path out of /proc/PID/cgroup that tells most: that of
// version 2, else of the devices controller, else of the first line.
func parseCgroup(text string) string {
	best, rank := "", 0
	for line := range strings.Lines(text) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) != 3 || fields[2] == "/" {
			continue
		}
		r := 1
		switch {
		case slices.Contains(strings.Split(fields[1], ","), "devices"):
			r = 3
		case fields[0] == "0" && fields[1] == "":
			r = 2
		}
		if r > rank {
			best, rank = fields[2], r
		}
	}
	return best
}

// Container reads the ID of a container and the UID of a pod out of a control
// group's path, "" where it names none. Kubernetes, containerd, CRI-O, Docker
// and Podman all put them there.
func (p Process) Container() (containerID, podUID string) {
	for part := range strings.SplitSeq(p.Cgroup, "/") {
		part = strings.TrimSuffix(strings.TrimSuffix(part, ".scope"), ".slice")
		if i := strings.LastIndex(part, "pod"); i >= 0 && strings.HasPrefix(part, "kubepods") || strings.HasPrefix(part, "pod") {
			if uid := strings.ReplaceAll(part[i+len("pod"):], "_", "-"); len(uid) == 36 {
				podUID = uid
				continue
			}
		}
		if i := strings.LastIndexAny(part, "-:"); i >= 0 {
			part = part[i+1:]
		}
		if len(part) == 64 && strings.Trim(part, "0123456789abcdef") == "" {
			containerID = part
		}
	}
	return containerID, podUID
}
