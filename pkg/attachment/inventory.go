package attachment

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// Entry is one RDMA-capable function of the node and who holds its RDMA device.
// A function with several devices has an entry for each; a software device,
// which has no function, one too.
type Entry struct {
	Function sysfs.Function // without address for a software device
	Driver   string
	PF       string // address of the physical function of a virtual one, or of the PCI function below an auxiliary device
	VF       int    // number of a virtual function, -1 if it is none
	NUMANode int    // -1: the machine does not say
	// Netdevs are the function's interfaces where its RDMA device is, or at
	// home while it has none.
	Netdevs []string
	Device  *DeviceStatus // nil: it has none, or it cannot be reached
	Chars   []sysfs.CharDeviceNode
	Holder  Holder
	// Absence says why there is no device, if the function should have one.
	Absence error
}

// DeviceStatus is an RDMA device as its own namespace sees it.
type DeviceStatus struct {
	rdma.Device
	PortStatus []rdma.Port // from port 1 on
	// IBPorts are the ports of a device with an InfiniBand link, from port 1 on.
	IBPorts []state.Port
}

// Place is where an RDMA device is.
type Place string

// The places.
const (
	Home        Place = "home"        // the namespace of the caller
	InPod       Place = "pod"         // in a namespace that a record names
	InNamespace Place = "namespace"   // in one that no record names
	Unreachable Place = "unreachable" // in one that no path leads to
	Nowhere     Place = "none"        // the function has no RDMA device
)

// Holder says who holds an RDMA device.
type Holder struct {
	Place     Place
	Namespace rdma.NamespaceID // of a device that is not at home
	Path      string           // a path that leads there
	// Record is what an ADD wrote about the function: the holder, if Place is
	// InPod, else what is left of an earlier attachment.
	Record *state.Record
	// Upstream are the files of another rdma plugin that claim the function.
	Upstream []string
	// Process runs in the namespace, if one does.
	Process *rdma.Process
	// ContainerID and PodUID are what the control group of that process says.
	ContainerID, PodUID string
}

// Inventory is what a walk over the node found.
type Inventory struct {
	Entries []Entry
	// Hidden is how many processes could not be looked at: namespaces that
	// only these lead to are missing. It is zero for root.
	Hidden int
	// Damaged are records that cannot be read.
	Damaged []error
}

// sighting is a device that was seen in a namespace.
type sighting struct {
	device DeviceStatus
	uverbs string
	nodes  []string         // all of them, by their names
	ns     rdma.NamespaceID // zero: home
	path   string
}

// Inventory walks over all functions and all namespaces. It changes nothing and
// takes no lock; without an RDMA subsystem it lists functions all the same.
func (n *Node) Inventory(proc rdma.Proc) (*Inventory, error) {
	inv := &Inventory{}
	functions, err := n.Sysfs.Functions()
	if err != nil {
		return nil, err
	}
	seen, err := n.sightings()
	if err != nil && !errors.Is(err, rdma.ErrNoSubsystem) {
		return nil, err
	}
	holders, hidden, err := proc.NamespaceHolders()
	if err != nil {
		return nil, err
	}
	inv.Hidden = hidden
	records, damaged, err := n.Records()
	if err != nil {
		return nil, err
	}
	inv.Damaged = damaged
	chars, err := n.Sysfs.CharDeviceNodes()
	if err != nil {
		return nil, err
	}
	used := map[uint32]bool{}
	for _, f := range functions {
		e, err := n.entry(f, chars)
		if err != nil {
			return nil, err
		}
		e.Holder = holderOf(f.Address, records)
		e.Holder.Upstream = n.Upstream.Claimants(f.Address)
		rest := e.Chars
		for _, s := range seen {
			if !n.belongs(s, f, e.Chars) {
				continue
			}
			used[s.device.Index] = true
			one := e
			one.Chars, rest = ofDevice(rest, s.device.Name)
			one.place(s, holders)
			inv.Entries = append(inv.Entries, one)
		}
		if len(rest) == len(e.Chars) && len(e.Chars) == 0 && !slices.ContainsFunc(inv.Entries, func(i Entry) bool { return i.Function == f }) {
			n.placeUnseen(&e)
			inv.Entries = append(inv.Entries, e)
		}
		for len(rest) > 0 { // devices that no namespace showed
			one := e
			one.Chars, rest = ofDevice(rest, rest[0].Device)
			n.placeUnseen(&one)
			inv.Entries = append(inv.Entries, one)
		}
	}
	for _, s := range seen {
		if used[s.device.Index] {
			continue
		}
		e := Entry{VF: -1, NUMANode: -1, Holder: Holder{Record: recordOfSoft(s, records)}}
		for _, c := range chars {
			if slices.Contains(s.nodes, c.Name) {
				e.Chars = append(e.Chars, c)
			}
		}
		e.place(s, holders)
		inv.Entries = append(inv.Entries, e)
	}
	return inv, nil
}

