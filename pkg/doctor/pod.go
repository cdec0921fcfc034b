package doctor

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// PodFacts is what the checks of a pod judge.
type PodFacts struct {
	Namespace  string // network namespace, as a path or net:[INODE]
	IsHost     bool   // it is the one we run in
	Live       *rdma.Mode
	Devices    []PodDevice
	Records    []PodRecord // attachments to this namespace
	Interfaces []PodInterface
	Containers []ContainerFacts // none: no process runs in the namespace
}

// PodDevice is an RDMA device that is in the pod's namespace.
type PodDevice struct {
	Name     string
	Index    uint32
	Function string // address of its parent
	Protocol string
	Ports    []PortFacts
	Chars    []CharFacts // as the kernel numbers them now
	Recorded bool        // a record says that it was attached to this pod
	// GSI says whether it has the queue pair that rdma_cm needs, nil if that
	// cannot be told.
	GSI      *bool
	GIDs     []netip.Addr
	GIDError string
}

// PodRecord is a record of an attachment to the namespace.
type PodRecord struct {
	Owner, Device, Function, Phase string
	IfName                         string
	Here                           bool // its device is in the pod
}

// PodInterface is a network interface in the pod.
type PodInterface struct {
	Name      string
	Up        bool
	Addresses []netip.Addr // without those of the loopback and link-local ones of IPv6
}

// ContainerFacts is one container of the pod, seen by one of its processes.
type ContainerFacts struct {
	ID      string // "" outside containers
	Process rdma.Process
	Memlock uint64
	NoLimit bool
	IPCLock bool // CAP_IPC_LOCK is effective
	LimErr  string
	// Nodes are the nodes in the container's /dev/infiniband.
	Nodes map[string]NodeFacts
	// SysDevices are the RDMA devices that the container's /sys shows; nil if
	// it has none mounted.
	SysDevices []string
	SysError   string
}

// NodeFacts is a node in a container's /dev/infiniband.
type NodeFacts struct {
	Number sysfs.DeviceNumber
	// Opened says whether a process in the container's control group and
	// network namespace could open it; nil if that was not tried.
	Opened *bool
	Error  string // of the attempt
	Denied bool   // with EPERM or EACCES
}

var podChecks = []check[PodFacts]{
	{"network-namespace", checkNamespace},
	{"mode", checkPodMode},
	{"device", checkPodDevice},
	{"foreign-devices", checkForeign},
	{"netdev", checkPodNetdev},
	{"port", checkPodPort},
	{"gids", checkPodGIDs},
	{"sysfs", perContainer(checkPodSysfs)},
	{"nodes", perContainer(checkPodNodes)},
	{"access", perContainer(checkPodAccess)},
	{"rdma-cm", checkPodGSI},
	{"connection-manager", perContainer(checkPodCM)},
	{"memlock", perContainer(checkPodMemlock)},
}

// ExaminePod judges a pod.
func ExaminePod(f PodFacts) []Finding { return examine(f, podChecks) }

func (c ContainerFacts) name() string {
	if c.ID != "" {
		return fmt.Sprintf("container %.12s (%s)", c.ID, c.Process.Command)
	}
	return fmt.Sprintf("process %d (%s)", c.Process.PID, c.Process.Command)
}

func perContainer(ask func(PodFacts, ContainerFacts) []Finding) func(PodFacts) []Finding {
	return func(f PodFacts) []Finding {
		var list []Finding
		for _, c := range f.Containers {
			list = append(list, ask(f, c)...)
		}
		if len(f.Containers) == 0 {
			return []Finding{warn("", "no process runs in the namespace", "What only a container shows (its nodes, limits and rights) was not examined.", "Try again while the pod runs.")}
		}
		return list
	}
}

func checkNamespace(f PodFacts) []Finding {
	if f.IsHost {
		return []Finding{fail(f.Namespace, "it is the host's network namespace", "A pod with hostNetwork uses the host's devices; none is moved for it.", "Run it without hostNetwork if it is to have a device of its own.")}
	}
	return []Finding{pass(f.Namespace, "the network namespace is there, and not the host's")}
}

func checkPodMode(f PodFacts) []Finding {
	switch {
	case f.Live == nil:
		return []Finding{fail("", "the node has no RDMA subsystem", "There is no RDMA in any pod.", "See rdma-cni doctor.")}
	case *f.Live == rdma.Shared:
		return []Finding{fail("", "the node's mode is shared", "No device can be in the pod alone; each pod with nodes can use all devices.", "See rdma-cni doctor.")}
	default:
		return []Finding{pass("", "the node's mode is exclusive")}
	}
}

