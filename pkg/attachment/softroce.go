package attachment

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/rtnl"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// A software RDMA device (soft-RoCE, the driver rdma_rxe) has no function. What
// stands for it is its network interface in the pod: a device does not survive
// its interface's change of namespace, so it is made when that is in the pod
// already. Wherever it is made, the kernel registers it in the initial
// namespace; from there it goes the way of every other device.
//
// One that the plugin has made is never brought home: its undo is its removal.
// The function's bus says whether it is one (sysfs.RXE), and with it the name of
// the record's file.

// SoftRoCE says whether a request may make a soft-RoCE device.
type SoftRoCE struct {
	// Make makes one on an interface that has no RDMA device.
	Make bool
	// OverHardware makes one also on an interface whose function has an RDMA
	// device of its own.
	OverHardware bool
}

const (
	softDriver = "rdma_rxe"
	// softKernel is the first release in which a device of softDriver can be
	// moved.
	softKernel = "7.3"
)

// podInterface is the interface that a request is about.
type podInterface struct {
	sysfs.Interface
	name      string
	mac       net.HardwareAddr
	addresses []netip.Addr
}

// parent finds what the request's device is on: a function, or an interface
// that stands for one. A request for a function, which is what networks of VFs
// make, costs nothing more here.
func (s *session) parent(ctx context.Context, req Request, pod *rdma.Namespace) (sysfs.Function, error) {
	if req.Function != "" && !req.SoftRoCE.Make {
		return s.function(req, pod)
	}
	i, found, err := findInterface(pod, req.IfName)
	if err != nil {
		return sysfs.Function{}, err
	}
	if found {
		if f, err := s.recordedInterface(req.Key, i); err != nil || f.Soft() {
			return f, err // an earlier ADD has decided
		}
	}
	f, err := s.function(req, pod)
	if req.Function != "" && err != nil {
		return f, err
	}
	if err == nil && s.hasDevice(ctx, f, req.SoftRoCE.Make) {
		if req.SoftRoCE.Make && !req.SoftRoCE.OverHardware {
			return f, &FunctionError{fmt.Errorf("interface %s is that of %s, which has an RDMA device of its own, and softRoCE would not use that but the processor; "+
				"leave softRoCE out to attach the adapter's device, or set softRoCEOverHardware if the software one is meant", req.IfName, f)}
		}
		if !req.SoftRoCE.Make {
			return f, nil
		}
	}
	if !found {
		if req.SoftRoCE.Make {
			return f, &FunctionError{fmt.Errorf("the pod has no interface %s on which a soft-RoCE device could be made; an earlier plugin of the network has to make it", req.IfName)}
		}
		return f, err
	}
	devices, softErr := s.softDevices(pod, i)
	switch {
	case softErr != nil:
		return f, softErr
	case len(devices) > 0:
		return s.Sysfs.InterfaceFunction(sysfs.Netdev, i.Interface), nil
	case req.SoftRoCE.Make:
		return s.Sysfs.InterfaceFunction(sysfs.RXE, i.Interface), nil
	}
	return f, err
}

// hasDevice tells whether a function has an RDMA device, here or in another
// namespace. Before that of an adapter is replaced, it waits out the moments of
// a move in which the function seems to have none.
func (s *session) hasDevice(ctx context.Context, f sysfs.Function, wait bool) bool {
	has := func() (bool, error) {
		_, err := f.RDMADevices()
		return !errors.Is(err, sysfs.ErrNoRDMADevice), nil
	}
	if ok, _ := has(); ok || !wait {
		return ok
	}
	if a, err := f.Absence(); err != nil || a.NoDriver || a.Userspace || a.ForeignDriver {
		return false
	}
	ok, _ := poll(ctx, settleWait, has)
	return ok
}

// functionOf is the function that a record names.
func (s *session) functionOf(address string) (sysfs.Function, error) {
	if bus, i, ok := sysfs.InterfaceOf(address); ok {
		return s.Sysfs.InterfaceFunction(bus, i), nil
	}
	if s.ahead.record != nil && s.ahead.record.Function == address {
		return s.ahead.function, nil
	}
	return s.Sysfs.Function(address)
}

// recordedInterface gives the function of a record of this attachment that is
// about this interface; without one it is no soft function.
func (s *session) recordedInterface(key state.Key, i podInterface) (sysfs.Function, error) {
	names, err := s.State.Names()
	if err != nil {
		return sysfs.Function{}, err
	}
	for _, name := range names {
		if bus, recorded, ok := sysfs.InterfaceOf(name.Function); ok && name.Is(key) && recorded == i.Interface {
			return s.Sysfs.InterfaceFunction(bus, recorded), nil
		}
	}
	return sysfs.Function{}, nil
}

