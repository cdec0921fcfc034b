package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/rdma-cni/rdma-cni/pkg/rawjson"
	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// The JSON of a record is written and read field by field. encoding/json would
// analyse the types of Record first, which takes longer than all else that is
// done to a record (docs/performance.md).

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

func (w *writer) quote(s string) { w.out = rawjson.Quote(w.out, s) }

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

// decode reads a record and compares it with its file's name. Keys that are not
// known, such as those of a later minor version, are passed over.
func decode(data []byte, n Name) (*Record, error) {
	keys, err := rawjson.Parse(data)
	if err != nil {
		return nil, err
	}
	var r Record
	if err := keys.Text("version", &r.Version); err != nil {
		return nil, err
	}
	if major, _, _ := strings.Cut(r.Version, "."); major != "2" {
		return nil, fmt.Errorf("its version is %q, this plugin reads 2.x", r.Version)
	}
	if err := r.readFrom(keys); err != nil {
		return nil, err
	}
	return &r, r.validate(n)
}

func (r *Record) readFrom(keys rawjson.Object) error {
	var since string
	var pod, netns, id rawjson.Object
	err := errors.Join(
		keys.Text("phase", (*string)(&r.Phase)),
		keys.Text("containerID", &r.ContainerID),
		keys.Text("ifName", &r.IfName),
		keys.Text("network", &r.Network),
		keys.Text("bus", (*string)(&r.Bus)),
		keys.Text("function", &r.Function),
		keys.Bool("foreign", &r.Foreign),
		keys.Text("reason", &r.Reason),
		keys.Text("since", &since),
		keys.Object("pod", &pod),
		pod.Text("namespace", &r.Pod.Namespace),
		pod.Text("name", &r.Pod.Name),
		pod.Text("uid", &r.Pod.UID),
		keys.Object("netns", &netns),
		netns.Text("path", &r.Netns.Path),
		netns.Object("id", &id),
		id.Uint("dev", 64, &r.Netns.ID.Dev),
		id.Uint("inode", 64, &r.Netns.ID.Inode),
		keys.Objects("devices", func(keys rawjson.Object) error {
			d, err := readDevice(keys)
			r.Devices = append(r.Devices, d)
			return err
		}),
	)
	if err == nil && since != "" {
		r.Since, err = time.Parse(time.RFC3339Nano, since)
	}
	if err == nil && !keys.Null("interfaces") {
		if err := json.Unmarshal(keys["interfaces"], &r.Interfaces); err != nil {
			return fmt.Errorf("key interfaces: %w", err)
		}
	}
	return err
}

func readDevice(keys rawjson.Object) (d Device, err error) {
	var index uint64
	var guid string
	err = errors.Join(
		keys.Uint("index", 32, &index),
		keys.Text("name", &d.Name),
		keys.Text("nameInPod", &d.NameInPod),
		keys.Text("nodeGUID", &guid),
		keys.Texts("charDevices", &d.CharDevices),
		keys.Texts("charDevicesInPod", &d.CharDevicesInPod),
		keys.Ints("tos", &d.TOS),
		keys.Ints("trafficClass", &d.TrafficClass),
		keys.Objects("ports", func(keys rawjson.Object) error {
			p, err := readPort(keys)
			d.Ports = append(d.Ports, p)
			return err
		}),
	)
	d.Index = uint32(index)
	if err != nil {
		return d, err
	}
	return d, d.NodeGUID.UnmarshalText([]byte(guid))
}

func readPort(keys rawjson.Object) (p Port, err error) {
	var pkey uint64
	var guid string
	if err := errors.Join(keys.Uint("pkey", 16, &pkey), keys.Text("guid", &guid)); err != nil {
		return p, err
	}
	p.PKey = uint16(pkey)
	return p, p.GUID.UnmarshalText([]byte(guid))
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
