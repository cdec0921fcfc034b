package state

import (
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/rdma-cni/rdma-cni/pkg/ipoib"
	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// record is one with a value in every field.
func record() *Record {
	return &Record{
		Phase:    Intended,
		Key:      Key{ContainerID: "c1", IfName: "net1"},
		Network:  "roce",
		Pod:      Pod{Namespace: "ns", Name: "pod", UID: "uid"},
		Netns:    Netns{Path: "/run/netns/blue", ID: rdma.NamespaceID{Dev: 4, Inode: 4026532281}},
		Bus:      sysfs.PCI,
		Function: "0000:3b:00.2",
		Devices: []Device{{
			Index: 3, Name: "mlx5_3", NameInPod: "rail0", NodeGUID: 0x505400fffe123457,
			CharDevices: []string{"uverbs3", "umad3"}, CharDevicesInPod: []string{"uverbs4"},
			TOS: []int{104}, TrafficClass: []int{-1},
			Ports: []Port{{GUID: 0x505400fffe123457, PKey: 0x8005}, {PKey: 0xffff}},
		}},
		Interfaces: []ipoib.Interface{{
			Name: "net1", Alias: "ib3", PortGUID: 0x505400fffe123457, PKey: 0x8005, Connected: true, Umcast: true, MTU: 2044, TxQueue: 256, Up: true,
			Addresses: []ipoib.Address{{
				Local: netip.MustParsePrefix("10.1.1.1/32"), Peer: netip.MustParsePrefix("10.1.1.2/30"), Broadcast: netip.MustParseAddr("10.1.1.3"),
				Label: "net1:x", Scope: 253, Flags: 0x200, Tentative: true, Valid: 5000, Preferred: 4000,
			}},
			Routes: []ipoib.Route{{
				Destination: netip.MustParsePrefix("fd00::/8"), Gateway: netip.MustParseAddr("fd00::1"), Source: netip.MustParseAddr("fd00::2"),
				Table: 77, Priority: 50, Scope: 253, Protocol: 3, Type: 1, TOS: 4, Flags: 4, MTU: 1400, MTULock: true, AdvMSS: 1300, Window: 9,
				HopLimit: 3, InitCwnd: 10, InitRwnd: 11, RTOMin: 12, QuickACK: 1, Congestion: "cubic",
			}},
		}, {Name: "part", Home: true, Child: true, PKey: 0x8006, MTU: 4092}},
		Foreign: true,
		Since:   time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC),
	}
}

var _ = Describe("the name of a record's file", func() {
	long := strings.Repeat("c", 200)

	DescribeTable("says what it was made of", func(containerID, ifName, function string) {
		r := record()
		r.ContainerID, r.IfName, r.Function = containerID, ifName, function
		file := r.Name().file()
		Expect(len(file)).To(BeNumerically("<=", 255))
		Expect(file).NotTo(ContainSubstring("/"))
		Expect(file).NotTo(HavePrefix("."))
		n, ok := parseName(file)
		Expect(ok).To(BeTrue(), file)
		Expect(n).To(Equal(r.Name()))
		Expect(n.Is(r.Key)).To(BeTrue())
		Expect(n.IfName).To(Equal(ifName))
		Expect(n.Function).To(Equal(function))
		Expect(n.Is(Key{ContainerID: containerID + "x", IfName: ifName})).To(BeFalse())
		Expect(n.Is(Key{ContainerID: containerID, IfName: ifName + "x"})).To(BeFalse())
	},
		Entry("usual", "0123456789abcdef", "net1", "0000:3b:00.2"),
		Entry("a scalable function", "c1", "net1", "mlx5_core.sf.4"),
		Entry("an interface with a software device", "c1", "net1", "rxe.4026532345.3"),
		Entry("every character of a container ID", "c_.-1", "net1", "0000:3b:00.2"),
		Entry("the separator in the interface", "c1", "eth0@if3", "0000:3b:00.2"),
		Entry("only separators in the interface", "c1", "@@@", "0000:3b:00.2"),
		Entry("the suffix in the interface", "c1", "a.json", "0000:3b:00.2"),
		Entry("bytes that are no text in the interface", "c1", "e\xff\x01", "0000:3b:00.2"),
		Entry("a container ID of 200 characters", long, "net1", "0000:3b:00.2"),
		Entry("a container ID of ten thousand characters", strings.Repeat("c", 10000), "net1", "0000:3b:00.2"),
	)

	It("fits at every length of a container ID, beside the longest other parts", func() {
		for length := 1; length < 300; length++ {
			r := record()
			r.ContainerID, r.IfName, r.Function = strings.Repeat("c", length), strings.Repeat("i", 15), strings.Repeat("f", 64)
			file := r.Name().file()
			Expect(len(file)).To(BeNumerically("<=", 255), "container ID of %d", length)
			n, ok := parseName(file)
			Expect(ok).To(BeTrue())
			Expect(n.Is(r.Key)).To(BeTrue(), "container ID of %d", length)
			Expect(n.Is(Key{r.ContainerID + "c", r.IfName})).To(BeFalse(), "container ID of %d", length)
		}
	})

	It("differs between attachments that look alike", func() {
		keys := []Key{
			{"a-b", "c"},
			{"a", "b-c"},
			{"a.b", "c"},
			{"a", "b@c"},
			{"a", "c"},
			{"A", "c"},
			{long + "1", "c"},
			{long + "2", "c"},
			{long + "1", "d"},
		}
		seen := map[string]Key{}
		for _, k := range keys {
			for _, f := range []string{"0000:3b:00.2", "0000:3b:00.3"} {
				r := record()
				r.Key, r.Function = k, f
				file := r.Name().file()
				Expect(seen).NotTo(HaveKey(file))
				seen[file] = k
				for _, other := range keys {
					Expect(r.Name().Is(other)).To(Equal(other == k), "%v %v", k, other)
				}
			}
		}
	})

	DescribeTable("is not read from other files", func(file string) {
		_, ok := parseName(file)
		Expect(ok).To(BeFalse())
	},
		Entry("none", ""),
		Entry("the lock", "lock"),
		Entry("a record half written", ".new"),
		Entry("only the suffix", ".json"),
		Entry("no separator", "c1.json"),
		Entry("one separator", "c1@net1.json"),
		Entry("no container", "@net1@0000:3b:00.2.json"),
		Entry("no interface", "c1@@0000:3b:00.2.json"),
		Entry("no function", "c1@net1@.json"),
		Entry("another suffix", "c1@net1@0000:3b:00.2.bak"),
		Entry("no suffix", "c1@net1@0000:3b:00.2"),
		Entry("a function that leads away", "c1@net1@...json"),
		Entry("a function that is none", "c1@net1@a b.json"),
		Entry("a function that is too long", "c1@net1@"+strings.Repeat("f", 65)+".json"),
	)
})

