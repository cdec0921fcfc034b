package doctor

import (
	"net/netip"

	. "github.com/onsi/gomega"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// goodPod has one device, with all that belongs to it.
func goodPod() PodFacts {
	number := sysfs.DeviceNumber{Major: 231, Minor: 194}
	address := netip.MustParseAddr("192.168.7.2")
	return PodFacts{
		Namespace: "/run/netns/cni-1", Live: ptr(rdma.Exclusive),
		Devices: []PodDevice{{
			Name: "mlx5_2", Function: "0000:3b:00.2", Protocol: "roce", Recorded: true, GIDs: []netip.Addr{address},
			Ports: []PortFacts{{Number: 1, State: "ACTIVE", Active: true, Netdev: "net1"}},
			Chars: []CharFacts{{Name: "uverbs2", Kind: sysfs.Uverbs, Number: number}, {Name: "umad2", Kind: sysfs.Umad, Number: sysfs.DeviceNumber{Major: 231, Minor: 2}}},
		}},
		Records:    []PodRecord{{Device: "mlx5_2", Function: "0000:3b:00.2", Phase: "attached", IfName: "net1", Here: true}},
		Interfaces: []PodInterface{{Name: "net1", Up: true, Addresses: []netip.Addr{address}}},
		Containers: []ContainerFacts{{
			ID: "0123456789abcdef", Process: rdma.Process{PID: 42, Command: "python3"}, NoLimit: true, SysDevices: []string{"mlx5_2"},
			Nodes: map[string]NodeFacts{
				"uverbs2": {Number: number, Opened: ptr(true)},
				"umad2":   {Number: sysfs.DeviceNumber{Major: 231, Minor: 2}, Opened: ptr(true)},
				"rdma_cm": {Number: sysfs.DeviceNumber{Major: 10, Minor: 124}},
			},
		}},
	}
}

var _ = Describe("the checks of a pod", func() {
	It("pass on a good one, each of them", func() {
		findings := ExaminePod(goodPod())
		for _, f := range findings {
			Expect(f.Severity).To(Equal(Pass), "%s: %s", f.Check, f.Message)
		}
		for _, c := range podChecks {
			Expect(findings).To(ContainElement(HaveField("Check", c.name)), "every check says something")
		}
		golden("good-pod.json", findings)
	})

	node := func(f *PodFacts, name string, change func(n *NodeFacts)) {
		n := f.Containers[0].Nodes[name]
		change(&n)
		f.Containers[0].Nodes[name] = n
	}
	DescribeTable("fire", func(check string, severity Severity, says string, change func(f *PodFacts)) {
		f := goodPod()
		change(&f)
		fired := of(ExaminePod(f), check)
		Expect(fired).To(ContainElement(And(HaveField("Severity", severity), HaveField("Message", ContainSubstring(says)))))
		for _, finding := range fired {
			Expect(finding.Fix).NotTo(BeEmpty(), finding.Message)
		}
	},
		Entry("hostNetwork", "network-namespace", Fail, "host's network namespace", func(f *PodFacts) { f.IsHost = true }),
		Entry("shared", "mode", Fail, "shared", func(f *PodFacts) { f.Live = ptr(rdma.Shared) }),
		Entry("no subsystem", "mode", Fail, "no RDMA subsystem", func(f *PodFacts) { f.Live = nil }),
		Entry("no device, no record", "device", Fail, "no RDMA device", func(f *PodFacts) { f.Devices, f.Records = nil, nil }),
		Entry("a lost device", "device", Fail, "not in the pod", func(f *PodFacts) { f.Devices, f.Records[0].Here = nil, false }),
		Entry("an unfinished ADD", "device", Warn, "not finished", func(f *PodFacts) { f.Records[0].Phase = "intended" }),
		Entry("a foreign device", "foreign-devices", Warn, "no record", func(f *PodFacts) { f.Devices[0].Recorded = false }),
		Entry("no interface", "netdev", Fail, "not in the pod", func(f *PodFacts) { f.Devices[0].Ports[0].Netdev = "" }),
		Entry("a port that is down", "port", Warn, "DOWN", func(f *PodFacts) { f.Devices[0].Ports[0].Active, f.Devices[0].Ports[0].State = false, "DOWN" }),
		Entry("no GID", "gids", Warn, "192.168.7.2", func(f *PodFacts) { f.Devices[0].GIDs = nil }),
		Entry("no address", "gids", Warn, "no IP address", func(f *PodFacts) { f.Interfaces[0].Addresses = nil }),
		Entry("an unreadable table", "gids", Warn, "EIO", func(f *PodFacts) { f.Devices[0].GIDError = "EIO" }),
		Entry("the host's /sys", "sysfs", Warn, "mlx5_0", func(f *PodFacts) { f.Containers[0].SysDevices = []string{"mlx5_0"} }),
		Entry("no /sys", "sysfs", Warn, "no such", func(f *PodFacts) { f.Containers[0].SysError = "no such file" }),
		Entry("a wrong number", "nodes", Fail, "231:195", func(f *PodFacts) {
			node(f, "uverbs2", func(n *NodeFacts) { n.Number.Minor = 195 })
		}),
		Entry("a missing verbs node", "nodes", Fail, "uverbs2", func(f *PodFacts) { delete(f.Containers[0].Nodes, "uverbs2") }),
		Entry("a missing management node", "nodes", Warn, "umad2", func(f *PodFacts) { delete(f.Containers[0].Nodes, "umad2") }),
		Entry("the node of before the move", "nodes", Warn, "uverbs5", func(f *PodFacts) { f.Containers[0].Nodes["uverbs5"] = NodeFacts{} }),
		Entry("a denied node", "access", Fail, "EPERM", func(f *PodFacts) {
			node(f, "uverbs2", func(n *NodeFacts) { n.Opened, n.Denied, n.Error = ptr(false), true, "EPERM" })
		}),
		Entry("an attempt that failed", "access", Warn, "not tried", func(f *PodFacts) {
			node(f, "uverbs2", func(n *NodeFacts) { n.Opened, n.Error = nil, "no such control group" })
		}),
		Entry("a dead node", "access", Fail, "EIO", func(f *PodFacts) {
			node(f, "uverbs2", func(n *NodeFacts) { n.Opened, n.Error = ptr(false), "EIO" })
		}),
		Entry("no queue pair for rdma_cm", "rdma-cm", Warn, "QP 1", func(f *PodFacts) { f.Devices[0].GSI = ptr(false) }),
		Entry("no connection manager", "connection-manager", Warn, "rdma_cm", func(f *PodFacts) { delete(f.Containers[0].Nodes, "rdma_cm") }),
		Entry("a low limit", "memlock", Warn, "64 KiB", func(f *PodFacts) { f.Containers[0].NoLimit, f.Containers[0].Memlock = false, 64<<10 }),
		Entry("an unreadable limit", "memlock", Warn, "denied", func(f *PodFacts) { f.Containers[0].LimErr = "denied" }),
		Entry("no process", "nodes", Warn, "no process", func(f *PodFacts) { f.Containers = nil }),
	)

	It("let CAP_IPC_LOCK make up for a low limit", func() {
		f := goodPod()
		f.Containers[0].NoLimit, f.Containers[0].Memlock, f.Containers[0].IPCLock = false, 64<<10, true
		Expect(of(ExaminePod(f), "memlock")).To(BeEmpty())
	})
})
