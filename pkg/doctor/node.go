package doctor

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
	"github.com/rdma-cni/rdma-cni/pkg/rdma"
)

// nodeChecks are in the order in which a person would ask.
var nodeChecks = []check[Facts]{
	{"root", checkRoot},
	{"subsystem", checkSubsystem},
	{"modules", checkModules},
	{"devices", checkDevices},
	{"mode", checkMode},
	{"mode-at-boot", checkPersisted},
	{"initramfs", checkInitramfs},
	{"mode-blockers", checkBlockers},
	{"kernel", checkKernel},
	{"driver", perDevice(checkDriver, "no RDMA device to look at")},
	{"node-guid", perDevice(checkGUID, "no RDMA device to look at")},
	{"admin-mac", perDevice(checkAdminMAC, "no virtual function to look at")},
	{"port", perDevice(checkPorts, "no RDMA device to look at")},
	{"mtu", perDevice(checkMTU, "no RDMA device with an interface at home to look at")},
	{"gid-table", perDevice(checkGIDs, "no RoCE device at home to look at")},
	{"bonding", checkBonding},
	{"numbering", checkNumbering},
	{"char-devices", checkChars},
	{"shared-device-plugin", checkSharedPlugin},
	{"records", checkRecords},
	{"stranded", checkStranded},
	{"plugin", checkPlugins},
	{"memlock", checkMemlock},
	{"config", checkConfig},
}

// Examine judges a node.
func Examine(f Facts) []Finding { return examine(f, nodeChecks) }

// perDevice asks about each device.
func perDevice(ask func(Facts, DeviceFacts) []Finding, none string) func(Facts) []Finding {
	return func(f Facts) []Finding {
		var list []Finding
		for _, d := range f.Devices {
			if d.Name != "" {
				list = append(list, ask(f, d)...)
			}
		}
		return orPass(list, none)
	}
}

func checkRoot(f Facts) []Finding {
	if f.Root {
		return []Finding{pass("", "run as root")}
	}
	return []Finding{warn("", "not run as root", "Records, other namespaces and other users' processes cannot be looked at: what they would show is missing here.", "Run this as root.")}
}

func checkSubsystem(f Facts) []Finding {
	if f.Subsystem == nil {
		return []Finding{pass("", "the RDMA subsystem answers")}
	}
	return []Finding{fail("", f.Subsystem.Error(), "There is no RDMA on this node, and every ADD of the rdma plugin fails.",
		"Load it (modprobe ib_uverbs), and put ib_uverbs into a file in /etc/modules-load.d. If there is no such module, install the kernel's full set (linux-modules-extra, kernel-modules-extra).")}
}

func checkModules(f Facts) []Finding {
	meanings := map[string]string{
		"ib_core":   "There is no RDMA without it.",
		"ib_uverbs": "Programs have no verbs: /dev/infiniband/uverbsN is missing.",
		"ib_umad":   "Programs that use management datagrams (ibstat, perfquery, subnet managers) do not work.",
		"rdma_cm":   "Connections by address (librdmacm) do not work.",
		"rdma_ucm":  "Programs that use librdmacm do not work: /dev/infiniband/rdma_cm is missing.",
	}
	var list []Finding
	for i, m := range coreModules {
		if f.Modules[m] {
			continue
		}
		make := warn
		if i < 2 {
			make = fail
		}
		list = append(list, make("", "module "+m+" is not loaded", meanings[m], "Load it (modprobe "+m+"), and put it into a file in /etc/modules-load.d."))
	}
	return orPass(list, "loaded: "+strings.Join(coreModules, ", "))
}

// rdmaVendors are the makers whose network controllers often have RDMA, by
// their PCI vendor ID, with the driver to load.
var rdmaVendors = map[string]string{
	"0x15b3": "NVIDIA (Mellanox), module mlx5_ib",
	"0x8086": "Intel, module irdma for E810, E823, X722 and later",
	"0x14e4": "Broadcom, module bnxt_re",
	"0x1077": "Marvell (QLogic), module qedr",
	"0x1425": "Chelsio, module iw_cxgb4",
	"0x1dd8": "AMD (Pensando), module ionic_rdma",
	"0x19e5": "Huawei, module hns_roce_hw_v2",
	"0x1414": "Microsoft, module mana_ib",
	"0x1ded": "Alibaba, module erdma",
	"0x1d0f": "Amazon, module efa (cannot be moved into pods)",
}