// findInterface looks for an interface of a namespace, by its name.
func findInterface(ns *rdma.Namespace, name string) (i podInterface, found bool, err error) {
	err = ns.Run(func() error {
		link, err := netlink.LinkByName(name)
		var missing netlink.LinkNotFoundError
		if errors.As(err, &missing) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("look up interface %s in the pod: %w", name, err)
		}
		found = true
		i = podInterface{
			Interface: sysfs.Interface{Netns: ns.ID().Inode, Index: link.Attrs().Index},
			name:      link.Attrs().Name, mac: link.Attrs().HardwareAddr,
		}
		list, err := rtnl.Dump(func() ([]netlink.Addr, error) { return netlink.AddrList(link, netlink.FAMILY_ALL) })
		if err != nil {
			return fmt.Errorf("addresses of interface %s in the pod: %w", name, err)
		}
		for _, a := range list {
			if addr, ok := netip.AddrFromSlice(a.IP); ok {
				i.addresses = append(i.addresses, addr.Unmap())
			}
		}
		return nil
	})
	return i, found, err
}

// softDevices finds the software devices on an interface of the pod, in the pod
// or at home.
func (s *session) softDevices(pod *rdma.Namespace, i podInterface) ([]rdma.Device, error) {
	var inside []rdma.Device
	err := pod.Do(func(conn *rdma.Conn) (err error) {
		inside, err = devicesOn(conn, i.Index)
		return err
	})
	if err != nil || len(inside) > 0 {
		return inside, err
	}
	return s.softAtHome(i)
}

// devicesOn lists the devices that conn sees on an interface of its namespace.
// That is certain: the kernel names the interface to those in its namespace.
func devicesOn(conn *rdma.Conn, index int) ([]rdma.Device, error) {
	devices, err := conn.Devices()
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(devices, func(d rdma.Device) bool {
		p, err := conn.Port(d.Index, 1)
		return err != nil || p.NetdevIndex != uint32(index)
	}), nil
}

// softAtHome finds the device at home that is on an interface of a pod. There
// the kernel says no more of it than its name, which interfaces of other pods
// can have too. So the device must also have the node GUID that the driver makes
// of the interface's MAC or, if that was changed since, the GID of one of its
// addresses. After the move the kernel says for certain, see finish.
func (s *session) softAtHome(i podInterface) ([]rdma.Device, error) {
	list, err := s.Sysfs.SoftDevices()
	if err != nil {
		return nil, err
	}
	var byMAC, byAddress []rdma.Device
	for _, soft := range list {
		if soft.Netdev != i.name {
			continue
		}
		d, err := s.conn.DeviceByName(soft.Name)
		if errors.Is(err, rdma.ErrDeviceNotFound) {
			continue // it went between the two looks
		}
		if err != nil {
			return nil, err
		}
		gids, err := s.Sysfs.RoCEv2Addresses(soft.Name, 1)
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(gids, func(gid netip.Addr) bool { return slices.Contains(i.addresses, gid) }) {
			byAddress = append(byAddress, d)
		}
		if guid := guidOfMAC(i.mac); guid != 0 && d.NodeGUID == guid {
			byMAC = append(byMAC, d)
		}
	}
	found := byMAC
	if len(found) != 1 && len(byAddress) > 0 {
		found = byAddress
	}
	if len(found) > 1 {
		names := make([]string, 0, len(found))
		for _, d := range found {
			names = append(names, d.Name)
		}
		return nil, &FunctionError{fmt.Errorf("several software RDMA devices (%s) are on an interface %s with the MAC %s and the same addresses, "+
			"so nothing tells which of them is the pod's; give the interfaces different MACs", strings.Join(names, ", "), i.name, i.mac)}
	}
	return found, nil
}

// guidOfMAC is the EUI-64 of a MAC, as rdma_rxe makes its node GUID. 0: the
// interface has no MAC of that kind.
func guidOfMAC(mac net.HardwareAddr) rdma.GUID {
	if len(mac) != 6 || bytes.Equal(mac, make([]byte, 6)) {
		return 0
	}
	return rdma.GUID(binary.BigEndian.Uint64([]byte{mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]}))
}

