package attachment

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// Options are what a request can ask for besides the move. The zero value asks
// for nothing.
type Options struct {
	// Name is the device's name inside the pod, "" leaves it as it is. It may
	// contain {ifname}, {pci} (the function's address, ':' written as '-') and
	// {index} (0 for the first RDMA device of the function, 1 for the next).
	Name string
	QoS  QoS
	// AllDevices attaches all RDMA devices of the function together, instead
	// of refusing a function that has more than one.
	AllDevices bool
	// SkipShared and SkipNoDevice let an attachment go without RDMA device on
	// a node in shared mode, or on a function that cannot have one.
	SkipShared, SkipNoDevice bool
	SoftRoCE                 SoftRoCE
	// RefuseZeroGUID refuses a device whose node GUID is zero.
	RefuseZeroGUID bool
	// WaitForGIDs is how long to wait for the RoCEv2 GIDs of Addresses, 0 for
	// not at all. In the end a missing one fails the attachment.
	WaitForGIDs time.Duration
	Addresses   []netip.Addr
}

// QoS is the quality of service that the device's ports shall have in the pod.
// What is nil is left as it is.
type QoS struct {
	TOS          *uint8 // default type of service of RoCE connections made by rdma_cm
	TrafficClass *uint8 // traffic class for all RoCE traffic, of drivers that have it
	// Optional makes a setting that cannot be made a warning.
	Optional bool
}

// SettingError: the name, quality of service or GID that was asked for cannot
// be had.
type SettingError struct{ Err error }

func (e *SettingError) Error() string { return e.Err.Error() }

// Unwrap gives the cause.
func (e *SettingError) Unwrap() error { return e.Err }

// ValidateName refuses a template that cannot give a valid name.
func ValidateName(template string) error {
	_, err := expandName(template, "net1", "0000:3b:00.2", 0)
	return err
}

// expandName fills in a template.
func expandName(template, ifName, function string, index int) (string, error) {
	name := strings.NewReplacer(
		"{ifname}", ifName,
		"{pci}", strings.ReplaceAll(function, ":", "-"),
		"{index}", strconv.Itoa(index),
	).Replace(template)
	return name, rdma.ValidateName(name)
}

// nameInPod is the name that the request gives to one of n devices.
func (r Request) nameInPod(f sysfs.Function, name string, i, n int) (string, error) {
	if r.Name == "" {
		return name, nil
	}
	if n > 1 && !strings.Contains(r.Name, "{index}") {
		return "", &SettingError{fmt.Errorf("%s has %d RDMA devices, so the name %q has to contain {index}", f, n, r.Name)}
	}
	expanded, err := expandName(r.Name, r.IfName, f.Address, i)
	if err != nil {
		return "", &SettingError{err}
	}
	return expanded, nil
}

// holderOfName describes who has an RDMA device of this name.
func (a *attach) holderOfName(name string) string {
	records, err := a.records()
	if err != nil {
		return "another device (" + err.Error() + ")"
	}
	for _, r := range records {
		for _, d := range r.Devices {
			if d.NameInPod == name && r.Key != a.req.Key {
				return "the device of " + r.Owner()
			}
		}
	}
	if _, err := a.conn.DeviceByName(name); err == nil {
		return "a device of the host"
	}
	holder := "a device of a namespace that no path leads to"
	rdma.Reachable(func(path string, ns *rdma.Namespace) bool {
		found := false
		_ = ns.Do(func(conn *rdma.Conn) error {
			_, err := conn.DeviceByName(name)
			found = err == nil
			return err
		})
		if found {
			holder = "a device in network namespace " + describePath(path)
		}
		return found
	})
	return holder
}

// unsupported makes an error of a setting that cannot be made, or a warning if
// the request can do without.
func (a *attach) unsupported(err error) error {
	if err == nil {
		return nil
	}
	if a.req.QoS.Optional {
		a.report.warn("%v", err)
		return nil
	}
	return &SettingError{err}
}

