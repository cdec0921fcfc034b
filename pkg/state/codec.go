package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// The JSON of a record is written and read field by field. encoding/json would
// analyse the types of Record first, which takes longer than all else that is
// done to a record: some 5 ms of an ADD on the test bed, a tenth of it.

// encode gives the record as one line of JSON.
func (r *Record) encode() ([]byte, error) {
	var w writer
	w.begin('{')
	w.text("version", r.Version)
	w.text("phase", string(r.Phase))
	w.text("containerID", r.ContainerID)
	w.text("ifName", r.IfName)
	w.text("network", r.Network)
	if r.Pod != (Pod{}) {
		w.key("pod")
		w.begin('{')
		w.text("namespace", r.Pod.Namespace)
		w.text("name", r.Pod.Name)
		w.text("uid", r.Pod.UID)
		w.end('}')
	}
	w.key("netns")
	w.begin('{')
	w.text("path", r.Netns.Path)
	w.key("id")
	w.begin('{')
	w.number("dev", r.Netns.ID.Dev)
	w.number("inode", r.Netns.ID.Inode)
	w.end('}')
	w.end('}')
	w.text("bus", string(r.Bus))
	w.text("function", r.Function)
	w.key("devices")
	w.begin('[')
	for i := range r.Devices {
		w.device(&r.Devices[i])
	}
	w.end(']')
	if len(r.Interfaces) > 0 {
		// Only a device with InfiniBand ports has them: what costs time does
		// so for it alone.
		w.marshal("interfaces", r.Interfaces)
	}
	if r.Foreign {
		w.boolean("foreign", true)
	}
	if r.Reason != "" {
		w.text("reason", r.Reason)
	}
	w.text("since", r.Since.Format(time.RFC3339Nano))
	w.end('}')
	return append(w.out, '\n'), w.err
}

func (w *writer) device(d *Device) {
	w.begin('{')
	w.number("index", uint64(d.Index))
	w.text("name", d.Name)
	w.text("nameInPod", d.NameInPod)
	w.text("nodeGUID", d.NodeGUID.String())
	if d.CharDevices != nil {
		w.texts("charDevices", d.CharDevices)
	}
	if len(d.CharDevicesInPod) > 0 {
		w.texts("charDevicesInPod", d.CharDevicesInPod)
	}
	if len(d.TOS) > 0 {
		w.numbers("tos", d.TOS)
	}
	if len(d.TrafficClass) > 0 {
		w.numbers("trafficClass", d.TrafficClass)
	}
	if len(d.Ports) > 0 {
		w.key("ports")
		w.begin('[')
		for _, p := range d.Ports {
			w.begin('{')
			w.text("guid", p.GUID.String())
			w.number("pkey", uint64(p.PKey))
			w.end('}')
		}
		w.end(']')
	}
	w.end('}')
}

// writer puts JSON together.
type writer struct {
	out  []byte
	more bool // something stands before in this object or list
	err  error
}

func (w *writer) next() {
	if w.more {
		w.out = append(w.out, ',')
	}
	w.more = true
}

func (w *writer) begin(bracket byte) {
	if bracket == '{' && len(w.out) > 0 && w.out[len(w.out)-1] != ':' {
		w.next()
	}
	w.out, w.more = append(w.out, bracket), false
}

func (w *writer) end(bracket byte) { w.out, w.more = append(w.out, bracket), true }

func (w *writer) quote(s string) {
	quoted, err := json.Marshal(s)
	w.out, w.err = append(w.out, quoted...), errors.Join(w.err, err)
}

func (w *writer) key(key string) {
	w.next()
	w.quote(key)
	w.out = append(w.out, ':')
}

func (w *writer) text(key, value string) {
	w.key(key)
	w.quote(value)
}

func (w *writer) number(key string, value uint64) {
	w.key(key)
	w.out = strconv.AppendUint(w.out, value, 10)
}

func (w *writer) boolean(key string, value bool) {
	w.key(key)
	w.out = strconv.AppendBool(w.out, value)
}

func (w *writer) marshal(key string, value any) {
	w.key(key)
	out, err := json.Marshal(value)
	w.out, w.err = append(w.out, out...), errors.Join(w.err, err)
}

func (w *writer) texts(key string, values []string) {
	w.key(key)
	w.begin('[')
	for _, v := range values {
		w.next()
		w.quote(v)
	}
	w.end(']')
}

func (w *writer) numbers(key string, values []int) {
	w.key(key)
	w.begin('[')
	for _, v := range values {
		w.next()
		w.out = strconv.AppendInt(w.out, int64(v), 10)
	}
	w.end(']')
}

