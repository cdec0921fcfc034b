package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// PodTarget names a pod in one of three ways.
type PodTarget struct {
	Pod   string // NAMESPACE/NAME
	Netns string // a path
	PID   int
}

// GatherPod looks at one pod. opener is the command that runs OpenNode, with
// whatever goes before its arguments; it changes nothing that lasts.
func (h Host) GatherPod(ctx context.Context, target PodTarget, opener []string) (PodFacts, error) {
	var f PodFacts
	path, err := h.podNetns(target)
	if err != nil {
		return f, err
	}
	ns, err := rdma.OpenNamespace(path)
	if err != nil {
		return f, err
	}
	defer func() { _ = ns.Close() }()
	own, err := rdma.OwnNamespace()
	if err != nil {
		return f, err
	}
	f.Namespace, f.IsHost = path, own.ID() == ns.ID()
	if err := own.Close(); err != nil {
		return f, err
	}
	var node Facts
	h.gatherMode(&node)
	f.Live = node.Live
	if err := h.gatherInside(ns, &f); err != nil {
		return f, err
	}
	if err := h.gatherContainers(ctx, ns.ID(), target.PID, opener, &f); err != nil {
		return f, err
	}
	return f, h.gatherPodRecords(ns.ID(), &f)
}

// podNetns finds a path to the pod's network namespace.
func (h Host) podNetns(target PodTarget) (string, error) {
	switch {
	case target.Netns != "":
		return target.Netns, nil
	case target.PID > 0:
		return filepath.Join(string(h.Proc), strconv.Itoa(target.PID), "ns/net"), nil
	}
	namespace, name, ok := strings.Cut(target.Pod, "/")
	if !ok || namespace == "" || name == "" || strings.Contains(name, "/") {
		return "", fmt.Errorf("%q does not name a pod; the form is NAMESPACE/NAME", target.Pod)
	}
	records, _, err := h.Node.Records()
	if err != nil {
		return "", err
	}
	for _, r := range records {
		if r.Pod.Namespace == namespace && r.Pod.Name == name {
			return r.Netns.Path, nil
		}
	}
	// A pod without attachment: kubelet names its log directory after the pod
	// and its UID, and the UID is part of its processes' control groups.
	const logs = "/var/log/pods"
	dirs, err := os.ReadDir(h.path(logs))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", err
	}
	for _, d := range dirs {
		uid, ok := strings.CutPrefix(d.Name(), namespace+"_"+name+"_")
		if !ok {
			continue
		}
		processes, err := h.Proc.Processes()
		if err != nil {
			return "", err
		}
		for _, p := range processes {
			if _, podUID := p.Container(); podUID == uid {
				return filepath.Join(string(h.Proc), strconv.Itoa(p.PID), "ns/net"), nil
			}
		}
	}
	return "", fmt.Errorf("pod %s has no record in %s and no running process by way of %s: it is not on this node, or not running; --netns PATH or --pid N name a pod without kubelet: %w",
		target.Pod, h.Node.State.Dir(), logs, os.ErrNotExist)
}

// gatherInside looks from inside the namespace.
func (h Host) gatherInside(ns *rdma.Namespace, f *PodFacts) error {
	nodes, err := h.Node.Sysfs.CharDeviceNodes()
	if err != nil {
		return err
	}
	return ns.Run(func() error {
		var err error
		if f.Interfaces, err = interfaces(); err != nil {
			return err
		}
		conn, err := rdma.Open()
		if errors.Is(err, rdma.ErrNoSubsystem) {
			return nil
		}
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }()
		inside, closeInside, mountErr := sysfs.MountHere()
		if mountErr == nil {
			defer func() { _ = closeInside() }()
		}
		devices, err := conn.Devices()
		if err != nil {
			return err
		}
		for _, d := range devices {
			uverbs, err := conn.Uverbs(d.Index)
			if err != nil && !errors.Is(err, rdma.ErrDeviceNotFound) {
				return err
			}
			pd := PodDevice{Name: d.Name, Index: d.Index, Protocol: d.Protocol}
			if d.Protocol == "roce" && h.Proc.SeesAll() {
				if has, err := conn.HasGSI(d.Index); err == nil {
					pd.GSI = &has
				}
			}
			own, err := conn.CharDevices(d)
			if err != nil && !errors.Is(err, rdma.ErrDeviceNotFound) {
				return err
			}
			i := slices.IndexFunc(nodes, func(n sysfs.CharDeviceNode) bool { return n.Name == uverbs })
			if i >= 0 {
				pd.Function = nodes[i].Function
				for _, n := range nodes {
					if n.Function == pd.Function && n.Device == d.Name && (pd.Function != "" || slices.Contains(own, n.Name)) {
						pd.Chars = append(pd.Chars, CharFacts{Name: n.Name, Kind: n.Kind, Index: n.CharDevice.Number(), Function: n.Function, Number: n.Number})
					}
				}
			}
			for port := uint32(1); port <= d.Ports; port++ {
				p, err := conn.Port(d.Index, port)
				if err != nil {
					return err
				}
				pd.Ports = append(pd.Ports, PortFacts{Number: int(port), State: p.StateName(), Active: p.Active(), Netdev: p.Netdev, GIDs: -1})
				if d.Protocol != "roce" {
					continue
				}
				if mountErr != nil {
					pd.GIDError = mountErr.Error()
					continue
				}
				gids, err := inside.RoCEv2Addresses(d.Name, port)
				if err != nil {
					pd.GIDError = err.Error()
				}
				pd.GIDs = append(pd.GIDs, gids...)
			}
			f.Devices = append(f.Devices, pd)
		}
		return nil
	})
}