// planQoS remembers what the settings that the request changes are at home.
func (a *attach) planQoS(d rdma.Device, planned *state.Device) error {
	if a.req.QoS.TOS != nil {
		tos, err := a.readTOS(d)
		if err != nil {
			if err := a.unsupported(err); err != nil {
				return err
			}
		}
		for _, v := range tos {
			planned.TOS = append(planned.TOS, int(v))
		}
	}
	if a.req.QoS.TrafficClass != nil {
		classes, err := a.function.TrafficClasses(d.Name, d.Ports)
		if errors.Is(err, os.ErrNotExist) {
			err = fmt.Errorf("RDMA device %s of %s has no traffic class to set (file tc/1/traffic_class): its driver is not one of MLNX_OFED or DOCA", d.Name, a.function)
		}
		if err := a.unsupported(err); err != nil {
			return err
		}
		planned.TrafficClass = classes
	}
	return nil
}

func (a *attach) readTOS(d rdma.Device) (tos []uint8, err error) {
	err = uniquely(a.conn, a.Sysfs, d, func(name string) error {
		tos, err = a.CM.TOS(name, d.Ports)
		return err
	})
	return tos, err
}

// setTrafficClass sets the traffic class at home: it survives the move, and
// drivers refuse to set it from a pod's namespace.
func (a *attach) setTrafficClass(d *state.Device) error {
	if d.TrafficClass == nil {
		return nil
	}
	return a.unsupported(a.function.SetTrafficClasses(d.Name, repeat(int(*a.req.QoS.TrafficClass), len(d.TrafficClass))))
}

// nameForMove is the name under which the device goes into the pod. While the
// TOS is set there, no other device of the node may have the same.
func (a *attach) nameForMove(d *state.Device) string {
	if d.TOS != nil && d.NameInPod != d.Name && nameTaken(a.Sysfs, d.NameInPod) {
		return passingName(d.Index)
	}
	return d.NameInPod
}

// setTOS sets the TOS of a device that is in the pod under name, where its move
// has reset it, and gives it its final name.
func (a *attach) setTOS(d *state.Device, name string) error {
	if d.TOS != nil {
		err := a.CM.SetTOS(name, repeat(*a.req.QoS.TOS, len(d.TOS)))
		if err := a.unsupported(err); err != nil {
			return err
		}
	}
	if name == d.NameInPod {
		return nil
	}
	return a.pod.Do(func(conn *rdma.Conn) error { return conn.Rename(d.Index, d.NameInPod) })
}

func repeat[T any](v T, n int) []T { return slices.Repeat([]T{v}, n) }

// restoreQoS gives a device at home the settings that it had before.
func (s *session) restoreQoS(f sysfs.Function, d rdma.Device, before *state.Device) error {
	if before == nil {
		return nil
	}
	var failures []error
	// The return has reset the TOS to 0.
	if slices.ContainsFunc(before.TOS, func(v int) bool { return v != 0 }) {
		tos := make([]uint8, 0, len(before.TOS))
		for _, v := range before.TOS {
			tos = append(tos, uint8(v))
		}
		failures = append(failures, uniquely(s.conn, s.Sysfs, d, func(name string) error { return s.CM.SetTOS(name, tos) }))
	}
	if before.TrafficClass != nil {
		failures = append(failures, f.SetTrafficClasses(d.Name, before.TrafficClass))
	}
	return errors.Join(failures...)
}

// uniquely calls fn with a name that no other device of the node has. From 7.3
// on devices in different namespaces can have the same name, and rdma_cm's
// settings, which go by the name, would be those of any of them.
func uniquely(conn *rdma.Conn, fs sysfs.FS, d rdma.Device, fn func(name string) error) error {
	if fs.DevicesNamed(d.Name) < 2 {
		return fn(d.Name)
	}
	name := passingName(d.Index)
	if err := conn.Rename(d.Index, name); err != nil {
		return err
	}
	return errors.Join(fn(name), conn.Rename(d.Index, d.Name))
}

// passingName is unique on the node, since the kernel's device index is.
func passingName(index uint32) string { return fmt.Sprintf("rdma-cni-%d", index) }