// decode reads a record and compares it with its file's name.
func decode(data []byte, n Name) (*Record, error) {
	top, err := readObject(data)
	if err != nil {
		return nil, err
	}
	var r Record
	top.read("version", &r.Version)
	if top.err != nil {
		return nil, top.err
	}
	if major, _, _ := strings.Cut(r.Version, "."); major != "2" {
		return nil, fmt.Errorf("its version is %q, this plugin reads 2.x", r.Version)
	}
	if err := r.readFrom(top); err != nil {
		return nil, err
	}
	return &r, r.validate(n)
}

func (r *Record) readFrom(top *object) error {
	var phase, bus, since string
	top.read("phase", &phase)
	top.read("containerID", &r.ContainerID)
	top.read("ifName", &r.IfName)
	top.read("network", &r.Network)
	top.read("bus", &bus)
	top.read("function", &r.Function)
	top.read("interfaces", &r.Interfaces)
	top.read("foreign", &r.Foreign)
	top.read("reason", &r.Reason)
	top.read("since", &since)
	r.Phase, r.Bus = Phase(phase), sysfs.Bus(bus)
	pod := top.object("pod")
	pod.read("namespace", &r.Pod.Namespace)
	pod.read("name", &r.Pod.Name)
	pod.read("uid", &r.Pod.UID)
	netns := top.object("netns")
	netns.read("path", &r.Netns.Path)
	id := netns.object("id")
	id.read("dev", &r.Netns.ID.Dev)
	id.read("inode", &r.Netns.ID.Inode)
	err := errors.Join(top.err, pod.err, netns.err, id.err)
	if since != "" {
		var timeErr error
		r.Since, timeErr = time.Parse(time.RFC3339Nano, since)
		err = errors.Join(err, timeErr)
	}
	var devices []json.RawMessage
	top.read("devices", &devices)
	for _, raw := range devices {
		d, deviceErr := readDevice(raw)
		r.Devices, err = append(r.Devices, d), errors.Join(err, deviceErr)
	}
	return errors.Join(err, top.err)
}

func readDevice(data []byte) (Device, error) {
	keys, err := readObject(data)
	if err != nil {
		return Device{}, err
	}
	var d Device
	var guid string
	keys.read("index", &d.Index)
	keys.read("name", &d.Name)
	keys.read("nameInPod", &d.NameInPod)
	keys.read("nodeGUID", &guid)
	keys.read("charDevices", &d.CharDevices)
	keys.read("charDevicesInPod", &d.CharDevicesInPod)
	keys.read("tos", &d.TOS)
	keys.read("trafficClass", &d.TrafficClass)
	var ports []json.RawMessage
	keys.read("ports", &ports)
	for _, raw := range ports {
		p, err := readPort(raw)
		if err != nil {
			return d, fmt.Errorf("ports: %w", err)
		}
		d.Ports = append(d.Ports, p)
	}
	if keys.err != nil {
		return d, keys.err
	}
	return d, d.NodeGUID.UnmarshalText([]byte(guid))
}

func readPort(data []byte) (p Port, err error) {
	keys, err := readObject(data)
	if err != nil {
		return p, err
	}
	var guid string
	keys.read("guid", &guid)
	keys.read("pkey", &p.PKey)
	return p, errors.Join(keys.err, p.GUID.UnmarshalText([]byte(guid)))
}

// validate refuses what no ADD has written.
func (r *Record) validate(n Name) error {
	switch {
	case r.Name() != n:
		return fmt.Errorf("it describes %s on %s", r.Key, r.Function)
	case r.Phase == Skipped:
		return nil
	case r.Phase != Intended && r.Phase != Attached:
		return fmt.Errorf("it has the unknown phase %q", r.Phase)
	case r.Bus != sysfs.PCI && r.Bus != sysfs.Auxiliary && r.Bus != sysfs.Netdev && r.Bus != sysfs.RXE:
		return fmt.Errorf("it has the unknown bus %q", r.Bus)
	case len(r.Devices) == 0:
		return errors.New("it names no device")
	}
	for _, d := range r.Devices {
		if err := errors.Join(rdma.ValidateName(d.Name), rdma.ValidateName(d.NameInPod)); err != nil {
			return err
		}
	}
	return nil
}

// object is a JSON object under way of being read. Keys that nobody asks for,
// such as those of a later minor version, are passed over.
type object struct {
	keys map[string]json.RawMessage
	err  error
}

func readObject(data []byte) (*object, error) {
	var o object
	err := json.Unmarshal(data, &o.keys)
	return &o, err
}

func (o *object) read(key string, into any) {
	raw, ok := o.keys[key]
	if !ok {
		return
	}
	if err := json.Unmarshal(raw, into); err != nil {
		o.err = errors.Join(o.err, fmt.Errorf("%s: %w", key, err))
	}
}

// object reads an object that may be absent.
func (o *object) object(key string) *object {
	var inner object
	o.read(key, &inner.keys)
	return &inner
}
