package doctor

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
	"github.com/rdma-cni/rdma-cni/pkg/install"
	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/rtnl"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// Host is where facts are gathered.
type Host struct {
	Node *attachment.Node
	Proc rdma.Proc
	Root string // of /etc, /boot, /lib, /dev, /opt and so on; "" is /
}

func (h Host) path(p string) string { return filepath.Join("/", h.Root, p) }

// coreModules are the modules that RDMA in containers needs, the first two
// without exception.
var coreModules = []string{"ib_core", "ib_uverbs", "ib_umad", "rdma_cm", "rdma_ucm"}

// Gather looks at the node. It changes nothing, takes no lock, and works
// without RDMA; configFile is the file of --config, "" if none.
func (h Host) Gather(ctx context.Context, configFile string) (Facts, error) {
	f := Facts{Root: os.Geteuid() == 0, Modules: map[string]bool{}}
	var err error
	if f.Kernel, err = KernelRelease(h.Proc); err != nil {
		return f, err
	}
	if version, err := os.ReadFile(filepath.Join(string(h.Proc), "version")); err == nil {
		f.Stable = stableOf(string(version))
	}
	h.gatherMode(&f)
	cmdline, err := os.ReadFile(filepath.Join(string(h.Proc), "cmdline"))
	if err != nil {
		return f, err
	}
	f.Persisted = ReadPersisted(h.Root, f.Kernel, string(cmdline))
	if f.Blockers, err = Blockers(h.Proc); err != nil {
		return f, err
	}
	builtin, _ := os.ReadFile(h.path("lib/modules/" + f.Kernel + "/modules.builtin"))
	for _, m := range coreModules {
		f.Modules[m] = h.Node.Sysfs.ModuleLoaded(m) || strings.Contains(string(builtin), "/"+m+".ko")
	}
	if err := h.gatherDevices(&f); err != nil {
		return f, err
	}
	if err := h.gatherChars(&f); err != nil {
		return f, err
	}
	if err := h.gatherProcesses(&f); err != nil {
		return f, err
	}
	if err := h.gatherRecords(ctx, &f); err != nil {
		return f, err
	}
	for _, dir := range cniDirs {
		f.Plugins = append(f.Plugins, h.plugin(ctx, dir))
	}
	if configFile != "" {
		f.Config = readConfig(configFile)
	}
	return f, nil
}

// stableOf finds the stable release in /proc/version. Debian writes it after
// its name, and keeps the release that uname gives (6.1.0-57) over updates.
func stableOf(version string) string {
	i := strings.LastIndex(version, " Debian ")
	if i < 0 {
		return ""
	}
	word, _, _ := strings.Cut(version[i+len(" Debian "):], " ")
	if _, ok := parseRelease(word); !ok {
		return ""
	}
	return word
}

func (h Host) gatherMode(f *Facts) {
	conn, err := rdma.Open()
	if err != nil {
		f.Subsystem = err
		return
	}
	defer func() { _ = conn.Close() }()
	mode, err := conn.Mode()
	if err != nil {
		f.LiveError = err
		return
	}
	f.Live = &mode
}

func (h Host) gatherDevices(f *Facts) error {
	inv, err := h.Node.Inventory(h.Proc)
	if err != nil {
		return err
	}
	if f.NICs, err = h.Node.Sysfs.NetworkFunctions(); err != nil {
		return err
	}
	macs := h.adminMACs()
	symbols := h.releasers()
	f.SoftRoCE = h.softRoCE(f.Kernel, symbols)
	for _, e := range inv.Entries {
		d := DeviceFacts{
			Function: e.Function.Address, Driver: e.Driver, PF: e.PF, VF: e.VF,
			Place: string(e.Holder.Place), Holder: e.Holder.Describe(), Kind: "pf",
		}
		switch {
		case e.Function.Address == "":
			d.Kind = "software"
		case e.Function.Bus == sysfs.Auxiliary:
			d.Kind = "sf"
		case e.PF != "":
			d.Kind = "vf"
		default:
			d.VFs = e.Function.VirtualFunctions()
		}
		if e.Absence != nil {
			d.Absence = e.Absence.Error()
		}
		if d.Kind == "vf" {
			d.AdminMAC = macs[fmt.Sprintf("%s/%d", e.PF, e.VF)]
			d.PFNetdevMTU = h.netdevMTU(e.PF)
		}
		if e.Device != nil {
			d.Name, d.NodeGUID, d.LinkLayer, d.Protocol = e.Device.Name, e.Device.NodeGUID, e.Device.LinkLayer(), e.Device.Protocol
			for i, p := range e.Device.PortStatus {
				d.Ports = append(d.Ports, h.port(e, i+1, p))
			}
			d.Movable, d.MovableModule = symbols.movable(e)
		} else if len(e.Chars) > 0 {
			d.Name = e.Chars[0].Device
		}
		f.Devices = append(f.Devices, d)
	}
	return nil
}