func checkPodDevice(f PodFacts) []Finding {
	var list []Finding
	for _, r := range f.Records {
		switch {
		case !r.Here:
			list = append(list, fail(r.Device, "it was attached as "+r.IfName+", but is not in the pod", "Its driver was reloaded, its function reset, or somebody moved it; it does not come back by itself.", "Delete the pod, so that its successor gets a device; rdma-cni list --pci "+r.Function+" shows where the device is."))
		case r.Phase != "attached":
			list = append(list, warn(r.Device, "its ADD was not finished (phase "+r.Phase+")", "The plugin was killed in the middle.", "Delete the pod; or rdma-cni gc once it is gone."))
		}
	}
	if len(f.Devices) == 0 && len(list) == 0 {
		return []Finding{fail("", "no RDMA device is in the pod, and no record says that one was attached", "The pod's network has no rdma plugin, or the pod was made before it had.",
			"Look at the network's configuration (rdma-cni doctor --config FILE), then make the pod anew.")}
	}
	for _, d := range f.Devices {
		list = append(list, pass(d.Name, "it is in the pod"))
	}
	return list
}

func checkForeign(f PodFacts) []Finding {
	var list []Finding
	for _, d := range f.Devices {
		if !d.Recorded {
			list = append(list, warn(d.Name, "no record says that it was attached to this pod", "Somebody moved it here, by hand or by another tool; CHECK of the pod's own attachments fails.", "Move it home (nsenter --net=PATH rdma dev set "+d.Name+" netns 1), or delete the pod."))
		}
	}
	return orPass(list, "every RDMA device in the pod was attached to it")
}

func checkPodNetdev(f PodFacts) []Finding {
	var list []Finding
	for _, d := range f.Devices {
		if d.Protocol != "roce" {
			continue
		}
		found := false
		for _, p := range d.Ports {
			found = found || p.Netdev != ""
		}
		if !found {
			list = append(list, fail(d.Name, "its network interface is not in the pod", "RoCE works only over the device's own interface: connections fail.", "Give interface and RDMA device the same function: one deviceID for all plugins of the network."))
		}
	}
	return orPass(list, "every RoCE device has its interface in the pod")
}

func checkPodPort(f PodFacts) []Finding {
	var list []Finding
	for _, d := range f.Devices {
		for _, p := range d.Ports {
			if !p.Active && (p.Netdev != "" || d.Protocol != "roce") {
				list = append(list, warn(d.Name, fmt.Sprintf("port %d is %s", p.Number, p.State), "No data can be sent.", "See whether the pod's interface is up, and the physical function's on the host; then cable and switch."))
			}
		}
	}
	return orPass(list, "every port with an interface is ACTIVE")
}

func checkPodGIDs(f PodFacts) []Finding {
	var list []Finding
	for _, d := range f.Devices {
		if d.GIDError != "" {
			list = append(list, warn(d.Name, "its GID table cannot be read: "+d.GIDError, "Whether its addresses can be used is not known.", "See the message."))
			continue
		}
		for _, p := range d.Ports {
			i := slices.IndexFunc(f.Interfaces, func(i PodInterface) bool { return i.Name == p.Netdev })
			if i < 0 || d.Protocol != "roce" {
				continue
			}
			if len(f.Interfaces[i].Addresses) == 0 {
				list = append(list, warn(d.Name, "its interface "+p.Netdev+" has no IP address", "Only the link-local GID can be used.", "Give the network an ipam, if the programs use addresses."))
			}
			for _, a := range f.Interfaces[i].Addresses {
				if !slices.Contains(d.GIDs, a) {
					list = append(list, warn(d.Name, "the address "+a.String()+" of "+p.Netdev+" has no RoCE v2 GID", "Connections from this address fail.", "Set the interface down and up again in the pod's namespace; update the kernel (see the check kernel of rdma-cni doctor)."))
				}
			}
		}
	}
	return orPass(list, "every address has its GID")
}

func checkPodGSI(f PodFacts) []Finding {
	var list []Finding
	for _, d := range f.Devices {
		if d.GSI != nil && !*d.GSI {
			list = append(list, warn(d.Name, "the kernel has no queue pair for management (QP 1) on it", "Connections by rdma_cm fail (rdma_connect: Invalid argument), and with them programs that have no other way to connect. "+
				"The driver of soft-RoCE, rdma_rxe, does not make the queue pair again after a move, up to 7.3 at least.",
				"Let the programs connect without rdma_cm, as ibv_rc_pingpong and perftest without -R do; for others use an adapter."))
		}
	}
	return orPass(list, "every device has what rdma_cm needs of it")
}

func checkPodSysfs(f PodFacts, c ContainerFacts) []Finding {
	if c.SysError != "" {
		return []Finding{warn(c.name(), c.SysError, "Programs find no RDMA device without /sys.", "Mount /sys in the container, as runtimes do by default.")}
	}
	for _, d := range f.Devices {
		if !slices.Contains(c.SysDevices, d.Name) {
			return []Finding{warn(c.name(), "its /sys does not show RDMA device "+d.Name+", but: "+strings.Join(c.SysDevices, ", "), "It is the /sys of another network namespace, such as a mount of the host's: programs that look there find the wrong devices.", "Do not mount the host's /sys into the container.")}
		}
	}
	return []Finding{pass(c.name(), "its /sys shows the pod's devices")}
}