// device is the first device in a record's JSON.
func device(keys map[string]any) map[string]any {
	return keys["devices"].([]any)[0].(map[string]any)
}

var _ = Describe("a record", func() {
	// decoded gives what is read of a record after a change to its JSON.
	decoded := func(change func(keys map[string]any)) (*Record, error) {
		r := record()
		r.Version = Version
		data, err := r.encode()
		Expect(err).NotTo(HaveOccurred())
		var keys map[string]any
		Expect(json.Unmarshal(data, &keys)).To(Succeed())
		change(keys)
		data, err = json.Marshal(keys)
		Expect(err).NotTo(HaveOccurred())
		return decode(data, r.Name())
	}

	It("can be read by a person", func() {
		data, err := record().encode()
		Expect(err).NotTo(HaveOccurred())
		Expect(data).To(MatchJSON(`{
			"version": "", "phase": "intended", "containerID": "c1", "ifName": "net1", "network": "roce",
			"pod": {"namespace": "ns", "name": "pod", "uid": "uid"},
			"netns": {"path": "/run/netns/blue", "id": {"dev": 4, "inode": 4026532281}},
			"bus": "pci", "function": "0000:3b:00.2",
			"devices": [{"index": 3, "name": "mlx5_3", "nameInPod": "rail0", "nodeGUID": "5054:00ff:fe12:3457",
				"charDevices": ["uverbs3", "umad3"], "charDevicesInPod": ["uverbs4"],
				"tos": [104], "trafficClass": [-1],
				"ports": [{"guid": "5054:00ff:fe12:3457", "pkey": 32773}, {"guid": "0000:0000:0000:0000", "pkey": 65535}]}],
			"interfaces": [
				{"name": "net1", "alias": "ib3", "portGUID": "5054:00ff:fe12:3457", "pkey": 32773, "connected": true, "umcast": true, "mtu": 2044, "txQueue": 256, "up": true,
					"addresses": [{"local": "10.1.1.1/32", "peer": "10.1.1.2/30", "broadcast": "10.1.1.3", "label": "net1:x", "scope": 253, "flags": 512,
						"tentative": true, "valid": 5000, "preferred": 4000}],
					"routes": [{"destination": "fd00::/8", "gateway": "fd00::1", "source": "fd00::2", "table": 77, "priority": 50, "scope": 253, "protocol": 3,
						"type": 1, "tos": 4, "flags": 4, "mtu": 1400, "mtuLock": true, "advMSS": 1300, "window": 9, "hopLimit": 3, "initCwnd": 10, "initRwnd": 11,
						"rtoMin": 12, "quickACK": 1, "congestion": "cubic"}]},
				{"name": "part", "home": true, "child": true, "portGUID": "0000:0000:0000:0000", "pkey": 32774, "mtu": 4092, "txQueue": 0}],
			"foreign": true,
			"since": "2026-01-02T03:04:05.000000006Z"}`), "the names of the fields are the format")
	})

	DescribeTable("is read", func(change func(keys map[string]any)) {
		r, err := decoded(change)
		Expect(err).NotTo(HaveOccurred())
		want := record()
		want.Version, want.Phase = r.Version, r.Phase
		Expect(r).To(Equal(want))
	},
		Entry("as it was written", func(map[string]any) {}),
		Entry("in its other phase", func(k map[string]any) { k["phase"] = "attached" }),
		Entry("of a newer minor version with fields unknown here", func(k map[string]any) {
			k["version"] = "2.7"
			k["qos"] = map[string]any{"trafficClass": 96}
			device(k)["vendor"] = []int{1}
		}),
	)

	DescribeTable("is refused", func(change func(keys map[string]any), text string) {
		_, err := decoded(change)
		Expect(err).To(MatchError(ContainSubstring(text)))
		Expect(err).NotTo(MatchError(os.ErrNotExist))
	},
		Entry("of a newer major version", func(k map[string]any) { k["version"] = "3.0" }, `version is "3.0"`),
		Entry("of a major version that begins alike", func(k map[string]any) { k["version"] = "20.0" }, `version is "20.0"`),
		Entry("of the format of another plugin", func(k map[string]any) { k["version"] = "1.0" }, `version is "1.0"`),
		Entry("without version", func(k map[string]any) { delete(k, "version") }, `version is ""`),
		Entry("with a version of another type", func(k map[string]any) { k["version"] = 2 }, "version"),
		Entry("of another container", func(k map[string]any) { k["containerID"] = "c2" }, "it describes container c2"),
		Entry("of another interface", func(k map[string]any) { k["ifName"] = "net2" }, "interface net2"),
		Entry("of another function", func(k map[string]any) { k["function"] = "0000:3b:00.3" }, "on 0000:3b:00.3"),
		Entry("in an unknown phase", func(k map[string]any) { k["phase"] = "done" }, `phase "done"`),
		Entry("on an unknown bus", func(k map[string]any) { k["bus"] = "usb" }, `bus "usb"`),
		Entry("without device", func(k map[string]any) { k["devices"] = nil }, "no device"),
		Entry("of a device without name", func(k map[string]any) { delete(device(k), "name") }, "cannot be empty"),
		Entry("of a device with a bad name", func(k map[string]any) { device(k)["name"] = "../x" }, "only letters"),
		Entry("of a device with a bad name in the pod", func(k map[string]any) { device(k)["nameInPod"] = "a b" }, "only letters"),
		Entry("of a device with a bad GUID", func(k map[string]any) { device(k)["nodeGUID"] = "zz" }, "not a GUID"),
		Entry("of a device with a negative index", func(k map[string]any) { device(k)["index"] = -1 }, "index"),
		Entry("of a port with a bad GUID", func(k map[string]any) { device(k)["ports"].([]any)[0].(map[string]any)["guid"] = "zz" }, "not a GUID"),
		Entry("of a port with a partition that is none", func(k map[string]any) { device(k)["ports"].([]any)[0].(map[string]any)["pkey"] = 65536 }, "pkey"),
		Entry("of an interface with a bad address", func(k map[string]any) {
			k["interfaces"].([]any)[0].(map[string]any)["addresses"].([]any)[0].(map[string]any)["local"] = "10.1.1.1"
		}, "interfaces"),
		Entry("that says of another plugin what is no yes or no", func(k map[string]any) { k["foreign"] = "ib-sriov" }, "foreign"),
		Entry("with a time that is none", func(k map[string]any) { k["since"] = "yesterday" }, "yesterday"),
	)

	It("names its owner", func() {
		r := record()
		Expect(r.Owner()).To(Equal("pod ns/pod (container c1 interface net1) of network roce since 2026-01-02T03:04:05Z"))
		Expect((&Record{Key: r.Key}).Owner()).To(Equal("container c1 interface net1"))
	})

	It("that is damaged is never one that is missing", func() {
		cause := errors.New("cause")
		err := &DamagedError{Path: "/run/cni/rdma/x.json", Err: cause}
		Expect(err).To(MatchError(cause))
		Expect(err).NotTo(MatchError(os.ErrNotExist))
		Expect(err).To(MatchError("record /run/cni/rdma/x.json is unusable: cause"))
	})
})