func (h Host) netdevMTU(address string) int {
	pf, err := h.Node.Sysfs.Function(address)
	if err != nil {
		return 0
	}
	for _, n := range pf.Netdevs() {
		return h.Node.Sysfs.NetdevMTU(n)
	}
	return 0
}

// port looks at a port. What sysfs knows of it shows only at home.
func (h Host) port(e attachment.Entry, number int, p rdma.Port) PortFacts {
	pf := PortFacts{Number: number, State: p.StateName(), Active: p.Active(), Netdev: p.Netdev, GIDs: -1}
	if number <= len(e.Device.IBPorts) {
		pf.IB = &e.Device.IBPorts[number-1]
	}
	if e.Holder.Place != attachment.Home {
		return pf
	}
	fs := h.Node.Sysfs
	if p.Netdev != "" {
		pf.MTU, pf.Oper, pf.Bond = fs.NetdevMTU(p.Netdev), fs.NetdevState(p.Netdev), fs.BondMaster(p.Netdev)
	}
	if used, size, err := fs.GIDUse(e.Device.Name, uint32(number)); err == nil {
		pf.GIDs, pf.GIDSize = used, size
	}
	if v2, err := fs.RoCEv2Addresses(e.Device.Name, uint32(number)); err == nil {
		pf.RoCEv2 = len(v2)
	}
	return pf
}

// adminMACs are the MAC addresses that physical functions have set for their
// virtual ones, by PF address and VF number.
func (h Host) adminMACs() map[string]string {
	macs := map[string]string{}
	links, err := rtnl.Dump(netlink.LinkList)
	if err != nil {
		return macs // an empty map: not known
	}
	byNetdev := map[string]string{}
	for _, nic := range h.networkFunctions() {
		for _, n := range nic.Netdevs() {
			byNetdev[n] = nic.Address
		}
	}
	for _, l := range links {
		for _, vf := range l.Attrs().Vfs {
			if pf := byNetdev[l.Attrs().Name]; pf != "" {
				macs[fmt.Sprintf("%s/%d", pf, vf.ID)] = vf.Mac.String()
			}
		}
	}
	return macs
}

func (h Host) networkFunctions() []sysfs.Function {
	var list []sysfs.Function
	nics, err := h.Node.Sysfs.NetworkFunctions()
	if err != nil {
		return nil
	}
	for _, nic := range nics {
		if f, err := h.Node.Sysfs.Function(nic.Address); err == nil {
			list = append(list, f)
		}
	}
	return list
}

// releasers are the modules whose driver can release a device from its users:
// the kernel shows that nowhere but in the name of the function that does it.
type releasers struct {
	known   bool // the kernel's symbols could be read
	modules map[string]bool
	users   []string // modules that use ib_core: the drivers are among them
}

func (h Host) releasers() releasers {
	r := releasers{modules: map[string]bool{}, users: h.Node.Sysfs.ModuleHolders("ib_core")}
	f, err := os.Open(filepath.Join(string(h.Proc), "kallsyms"))
	if err != nil {
		return r
	}
	defer func() { _ = f.Close() }()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		r.known = true
		if !bytes.Contains(lines.Bytes(), []byte("disassociate_ucontext")) {
			continue // one of a hundred thousand and more
		}
		fields := strings.Fields(lines.Text())
		if len(fields) < 3 {
			continue
		}
		if len(fields) > 3 {
			r.modules[strings.Trim(fields[3], "[]")] = true
		}
	}
	return r
}

// softwareDrivers make RDMA devices without a function.
var softwareDrivers = []string{"rdma_rxe", "siw"}

// movable tells whether a device's driver can release it, and which module that
// is; nil if it cannot be told, as for a driver that is built in.
func (r releasers) movable(e attachment.Entry) (*bool, string) {
	candidates := sysfs.RDMAModules(e.Driver)
	if len(candidates) == 0 && e.Function.Address != "" {
		candidates = []string{e.Function.DriverModule()}
	} else if e.Function.Address == "" {
		candidates = softwareDrivers
	}
	candidates = slices.DeleteFunc(slices.Clone(candidates), func(m string) bool { return !slices.Contains(r.users, m) })
	if len(candidates) != 1 || !r.known {
		return nil, ""
	}
	can := r.modules[candidates[0]]
	return &can, candidates[0]
}

func (h Host) gatherChars(f *Facts) error {
	nodes, err := h.Node.Sysfs.CharDeviceNodes()
	if err != nil {
		return err
	}
	for _, n := range nodes {
		c := CharFacts{Name: n.Name, Kind: n.Kind, Index: n.CharDevice.Number(), Function: n.Function, Number: n.Number}
		c.look(h.path("dev/infiniband/" + n.Name))
		f.Chars = append(f.Chars, c)
	}
	number, err := h.Node.Sysfs.ConnectionManager()
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	f.CM = &CharFacts{Name: "rdma_cm", Number: number}
	f.CM.look(h.path("dev/infiniband/rdma_cm"))
	return nil
}

