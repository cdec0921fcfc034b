package rdma

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Reachable calls fn for each network namespace that a path on this machine
// leads to, once: first bind mounts, then processes, then files that processes
// hold open. path is that path, good for an error message. fn returns true to
// end the walk; it must not keep ns. Namespaces that come or go meanwhile can
// be missed; namespaces that only a socket or the kernel holds have no path.
//
// The walk reads all of /proc and costs milliseconds for each hundred
// processes.
func Reachable(fn func(path string, ns *Namespace) bool) {
	w := walk{seen: map[uint64]bool{}, fn: fn}
	if own, err := OwnNamespace(); err == nil {
		w.nsfs = own.ID().Dev
		_ = own.Close()
	}
	if mounts, err := os.Open("/proc/self/mountinfo"); err == nil {
		paths := namespaceMounts(mounts)
		_ = mounts.Close()
		for _, path := range paths {
			if w.visit(path) {
				return
			}
		}
	}
	processes, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range processes {
		if w.visit(p + "/ns/net") {
			return
		}
	}
	for _, p := range processes {
		files, err := os.ReadDir(p + "/fd")
		if err != nil {
			continue
		}
		for _, f := range files {
			if w.visit(p + "/fd/" + f.Name()) {
				return
			}
		}
	}
}

type walk struct {
	nsfs uint64          // the file system of namespaces
	seen map[uint64]bool // inodes on it
	fn   func(path string, ns *Namespace) bool
}

// visit shows a path to fn if it leads to a new namespace. It looks at the
// file first: opening what processes hold open can have effects, and the text
// of the link does not tell a namespace whose mount is gone.
func (w *walk) visit(path string) (stop bool) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil || st.Dev != w.nsfs || w.seen[st.Ino] {
		return false
	}
	w.seen[st.Ino] = true
	ns, err := OpenNamespace(path)
	if err != nil {
		return false
	}
	defer func() { _ = ns.Close() }()
	return w.fn(path, ns)
}

// namespaceMounts finds the mount points of network namespaces in a
// mountinfo(5) file.
func namespaceMounts(mountinfo io.Reader) []string {
	var paths []string
	eachNamespaceMount(mountinfo, func(_ uint64, path string) { paths = append(paths, path) })
	return paths
}

// namespaceMountInodes is namespaceMounts by the number of the namespace.
func namespaceMountInodes(mountinfo io.Reader) map[uint64][]string {
	paths := map[uint64][]string{}
	eachNamespaceMount(mountinfo, func(inode uint64, path string) { paths[inode] = append(paths[inode], path) })
	return paths
}

// eachNamespaceMount reads a mountinfo(5) file: the root field of a bound
// network namespace is that of a file on nsfs.
func eachNamespaceMount(mountinfo io.Reader, fn func(inode uint64, path string)) {
	for lines := bufio.NewReader(mountinfo); ; {
		line, err := lines.ReadString('\n') // overlay mounts make lines of any length
		fields := strings.Fields(line)
		if len(fields) > 4 {
			if inode, ok := namespaceInode(fields[3]); ok {
				fn(inode, unescape(fields[4]))
			}
		}
		if err != nil {
			return
		}
	}
}

// unescape undoes mountinfo's octal escapes of blanks and backslashes.
func unescape(s string) string {
	for _, c := range []byte(" \t\n\\") {
		s = strings.ReplaceAll(s, fmt.Sprintf("\\%03o", c), string(c))
	}
	return s
}
