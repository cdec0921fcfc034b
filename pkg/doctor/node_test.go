package doctor

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"

	. "github.com/onsi/gomega"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares JSON with a file.
func golden(name string, data any) {
	GinkgoHelper()
	text, err := json.MarshalIndent(data, "", "  ")
	Expect(err).NotTo(HaveOccurred())
	path := filepath.Join("testdata", name)
	if *update {
		Expect(os.MkdirAll("testdata", 0o755)).To(Succeed())
		Expect(os.WriteFile(path, append(text, '\n'), 0o644)).To(Succeed())
	}
	want, err := os.ReadFile(path)
	Expect(err).NotTo(HaveOccurred())
	Expect(text).To(MatchJSON(want))
}

func ptr[T any](v T) *T { return &v }

// goodNode is a node of a GPU cluster on which all is well.
func goodNode() Facts {
	modules := map[string]bool{}
	for _, m := range coreModules {
		modules[m] = true
	}
	device := DeviceFacts{
		Name: "mlx5_2", Function: "0000:3b:00.2", Kind: "vf", Driver: "mlx5_core", PF: "0000:3b:00.0", Place: "home", Holder: "home",
		NodeGUID: 0x506b4b0300c3b2a1, LinkLayer: "Ethernet", Protocol: "roce", AdminMAC: "50:6b:4b:c3:b2:a1", PFNetdevMTU: 9000,
		Movable: ptr(true), MovableModule: "mlx5_ib",
		Ports: []PortFacts{{Number: 1, State: "ACTIVE", Active: true, Netdev: "ens1f0v0", MTU: 9000, Oper: "up", GIDs: 4, GIDSize: 128, RoCEv2: 2}},
	}
	number := sysfs.DeviceNumber{Major: 231, Minor: 192}
	return Facts{
		Root: true, Kernel: "6.12.117", Modules: modules, Live: ptr(rdma.Exclusive),
		Persisted: Persisted{
			Files:     []Setting{{Source: "/etc/modprobe.d/ib_core.conf", Line: 1, Mode: rdma.Exclusive}},
			Initramfs: Initramfs{Path: "/boot/initrd.img-6.12.117"},
		},
		Devices:  []DeviceFacts{device},
		Chars:    []CharFacts{{Name: "uverbs0", Kind: sysfs.Uverbs, Function: "0000:3b:00.2", Number: number, Node: &number}},
		CM:       &CharFacts{Name: "rdma_cm", Number: sysfs.DeviceNumber{Major: 10, Minor: 124}, Node: &sysfs.DeviceNumber{Major: 10, Minor: 124}},
		Plugins:  []PluginFacts{{Dir: "/opt/cni/bin", Exists: true, Binary: true, Mode: 0o755, DirMode: 0o755, Version: "rdma-cni cni version:v1", Ours: true, Arch: hostArch()}},
		Runtimes: []RuntimeFacts{{Command: "containerd", PID: 700, NoLimit: true}},
		Config:   &ConfigFacts{File: "rail.conflist", Networks: []NetworkFacts{{Name: "rail", Plugins: []PluginConf{{Type: "sriov"}, {Type: "rdma"}}}}},
	}
}

// softRoCE makes the network one of [ptp, rdma with softRoCE], on such a node.
func softRoCE(f *Facts, s SoftRoCEFacts) {
	f.Config.Networks[0].Plugins = []PluginConf{{Type: "ptp"}, {Type: "rdma", SoftRoCE: true}}
	f.SoftRoCE = s
}

// of picks the findings of a check that are no PASS.
func of(findings []Finding, check string) []Finding {
	return slices.DeleteFunc(slices.Clone(findings), func(f Finding) bool { return f.Check != check || f.Severity == Pass })
}