func checkPodNodes(f PodFacts, c ContainerFacts) []Finding {
	var list []Finding
	var wanted, names []string
	for _, d := range f.Devices {
		for _, k := range d.Chars {
			wanted = append(wanted, k.Name)
			node, ok := c.Nodes[k.Name]
			switch {
			case ok && node.Number != k.Number:
				list = append(list, fail(c.name(), fmt.Sprintf("/dev/infiniband/%s is %s there, but %s of RDMA device %s is %s", k.Name, node.Number, k.Name, d.Name, k.Number), "Programs find no device, or another one's.", "Make the pod anew."))
			case !ok && k.Kind == sysfs.Uverbs:
				list = append(list, fail(c.name(), "it has no /dev/infiniband/"+k.Name+", the verbs node of RDMA device "+d.Name, "ibv_devinfo finds no device. The node was chosen before the move, and the move has changed the number; or nothing gave the container any node.",
					"Let a device plugin or CDI (rdma-cni cdi generate) give it the node; if it was given another number, see the check numbering of rdma-cni doctor and make the pod anew."))
			case !ok && k.Kind == sysfs.Umad:
				list = append(list, warn(c.name(), "it has no /dev/infiniband/"+k.Name, "Programs that use management datagrams do not work.", "As for the verbs node."))
			}
		}
	}
	for name := range c.Nodes {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if name != "rdma_cm" && !slices.Contains(wanted, name) && len(f.Devices) > 0 {
			list = append(list, warn(c.name(), "it has /dev/infiniband/"+name+", which is no node of a device in the pod", "It cannot be opened there, since its device is in another namespace; often it is the number of before the move.", "See the other findings of this check."))
		}
	}
	if len(list) == 0 {
		return []Finding{pass(c.name(), "its nodes are those of the pod's devices")}
	}
	return list
}

func checkPodAccess(f PodFacts, c ContainerFacts) []Finding {
	var list []Finding
	tried := 0
	for _, d := range f.Devices {
		for _, k := range d.Chars {
			node, ok := c.Nodes[k.Name]
			if ok && node.Opened == nil && node.Error != "" {
				list = append(list, warn(c.name(), "whether /dev/infiniband/"+k.Name+" can be opened was not tried: "+node.Error, "What the container's device control group allows is not known.", "Run this as root in the host's namespaces."))
			}
			if !ok || node.Opened == nil {
				continue
			}
			tried++
			switch {
			case *node.Opened:
			case node.Denied:
				list = append(list, fail(c.name(), "/dev/infiniband/"+k.Name+" cannot be opened: "+node.Error, "The container's device control group does not allow it.", "Request the device from a device plugin, or use CDI or --device, instead of mounting the node."))
			default:
				list = append(list, fail(c.name(), "/dev/infiniband/"+k.Name+" cannot be opened: "+node.Error, "Its device is being moved, or has lost its driver.", "See the kernel log."))
			}
		}
	}
	if len(list) > 0 {
		return list
	}
	if tried == 0 {
		return []Finding{pass(c.name(), "it has no node whose opening could be tried")}
	}
	return []Finding{pass(c.name(), fmt.Sprintf("%d nodes can be opened", tried))}
}

func checkPodCM(_ PodFacts, c ContainerFacts) []Finding {
	if _, ok := c.Nodes["rdma_cm"]; !ok {
		return []Finding{warn(c.name(), "it has no /dev/infiniband/rdma_cm", "Programs that connect by address (librdmacm) do not work.", "Let a device plugin or CDI give it that node.")}
	}
	return []Finding{pass(c.name(), "it has /dev/infiniband/rdma_cm")}
}

func checkPodMemlock(_ PodFacts, c ContainerFacts) []Finding {
	switch {
	case c.LimErr != "":
		return []Finding{warn(c.name(), c.LimErr, "Its limit of locked memory is not known.", "Run this as root.")}
	case c.NoLimit:
		return []Finding{pass(c.name(), "no limit of locked memory")}
	case c.IPCLock:
		return []Finding{pass(c.name(), "CAP_IPC_LOCK lifts its limit of locked memory ("+megabytes(c.Memlock)+")")}
	case c.Memlock < enoughMemlock:
		return []Finding{warn(c.name(), "its limit of locked memory is "+megabytes(c.Memlock)+", and it has no effective CAP_IPC_LOCK", "Registering larger buffers fails with ENOMEM; NCCL then falls back to TCP without an error. The capability in a pod's manifest is effective for root only.",
			"Raise the runtime's limit (LimitMEMLOCK=infinity in a drop-in of its systemd unit); or run the container as root with the capability IPC_LOCK.")}
	default:
		return []Finding{pass(c.name(), "its limit of locked memory is "+megabytes(c.Memlock))}
	}
}
