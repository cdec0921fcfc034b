package attachment

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// seen is what an attachment looks like from inside the pod.
type seen struct {
	chars   [][]string // of each device
	netdevs []string   // of the devices' ports, those in the pod
	roce    bool       // one of the devices speaks RoCE
}

// inspect looks at an attachment from inside the pod, and returns a
// *MismatchError if that is not what its record says.
func (s *session) inspect(pod *rdma.Namespace, f sysfs.Function, r *state.Record) (seen, error) {
	var in seen
	conn, err := pod.Conn()
	if err != nil {
		return in, err
	}
	devices, err := conn.Devices()
	if err != nil {
		return in, err
	}
	for i := range r.Devices {
		if err := in.look(conn, f, devices, r, &r.Devices[i]); err != nil {
			return in, err
		}
	}
	return in, s.refuseForeign(pod, r, slices.DeleteFunc(devices, func(d rdma.Device) bool {
		return slices.ContainsFunc(r.Devices, func(own state.Device) bool { return own.Index == d.Index })
	}))
}

// look looks at one device. devices are those of the pod as far as a dump shows
// them; one that it does not show is asked for.
func (in *seen) look(conn *rdma.Conn, f sysfs.Function, devices []rdma.Device, r *state.Record, d *state.Device) (err error) {
	var device rdma.Device
	if i := slices.IndexFunc(devices, func(there rdma.Device) bool { return there.Index == d.Index }); i >= 0 {
		device = devices[i]
	} else if device, err = conn.Device(d.Index); errors.Is(err, rdma.ErrDeviceNotFound) {
		return mismatch("RDMA device %s of %s is not in the pod's network namespace %s", d.NameInPod, f, r.Netns.Path)
	} else if err != nil {
		return err
	}
	uverbs, err := sameDevice(conn, f, d, device)
	if err != nil {
		return err
	}
	chars, err := portNodes(conn, d, device)
	if err != nil {
		return err
	}
	in.chars = append(in.chars, append([]string{uverbs}, chars...))
	in.roce = in.roce || device.Protocol == "roce"
	for port := uint32(1); port <= device.Ports; port++ {
		p, err := conn.Port(device.Index, port)
		if err != nil {
			return err
		}
		if p.Netdev != "" {
			in.netdevs = append(in.netdevs, p.Netdev)
		}
	}
	return nil
}

// sameDevice compares the device that has the recorded index with the record,
// and gives its verbs node.
func sameDevice(conn *rdma.Conn, f sysfs.Function, d *state.Device, device rdma.Device) (uverbs string, err error) {
	uverbs, own, err := verbsNode(conn, f, device.Index, d)
	switch {
	case err != nil:
		return "", err
	case uverbs == "":
		return "", mismatch("RDMA device %s of %s is in the pod, but its verbs node was not made; the kernel log may say why", device.Name, f)
	case !own || device.NodeGUID != d.NodeGUID:
		return "", mismatch("the device with the index of %s (%d) in the pod is another one: %s, node GUID %s instead of %s",
			d.NameInPod, d.Index, device.Name, device.NodeGUID, d.NodeGUID)
	case device.Name != d.NameInPod:
		return "", mismatch("RDMA device %s of %s is called %s in the pod", d.NameInPod, f, device.Name)
	}
	return uverbs, nil
}