func checkDevices(f Facts) []Finding {
	var list []Finding
	found := 0
	for _, d := range f.Devices {
		if d.Name != "" {
			found++
			continue
		}
		if d.Absence != "" {
			list = append(list, warn(d.Function, d.Absence, "This function can give no pod an RDMA device.", "See the message."))
		}
	}
	if found > 0 {
		return orPass(list, fmt.Sprintf("%d RDMA devices", found))
	}
	var nics []string
	for _, n := range f.NICs {
		driver := n.Driver
		if driver == "" {
			driver = "none"
		}
		what := fmt.Sprintf("%s (driver %s", n.Address, driver)
		if v := rdmaVendors[n.Vendor]; v != "" {
			what += "; " + v
		}
		nics = append(nics, what+")")
	}
	message := "no RDMA device"
	switch {
	case len(nics) == 0:
		message += ", and no PCI network controller at all"
	default:
		message += "; network controllers: " + listed(len(nics), func(i int) string { return nics[i] })
	}
	return append(list, fail("", message, "Nothing can be attached to pods.",
		"Load the RDMA module of your adapter's driver; if it is loaded, see the kernel log and whether RDMA is switched off (devlink dev param show, the adapter's firmware). Without such an adapter rdma_rxe gives a software device, from kernel 7.3 on also in pods."))
}

func checkMode(f Facts) []Finding {
	const change = "Set it: rdma-cni mode set exclusive --persist."
	switch {
	case f.Subsystem != nil:
		return []Finding{fail("", "there is no mode without the RDMA subsystem", "", "See the check subsystem.")}
	case f.LiveError != nil:
		return []Finding{fail("", f.LiveError.Error(), "Devices cannot be moved on this kernel.", "Use kernel 5.3 or later.")}
	case *f.Live == rdma.Exclusive:
		return []Finding{pass("", "the live mode is exclusive")}
	default:
		return []Finding{fail("", "the live mode is "+f.Live.String(), "No RDMA device can be moved: every ADD of the rdma plugin fails, and each pod that has a device's nodes can use all of them.", change)}
	}
}

func checkPersisted(f Facts) []Finding {
	p := f.Persisted
	if p.Problem != "" {
		return []Finding{warn("", p.Problem, "What the mode will be after a reboot cannot be told.", "Make the files readable.")}
	}
	disk, by := p.OnDisk()
	where := "the kernel's default"
	if by != nil {
		where = by.String()
	}
	const fix = "Make it last: rdma-cni mode set exclusive --persist."
	var list []Finding
	if n := len(p.Files); n > 0 && p.CmdLine != nil && p.CmdLine.Mode != p.Files[n-1].Mode && !p.BuiltIn {
		list = append(list, warn("", fmt.Sprintf("%s says %s, but the kernel command line says %s", p.Files[n-1], p.Files[n-1].Mode, p.CmdLine.Mode),
			"Which one wins depends on how ib_core is loaded.", "Remove one of the two."))
	}
	for _, s := range p.Files {
		if s.Mode != disk {
			list = append(list, warn("", fmt.Sprintf("%s says %s, but %s overrides it", s, s.Mode, by), "Only the last file counts.", "Remove the line that does not count."))
		}
	}
	if p.BuiltIn && len(p.Files) > 0 {
		list = append(list, warn("", "ib_core is built into this kernel, which does not read "+p.Files[0].String(), "Only the kernel command line counts.", "Put ib_core.netns_mode=0 on the kernel command line."))
	}
	switch live := f.Live; {
	case live == nil && disk == rdma.Exclusive, live != nil && *live == disk && disk == rdma.Exclusive:
		list = append(list, pass("", "exclusive after the next boot, by "+where))
	case live != nil && *live == rdma.Shared && disk == rdma.Exclusive:
		list = append(list, fail("", "exclusive is persisted by "+where+", but the live mode is shared",
			"The setting was made after ib_core was loaded, or ib_core was loaded without it, which the initramfs does that holds the module but not the setting.",
			"Reboot, after a look at the check initramfs; or see whether the mode can be changed now: rdma-cni mode set exclusive."))
	case live != nil && *live == rdma.Exclusive:
		list = append(list, warn("", "the live mode is exclusive, but after the next boot it will be shared, by "+where, "Attachments will fail after a reboot, unless something sets the mode while the node starts.", fix))
	default:
		list = append(list, warn("", "shared after the next boot, by "+where, "Attachments will fail after a reboot, unless something sets the mode while the node starts.", fix))
	}
	return list
}