// Records reads all records; damaged ones are told apart.
func (n *Node) Records() (records []*state.Record, damaged []error, err error) {
	names, err := n.State.Names()
	if err != nil {
		return nil, nil, err
	}
	for _, name := range names {
		r, err := n.State.Load(name)
		var d *state.DamagedError
		switch {
		case errors.Is(err, os.ErrNotExist): // its DEL came first
		case errors.As(err, &d):
			damaged = append(damaged, d)
		case err != nil:
			return nil, nil, err
		default:
			records = append(records, r)
		}
	}
	return records, damaged, nil
}

// ofDevice parts the nodes of one RDMA device from others.
func ofDevice(nodes []sysfs.CharDeviceNode, name string) (its, rest []sysfs.CharDeviceNode) {
	for _, n := range nodes {
		if n.Device == name {
			its = append(its, n)
		} else {
			rest = append(rest, n)
		}
	}
	return its, rest
}

func holderOf(address string, records []*state.Record) Holder {
	h := Holder{Place: Nowhere}
	var last time.Time
	for _, r := range records {
		if r.Function == address && !r.Since.Before(last) {
			h.Record, last = r, r.Since
		}
	}
	return h
}

// recordOfSoft finds the record of a software device, which has no function to
// go by.
func recordOfSoft(s sighting, records []*state.Record) *state.Record {
	for _, r := range records {
		if r.Bus != sysfs.Netdev && r.Bus != sysfs.RXE {
			continue
		}
		if slices.ContainsFunc(r.Devices, func(d state.Device) bool { return d.Index == s.device.Index && d.NodeGUID == s.device.NodeGUID }) {
			return r
		}
	}
	return nil
}

func (n *Node) entry(f sysfs.Function, chars []sysfs.CharDeviceNode) (Entry, error) {
	e := Entry{Function: f, VF: -1, NUMANode: f.NUMANode(), Netdevs: f.Netdevs()}
	var err error
	if e.Driver, err = f.Driver(); err != nil {
		return e, err
	}
	if pf, number, ok := f.PhysicalFunction(); ok {
		e.PF, e.VF = pf, number
	} else if f.Bus == sysfs.Auxiliary {
		e.PF = f.Parent()
	}
	for _, c := range chars {
		if c.Function == f.Address {
			e.Chars = append(e.Chars, c)
		}
	}
	return e, nil
}

// belongs tells whether a device that was seen is that of a function: by its
// verbs node, or by its name if it is at home, where sysfs shows that.
func (n *Node) belongs(s sighting, f sysfs.Function, chars []sysfs.CharDeviceNode) bool {
	if s.uverbs != "" {
		return slices.ContainsFunc(chars, func(c sysfs.CharDeviceNode) bool { return c.Name == s.uverbs })
	}
	names, err := f.RDMADevices()
	return s.ns == (rdma.NamespaceID{}) && err == nil && slices.Contains(names, s.device.Name)
}

// place notes where the device was seen.
func (e *Entry) place(s sighting, holders []rdma.Holders) {
	e.Device = &s.device
	if s.ns == (rdma.NamespaceID{}) {
		e.Holder.Place = Home
		if len(e.Netdevs) == 0 {
			e.Netdevs = portNetdevs(s.device)
		}
		return
	}
	e.Netdevs = portNetdevs(s.device)
	e.Holder.Place, e.Holder.Namespace, e.Holder.Path = InNamespace, s.ns, s.path
	if r := e.Holder.Record; r != nil && r.Netns.ID == s.ns {
		e.Holder.Place, e.Holder.Path = InPod, r.Netns.Path
	}
	i := slices.IndexFunc(holders, func(h rdma.Holders) bool { return h.ID.Inode == s.ns.Inode })
	if i >= 0 && len(holders[i].Processes) > 0 {
		p := holders[i].Processes[0]
		for _, other := range holders[i].Processes {
			if id, _ := other.Container(); id != "" {
				p = other
				break
			}
		}
		e.Holder.Process = &p
		e.Holder.ContainerID, e.Holder.PodUID = p.Container()
	}
}