// interfaces lists the interfaces of the namespace of the calling thread.
func interfaces() ([]PodInterface, error) {
	links, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("list the pod's interfaces: %w", err)
	}
	var list []PodInterface
	for _, l := range links {
		i := PodInterface{Name: l.Name, Up: l.Flags&net.FlagUp != 0}
		addresses, err := l.Addrs()
		if err != nil {
			return nil, fmt.Errorf("addresses of %s in the pod: %w", l.Name, err)
		}
		for _, a := range addresses {
			prefix, err := netip.ParsePrefix(a.String())
			if err == nil && !prefix.Addr().IsLoopback() && !prefix.Addr().IsLinkLocalUnicast() {
				i.Addresses = append(i.Addresses, prefix.Addr())
			}
		}
		list = append(list, i)
	}
	return list, nil
}

func (h Host) gatherPodRecords(id rdma.NamespaceID, f *PodFacts) error {
	records, _, err := h.Node.Records()
	if err != nil {
		return err
	}
	for _, r := range records {
		if r.Netns.ID != id {
			continue
		}
		for _, attached := range r.Devices {
			p := PodRecord{Owner: r.Owner(), Device: attached.NameInPod, Function: r.Function, Phase: string(r.Phase), IfName: r.IfName}
			for i, d := range f.Devices {
				// A software device has no function, and stands on an interface.
				_, _, soft := sysfs.InterfaceOf(r.Function)
				if d.Index == attached.Index && (d.Function == r.Function || soft && d.Function == "") {
					p.Here, f.Devices[i].Recorded = true, true
				}
			}
			f.Records = append(f.Records, p)
		}
	}
	for i, d := range f.Devices {
		if d.Recorded {
			continue
		}
		for _, c := range f.Containers {
			f.Devices[i].Recorded = f.Devices[i].Recorded || c.ID != "" && h.Node.Upstream.Attached(c.ID, d.Name)
		}
	}
	return nil
}

// gatherContainers looks at one process of each container in the namespace, or
// at the one asked for.
func (h Host) gatherContainers(ctx context.Context, id rdma.NamespaceID, pid int, opener []string, f *PodFacts) error {
	var processes []rdma.Process
	if pid > 0 {
		p, err := h.Proc.Process(pid)
		if err != nil {
			return err
		}
		processes = []rdma.Process{p}
	} else {
		holders, _, err := h.Proc.NamespaceHolders()
		if err != nil {
			return err
		}
		for _, n := range holders {
			if n.ID.Inode == id.Inode {
				processes = n.Processes
			}
		}
	}
	seen := map[string]bool{}
	for _, p := range processes {
		container, _ := p.Container()
		// The process that only holds a pod's namespaces has no use for RDMA.
		if seen[container] || p.Command == "pause" && len(processes) > 1 {
			continue
		}
		seen[container] = true
		f.Containers = append(f.Containers, h.container(ctx, container, p, opener, f.Devices))
	}
	return nil
}

// ipcLock is CAP_IPC_LOCK's bit (include/uapi/linux/capability.h).
const ipcLock = 14

