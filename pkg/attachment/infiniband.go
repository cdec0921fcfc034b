package attachment

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/ipoib"
	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// An IPoIB interface is a user of its RDMA device: a move removes it from
// wherever it is and makes a fresh one, up to 6.16 in the initial namespace,
// from 6.17 on in the device's. So around each move of a device with InfiniBand
// ports, what its interfaces were is in the record, and the fresh ones are
// brought to where those were and made into what they were.

// InterfaceError: an IPoIB interface could not be carried over a move.
type InterfaceError struct {
	Name, Function string
	Err            error // names the step
}

func (e *InterfaceError) Error() string {
	return fmt.Sprintf("carry IPoIB interface %s of %s over the move of its RDMA device: %v", e.Name, e.Function, e.Err)
}

// Unwrap gives the cause.
func (e *InterfaceError) Unwrap() error { return e.Err }

// errNoInterface: the kernel made no IPoIB interface where it should have.
var errNoInterface = errors.New("the kernel has made no new one, neither in the pod nor on the host; is the module ib_ipoib loaded, and what does the kernel log say?")

// ibSriovWait bounds the wait for the lock of ib-sriov, which it holds for as
// long as one of its own calls takes.
const ibSriovWait = 10 * time.Second

func isInfiniBand(d rdma.Device) bool { return d.Protocol == "ib" }

// planInfiniBand remembers the ports and the IPoIB interfaces of a device, and
// refuses what could not be made again.
func (a *attach) planInfiniBand(r *state.Record, devices []rdma.Device) error {
	if !slices.ContainsFunc(devices, isInfiniBand) {
		return nil
	}
	if err := a.refuseGIDWait(); err != nil {
		return err
	}
	for i, d := range devices {
		ports, err := ibPorts(a.Sysfs, d)
		if err != nil {
			return err
		}
		r.Devices[i].Ports = ports
	}
	interfaces, err := a.interfaces(a.pod, a.function)
	if err != nil {
		return err
	}
	if len(interfaces) > 0 && len(devices) > 1 {
		return &FunctionError{fmt.Errorf("%s has %d RDMA devices and IPoIB interfaces: which belongs to which cannot be told after a move; leave out \"devices\": \"all\"", a.function, len(devices))}
	}
	for i, one := range interfaces {
		if one.Obstacle != "" {
			return &FunctionError{fmt.Errorf("IPoIB interface %s of %s would be made anew by the move, and what is on it cannot be: %s; "+
				"put the plugin that does this after rdma in the network", one.Name, a.function, one.Obstacle)}
		}
		same := func(other ipoib.Interface) bool { return other.Replaces(one) && (!one.Child || other.Home == one.Home) }
		if slices.ContainsFunc(interfaces[:i], same) {
			return &FunctionError{fmt.Errorf("two IPoIB interfaces of %s have the port GUID %s, so they cannot be told apart after a move; give each port a GUID of its own", a.function, one.PortGUID)}
		}
	}
	if !slices.ContainsFunc(interfaces, func(i ipoib.Interface) bool { return i.Name == a.req.IfName && !i.Home }) {
		a.report.warn("interface %s in the pod is no IPoIB interface of %s", a.req.IfName, a.function)
	}
	r.Interfaces = interfaces
	return nil
}

func (a *attach) refuseGIDWait() error {
	if a.req.WaitForGIDs == 0 {
		return nil
	}
	return &SettingError{fmt.Errorf("%s has an InfiniBand port, whose GIDs do not come from addresses: waitForGID is for RoCE", a.function)}
}

// ibPorts reads the InfiniBand ports of a device through a sysfs that shows it.
func ibPorts(fs sysfs.FS, d rdma.Device) ([]state.Port, error) {
	ports := make([]state.Port, 0, d.Ports)
	for port := uint32(1); port <= d.Ports; port++ {
		p, err := fs.IBPort(d.Name, port)
		if err != nil {
			return nil, err
		}
		ports = append(ports, state.Port{GUID: rdma.GUID(p.GUID), PKey: p.PKey})
	}
	return ports, nil
}

// interfaces lists the IPoIB interfaces of a function, in the pod, if there is
// one, and at home. Others would be found by nobody.
func (s *session) interfaces(pod *rdma.Namespace, f sysfs.Function) ([]ipoib.Interface, error) {
	var list []ipoib.Interface
	if pod != nil {
		there, err := s.interfacesIn(pod, f, true)
		if err != nil {
			return nil, err
		}
		list = there
	}
	here, err := s.interfacesIn(s.home, f, false)
	for _, i := range here {
		i.Home = true
		list = append(list, i)
	}
	return list, err
}