func nameTaken(fs sysfs.FS, name string) bool { return fs.DevicesNamed(name) > 0 }

// awaitGIDs waits until the devices have the GIDs of the pod's addresses.
func (a *attach) awaitGIDs(ctx context.Context) error {
	if a.req.WaitForGIDs == 0 || len(a.req.Addresses) == 0 || len(a.report.Devices) == 0 {
		return nil
	}
	fs, closeFS, err := a.podSysfs()
	if err != nil {
		return err
	}
	defer func() { _ = closeFS() }()
	var missing []netip.Addr
	ok, err := poll(ctx, a.req.WaitForGIDs, func() (bool, error) {
		missing, err = a.missingGIDs(fs)
		return len(missing) == 0, err
	})
	if err == nil && !ok {
		err = &SettingError{fmt.Errorf("no RDMA device of %s had a RoCEv2 GID for %v of interface %s within %s; "+
			"is the interface up, and the device the interface's own?", a.function, missing, a.req.IfName, a.req.WaitForGIDs)}
	}
	if err != nil {
		undo := func(ctx context.Context) error {
			r, err := a.recordOf(a.req.Key)
			if err != nil || r == nil {
				return err
			}
			return a.rollBack(ctx, r)
		}
		return errors.Join(err, a.underLock(context.WithoutCancel(ctx), undo))
	}
	return nil
}

// podSysfs opens the pod's view of sysfs: a device's GIDs are only there.
func (a *attach) podSysfs() (fs sysfs.FS, closeFS func() error, err error) {
	err = a.pod.Run(func() error {
		fs, closeFS, err = sysfs.MountHere()
		return err
	})
	return fs, closeFS, err
}

func (a *attach) missingGIDs(fs sysfs.FS) ([]netip.Addr, error) {
	var there []netip.Addr
	for _, d := range a.report.Devices {
		ports, err := fs.Ports(d.NameInPod)
		if err != nil {
			return nil, err
		}
		for _, port := range ports {
			addresses, err := fs.RoCEv2Addresses(d.NameInPod, port)
			if err != nil {
				return nil, err
			}
			there = append(there, addresses...)
		}
	}
	return slices.DeleteFunc(slices.Clone(a.req.Addresses), func(want netip.Addr) bool { return slices.Contains(there, want) }), nil
}

// skipShared lets an attachment go without device on a node in shared mode, if
// the request allows it.
func (a *attach) skipShared(ctx context.Context, err error) error {
	var mode *ModeError
	if !errors.As(err, &mode) || !a.req.SkipShared {
		return err
	}
	return a.skip(ctx, "the node is in RDMA namespace mode "+mode.Mode.String()+", in which every pod can use every RDMA device")
}

// withoutDevice explains a function that has no RDMA device, or lets the
// attachment go without if the request allows it and the function cannot have
// one.
func (a *attach) withoutDevice(ctx context.Context, err error) error {
	absence, absenceErr := a.function.Absence()
	if absenceErr != nil {
		return errors.Join(err, absenceErr)
	}
	if a.req.SkipNoDevice && (absence.Userspace || absence.ForeignDriver) {
		return a.skip(ctx, absence.Error())
	}
	return &FunctionError{absence}
}

// skip records that the attachment has no device, so that CHECK and DEL know.
func (a *attach) skip(ctx context.Context, reason string) error {
	a.report.warn("no RDMA device is attached: %s", reason)
	function := a.req.Function
	if a.function.Address != "" {
		function = a.function.Address
	}
	if function == "" {
		function = "none"
	}
	return a.underLock(ctx, func(ctx context.Context) error {
		names, err := a.State.Names()
		if err != nil {
			return err
		}
		if _, err := a.resume(ctx, names); err != nil {
			return err
		}
		return a.State.Save(&state.Record{
			Phase: state.Skipped, Key: a.req.Key, Network: a.req.Network, Pod: a.req.Pod,
			Netns: state.Netns{Path: a.req.Netns, ID: a.pod.ID()}, Function: function, Reason: reason, Since: time.Now().UTC(),
		})
	})
}
