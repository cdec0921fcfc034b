package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// listFilter chooses functions; empty fields choose all.
type listFilter struct{ pci, netdev, device, pod string }

func (a *app) listCommand() *cobra.Command {
	var filter listFilter
	var watch bool
	cmd := &cobra.Command{
		Use:     "list",
		Aliases: []string{"discover"},
		Short:   "List RDMA-capable functions and who holds their devices",
		Long: `list shows every RDMA-capable function of the node: PCI functions and auxiliary
devices with an RDMA device, virtual functions whose physical one has one, and
functions that should have one but do not, with the reason. A device inside a pod
is found by its record, and without one by a walk over all network namespaces,
which takes root.

The owner is "home" for a device in the namespace of this process. An InfiniBand
port is shown with its GUID and the first key of its partition table.
` + exitCodes + `
A node without RDMA is no failure: the list is empty.`,
		Example: `  rdma-cni list
  rdma-cni list --pod training/worker-0 -o json
  rdma-cni list --watch`,
	}
	flags := cmd.Flags()
	flags.StringVar(&filter.pci, "pci", "", "only the function of this PCI or auxiliary address")
	flags.StringVar(&filter.netdev, "netdev", "", "only the function of this network interface")
	flags.StringVar(&filter.device, "device", "", "only the function of this RDMA device")
	flags.StringVar(&filter.pod, "pod", "", "only what this pod holds (NAMESPACE/NAME), or this container (its ID)")
	flags.BoolVarP(&watch, "watch", "w", false, "print again whenever something changes, until interrupted")
	return a.does(cmd, func(cmd *cobra.Command, _ []string) error {
		if !watch {
			return a.list(filter)
		}
		return a.watch(cmd, filter)
	})
}

func (a *app) list(filter listFilter) error {
	inv, err := a.node.Inventory(a.proc)
	if err != nil {
		return err
	}
	for _, d := range inv.Damaged {
		a.talk("warning: %v", d)
	}
	if inv.Hidden > 0 {
		a.talk("warning: %d processes cannot be looked at, so devices in their namespaces can be missing; run this as root", inv.Hidden)
	}
	rows := listRows(inv.Entries, filter)
	return a.print(rows, func(w io.Writer) { listTable(w, rows) })
}

// watchStep is how often a watch looks. The kernel announces no move by
// netlink, and uevents do not tell of namespaces.
const watchStep = time.Second