func (s *session) interfacesIn(ns *rdma.Namespace, f sysfs.Function, stacks bool) (list []ipoib.Interface, err error) {
	err = s.inside(ns, func(h *ipoib.Handle) error {
		list, err = h.Interfaces(f.Address, stacks)
		return err
	})
	return list, err
}

// inside calls fn with the interfaces of a namespace.
func (s *session) inside(ns *rdma.Namespace, fn func(h *ipoib.Handle) error) error {
	run := func() error {
		h, err := ipoib.Open()
		if err != nil {
			return err
		}
		defer h.Close()
		return fn(h)
	}
	if ns == s.home {
		return run() // where this thread is
	}
	return ns.Run(run)
}

// withIBLock runs fn while ib-sriov moves nothing, if the record is about
// InfiniBand.
func (s *session) withIBLock(ctx context.Context, r *state.Record, fn func() error) (err error) {
	if s.IBSriovLock == "" || s.ibLocked || !r.InfiniBand() {
		return fn()
	}
	lock, err := state.LockOther(ctx, within(ctx, ibSriovWait), s.IBSriovLock)
	if err != nil {
		return err
	}
	if lock != nil {
		s.ibLocked = true
		defer func() {
			s.ibLocked = false
			err = errors.Join(err, lock.Release())
		}()
	}
	return fn()
}

// carry makes the interfaces of a record out of those that the move has made.
func (a *attach) carry(ctx context.Context, r *state.Record) error {
	for _, want := range r.Interfaces {
		if err := a.remake(ctx, a.pod, a.function, r, want); err != nil {
			return &InterfaceError{Name: want.Name, Function: a.function.Address, Err: err}
		}
	}
	return nil
}

// end undoes an attachment: its devices are at home, and the IPoIB interfaces
// that the moves took are where the plugin before this one left them, for its
// DEL to find. What cannot be set on them again is reported only.
func (s *session) end(ctx context.Context, r *state.Record, netnsPath string, report *Report) error {
	if r.Foreign {
		report.warn("another plugin moved the RDMA device of %s into the pod, and brings it home", r.Function)
		return nil
	}
	return s.withIBLock(ctx, r, func() error {
		if err := s.bringAllHome(ctx, claimsOf(r), netnsPath, report); err != nil {
			return err
		}
		return s.giveBack(ctx, r, netnsPath, report)
	})
}

func (s *session) giveBack(ctx context.Context, r *state.Record, netnsPath string, report *Report) error {
	if len(r.Interfaces) == 0 || s.conn == nil {
		return nil
	}
	f, err := s.Sysfs.Function(r.Function)
	if errors.Is(err, sysfs.ErrNoFunction) {
		return nil // said already
	}
	if err != nil {
		return err
	}
	pod := s.live(netnsPath, r.Netns.ID)
	if pod == nil {
		pod = s.live(r.Netns.Path, r.Netns.ID)
	}
	if pod != nil {
		defer func() { _ = pod.Close() }()
	}
	var failures []error
	for _, want := range r.Interfaces {
		if pod == nil && !want.Home {
			continue // it went with the pod; the fresh one is at home
		}
		err := s.remake(ctx, pod, f, r, want)
		if err == nil {
			continue
		}
		interfaceErr := &InterfaceError{Name: want.Name, Function: r.Function, Err: err}
		if retryable(err) {
			failures = append(failures, interfaceErr)
			continue
		}
		report.fault("%v", interfaceErr)
		s.lost = append(s.lost, interfaceErr)
	}
	return errors.Join(failures...)
}

// retryable tells failures that can be over at the next try.
func retryable(err error) bool {
	return errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EAGAIN)
}

// remake brings the interface that stands for want to where want was, and sets
// on it what was set on want. It can be repeated. pod is nil if it is gone.
func (s *session) remake(ctx context.Context, pod *rdma.Namespace, f sysfs.Function, r *state.Record, want ipoib.Interface) error {
	target, other := pod, s.home
	if want.Home {
		target, other = s.home, pod
	}
	found, err := s.bring(ctx, target, other, f, r, want)
	if err != nil {
		return err
	}
	return s.inside(target, func(h *ipoib.Handle) error {
		if err := h.Name(*found, want); err != nil {
			return err
		}
		return h.Set(*found, want)
	})
}