func checkInitramfs(f Facts) []Finding {
	i := f.Persisted.Initramfs
	disk, _ := f.Persisted.OnDisk()
	boot, _ := f.Persisted.AtBoot()
	switch {
	case f.Persisted.BuiltIn:
		return []Finding{pass("", "ib_core is built into the kernel")}
	case i.IBCore && boot != disk:
		return []Finding{fail(i.Path, "it holds ib_core, without the option that /etc/modprobe.d has", "ib_core is loaded before the root file system is there, in mode "+boot.String()+", and keeps that: the option on disk has no effect.",
			"After each change of the option "+RebuildInitramfs+", and reboot.")}
	case i.IBCore:
		return []Finding{pass(i.Path, "it holds ib_core and has mode "+boot.String()+" as well")}
	case i.Problem != "":
		return []Finding{warn(i.Path, "the initramfs was not examined: "+i.Problem, "If ib_core is loaded from it, options on disk have no effect until it is rebuilt.", "If the mode is not what /etc/modprobe.d says after a reboot, "+RebuildInitramfs+".")}
	default:
		return []Finding{pass(i.Path, "it does not hold ib_core")}
	}
}

func checkBlockers(f Facts) []Finding {
	if f.Live != nil && *f.Live == rdma.Exclusive {
		return []Finding{pass("", "the mode need not be changed")}
	}
	var list []Finding
	for _, b := range f.Blockers {
		list = append(list, warn("", b.String(), "While this network namespace exists the kernel refuses to change the mode, with EBUSY.",
			"End what holds it; or persist the mode (rdma-cni mode set exclusive --persist) and reboot."))
	}
	return orPass(list, "no other network namespace is in sight: the mode can be changed now")
}

// release is a kernel's version.
type release struct{ major, minor, patch int }

func parseRelease(s string) (r release, ok bool) {
	fields := strings.FieldsFunc(s, func(c rune) bool { return c < '0' || c > '9' })
	if len(fields) < 2 {
		return r, false
	}
	numbers := make([]int, 3)
	for i := range min(len(fields), 3) {
		n, err := strconv.Atoi(fields[i])
		if err != nil {
			return r, false
		}
		numbers[i] = n
	}
	return release{numbers[0], numbers[1], numbers[2]}, true
}

func (r release) before(major, minor int) bool {
	return r.major < major || r.major == major && r.minor < minor
}

func checkKernel(f Facts) []Finding {
	r, ok := parseRelease(f.Kernel)
	if !ok {
		return []Finding{warn("", "the kernel's release "+f.Kernel+" is not understood", "What this kernel cannot do is not known.", "Compare it with the documentation.")}
	}
	if r.before(5, 3) {
		return []Finding{fail("", "kernel "+f.Kernel, "It cannot move RDMA devices between network namespaces.", "Use kernel 5.3 or later, better 6.1.")}
	}
	var list []Finding
	if stable, ok := parseRelease(f.Stable); ok {
		r = stable
	}
	roce := slices.ContainsFunc(f.Devices, func(d DeviceFacts) bool { return d.Protocol == "roce" })
	if roce && r.before(7, 0) && !fixedGIDLoss(r) {
		list = append(list, warn("", "kernel "+f.Kernel+" and RoCE devices", "An address that is set while the device moves can be missing in the GID table: fixed in 7.0, and in the stable kernels of 2026 (6.12.117 and 6.1.192 have it).",
			"If a pod lacks the GID of its address, set its interface down and up again; update the kernel."))
	}
	message := "kernel " + f.Kernel
	if r.before(7, 3) {
		message += "; device names are unique over all namespaces of the node (from 7.3 on in each), and software devices (rdma_rxe) cannot be moved"
	}
	return append(list, pass("", message))
}