// softToAttach gives the software device that somebody else has made, and its
// nodes.
func (a *attach) softToAttach() (*sight, error) {
	i, found, err := findInterface(a.pod, a.req.IfName)
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, a.softGone()
	}
	devices, err := a.softAtHome(i)
	if err != nil {
		return nil, err
	}
	if len(devices) == 0 {
		inside, err := a.softDevices(a.pod, i)
		switch {
		case err != nil:
			return nil, err
		case len(inside) > 0:
			return nil, &BusyError{Function: a.function.String(), Where: "in the pod already, although no record says that it was attached; bring it home (rdma dev set ... netns ...)"}
		}
		return nil, a.softGone()
	}
	chars, err := softChars(a.conn, devices[0].Index)
	return &sight{devices, chars}, err
}

func (a *attach) softGone() error {
	return &FunctionError{fmt.Errorf("the software RDMA device on interface %s has gone meanwhile", a.req.IfName)}
}

// softChars lists the nodes of devices without parent. sysfs could only tell
// them by the device's name, which other pods' devices can have too. One that is
// not there, or has no nodes, has none.
func softChars(conn *rdma.Conn, indexes ...uint32) ([]sysfs.CharDevice, error) {
	var list []sysfs.CharDevice
	for _, index := range indexes {
		d, err := conn.Device(index)
		if err != nil && !errors.Is(err, rdma.ErrDeviceNotFound) {
			return nil, err
		}
		var nodes []string
		if err == nil {
			nodes, err = conn.CharDevices(d)
		}
		if err != nil && !errors.Is(err, rdma.ErrDeviceNotFound) {
			return nil, err
		}
		for _, node := range nodes {
			list = append(list, sysfs.CharDevice{Name: node, Kind: sysfs.Kind(strings.TrimRight(node, "0123456789")), Device: d.Name})
		}
	}
	return list, nil
}

// attachLink makes a soft-RoCE device on the pod's interface and attaches it.
func (a *attach) attachLink(ctx context.Context, names []state.Name) error {
	if err := a.endOtherLinks(ctx, names); err != nil {
		return err
	}
	nameInPod, err := a.linkName()
	if err != nil {
		return err
	}
	// Whatever kills us between making the device and knowing its index, its
	// name at home is in the record and no other device's.
	_, on, _ := sysfs.InterfaceOf(a.function.Address)
	record := a.newRecord()
	record.Devices = []state.Device{{Index: state.NoIndex, Name: fmt.Sprintf("rdma-cni-%d-%d", on.Netns, on.Index), NameInPod: nameInPod}}
	if err := a.State.Save(record); err != nil {
		return err
	}
	if err := a.makeLink(record); err != nil {
		return errors.Join(err, a.rollBack(ctx, record))
	}
	return nil
}

func (a *attach) makeLink(record *state.Record) error {
	link := &record.Devices[0]
	err := a.pod.Do(func(conn *rdma.Conn) error { return conn.AddLink(rdma.RXE, link.Name, a.req.IfName) })
	if err != nil {
		return a.explainAddLink(err)
	}
	d, err := a.conn.DeviceByName(link.Name)
	if errors.Is(err, rdma.ErrDeviceNotFound) {
		d, err = a.fetchLink(record)
	}
	if err != nil {
		return err
	}
	if err := a.refuseUnfit(d); err != nil {
		return err
	}
	chars, err := softChars(a.conn, d.Index)
	if err != nil {
		return err
	}
	link.Index, link.NodeGUID, link.CharDevices = d.Index, d.NodeGUID, charNames(chars, d.Name)
	if err := a.planQoS(d, link); err != nil {
		return err
	}
	if err := a.State.Save(record); err != nil {
		return err
	}
	if err := a.move(link); err != nil {
		return err
	}
	return a.finish(record)
}

// fetchLink brings a new device home from the initial namespace, where the
// kernel has registered it, if this plugin runs in another one, as in a node that
// is a container.
func (a *attach) fetchLink(record *state.Record) (rdma.Device, error) {
	link := &record.Devices[0]
	found, err := a.search(a.function, claimsOf(record)[0], func(_ string, ns *rdma.Namespace) error {
		return ns.Do(func(conn *rdma.Conn) error {
			d, err := conn.DeviceByName(link.Name)
			if err != nil {
				return err
			}
			return conn.Move(d.Index, a.home)
		})
	})
	if err != nil {
		return rdma.Device{}, fmt.Errorf("fetch the new soft-RoCE device from the initial network namespace: %w", err)
	}
	if !found {
		return rdma.Device{}, &FunctionError{fmt.Errorf("the kernel has registered the new soft-RoCE device %s on interface %s in the initial network namespace, and this plugin runs in another one, from which no path leads there; "+
			"bind the initial namespace to a path that this node sees (in kind: an extra mount of the machine's /run/netns/host, after 'ip netns attach host 1'). "+
			"That device goes with its interface", link.Name, a.req.IfName)}
	}
	return a.conn.DeviceByName(link.Name)
}