func (h Host) container(ctx context.Context, id string, p rdma.Process, opener []string, devices []PodDevice) ContainerFacts {
	c := ContainerFacts{ID: id, Process: p, Nodes: map[string]NodeFacts{}}
	var err error
	if c.Memlock, c.NoLimit, err = readMemlock(h.Proc, p.PID); err != nil {
		c.LimErr = err.Error()
	}
	dir := filepath.Join(string(h.Proc), strconv.Itoa(p.PID))
	if status, err := os.ReadFile(dir + "/status"); err == nil {
		c.IPCLock = hasCapability(string(status), ipcLock)
	}
	names, err := os.ReadDir(dir + "/root/sys/class/infiniband")
	if err != nil {
		c.SysError = "RDMA devices in its /sys: " + err.Error()
	}
	for _, n := range names {
		c.SysDevices = append(c.SysDevices, n.Name())
	}
	wanted := map[string]bool{}
	for _, d := range devices {
		for _, k := range d.Chars {
			wanted[k.Name] = true
		}
	}
	nodes, err := os.ReadDir(dir + "/root/dev/infiniband")
	if err != nil {
		return c // it has none, which the checks tell
	}
	for _, n := range nodes {
		var st unix.Stat_t
		path := "/dev/infiniband/" + n.Name()
		if err := unix.Stat(dir+"/root"+path, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR {
			continue
		}
		node := NodeFacts{Number: sysfs.DeviceNumber{Major: unix.Major(st.Rdev), Minor: unix.Minor(st.Rdev)}}
		if wanted[n.Name()] && len(opener) > 0 {
			node.try(ctx, opener, p, path)
		}
		c.Nodes[n.Name()] = node
	}
	return c
}

// hasCapability reads the effective capabilities in /proc/PID/status.
func hasCapability(status string, bit uint) bool {
	for line := range strings.Lines(status) {
		if digits, ok := strings.CutPrefix(line, "CapEff:"); ok {
			mask, err := strconv.ParseUint(strings.TrimSpace(digits), 16, 64)
			return err == nil && mask>>bit&1 == 1
		}
	}
	return false
}

// openTime bounds the attempt: in a frozen control group it would not end.
const openTime = 5 * time.Second

// try lets a short-lived process in the container's control group open the
// node: nothing else tells what a device control group of version 2 allows,
// which is a program in the kernel.
func (n *NodeFacts) try(ctx context.Context, opener []string, p rdma.Process, path string) {
	ctx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	args := append(slices.Clone(opener[1:]), strconv.Itoa(p.PID), p.Cgroup, path)
	out, err := exec.CommandContext(ctx, opener[0], args...).Output() //nolint:forbidigo // this program itself, for its control group
	var answer OpenAnswer
	if err == nil {
		err = json.Unmarshal(out, &answer)
	}
	if err != nil {
		n.Error = "the attempt failed: " + err.Error()
		return
	}
	n.Opened, n.Error, n.Denied = &answer.Opened, answer.Error, answer.Denied
	if answer.NotTried {
		n.Opened = nil
	}
}

// OpenAnswer is what the process that ran OpenNode prints, as JSON.
type OpenAnswer struct {
	Opened   bool   `json:"opened"`
	Denied   bool   `json:"denied"`
	NotTried bool   `json:"notTried"` // the process could not get where it should
	Error    string `json:"error,omitempty"`
}

// OpenNode moves this process into the control group of another one, enters its
// network namespace, and opens a device node of its root file system. The
// process must end thereafter.
func OpenNode(pid int, cgroup, path string) OpenAnswer {
	dir := "/proc/" + strconv.Itoa(pid)
	ns, err := rdma.OpenNamespace(dir + "/ns/net")
	if err != nil {
		return OpenAnswer{NotTried: true, Error: err.Error()}
	}
	defer func() { _ = ns.Close() }()
	if cgroup != "" {
		if err := joinCgroup(cgroup); err != nil {
			return OpenAnswer{NotTried: true, Error: err.Error()}
		}
	}
	answer := OpenAnswer{NotTried: true}
	err = ns.Run(func() error {
		answer.NotTried = false
		fd, err := unix.Open(dir+"/root"+path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		answer.Opened = true
		return unix.Close(fd)
	})
	if err != nil {
		answer.Denied = !answer.NotTried && errors.Is(err, os.ErrPermission)
		answer.Error = fmt.Sprintf("%v (%s)", err, errnoName(err))
	}
	return answer
}

func errnoName(err error) string {
	var errno unix.Errno
	if !errors.As(err, &errno) {
		return "no errno"
	}
	return unix.ErrnoName(errno)
}

// joinCgroup moves this process into a control group, in the hierarchy that
// decides about devices.
func joinCgroup(cgroup string) error {
	var st unix.Statfs_t
	root := "/sys/fs/cgroup"
	if err := unix.Statfs(root, &st); err != nil {
		return &os.PathError{Op: "statfs", Path: root, Err: err}
	}
	if st.Type != unix.CGROUP2_SUPER_MAGIC {
		root += "/devices"
	}
	return os.WriteFile(filepath.Join(root, filepath.Clean("/"+cgroup), "cgroup.procs"), []byte("0"), 0)
}