// fixedGIDLoss tells whether a stable kernel has the back-ported fix of lost
// GID events. These are releases whose source was read; some before them may
// have it too.
func fixedGIDLoss(r release) bool {
	switch {
	case r.major == 6 && r.minor == 12:
		return r.patch >= 117
	case r.major == 6 && r.minor == 1:
		return r.patch >= 192
	}
	return false
}

func checkDriver(_ Facts, d DeviceFacts) []Finding {
	switch {
	case d.Movable == nil:
		return []Finding{pass(d.Name, "it cannot be told from outside whether its driver can release it; rdma-cni doctor --probe "+d.Name+" tries it")}
	case *d.Movable:
		return []Finding{pass(d.Name, "its driver ("+d.MovableModule+") can release it from its users, so it can be moved")}
	default:
		severity := warn // a physical function or software device beside the ones for pods
		if d.Kind == "vf" || d.Kind == "sf" {
			severity = fail
		}
		return []Finding{severity(d.Name, "its driver ("+d.MovableModule+") cannot release a device from its users (it has no disassociate_ucontext)", "The kernel refuses to move it, with EOPNOTSUPP: no pod can get it.",
			"Use a newer kernel if that driver has learnt it (bnxt_re 6.5, erdma 6.12, rdma_rxe 7.3), or another adapter.")}
	}
}

func checkGUID(_ Facts, d DeviceFacts) []Finding {
	if d.Place != string(attachment.Home) && d.NodeGUID == 0 && len(d.Ports) == 0 {
		return nil // not seen
	}
	if d.NodeGUID != 0 {
		return []Finding{pass(d.Name, "node GUID "+d.NodeGUID.String())}
	}
	return []Finding{warn(d.Name, "its node GUID is zero", "Connections by rdma_cm fail, and several devices cannot be told apart.",
		"Give the virtual function a MAC address (ip link set PF vf N mac ...) or, on InfiniBand, GUIDs (ip link set PF vf N node_guid ...), then unbind and bind its driver.")}
}

func checkAdminMAC(_ Facts, d DeviceFacts) []Finding {
	if d.Kind != "vf" || d.AdminMAC == "" || d.LinkLayer == "InfiniBand" {
		return nil
	}
	if strings.Trim(d.AdminMAC, "0:") != "" {
		return []Finding{pass(d.Name, "administrative MAC "+d.AdminMAC)}
	}
	return []Finding{warn(d.Name, fmt.Sprintf("VF %d of %s has no administrative MAC address", d.VF, d.PF), "Its driver makes one up at each load, and some derive a zero node GUID.",
		"Set one (ip link set PF vf N mac ...) before the VF's driver binds, or unbind and bind it afterwards.")}
}

func checkPorts(_ Facts, d DeviceFacts) []Finding {
	var list []Finding
	for _, p := range d.Ports {
		if p.IB != nil && p.IB.GUID == 0 {
			list = append(list, warn(d.Name, fmt.Sprintf("port %d has the GUID 0", p.Number), "No subnet manager makes the port active.",
				"Set it (ip link set PF vf N port_guid ...), or have ib-sriov do it (guid), then unbind and bind the driver."))
		}
		if p.Active {
			list = append(list, pass(d.Name, fmt.Sprintf("port %d is ACTIVE%s", p.Number, p.identity())))
			continue
		}
		fix := "See the cable, the switch and, on InfiniBand, whether a subnet manager runs."
		message := fmt.Sprintf("port %d is %s%s", p.Number, p.State, p.identity())
		if p.Netdev != "" && p.Oper != "" && p.IB == nil {
			message += ", its interface " + p.Netdev + " is " + p.Oper
			fix = "Set its interface up (ip link set " + p.Netdev + " up), and that of the physical function; a plugin such as sriov sets it up in the pod."
		}
		if d.Place == string(attachment.Home) && (d.Kind == "vf" || d.Kind == "sf") && p.Oper != "up" {
			list = append(list, pass(d.Name, message+", as is usual for a function that waits for a pod"))
			continue
		}
		list = append(list, warn(d.Name, message, "No data can be sent.", fix))
	}
	return list
}