// look compares the node with its path.
func (c *CharFacts) look(path string) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		c.NodeErr = (&os.PathError{Op: "stat", Path: path, Err: err}).Error()
		return
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR {
		c.NodeErr = path + " is not a character device"
		return
	}
	c.Node = &sysfs.DeviceNumber{Major: unix.Major(st.Rdev), Minor: unix.Minor(st.Rdev)}
}

// runtimeCommands are the runtimes whose limits containers inherit.
var runtimeCommands = []string{"containerd", "crio", "dockerd", "podman", "cri-dockerd"}

// sharedPluginCommand is what /proc/PID/comm leaves of k8s-rdma-shared-dp.
const sharedPluginCommand = "k8s-rdma-shared"

func (h Host) gatherProcesses(f *Facts) error {
	processes, err := h.Proc.Processes()
	if err != nil {
		return err
	}
	for _, p := range processes {
		if strings.HasPrefix(p.Command, sharedPluginCommand) {
			f.SharedPlugin = append(f.SharedPlugin, fmt.Sprintf("process %d (%s)", p.PID, p.Command))
		}
		if !slices.Contains(runtimeCommands, p.Command) {
			continue
		}
		r := RuntimeFacts{Command: p.Command, PID: p.PID}
		if r.Memlock, r.NoLimit, err = readMemlock(h.Proc, p.PID); err != nil {
			r.Err = err.Error()
		}
		f.Runtimes = append(f.Runtimes, r)
	}
	// Kubelet remembers the plugins that registered, also one that has died.
	const checkpoint = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
	if text, err := os.ReadFile(h.path(checkpoint)); err == nil && registersShared(text) {
		f.SharedPlugin = append(f.SharedPlugin, "resources rdma/... in "+checkpoint)
	}
	return nil
}

func (h Host) gatherRecords(ctx context.Context, f *Facts) error {
	verdicts, err := h.Node.Reap(ctx, attachment.ReapOptions{DryRun: true, Proc: h.Proc})
	if errors.Is(err, os.ErrPermission) {
		return nil // told by the check "root"
	}
	if err != nil {
		return err
	}
	for _, v := range verdicts {
		r := RecordFacts{Function: v.Name.Function, Owner: "container " + v.Name.ContainerID, Action: string(v.Action), Reason: v.Reason}
		if v.Record != nil {
			r.Owner = v.Record.Owner()
		}
		if v.Err != nil {
			r.Err = v.Err.Error()
		}
		f.Records = append(f.Records, r)
	}
	return nil
}

// cniDirs are where runtimes look for plugins: most, OpenShift, Fedora's
// packages, Debian's, k3s.
var cniDirs = []string{"/opt/cni/bin", "/var/lib/cni/bin", "/usr/libexec/cni", "/usr/lib/cni", "/var/lib/rancher/k3s/data/cni"}

// versionTime bounds the run of a plugin that says its version.
const versionTime = 5 * time.Second

func (h Host) plugin(ctx context.Context, dir string) PluginFacts {
	p := PluginFacts{Dir: dir}
	var st unix.Stat_t
	err := unix.Stat(h.path(dir), &st)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return p
	case err != nil:
		p.Err = err.Error()
		return p
	}
	p.Exists, p.DirMode, p.DirUID = true, st.Mode&0o7777, int(st.Uid)
	path := h.path(filepath.Join(dir, "rdma"))
	err = unix.Stat(path, &st)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return p
	case err != nil:
		p.Err = err.Error()
		return p
	}
	p.Binary, p.Mode, p.UID = true, st.Mode&0o7777, int(st.Uid)
	arch, err := install.ArchOf(path)
	if err != nil {
		p.Problem = "it is no ELF program: " + err.Error()
		return p
	}
	p.Arch, p.Ours = arch.String(), install.IsOurs(path)
	if p.safe() && p.Arch == hostArch() {
		ctx, cancel := context.WithTimeout(ctx, versionTime)
		defer cancel()
		out, err := exec.CommandContext(ctx, path, "-version").Output() //nolint:forbidigo // it is what is examined: does it run?
		p.Version = strings.TrimSpace(string(out))
		if err != nil {
			p.Problem = "it does not run: " + err.Error()
		}
	}
	return p
}

// safe tells whether nobody but root can change the program. Others are not
// run.
func (p PluginFacts) safe() bool {
	return p.UID == 0 && p.DirUID == 0 && p.Mode&0o022 == 0 && p.DirMode&0o022 == 0
}

// hostArch is the architecture of this program, which runs here.
func hostArch() string {
	arch, err := install.HostArch()
	if err != nil {
		return ""
	}
	return arch.String()
}