var _ = Describe("the checks of a node", func() {
	It("pass on a good one, each of them", func() {
		findings := Examine(goodNode())
		for _, f := range findings {
			Expect(f.Severity).To(Equal(Pass), "%s: %s", f.Check, f.Message)
		}
		for _, c := range nodeChecks {
			Expect(findings).To(ContainElement(HaveField("Check", c.name)), "every check says something")
		}
		golden("good-node.json", findings)
	})

	It("pass on a network of soft-RoCE, with any plugin before", func() {
		f := goodNode()
		f.Kernel = "7.3.4"
		softRoCE(&f, SoftRoCEFacts{Installed: true})
		f.Config.Networks[0].Manifest = true
		Expect(of(Examine(f), "config")).To(BeEmpty())
	})

	It("explain a node without any RDMA", func() {
		findings := Examine(Facts{
			Root: true, Kernel: "6.1.0", Modules: map[string]bool{}, Subsystem: rdma.ErrNoSubsystem,
			NICs: []sysfs.NetworkFunction{{Address: "0000:3b:00.0", Vendor: "0x15b3", Device: "0x101b", Driver: "mlx5_core"}},
		})
		golden("no-rdma.json", findings)
	})

	DescribeTable("fire", func(check string, severity Severity, says string, change func(f *Facts)) {
		f := goodNode()
		change(&f)
		fired := of(Examine(f), check)
		Expect(fired).NotTo(BeEmpty())
		Expect(fired).To(ContainElement(And(HaveField("Severity", severity), HaveField("Message", ContainSubstring(says)))))
		for _, finding := range fired {
			Expect(finding.Fix).NotTo(BeEmpty(), finding.Message)
		}
	},
		Entry("not root", "root", Warn, "root", func(f *Facts) { f.Root = false }),
		Entry("no subsystem", "subsystem", Fail, "not loaded", func(f *Facts) { f.Subsystem = rdma.ErrNoSubsystem }),
		Entry("no uverbs", "modules", Fail, "ib_uverbs", func(f *Facts) { f.Modules["ib_uverbs"] = false }),
		Entry("no ucm", "modules", Warn, "rdma_ucm", func(f *Facts) { f.Modules["rdma_ucm"] = false }),
		Entry("no device", "devices", Fail, "no RDMA device", func(f *Facts) { f.Devices = nil }),
		Entry("a function without device", "devices", Warn, "mlx5_ib", func(f *Facts) {
			f.Devices = append(f.Devices, DeviceFacts{Function: "0000:3b:00.3", Absence: "the module mlx5_ib is not loaded"})
		}),
		Entry("shared", "mode", Fail, "shared", func(f *Facts) { f.Live = ptr(rdma.Shared) }),
		Entry("an old kernel's mode", "mode", Fail, "5.2", func(f *Facts) { f.Live, f.LiveError = nil, errors.New("needs kernel 5.2") }),
		Entry("not persisted", "mode-at-boot", Warn, "shared, by the kernel's default", func(f *Facts) { f.Persisted.Files = nil }),
		Entry("persisted, not live", "mode-at-boot", Fail, "live mode is shared", func(f *Facts) { f.Live = ptr(rdma.Shared) }),
		Entry("neither", "mode-at-boot", Warn, "shared after the next boot", func(f *Facts) { f.Live, f.Persisted.Files = ptr(rdma.Shared), nil }),
		Entry("a contradiction", "mode-at-boot", Warn, "command line says shared", func(f *Facts) {
			f.Persisted.CmdLine = &Setting{Source: "kernel command line", Mode: rdma.Shared}
		}),
		Entry("an overridden file", "mode-at-boot", Warn, "overrides", func(f *Facts) {
			f.Persisted.Files = append([]Setting{{Source: "/etc/modprobe.d/a.conf", Line: 1, Mode: rdma.Shared}}, f.Persisted.Files...)
		}),
		Entry("a built-in module", "mode-at-boot", Warn, "built into", func(f *Facts) { f.Persisted.BuiltIn = true }),
		Entry("unreadable files", "mode-at-boot", Warn, "denied", func(f *Facts) { f.Persisted.Problem = "permission denied" }),
		Entry("the trap", "initramfs", Fail, "holds ib_core, without the option", func(f *Facts) { f.Persisted.Initramfs.IBCore = true }),
		Entry("an image that cannot be read", "initramfs", Warn, "lz4", func(f *Facts) { f.Persisted.Initramfs.Problem = "lz4" }),
		Entry("a namespace in the way", "mode-blockers", Warn, "process 9 (redis) of redis.service", func(f *Facts) {
			f.Live = ptr(rdma.Shared)
			f.Blockers = []Blocker{{Namespace: "net:[5]", Processes: []rdma.Process{{PID: 9, Command: "redis", Cgroup: "/system.slice/redis.service"}}}}
		}),
		Entry("a kernel that cannot move", "kernel", Fail, "4.18.0", func(f *Facts) { f.Kernel = "4.18.0-553.el8" }),
		Entry("a kernel that loses GIDs", "kernel", Warn, "RoCE", func(f *Facts) { f.Kernel = "5.15.0" }),
		Entry("an InfiniBand port without GUID", "port", Warn, "GUID 0", func(f *Facts) { f.Devices[0].Ports[0].IB = &state.Port{PKey: 0xffff} }),
		Entry("an InfiniBand port that waits for its subnet manager", "port", Warn, "INIT, GUID 0002:c903:0000:0001, partition 0x8005", func(f *Facts) {
			f.Devices[0].Place, f.Devices[0].Ports[0] = "pod", PortFacts{Number: 1, State: "INIT", IB: &state.Port{GUID: 0x2c90300000001, PKey: 0x8005}}
		}),
		Entry("a release that is none", "kernel", Warn, "custom", func(f *Facts) { f.Kernel = "custom" }),
		Entry("a driver that cannot release", "driver", Fail, "disassociate_ucontext", func(f *Facts) { f.Devices[0].Movable = ptr(false) }),
		Entry("such a software device", "driver", Warn, "disassociate_ucontext", func(f *Facts) { f.Devices[0].Movable, f.Devices[0].Kind = ptr(false), "software" }),
		Entry("a zero GUID", "node-guid", Warn, "zero", func(f *Facts) { f.Devices[0].NodeGUID = 0 }),
		Entry("no administrative MAC", "admin-mac", Warn, "VF 0 of 0000:3b:00.0", func(f *Facts) { f.Devices[0].AdminMAC = "00:00:00:00:00:00" }),
		Entry("a port that is down", "port", Warn, "DOWN", func(f *Facts) {
			f.Devices[0].Ports[0].Active, f.Devices[0].Ports[0].State = false, "DOWN"
		}),
		Entry("a small MTU", "mtu", Warn, "MTU 1000", func(f *Facts) { f.Devices[0].Ports[0].MTU = 1000 }),
		Entry("an MTU above the PF's", "mtu", Warn, "physical function 1500", func(f *Facts) { f.Devices[0].PFNetdevMTU = 1500 }),
		Entry("no RoCE v2 GID", "gid-table", Warn, "0 of them RoCE v2", func(f *Facts) { f.Devices[0].Ports[0].RoCEv2 = 0 }),
		Entry("a full GID table", "gid-table", Warn, "120 of 128", func(f *Facts) { f.Devices[0].Ports[0].GIDs = 120 }),
		Entry("a bond's device", "bonding", Warn, "bond", func(f *Facts) { f.Devices[0].Name = "mlx5_bond_0" }),
		Entry("an interface in a bond", "bonding", Warn, "bond0", func(f *Facts) { f.Devices[0].Ports[0].Bond = "bond0" }),
		Entry("a hole", "numbering", Warn, "uverbs0", func(f *Facts) { f.Chars[0].Name, f.Chars[0].Index = "uverbs1", 1 }),
		Entry("a missing node", "char-devices", Fail, "no such file", func(f *Facts) { f.Chars[0].Node, f.Chars[0].NodeErr = nil, "no such file" }),
		Entry("a wrong node", "char-devices", Fail, "is 231:193", func(f *Facts) { f.Chars[0].Node = &sysfs.DeviceNumber{Major: 231, Minor: 193} }),
		Entry("the shared plugin on an exclusive node", "shared-device-plugin", Fail, "exclusive", func(f *Facts) { f.SharedPlugin = []string{"process 8"} }),
		Entry("the shared plugin on a shared node", "shared-device-plugin", Warn, "not exclusive", func(f *Facts) {
			f.SharedPlugin, f.Live = []string{"process 8"}, ptr(rdma.Shared)
		}),
		Entry("a stale record", "records", Warn, "stale", func(f *Facts) { f.Records = []RecordFacts{{Function: "0000:3b:00.2", Action: "drop"}} }),
		Entry("a record that cannot be judged", "records", Warn, "cannot be judged", func(f *Facts) { f.Records = []RecordFacts{{Err: "EIO"}} }),
		Entry("an unreachable device", "stranded", Fail, "no path", func(f *Facts) {
			f.Devices[0].Place, f.Devices[0].Holder = "unreachable", "in a namespace that no path leads to"
		}),
		Entry("a stranger's device", "stranded", Warn, "no record", func(f *Facts) { f.Devices[0].Place = "namespace" }),
		Entry("no plugin", "plugin", Warn, "not installed", func(f *Facts) { f.Plugins = []PluginFacts{{Dir: "/opt/cni/bin", Exists: true}} }),
		Entry("a foreign architecture", "plugin", Fail, "EM_S390", func(f *Facts) { f.Plugins[0].Arch = "EM_S390" }),
		Entry("a plugin that others can write", "plugin", Fail, "others than root", func(f *Facts) { f.Plugins[0].Mode = 0o777 }),
		Entry("a plugin that cannot be executed", "plugin", Fail, "cannot be executed", func(f *Facts) { f.Plugins[0].Mode = 0o644 }),
		Entry("a plugin that is no program", "plugin", Fail, "no ELF", func(f *Facts) { f.Plugins[0].Arch, f.Plugins[0].Problem = "", "it is no ELF program" }),
		Entry("a plugin that does not run", "plugin", Fail, "does not run", func(f *Facts) { f.Plugins[0].Problem = "it does not run: exit 1" }),
		Entry("somebody else's plugin", "plugin", Warn, "another program", func(f *Facts) { f.Plugins[0].Ours = false }),
		Entry("a directory that cannot be read", "plugin", Warn, "denied", func(f *Facts) { f.Plugins[0].Err = "denied" }),
		Entry("a low limit", "memlock", Warn, "8 MiB", func(f *Facts) { f.Runtimes[0].NoLimit, f.Runtimes[0].Memlock = false, 8<<20 }),
		Entry("an unreadable limit", "memlock", Warn, "denied", func(f *Facts) { f.Runtimes[0].Err = "denied" }),
		Entry("rdma first", "config", Fail, "rdma comes before", func(f *Facts) {
			f.Config.Networks[0].Plugins = []PluginConf{{Type: "rdma"}, {Type: "sriov"}}
		}),
		Entry("rdma alone", "config", Fail, "only plugin", func(f *Facts) { f.Config.Networks[0].Plugins = []PluginConf{{Type: "rdma"}} }),
		Entry("no rdma", "config", Warn, "no rdma plugin", func(f *Facts) { f.Config.Networks[0].Plugins = []PluginConf{{Type: "sriov"}} }),
		Entry("rdma twice", "config", Fail, "several", func(f *Facts) {
			f.Config.Networks[0].Plugins = append(f.Config.Networks[0].Plugins, PluginConf{Type: "rdma"})
		}),
		Entry("two devices", "config", Fail, "is given device", func(f *Facts) {
			f.Config.Networks[0].Plugins = []PluginConf{{Type: "host-device", PCIBusID: "0000:3b:00.2"}, {Type: "rdma", DeviceID: "0000:3b:00.3"}}
		}),
		Entry("a bad file", "config", Fail, "not there", func(f *Facts) { f.Config = &ConfigFacts{Err: "not there"} }),
		Entry("soft-RoCE without driver", "config", Fail, "no module rdma_rxe", func(f *Facts) { softRoCE(f, SoftRoCEFacts{}) }),
		Entry("soft-RoCE on an old kernel", "config", Fail, "older than 7.3", func(f *Facts) { softRoCE(f, SoftRoCEFacts{Installed: true}) }),
		Entry("soft-RoCE with a driver that cannot release", "config", Fail, "cannot release", func(f *Facts) {
			f.Kernel = "7.3.4"
			softRoCE(f, SoftRoCEFacts{Installed: true, Loaded: true, CanMove: ptr(false)})
		}),
		Entry("no annotation", "config", Warn, "resourceName", func(f *Facts) { f.Config.Networks[0].Manifest = true }),
	)
})