// identity adds what a subnet manager knows an InfiniBand port by.
func (p PortFacts) identity() string {
	if p.IB == nil {
		return ""
	}
	return fmt.Sprintf(", GUID %s, partition %s", p.IB.GUID, p.IB.KeyText())
}

// smallestMTU leaves an RDMA MTU of 1024: RoCE's own headers take up to 58
// bytes of the interface's.
const smallestMTU = 1024 + 58

func checkMTU(_ Facts, d DeviceFacts) []Finding {
	var list []Finding
	for _, p := range d.Ports {
		if p.MTU == 0 || d.Protocol == "ib" {
			continue
		}
		switch {
		case p.MTU < smallestMTU:
			list = append(list, warn(d.Name, fmt.Sprintf("interface %s has MTU %d", p.Netdev, p.MTU), "RDMA packets carry 512 bytes or fewer, and peers with more fail to connect.", "Raise it to 1500, better to 4200 or 9000 on all hosts and switches of the network."))
		case d.PFNetdevMTU > 0 && p.MTU > d.PFNetdevMTU:
			list = append(list, warn(d.Name, fmt.Sprintf("interface %s has MTU %d, its physical function %d", p.Netdev, p.MTU, d.PFNetdevMTU), "Long packets are dropped.", "Raise the MTU of the physical function's interface."))
		default:
			list = append(list, pass(d.Name, fmt.Sprintf("interface %s has MTU %d", p.Netdev, p.MTU)))
		}
	}
	return list
}

// fullGIDs is the share of a GID table, in percent, from which on it is called
// full.
const fullGIDs = 90

func checkGIDs(_ Facts, d DeviceFacts) []Finding {
	var list []Finding
	for _, p := range d.Ports {
		if p.GIDs < 0 || d.Protocol != "roce" {
			continue
		}
		message := fmt.Sprintf("port %d uses %d of %d GIDs, %d of them RoCE v2", p.Number, p.GIDs, p.GIDSize, p.RoCEv2)
		switch {
		case p.Active && p.RoCEv2 == 0:
			list = append(list, warn(d.Name, message, "No address of the port can be used for RoCE v2.", "Give its interface an address, or set it down and up again; see the kernel log."))
		case p.GIDSize > 0 && p.GIDs*100 >= p.GIDSize*fullGIDs:
			list = append(list, warn(d.Name, message, "Further addresses get no GID. A device that many pods share runs full.", "Give each pod a function of its own (mode exclusive)."))
		default:
			list = append(list, pass(d.Name, message))
		}
	}
	return list
}

func checkBonding(f Facts) []Finding {
	var list []Finding
	for _, d := range f.Devices {
		bond := ""
		for _, p := range d.Ports {
			if p.Bond != "" {
				bond = p.Bond
			}
		}
		switch {
		case d.Name == "":
		case strings.Contains(d.Name, "_bond_"):
			list = append(list, warn(d.Name, "it is the one RDMA device of a bond of physical functions", "The other functions of the bond have none, and making or breaking the bond registers devices anew, in the first namespace: pods lose theirs.",
				"Give pods virtual functions, never this device; do not change the bond while pods run."))
		case bond != "":
			list = append(list, warn(d.Name, "its interface is in "+bond, "If the adapter aggregates the links itself, making or breaking the bond registers devices anew, in the first namespace: pods lose theirs.",
				"Do not change the bond while pods run."))
		}
	}
	return orPass(list, "no RDMA device is part of a bond")
}