func (a *app) watch(cmd *cobra.Command, filter listFilter) error {
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, unix.SIGTERM)
	defer stop()
	out, last := a.Out, []byte(nil)
	defer func() { a.Out = out }()
	tick := time.NewTicker(watchStep)
	defer tick.Stop()
	for {
		var now bytes.Buffer
		a.Out = &now
		if err := a.list(filter); err != nil {
			return err
		}
		if !bytes.Equal(now.Bytes(), last) {
			separator := ""
			if last != nil {
				separator = map[string]string{formatTable: "\n", formatYAML: "---\n"}[a.format]
			}
			if _, err := fmt.Fprint(out, separator, now.String()); err != nil {
				return fmt.Errorf("write the output: %w", err)
			}
			last = now.Bytes()
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// listRow is the schema of list's output.
type listRow struct {
	Address     string        `json:"address,omitempty"` // empty for a software device
	Bus         string        `json:"bus"`               // pci, auxiliary, virtual
	Type        string        `json:"type"`              // pf, vf, sf, software
	PF          string        `json:"pf,omitempty"`
	VF          *int          `json:"vf,omitempty"`
	Driver      string        `json:"driver,omitempty"`
	NUMANode    *int          `json:"numaNode,omitempty"`
	LinkLayer   string        `json:"linkLayer,omitempty"`
	Netdevs     []string      `json:"netdevs,omitempty"`
	Device      string        `json:"device,omitempty"`
	Index       *uint32       `json:"index,omitempty"`
	NodeGUID    string        `json:"nodeGUID,omitempty"`
	Ports       []listPort    `json:"ports,omitempty"`
	CharDevices []listCharDev `json:"charDevices,omitempty"`
	Absence     string        `json:"absence,omitempty"`
	Holder      listHolder    `json:"holder"`
}

type listPort struct {
	Port   int    `json:"port"`
	State  string `json:"state"`
	Netdev string `json:"netdev,omitempty"`
	GUID   string `json:"guid,omitempty"` // of an InfiniBand port, as PKey
	PKey   string `json:"pkey,omitempty"`
}

// text is the port in the table.
func (p listPort) text() string {
	if p.GUID == "" {
		return p.State
	}
	return fmt.Sprintf("%s %s pkey %s", p.State, p.GUID, p.PKey)
}

type listCharDev struct {
	Name string `json:"name"`
	sysfs.DeviceNumber
}

type listHolder struct {
	Place        string     `json:"place"` // home, pod, namespace, unreachable, none
	PodNamespace string     `json:"podNamespace,omitempty"`
	PodName      string     `json:"podName,omitempty"`
	PodUID       string     `json:"podUID,omitempty"`
	ContainerID  string     `json:"containerID,omitempty"`
	IfName       string     `json:"ifName,omitempty"`
	Network      string     `json:"network,omitempty"`
	Since        *time.Time `json:"since,omitempty"`
	Netns        string     `json:"netns,omitempty"`      // a path that leads there
	NetnsInode   uint64     `json:"netnsInode,omitempty"` // as in net:[INODE]
	Recorded     bool       `json:"recorded"`             // a record of ours says so
	Upstream     []string   `json:"upstreamRecords,omitempty"`
	PID          int        `json:"pid,omitempty"` // a process that runs there
	Command      string     `json:"command,omitempty"`
}

func listRows(entries []attachment.Entry, filter listFilter) []listRow {
	rows := []listRow{}
	for _, e := range entries {
		r := listRowOf(e)
		if filter.admits(r) {
			rows = append(rows, r)
		}
	}
	return rows
}

func listRowOf(e attachment.Entry) listRow {
	r := listRow{
		Address: e.Function.Address, Bus: string(e.Function.Bus), Type: functionType(e),
		PF: e.PF, Driver: e.Driver, Netdevs: e.Netdevs, Holder: listHolderOf(e.Holder),
	}
	if r.Bus == "" {
		r.Bus = "virtual"
	}
	if e.VF >= 0 {
		r.VF = &e.VF
	}
	if e.NUMANode >= 0 {
		r.NUMANode = &e.NUMANode
	}
	if e.Absence != nil {
		r.Absence = e.Absence.Error()
	}
	if d := e.Device; d != nil {
		r.Device, r.Index, r.NodeGUID, r.LinkLayer = d.Name, &d.Index, d.NodeGUID.String(), d.LinkLayer()
		for i, p := range d.PortStatus {
			port := listPort{Port: i + 1, State: p.StateName(), Netdev: p.Netdev}
			if i < len(d.IBPorts) {
				port.GUID, port.PKey = d.IBPorts[i].GUID.String(), d.IBPorts[i].KeyText()
			}
			r.Ports = append(r.Ports, port)
		}
	}
	for _, c := range e.Chars {
		r.CharDevices = append(r.CharDevices, listCharDev{Name: c.Name, DeviceNumber: c.Number})
		if r.Device == "" {
			r.Device = c.Device // its name in its own namespace, which we do not see
		}
	}
	return r
}

func functionType(e attachment.Entry) string {
	switch {
	case e.Function.Address == "":
		return "software"
	case e.Function.Bus == sysfs.Auxiliary:
		return "sf"
	case e.PF != "":
		return "vf"
	default:
		return "pf"
	}
}

func listHolderOf(h attachment.Holder) listHolder {
	l := listHolder{
		Place: string(h.Place), Netns: h.Path, NetnsInode: h.Namespace.Inode, Upstream: h.Upstream,
		ContainerID: h.ContainerID, PodUID: h.PodUID,
	}
	if h.Process != nil {
		l.PID, l.Command = h.Process.PID, h.Process.Command
	}
	if r := h.Record; r != nil && (h.Place == attachment.InPod || h.Place == attachment.Unreachable) {
		since := r.Since
		l.Recorded, l.Since = true, &since
		l.PodNamespace, l.PodName, l.ContainerID = r.Pod.Namespace, r.Pod.Name, r.ContainerID
		l.IfName, l.Network = r.IfName, r.Network
		if r.Pod.UID != "" {
			l.PodUID = r.Pod.UID
		}
		if l.Netns == "" {
			l.Netns = r.Netns.Path
		}
	}
	return l
}

func (f listFilter) admits(r listRow) bool {
	h := r.Holder
	return (f.pci == "" || strings.EqualFold(f.pci, r.Address)) &&
		(f.netdev == "" || slices.Contains(r.Netdevs, f.netdev)) &&
		(f.device == "" || f.device == r.Device) &&
		(f.pod == "" || f.pod == podName(h.PodNamespace, h.PodName) || f.pod == h.ContainerID || f.pod == h.PodUID)
}

func listTable(w io.Writer, rows []listRow) {
	if len(rows) == 0 {
		_, _ = fmt.Fprintln(w, "No RDMA-capable function found; 'rdma-cni doctor' says what is missing.")
		return
	}
	cells := make([][]string, 0, len(rows))
	for _, r := range rows {
		address, numa := r.Address, ""
		if address == "" {
			address = "(software)"
		}
		if r.NUMANode != nil {
			numa = strconv.Itoa(*r.NUMANode)
		}
		kind := strings.ToUpper(r.Type)
		if r.VF != nil {
			kind += fmt.Sprintf(" %d of %s", *r.VF, r.PF)
		} else if r.PF != "" {
			kind += " of " + r.PF
		}
		var chars, ports []string
		for _, c := range r.CharDevices {
			chars = append(chars, c.Name)
		}
		for _, p := range r.Ports {
			ports = append(ports, p.text())
		}
		guid := r.NodeGUID
		if r.Device != "" && guid == rdma.GUID(0).String() {
			guid = "zero"
		}
		cells = append(cells, []string{
			address, kind, r.Driver, r.Device, r.LinkLayer, strings.Join(ports, ","),
			strings.Join(r.Netdevs, ","), strings.Join(chars, ","), guid, numa, r.Holder.text(r),
		})
	}
	table(w, []string{"ADDRESS", "TYPE", "DRIVER", "DEVICE", "LINK", "PORT", "NETDEV", "NODES", "NODE GUID", "NUMA", "OWNER"}, cells)
}

func (h listHolder) text(r listRow) string {
	switch attachment.Place(h.Place) {
	case attachment.Home:
		return "home"
	case attachment.Nowhere:
		if r.Absence != "" {
			return "none: " + r.Absence
		}
		return "none"
	case attachment.Unreachable:
		if !h.Recorded {
			return "in a namespace that no path leads to"
		}
	case attachment.InNamespace:
		s := "not recorded: " + h.Netns
		if h.ContainerID != "" {
			s += ", container " + owner(attachmentPod(h), h.ContainerID)
		}
		if h.Command != "" {
			s += fmt.Sprintf(", process %d (%s)", h.PID, h.Command)
		}
		return s
	}
	s := owner(attachmentPod(h), h.ContainerID) + " " + h.IfName
	if h.Since != nil {
		s += " since " + h.Since.UTC().Format(time.RFC3339)
	}
	return s
}

func attachmentPod(h listHolder) state.Pod {
	return state.Pod{Namespace: h.PodNamespace, Name: h.PodName}
}