// endOtherLinks ends what other attachments left on the same interface, which
// is that of a dead pod whose namespace's number has been given again, or was
// attached under another container ID. One that lives is not touched.
func (a *attach) endOtherLinks(ctx context.Context, names []state.Name) error {
	for _, name := range names {
		if !a.isOthers(name) {
			continue
		}
		r, err := a.State.Load(name)
		if err == nil {
			alive, err := a.holdsAlive(r)
			if err != nil {
				return err
			}
			if alive {
				return &BusyError{Function: a.function.String(), Where: "attached to " + r.Owner() + ", by the same interface"}
			}
		}
		if err := a.detachRecord(ctx, state.Key{ContainerID: name.ContainerID, IfName: name.IfName}, name, "", a.report); err != nil {
			return err
		}
	}
	return nil
}

// linkName is the name that the request gives to a soft-RoCE device.
func (a *attach) linkName() (string, error) {
	template := a.req.Name
	if template == "" {
		// An interface's name may contain what an RDMA device's must not.
		template = "rxe_" + strings.Map(func(r rune) rune {
			if rdma.ValidateName(string(r)) != nil && r != '.' {
				return '_'
			}
			return r
		}, a.req.IfName)
	}
	name, err := expandName(template, a.req.IfName, a.function.Address, 0)
	if err != nil {
		return "", &SettingError{err}
	}
	return name, nil
}

// explainAddLink says why the kernel refused to make a device and what helps.
func (a *attach) explainAddLink(err error) error {
	hint := ""
	switch {
	case errors.Is(err, unix.EINVAL) && !a.Sysfs.ModuleLoaded(softDriver):
		hint = "this kernel has no soft-RoCE driver, or it cannot be loaded (modprobe rdma_rxe): install a kernel of release " + softKernel + " or newer that has the module rdma_rxe; " +
			"kernels for clouds often lack it, and some distributions have it in a package of extra modules"
	case errors.Is(err, unix.EPERM):
		hint = "soft-RoCE does not work on VLAN interfaces, and needs CAP_NET_ADMIN in the initial user namespace"
	case errors.Is(err, unix.EEXIST), errors.Is(err, unix.ENFILE):
		hint = "the interface has a soft-RoCE device already, in a namespace where it was not looked for; rdma-cni list shows it"
	}
	if hint != "" {
		err = fmt.Errorf("%w; %s", err, hint)
	}
	return &FunctionError{fmt.Errorf("make a soft-RoCE device on interface %s: %w", a.req.IfName, err)}
}

// softKernelNeeded says which kernel can move software devices, when this one
// has refused to.
func softKernelNeeded() string {
	release := "of an unknown release"
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		release = unix.ByteSliceToString(u.Release[:])
	}
	return "soft-RoCE devices can go into a pod from Linux " + softKernel + " on, and this kernel is " + release
}

// whereSoft is where for software devices. One that is nowhere to be found is
// gone: it does not outlive its interface, and that not its namespace.
func (s *session) whereSoft(f sysfs.Function, c claim) (place, rdma.Device, error) {
	if c.device == nil {
		var err error
		if c, err = s.identify(c, ""); err != nil {
			return 0, rdma.Device{}, err
		}
	}
	d, err := findIn(s.conn, f, c)
	if err != nil {
		return 0, rdma.Device{}, err
	}
	if d != nil {
		return atHome, *d, nil
	}
	if ns := s.live(c.netns.Path, c.netns.ID); ns != nil {
		defer func() { _ = ns.Close() }()
		if found, err := holds(ns, f, c); err != nil || found {
			return elsewhere, rdma.Device{}, err
		}
	}
	if nodes, err := s.Sysfs.CharDeviceNodes(); err != nil || !slices.ContainsFunc(nodes, func(n sysfs.CharDeviceNode) bool { return n.Function == "" }) {
		return absent, rdma.Device{}, err // spares the walk
	}
	found, err := s.search(f, c, func(string, *rdma.Namespace) error { return nil })
	if err != nil || found {
		return elsewhere, rdma.Device{}, err
	}
	return absent, rdma.Device{}, nil
}

// findSoft is findIn for software devices. While the index is not known, the
// name is: it was made for this one interface.
func findSoft(conn *rdma.Conn, c claim) (*rdma.Device, error) {
	if c.device == nil {
		return nil, nil
	}
	var d rdma.Device
	var err error
	if c.device.Index == state.NoIndex {
		d, err = conn.DeviceByName(c.device.Name)
	} else {
		d, err = conn.Device(c.device.Index)
	}
	if errors.Is(err, rdma.ErrDeviceNotFound) {
		return nil, nil
	}
	if err != nil || c.device.Index != state.NoIndex && d.NodeGUID != c.device.NodeGUID {
		return nil, err
	}
	return &d, nil
}

