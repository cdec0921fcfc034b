package attachment

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// ProbeReport is how a device fared on its way into a namespace and back.
type ProbeReport struct {
	Device    rdma.Device
	Function  string
	Out, Back time.Duration // of the two moves
	// Before, Inside and After are its character devices at home, in the
	// namespace, and at home again.
	Before, Inside, After []string
}

// InUseError: a device is not idle, so a probe would cut off its users.
type InUseError struct{ Device, By string }

func (e *InUseError) Error() string {
	return fmt.Sprintf("RDMA device %s is in use: %s; a move would cut its users off", e.Device, e.By)
}

// Probe moves an idle device into a fresh namespace and back, as an attachment
// would. It takes the node lock. No record is needed: the namespace has no
// path and ends with the process, and the kernel then takes the device home.
func (n *Node) Probe(ctx context.Context, name string) (report *ProbeReport, err error) {
	s, err := n.open()
	if err != nil {
		return nil, err
	}
	defer s.close()
	if err := s.requireExclusive(); err != nil {
		return nil, err
	}
	err = s.withLock(ctx, "probe of "+name, func() (err error) {
		report, err = s.probe(ctx, name)
		return err
	})
	return report, err
}

func (s *session) probe(ctx context.Context, name string) (*ProbeReport, error) {
	device, err := s.conn.DeviceByName(name)
	if err != nil {
		return nil, err
	}
	chars, err := s.charsOf(device)
	if err != nil {
		return nil, err
	}
	report := &ProbeReport{Device: device, Before: nodeNames(chars)}
	if len(chars) > 0 {
		report.Function = chars[0].Function
	}
	if err := s.requireIdle(device, report.Function); err != nil {
		return report, err
	}
	ns, err := rdma.NewNamespace()
	if err != nil {
		return report, err
	}
	defer func() { _ = ns.Close() }()
	begin := time.Now()
	if err := s.conn.Move(device.Index, ns); err != nil {
		driver := ""
		if f, fErr := s.Sysfs.Function(report.Function); fErr == nil {
			driver, _ = f.Driver()
		}
		move := &MoveError{Device: name, Driver: driver, Err: err}
		if errors.Is(err, unix.EOPNOTSUPP) {
			move.Hint = "this driver cannot release a device from its users (it has no disassociate_ucontext)"
		}
		// The kernel can fail when the device has left already.
		return report, errors.Join(move, s.bringBack(ctx, ns, device, report))
	}
	report.Out = time.Since(begin)
	if chars, err = s.charsOf(device); err == nil {
		report.Inside = nodeNames(chars)
	}
	if err := errors.Join(err, s.bringBack(ctx, ns, device, report)); err != nil {
		return report, err
	}
	if chars, err = s.charsOf(device); err != nil {
		return report, err
	}
	report.After = nodeNames(chars)
	if len(report.Inside) == 0 && len(report.Before) > 0 {
		return report, mismatch("RDMA device %s arrived in the namespace without character devices; the kernel log may say why", name)
	}
	return report, nil
}

// bringBack moves the device home, if it is in ns. If that fails the end of ns
// does it.
func (s *session) bringBack(ctx context.Context, ns *rdma.Namespace, device rdma.Device, report *ProbeReport) error {
	err := ns.Do(func(conn *rdma.Conn) error {
		if _, err := conn.Device(device.Index); errors.Is(err, rdma.ErrDeviceNotFound) {
			return nil
		}
		begin := time.Now()
		err := conn.Move(device.Index, s.home)
		report.Back = time.Since(begin)
		return err
	})
	if err != nil {
		err = fmt.Errorf("bring RDMA device %s home: %w", device.Name, err)
		_ = ns.Close()
	}
	home, pollErr := poll(ctx, returnWait, func() (bool, error) {
		d, err := s.conn.Device(device.Index)
		if errors.Is(err, rdma.ErrDeviceNotFound) {
			return false, nil
		}
		return err == nil && d.NodeGUID == device.NodeGUID, err
	})
	if !home && pollErr == nil {
		pollErr = fmt.Errorf("RDMA device %s is not home after %s; the kernel brings it when the namespace ends", device.Name, returnWait)
	}
	return errors.Join(err, pollErr)
}

func (s *session) charsOf(device rdma.Device) ([]sysfs.CharDeviceNode, error) {
	uverbs, err := s.conn.Uverbs(device.Index)
	if err != nil && !errors.Is(err, rdma.ErrDeviceNotFound) {
		return nil, err
	}
	nodes, err := s.Sysfs.CharDeviceNodes()
	if err != nil {
		return nil, err
	}
	function, known := "", false
	for _, n := range nodes {
		if n.Name == uverbs {
			function, known = n.Function, true
		}
	}
	return slices.DeleteFunc(nodes, func(n sysfs.CharDeviceNode) bool {
		// By name where no verbs node leads to the function, as while the
		// device is not here.
		return n.Device != device.Name || known && n.Function != function
	}), nil
}

func nodeNames(nodes []sysfs.CharDeviceNode) []string {
	names := make([]string, 0, len(nodes))
	for _, n := range nodes {
		names = append(names, n.Name)
	}
	return names
}

// requireIdle makes sure that nobody uses the device.
func (s *session) requireIdle(device rdma.Device, function string) error {
	records, _, err := s.Records()
	if err != nil {
		return err
	}
	for _, r := range records {
		if r.Function == function && function != "" {
			return &InUseError{Device: device.Name, By: "a record says that it is attached to " + r.Owner()}
		}
	}
	if device.Protocol == "ib" {
		return &InUseError{Device: device.Name, By: "a move destroys the IPoIB interfaces of an InfiniBand device, with their addresses"}
	}
	soft, err := s.Sysfs.SoftDevices()
	if err != nil {
		return err
	}
	if slices.ContainsFunc(soft, func(d sysfs.SoftDevice) bool { return d.Name == device.Name }) {
		return &InUseError{Device: device.Name, By: "a move takes rdma_cm from a soft-RoCE device for good"}
	}
	counts, err := s.conn.Resources(device.Index)
	if err != nil {
		return err
	}
	for _, kind := range []string{"ctx", "cm_id", "mr", "srq"} {
		if n := counts[kind]; n > 0 {
			return &InUseError{Device: device.Name, By: fmt.Sprintf("it has %d %s (rdma resource show)", n, kind)}
		}
	}
	// Two queue pairs a port are the kernel's own, for management datagrams.
	if n := counts["qp"]; n > 2*uint64(device.Ports) {
		return &InUseError{Device: device.Name, By: fmt.Sprintf("it has %d queue pairs, which a storage or other kernel user may have (rdma resource show qp)", n)}
	}
	return nil
}