// bring finds the interface that stands for want, moves it into target if it is
// in other, and gives it as it is in target.
func (s *session) bring(ctx context.Context, target, other *rdma.Namespace, f sysfs.Function, r *state.Record, want ipoib.Interface) (found *ipoib.Interface, err error) {
	// An explicit move returns when the fresh interfaces are there. One that the
	// kernel makes when a namespace dies comes a moment after its device.
	_, err = poll(ctx, settleWait, func() (bool, error) {
		if found, err = s.replacement(target, f, want); found != nil || err != nil {
			return true, err
		}
		if want.Child {
			err = s.addChild(target, other, f, r, want)
		} else {
			err = s.moveReplacement(other, target, f, want)
		}
		if err != nil {
			return false, err
		}
		found, err = s.replacement(target, f, want)
		return found != nil, err
	})
	if err == nil && found == nil {
		err = errNoInterface
	}
	return found, err
}

func (s *session) replacement(ns *rdma.Namespace, f sysfs.Function, want ipoib.Interface) (*ipoib.Interface, error) {
	if ns == nil {
		return nil, nil
	}
	list, err := s.interfacesIn(ns, f, false)
	if err != nil {
		return nil, err
	}
	if i := slices.IndexFunc(list, func(i ipoib.Interface) bool { return i.Replaces(want) }); i >= 0 {
		return &list[i], nil
	}
	return nil, nil
}

// moveReplacement moves it from the one namespace to the other, if it is there.
func (s *session) moveReplacement(from, to *rdma.Namespace, f sysfs.Function, want ipoib.Interface) error {
	found, err := s.replacement(from, f, want)
	if err != nil || found == nil {
		return err
	}
	return s.inside(from, func(h *ipoib.Handle) error { return h.Move(*found, to) })
}

// addChild makes a child again. A move has taken it wherever it was, and its
// parent can be in the other namespace.
func (s *session) addChild(target, other *rdma.Namespace, f sysfs.Function, r *state.Record, want ipoib.Interface) error {
	i := slices.IndexFunc(r.Interfaces, func(p ipoib.Interface) bool { return !p.Child && p.PortGUID == want.PortGUID })
	if i < 0 {
		return nil
	}
	for _, ns := range []*rdma.Namespace{target, other} {
		parent, err := s.replacement(ns, f, r.Interfaces[i])
		if err != nil {
			return err
		}
		if parent == nil {
			continue
		}
		to := target
		if ns == target {
			to = nil
		}
		return s.inside(ns, func(h *ipoib.Handle) error { return h.AddChild(*parent, want, to) })
	}
	return nil
}

// checkInfiniBand compares ports and interfaces with the record, from inside
// the pod.
func (s *session) checkInfiniBand(pod *rdma.Namespace, f sysfs.Function, r *state.Record, report *Report) error {
	if !r.InfiniBand() {
		return nil
	}
	if err := checkPorts(pod, r, report); err != nil {
		return err
	}
	now, err := s.interfaces(pod, f)
	if err != nil {
		return err
	}
	for _, want := range r.Interfaces {
		if want.Home && r.Phase == state.Attached {
			continue // the host's own affair since ADD
		}
		i := slices.IndexFunc(now, func(i ipoib.Interface) bool { return i.Home == want.Home && i.Replaces(want) })
		switch {
		case i < 0:
			return mismatch("IPoIB interface %s of %s is gone from %s", want.Name, f, placeName(want))
		case now[i].Missing(want) != "":
			return mismatch("IPoIB interface %s of %s in %s is not what it was before the move: %s", want.Name, f, placeName(want), now[i].Missing(want))
		case now[i].PKey != want.PKey:
			report.warn("IPoIB interface %s is in partition %#04x, and was in %#04x when it was attached", want.Name, now[i].PKey, want.PKey)
		}
		if want.Name == r.IfName && !want.Home {
			report.HardwareAddr = now[i].HardwareAddr.String()
		}
	}
	if r.Foreign && !slices.ContainsFunc(now, func(i ipoib.Interface) bool { return i.Name == r.IfName && !i.Home }) {
		report.warn("interface %s in the pod is no IPoIB interface of %s", r.IfName, f)
	}
	return nil
}

func placeName(i ipoib.Interface) string {
	if i.Home {
		return "the host"
	}
	return "the pod"
}