// nodes lists the device's character devices, of the kinds that it had at home.
func nodes(conn *rdma.Conn, d *state.Device, device rdma.Device) ([]string, error) {
	uverbs, err := conn.Uverbs(device.Index)
	if errors.Is(err, rdma.ErrDeviceNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	others, err := portNodes(conn, d, device)
	return append([]string{uverbs}, others...), err
}

// portNodes lists the nodes of the device's ports, of the kinds that it had at
// home, in the order of sysfs.CharDevices. Netlink tells them in a third of the
// time that sysfs takes, whose entries are new after a move.
func portNodes(conn *rdma.Conn, d *state.Device, device rdma.Device) ([]string, error) {
	had := func(kind sysfs.Kind) bool {
		return slices.ContainsFunc(d.CharDevices, func(name string) bool { return strings.HasPrefix(name, string(kind)) })
	}
	if !had(sysfs.Umad) {
		return nil, nil
	}
	var umads, issms []string
	for port := uint32(1); port <= device.Ports; port++ {
		umad, err := conn.Umad(device.Index, port)
		if errors.Is(err, rdma.ErrDeviceNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		umads = append(umads, umad)
		if had(sysfs.Issm) {
			// The kernel does not tell this one. A port's two nodes have one
			// number and are made together or not at all (ib_umad_init_port
			// in drivers/infiniband/core/user_mad.c, 5.3 to 7.3).
			issms = append(issms, string(sysfs.Issm)+strings.TrimPrefix(umad, string(sysfs.Umad)))
		}
	}
	slices.SortFunc(umads, byNumber)
	slices.SortFunc(issms, byNumber)
	return append(umads, issms...), nil
}

func byNumber(a, b string) int {
	return cmp.Or(cmp.Compare(len(a), len(b)), strings.Compare(a, b))
}

// refuseForeign makes sure that the pod has no RDMA device that was not
// attached to it.
func (s *session) refuseForeign(pod *rdma.Namespace, r *state.Record, others []rdma.Device) error {
	if len(others) == 0 {
		return nil
	}
	known, err := s.indexesIn(pod.ID())
	if err != nil {
		return err
	}
	for _, d := range others {
		if !known[d.Index] && !s.Upstream.Attached(r.ContainerID, d.Name) {
			return mismatch("the pod's network namespace %s also holds RDMA device %s, which no record says was attached to it; "+
				"bring it home (rdma dev set %s netns ...) or delete the pod", r.Netns.Path, d.Name, d.Name)
		}
	}
	return nil
}

// indexesIn gives the device indexes of all attachments to a namespace.
func (s *session) indexesIn(id rdma.NamespaceID) (map[uint32]bool, error) {
	records, err := s.records()
	if err != nil {
		return nil, err
	}
	known := map[uint32]bool{}
	for _, r := range records {
		if r.Netns.ID != id {
			continue
		}
		for _, d := range r.Devices {
			known[d.Index] = true
		}
	}
	return known, nil
}

// Verify compares an attachment with its record and with the kernel. What does
// not agree is a *MismatchError. It changes nothing and takes no lock.
func (n *Node) Verify(req Request) (*Report, error) {
	r, err := n.recordOf(req.Key)
	if err != nil {
		return nil, err
	}
	if r != nil && r.Phase == state.Skipped {
		report := &Report{Function: r.Function}
		report.warn("no RDMA device is attached: %s", r.Reason)
		return report, nil
	}
	s, err := n.open()
	if err != nil {
		return nil, err
	}
	defer s.close()
	if err := s.requireExclusive(); err != nil {
		return nil, err
	}
	pod, err := s.openPod(req.Netns)
	if err != nil {
		return nil, err
	}
	defer func() { _ = pod.Close() }()
	if r == nil {
		return s.verifyUpstream(req, pod)
	}
	return s.verifyRecord(req, pod, r)
}

// recordOf loads the record of an attachment, nil if it has none.
func (n *Node) recordOf(key state.Key) (*state.Record, error) {
	names, err := n.State.Names()
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if name.Is(key) {
			r, err := n.State.Load(name)
			if errors.Is(err, os.ErrNotExist) {
				continue
			}
			return r, err
		}
	}
	return nil, nil
}

func (s *session) verifyRecord(req Request, pod *rdma.Namespace, r *state.Record) (*Report, error) {
	report := &Report{Function: r.Function, Devices: r.Devices}
	if r.Phase != state.Attached {
		return report, mismatch("the ADD of %s was not finished: its record says %q", r.Key, r.Phase)
	}
	if r.Netns.ID != pod.ID() {
		return report, mismatch("%s was attached to network namespace %s (%s), but is now checked in %s (%s)",
			r.Key, r.Netns.ID, r.Netns.Path, pod.ID(), req.Netns)
	}
	f, err := s.functionOf(r.Function)
	if errors.Is(err, sysfs.ErrNoFunction) {
		return report, mismatch("function %s has disappeared from this node, and the pod's RDMA device %s with it", r.Function, r.Devices[0].NameInPod)
	}
	if err != nil {
		return report, err
	}
	if req.Function != "" && !f.Soft() && !strings.EqualFold(req.Function, f.Address) {
		return report, mismatch("%s was attached with %s, but its configuration says %s", r.Key, f, req.Function)
	}
	in, err := s.inspect(pod, f, r)
	if err != nil {
		return report, s.explainMismatch(f, r, err)
	}
	if err := s.checkInfiniBand(pod, f, r, report); err != nil {
		return report, err
	}
	if in.roce && !slices.Contains(in.netdevs, r.IfName) {
		return report, mismatch("RDMA device %s has netdev %q in the pod instead of %s", r.Devices[0].NameInPod, strings.Join(in.netdevs, ","), r.IfName)
	}
	for i := range r.Devices {
		d := &r.Devices[i]
		if !slices.Equal(in.chars[i], d.CharDevicesInPod) {
			return report, mismatch("the character devices of RDMA device %s were %s after ADD and are %s now", d.NameInPod,
				strings.Join(d.CharDevicesInPod, ","), strings.Join(in.chars[i], ","))
		}
		if !slices.Equal(d.CharDevicesInPod, d.CharDevices) {
			report.fault("%s", renumbered(d))
		}
	}
	return report, nil
}

// explainMismatch adds to an error that a device is at home, which is how a
// driver that was reloaded leaves it.
func (s *session) explainMismatch(f sysfs.Function, r *state.Record, err error) error {
	for _, c := range claimsOf(r) {
		if p, _, whereErr := s.where(f, c); whereErr == nil && (p == atHome || p == replaced) {
			return &MismatchError{fmt.Errorf("%w: %s has its RDMA device at home (its driver was reloaded, or somebody moved it); delete the pod so that it gets a new one", err, f)}
		}
	}
	return err
}

// verifyUpstream verifies an attachment that the replaced plugin made.
func (s *session) verifyUpstream(req Request, pod *rdma.Namespace) (*Report, error) {
	u, err := s.Upstream.Load(req.Network, req.Key)
	if err != nil {
		return nil, err
	}
	if u == nil {
		return nil, mismatch("%s has no record in %s, so no RDMA device was attached to it", req.Key, s.State.Dir())
	}
	report := &Report{Function: u.DeviceID}
	f, err := s.Sysfs.Function(u.DeviceID)
	if err != nil {
		return report, &MismatchError{err}
	}
	found, err := holds(pod, f, claim{function: u.DeviceID})
	if err == nil && !found {
		err = mismatch("the RDMA device of %s, attached by another rdma plugin, is not in the pod's network namespace %s", f, req.Netns)
	}
	return report, err
}