func portNetdevs(d DeviceStatus) []string {
	var names []string
	for _, p := range d.PortStatus {
		if p.Netdev != "" && !slices.Contains(names, p.Netdev) {
			names = append(names, p.Netdev)
		}
	}
	return names
}

// placeUnseen says where the device of a function is that no namespace showed.
func (n *Node) placeUnseen(e *Entry) {
	names, err := e.Function.RDMADevices()
	switch {
	case errors.Is(err, sysfs.ErrElsewhere):
		e.Holder.Place = Unreachable
	case errors.Is(err, sysfs.ErrNoRDMADevice):
		absence, absenceErr := e.Function.Absence()
		e.Absence = absenceErr
		if absence != nil {
			e.Absence = absence
		}
	case err != nil:
		e.Absence = err
	case len(e.Chars) > 0 && !slices.Contains(names, e.Chars[0].Device):
		e.Holder.Place = Unreachable
	default: // it came home while we looked elsewhere
		e.Holder.Place = Home
	}
}

// sightings looks for devices at home and in every namespace that a path leads
// to. One that cannot be asked is passed over.
func (n *Node) sightings() ([]sighting, error) {
	s, err := n.open()
	if err != nil {
		return nil, err
	}
	defer s.close()
	list, err := sightingsIn(s.conn, rdma.NamespaceID{}, "")
	if err != nil {
		return nil, err
	}
	mode, err := s.conn.Mode()
	if err != nil || mode != rdma.Exclusive {
		return list, nil // in mode shared all devices are seen from home
	}
	rdma.Reachable(func(path string, ns *rdma.Namespace) bool {
		if ns.ID() == s.home.ID() {
			return false
		}
		var there []sighting
		err := ns.Do(func(conn *rdma.Conn) (err error) {
			there, err = sightingsIn(conn, ns.ID(), path)
			return err
		})
		if err == nil {
			list = append(list, there...)
		}
		return false
	})
	return list, nil
}

// dumps is how often a list of devices is asked for: one can miss a device
// while another one leaves.
const dumps = 2

func sightingsIn(conn *rdma.Conn, id rdma.NamespaceID, path string) ([]sighting, error) {
	var list []sighting
	for range dumps {
		devices, err := conn.Devices()
		if err != nil {
			return nil, err
		}
		for _, d := range devices {
			if slices.ContainsFunc(list, func(s sighting) bool { return s.device.Index == d.Index }) {
				continue
			}
			one := sighting{device: DeviceStatus{Device: d}, ns: id, path: path}
			if one.nodes, err = conn.CharDevices(d); err != nil && !errors.Is(err, rdma.ErrDeviceNotFound) {
				return nil, err
			}
			if len(one.nodes) > 0 {
				one.uverbs = one.nodes[0]
			}
			for port := uint32(1); port <= d.Ports; port++ {
				p, err := conn.Port(d.Index, port)
				if err != nil {
					break // the device left meanwhile
				}
				one.device.PortStatus = append(one.device.PortStatus, p)
			}
			if isInfiniBand(d) {
				one.device.seeInfiniBand()
			}
			list = append(list, one)
		}
	}
	return list, nil
}

// Describe says where a device is and whose it is, in a few words.
func (h Holder) Describe() string {
	switch h.Place {
	case Home:
		return "home"
	case Nowhere:
		return "no RDMA device"
	case Unreachable:
		s := "in a namespace that no path leads to"
		if h.Record != nil {
			s += ", attached to " + h.Record.Owner()
		}
		return s
	}
	var who []string
	if h.Place == InPod {
		who = append(who, h.Record.Owner())
	} else {
		who = append(who, fmt.Sprintf("namespace %s (%s), no record", h.Path, h.Namespace))
		if h.ContainerID != "" {
			who = append(who, "container "+h.ContainerID)
		}
		if h.PodUID != "" {
			who = append(who, "pod UID "+h.PodUID)
		}
		if len(h.Upstream) > 0 {
			who = append(who, "record of another rdma plugin "+strings.Join(h.Upstream, ", "))
		}
	}
	if h.Process != nil {
		who = append(who, fmt.Sprintf("process %d (%s)", h.Process.PID, h.Process.Command))
	}
	return strings.Join(who, ", ")
}