// identify finds the device of a claim that only knows the interface, since its
// record cannot be read.
func (s *session) identify(c claim, netnsPath string) (claim, error) {
	_, on, _ := sysfs.InterfaceOf(c.function)
	look := func(path string, ns *rdma.Namespace) (err error) {
		if ns.ID().Inode != on.Netns || c.device != nil {
			return nil
		}
		name, err := interfaceName(ns, on.Index)
		if err != nil || name == "" {
			return err
		}
		i, found, err := findInterface(ns, name)
		if err != nil || !found {
			return err
		}
		devices, err := s.softDevices(ns, i)
		if err != nil || len(devices) == 0 {
			return err
		}
		d := devices[0]
		c.netns = state.Netns{Path: path, ID: ns.ID()}
		c.device = &state.Device{Index: d.Index, Name: d.Name, NameInPod: d.Name, NodeGUID: d.NodeGUID}
		return nil
	}
	if ns := s.live(netnsPath, rdma.NamespaceID{}); ns != nil {
		defer func() { _ = ns.Close() }()
		if err := look(netnsPath, ns); err != nil || c.device != nil {
			return c, err
		}
	}
	var err error
	rdma.Reachable(func(path string, ns *rdma.Namespace) bool {
		err = look(path, ns)
		return err != nil || c.device != nil
	})
	return c, err
}

// interfaceName gives the name of an interface, "" if the namespace has it no
// more.
func interfaceName(ns *rdma.Namespace, index int) (name string, err error) {
	err = ns.Run(func() error {
		link, err := netlink.LinkByIndex(index)
		var missing netlink.LinkNotFoundError
		if errors.As(err, &missing) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("look up the interface with index %d: %w", index, err)
		}
		name = link.Attrs().Name
		return nil
	})
	return name, err
}

// removeLink removes a device that the plugin has made, and that conn sees. The
// end of its interface does the same and can come at any moment.
//
// The namespace of the interface is held open meanwhile: rdma_rxe of 7.3 releases
// its socket there twice if that namespace dies during the removal (refcount_t:
// underflow, in rxe_net_del). One that cannot be opened any more is dying or dead,
// and the removal is left to the kernel.
func (s *session) removeLink(conn *rdma.Conn, d rdma.Device, c claim) (err error) {
	remove := func() error {
		if err := conn.DeleteLink(d.Index); !errors.Is(err, rdma.ErrDeviceNotFound) {
			return err
		}
		return nil
	}
	if ns := s.live(c.netns.Path, c.netns.ID); ns != nil {
		defer func() { _ = ns.Close() }()
		return remove()
	}
	removed := false
	rdma.Reachable(func(_ string, ns *rdma.Namespace) bool {
		if ns.ID() == c.netns.ID {
			removed, err = true, remove()
		}
		return removed
	})
	if removed {
		return err
	}
	gone, err := poll(context.Background(), returnWait, func() (bool, error) {
		_, err := conn.Device(d.Index)
		if errors.Is(err, rdma.ErrDeviceNotFound) {
			return true, nil
		}
		return false, err
	})
	if err == nil && !gone {
		err = &BusyError{Function: "interface " + c.IfName, Where: fmt.Sprintf("still there (%s) although no path leads to the network namespace of its interface; "+
			"the kernel removes it with that namespace, when the last process or socket lets go of it", d.Name)}
	}
	return err
}

// settleSoft ends the way back of a software device that is at home.
func (s *session) settleSoft(f sysfs.Function, d rdma.Device, c claim, report *Report) error {
	if f.Bus == sysfs.RXE {
		return s.removeLink(s.conn, d, c)
	}
	_, err := s.restore(f, d, c, report)
	if _, lookErr := s.conn.Device(d.Index); errors.Is(lookErr, rdma.ErrDeviceNotFound) {
		return nil // its interface has gone, and it with that
	}
	if err != nil {
		return err
	}
	chars, err := softChars(s.conn, d.Index)
	if err != nil {
		return err
	}
	compareNumbers(f, nodesOf(chars), c, report)
	return nil
}

func nodesOf(chars []sysfs.CharDevice) []string {
	names := make([]string, 0, len(chars))
	for _, c := range chars {
		names = append(names, c.Name)
	}
	return names
}