func checkNumbering(f Facts) []Finding {
	var list []Finding
	kinds := map[string][]int{}
	var order []string
	for _, c := range f.Chars {
		k := string(c.Kind)
		if k == "issm" {
			continue // numbered with umad
		}
		if kinds[k] == nil {
			order = append(order, k)
		}
		kinds[k] = append(kinds[k], c.Index)
	}
	for _, k := range order {
		var holes []string
		highest := slices.Max(kinds[k])
		for i := range highest {
			if !slices.Contains(kinds[k], i) {
				holes = append(holes, k+strconv.Itoa(i))
			}
		}
		if len(holes) > 0 {
			list = append(list, warn("", "free numbers below used ones: "+strings.Join(holes, ", "), "The next device that is moved takes the lowest free number and keeps it, so that a pod which was given its old node cannot use it.",
				"Move the device with the highest number once (rdma-cni doctor --probe DEVICE), which fills a hole; then restart the device plugin, and write CDI specs anew, so that they read the numbers again."))
		}
	}
	return orPass(list, "no free number below a used one")
}

func checkChars(f Facts) []Finding {
	var list []Finding
	chars := f.Chars
	if f.CM != nil {
		chars = append(slices.Clone(chars), *f.CM)
	}
	for _, c := range chars {
		switch {
		case c.Node == nil:
			list = append(list, fail(c.Name, c.NodeErr, "Programs and device plugins on the host find no such device.", "See whether /dev is a devtmpfs (mount), and whether udev runs."))
		case *c.Node != c.Number:
			list = append(list, fail(c.Name, fmt.Sprintf("/dev/infiniband/%s is %s, but the kernel's number is %s", c.Name, c.Node, c.Number), "It leads to another device or to none.", "Remove it, and make it anew (udevadm trigger), or mknod."))
		}
	}
	if len(chars) == 0 {
		return []Finding{pass("", "no RDMA character device to look at")}
	}
	return orPass(list, fmt.Sprintf("%d nodes in /dev/infiniband have the kernel's numbers", len(chars)))
}

func checkSharedPlugin(f Facts) []Finding {
	signs := strings.Join(f.SharedPlugin, ", ")
	exclusive := f.Live != nil && *f.Live == rdma.Exclusive
	switch {
	case signs == "":
		return []Finding{pass("", "no sign of the RDMA shared device plugin")}
	case exclusive:
		return []Finding{fail("", "the RDMA shared device plugin is on this node, whose mode is exclusive: "+signs,
			`It ends at its start with "incorrect RDMA subsystem network namespace", or the nodes that it gives to pods cannot be opened: EPERM.`,
			"Decide for one: on nodes for the rdma plugin keep the shared plugin away (nodeSelector) and use the SR-IOV device plugin; or set the mode to shared (rdma-cni mode set shared --persist; EBUSY while other network namespaces exist, so reboot) and remove the rdma plugin from their networks.")}
	default:
		return []Finding{warn("", "the RDMA shared device plugin is on this node, whose mode is not exclusive: "+signs,
			"The two exclude each other: pods with a shared device run, and every ADD of the rdma plugin is refused.",
			"Decide for one: leave the rdma plugin out of the networks of this node; or remove the shared plugin from it and set the mode to exclusive (rdma-cni mode set exclusive --persist; EBUSY while other network namespaces exist, so reboot).")}
	}
}

func checkRecords(f Facts) []Finding {
	var list []Finding
	for _, r := range f.Records {
		switch {
		case r.Err != "":
			list = append(list, warn(r.Function, "the record of "+r.Owner+" cannot be judged: "+r.Err, "", "See the message."))
		case r.Action != string(attachment.Keep):
			list = append(list, warn(r.Function, "the record of "+r.Owner+" is stale: "+r.Reason, "The runtime never said that the pod is gone.", "End it: rdma-cni gc (--dry-run says what it would do)."))
		}
	}
	return orPass(list, fmt.Sprintf("%d records, none is stale", len(f.Records)))
}