// checkPorts looks at the ports. A GUID is the attachment's; partition and
// state are the subnet manager's, who can change them at any time.
func checkPorts(pod *rdma.Namespace, r *state.Record, report *Report) error {
	return pod.Do(func(conn *rdma.Conn) (err error) {
		fs, closeFS, err := sysfs.MountHere()
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, closeFS()) }()
		for _, d := range r.Devices {
			ports, err := ibPorts(fs, rdma.Device{Name: d.NameInPod, Ports: uint32(len(d.Ports))})
			if err != nil {
				return err
			}
			for i, p := range ports {
				port := fmt.Sprintf("port %d of RDMA device %s", i+1, d.NameInPod)
				if p.GUID != d.Ports[i].GUID {
					return mismatch("%s has the GUID %s, and had %s when it was attached", port, p.GUID, d.Ports[i].GUID)
				}
				if p.GUID == 0 {
					report.warn("%s has the GUID 0: no subnet manager makes it active; set it (ip link set PF vf N port_guid ...)", port)
				}
				if p.PKey != d.Ports[i].PKey {
					report.warn("%s is in partition %#04x, and was in %#04x when it was attached", port, p.PKey, d.Ports[i].PKey)
				}
				status, err := conn.Port(d.Index, uint32(i+1))
				if err != nil {
					return err
				}
				if !status.Active() {
					report.warn("%s is %s: no data can be sent; see whether a subnet manager runs and knows its GUID", port, status.StateName())
				}
			}
		}
		return nil
	})
}

// adopt recognises a device that is in the pod already, where ib-sriov moves it
// before it sets up the interface (rdmaIsolation). It is verified and recorded,
// and not ours to bring home. Otherwise notHome, why it is not at home and
// nobody's as far as records say, stays the answer.
func (a *attach) adopt(notHome error) (err error) {
	if !errors.Is(notHome, sysfs.ErrElsewhere) {
		return notHome
	}
	var device *rdma.Device
	var ports []state.Port
	err = a.pod.Do(func(conn *rdma.Conn) (err error) {
		device, err = findIn(conn, a.function, claim{function: a.function.Address})
		if err != nil || device == nil || !isInfiniBand(*device) {
			return err
		}
		fs, closeFS, err := sysfs.MountHere()
		if err != nil {
			return err
		}
		ports, err = ibPorts(fs, *device)
		return errors.Join(err, closeFS())
	})
	if err != nil {
		return err
	}
	if ports == nil {
		return notHome
	}
	if err := a.refuseGIDWait(); err != nil {
		return err
	}
	if name, err := a.req.nameInPod(a.function, device.Name, 0, 1); err != nil || name != device.Name {
		return errors.Join(err, &SettingError{fmt.Errorf("RDMA device %s of %s is in the pod already, moved by another plugin, which will look for it under that name: it cannot be called %q; "+
			"leave out rdmaDeviceName, or rdmaIsolation of ib-sriov", device.Name, a.function, name)})
	}
	if a.req.QoS.TOS != nil || a.req.QoS.TrafficClass != nil {
		err := fmt.Errorf("RDMA device %s of %s is in the pod already, moved by another plugin: rdmaQoS is for devices that this plugin moves", device.Name, a.function)
		if err := a.unsupported(err); err != nil {
			return err
		}
	}
	chars, err := a.function.CharDevices()
	if err != nil {
		return err
	}
	r := a.newRecord()
	r.Foreign = true
	r.Devices = []state.Device{{
		Index: device.Index, Name: device.Name, NameInPod: device.Name, NodeGUID: device.NodeGUID,
		CharDevices: charNames(chars, device.Name), Ports: ports,
	}}
	a.report.warn("RDMA device %s of %s is in the pod already: another plugin has moved it (rdmaIsolation of ib-sriov), and brings it home", device.Name, a.function)
	return a.finish(r)
}

// seeInfiniBand adds what only the device's own namespace shows, in which the
// calling thread is, of its ports. What cannot be read is left out: the device
// can leave at any time.
func (d *DeviceStatus) seeInfiniBand() {
	fs, closeFS, err := sysfs.MountHere()
	if err != nil {
		return
	}
	defer func() { _ = closeFS() }()
	if d.IBPorts, err = ibPorts(fs, d.Device); err != nil {
		return
	}
	names, err := ipoib.Names()
	if err != nil {
		return
	}
	for i := range d.PortStatus {
		if d.PortStatus[i].Netdev == "" && i < len(d.IBPorts) {
			d.PortStatus[i].Netdev = names[d.IBPorts[i].GUID]
		}
	}
}