func checkStranded(f Facts) []Finding {
	var list []Finding
	for _, d := range f.Devices {
		switch d.Place {
		case string(attachment.Unreachable):
			list = append(list, fail(d.Function, "the RDMA device "+d.Name+" is "+d.Holder, "No pod can get it until it comes home.",
				"It comes home when the last socket or process that holds its namespace ends. Look for processes in state D and at the kernel log; if nothing helps, unbind and bind the function's driver."))
		case string(attachment.InNamespace):
			list = append(list, warn(d.Function, "the RDMA device "+d.Name+" is outside, and no record says why: "+d.Holder, "Somebody moved it by hand or by another tool. The rdma plugin does not touch it.",
				"End what holds the namespace; or move it home from there (nsenter --net=PATH rdma dev set "+d.Name+" netns 1)."))
		}
	}
	return orPass(list, "every RDMA device is at home or in a namespace that a record names")
}

func checkPlugins(f Facts) []Finding {
	var list []Finding
	found := false
	for _, p := range f.Plugins {
		if p.Err != "" {
			list = append(list, warn(p.Dir, p.Err, "", "See the message."))
		}
		if !p.Binary {
			continue
		}
		found = true
		file := p.Dir + "/rdma"
		const replace = "Install the plugin anew."
		switch {
		case p.Arch == "":
			list = append(list, fail(file, p.Problem, "Pods of its networks do not start.", replace))
		case p.Arch != hostArch():
			list = append(list, fail(file, "it is built for "+p.Arch+", this machine is "+hostArch(), "Pods of its networks do not start: exec format error.", "Install the one for this machine."))
		case !p.safe():
			list = append(list, fail(file, fmt.Sprintf("others than root can change it or its directory (file mode %#o, user %d; directory mode %#o, user %d)", p.Mode, p.UID, p.DirMode, p.DirUID), "Who can change it is root: runtimes run it so.", "chown root, chmod 0755, both."))
		case p.Mode&0o111 == 0:
			list = append(list, fail(file, fmt.Sprintf("it cannot be executed (mode %#o)", p.Mode), "Pods of its networks do not start.", "chmod 0755 it."))
		case p.Problem != "":
			list = append(list, fail(file, p.Problem, "Pods of its networks do not start.", replace))
		case !p.Ours:
			list = append(list, warn(file, "it is another program ("+p.Version+")", "Its faults are its own; devices that it attaches have no record here.", "Replace it with this project's plugin: pods that it attached are detached properly."))
		default:
			list = append(list, pass(file, p.Version))
		}
	}
	if !found {
		var dirs []string
		for _, p := range f.Plugins {
			if p.Exists {
				dirs = append(dirs, p.Dir)
			}
		}
		where := "no CNI directory exists"
		if len(dirs) > 0 {
			where = "it is not in " + strings.Join(dirs, ", ")
		}
		list = append(list, warn("", "the plugin rdma is not installed: "+where, "Networks that name it fail: no pod of theirs starts.", "Install it into the directory that the runtime is configured for, usually /opt/cni/bin: by the DaemonSet, or by rdma-cni install --cni-bin-dir DIR --rdma-cni-bin-file FILE --no-sleep."))
	}
	return list
}

func checkMemlock(f Facts) []Finding {
	var list []Finding
	for _, r := range f.Runtimes {
		name := fmt.Sprintf("%s (process %d)", r.Command, r.PID)
		switch {
		case r.Err != "":
			list = append(list, warn(name, r.Err, "Its limit of locked memory is not known.", "Run this as root."))
		case r.NoLimit:
			list = append(list, pass(name, "no limit of locked memory"))
		case r.Memlock < enoughMemlock:
			list = append(list, warn(name, "containers inherit a limit of locked memory of "+megabytes(r.Memlock), "Registering buffers fails with ENOMEM in containers without CAP_IPC_LOCK and for users other than root; NCCL then falls back to TCP without an error.",
				"Put LimitMEMLOCK=infinity into a drop-in of its systemd unit, and restart it."))
		default:
			list = append(list, pass(name, "containers inherit a limit of locked memory of "+megabytes(r.Memlock)))
		}
	}
	return orPass(list, "no container runtime runs that has limits to pass on")
}
