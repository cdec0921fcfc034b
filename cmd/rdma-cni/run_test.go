package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
	"github.com/rdma-cni/rdma-cni/pkg/doctor"
	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

var _ = Describe("the command line", func() {
	DescribeTable("ends with the documented code", func(code int, says string, args ...string) {
		t := newTestApp()
		Expect(t.exec(args...)).To(Equal(code), t.err.String())
		Expect(t.err.String()).To(ContainSubstring(says))
		if code == codeUsage {
			Expect(t.out.String()).To(BeEmpty())
		}
	},
		Entry("help", codeOK, "", "--help"),
		Entry("nothing", codeOK, ""),
		Entry("version", codeOK, "", "--version"),
		Entry("an unknown command", codeUsage, "unknown command", "frob"),
		Entry("an unknown flag", codeUsage, "unknown flag", "list", "--frob"),
		Entry("an unknown format", codeUsage, "table, json, yaml", "list", "-o", "xml"),
		Entry("an argument too many", codeUsage, "frob", "gc", "frob"),
		Entry("a mode that is none", codeUsage, "frob", "mode", "set", "frob"),
		Entry("no function for CDI", codeUsage, "at least one", "cdi", "generate"),
		Entry("two functions for CDI", codeUsage, "none of the others", "cdi", "generate", "--all", "--pci", "x"),
		Entry("a function that is not there", codeProblem, "0000:99:00.0", "cdi", "generate", "--pci", "0000:99:00.0"),
		Entry("an empty node", codeOK, "", "list"),
		Entry("nothing to collect", codeOK, "", "gc"),
		Entry("no device for CDI", codeOK, "No RDMA devices found", "cdi", "generate", "--all"),
		Entry("no spec to remove", codeOK, "", "cdi", "cleanup"),
		Entry("two targets", codeUsage, "none of the others", "doctor", "--pid", "1", "--netns", "x"),
		Entry("a pod that is not there", codeProblem, "not on this node", "doctor", "--pod", "a/b"),
		Entry("a pod's name that is none", codeProblem, "NAMESPACE/NAME", "doctor", "--pod", "a"),
		Entry("a CNI directory that is not there", codeProblem, "--cni-bin-dir", "install", "--cni-bin-dir", "/nowhere", "--rdma-cni-bin-file", "/proc/self/exe"),
		Entry("no CNI directory", codeUsage, "empty", "install", "--cni-bin-dir="),
		Entry("check and uninstall", codeUsage, "none of the others", "install", "--check", "--uninstall"),
		Entry("completion", codeOK, "", "completion", "bash"),
	)

	It("writes valid JSON and YAML for an empty node", func() {
		for _, command := range []string{"list", "gc"} {
			t := newTestApp()
			Expect(t.exec(command, "-o", "json")).To(BeZero())
			Expect(t.out.String()).To(Equal("[]\n"))
			Expect(t.exec(command, "-o", "yaml")).To(BeZero())
			Expect(t.out.String()).To(Equal("[]\n"))
		}
	})

	It("completes words", func() {
		t := newTestApp()
		Expect(t.exec("__complete", "mode", "set", "")).To(BeZero())
		Expect(t.out.String()).To(And(ContainSubstring("exclusive"), ContainSubstring("shared")))
		Expect(t.exec("__complete", "list", "-o", "")).To(BeZero())
		Expect(t.out.String()).To(ContainSubstring("yaml"))
	})

	It("reports output that cannot be written", func() {
		t := newTestApp()
		t.Out = failing{}
		Expect(t.exec("list")).To(Equal(codeProblem))
		Expect(t.err.String()).To(ContainSubstring("disk full"))
	})
})

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, errors.New("disk full") }

// entries are functions in all the places.
func entries() []attachment.Entry {
	device := func(index uint32, name string) *attachment.DeviceStatus {
		return &attachment.DeviceStatus{
			Device:     rdma.Device{Index: index, Name: name, NodeGUID: 0x506b4b0300c3b2a1, Protocol: "roce", Ports: 1},
			PortStatus: []rdma.Port{{State: 4, Netdev: "net1"}},
		}
	}
	chars := func(n uint32) []sysfs.CharDeviceNode {
		return []sysfs.CharDeviceNode{{CharDevice: sysfs.CharDevice{Name: fmt.Sprintf("uverbs%d", n), Kind: sysfs.Uverbs}, Number: sysfs.DeviceNumber{Major: 231, Minor: 192 + n}}}
	}
	vf := func(n int) sysfs.Function {
		return sysfs.Function{Bus: sysfs.PCI, Address: fmt.Sprintf("0000:3b:00.%d", n)}
	}
	record := &state.Record{
		Key: state.Key{ContainerID: strings.Repeat("ab", 32), IfName: "net1"}, Network: "rail", Pod: state.Pod{Namespace: "training", Name: "worker-0", UID: "u"},
		Netns: state.Netns{Path: "/run/netns/cni-1", ID: rdma.NamespaceID{Dev: 4, Inode: 4026532000}}, Since: time.Date(2026, 12, 1, 8, 0, 0, 0, time.UTC),
	}
	ib := device(7, "mlx5_7")
	ib.Protocol, ib.IBPorts = "ib", []state.Port{{GUID: 0x2c90300000001, PKey: 0x8005}}
	return []attachment.Entry{
		{Function: vf(7), Driver: "mlx5_core", PF: "0000:3b:00.0", VF: 5, NUMANode: 1, Netdevs: []string{"ib0"}, Device: ib, Chars: chars(7), Holder: attachment.Holder{Place: attachment.Home}},
		{Function: vf(0), Driver: "mlx5_core", VF: -1, NUMANode: 1, Netdevs: []string{"ens1f0"}, Device: device(0, "mlx5_0"), Chars: chars(0), Holder: attachment.Holder{Place: attachment.Home}},
		{
			Function: vf(2), Driver: "mlx5_core", PF: "0000:3b:00.0", VF: 0, NUMANode: 1, Netdevs: []string{"net1"}, Device: device(1, "mlx5_1"), Chars: chars(1),
			Holder: attachment.Holder{Place: attachment.InPod, Record: record, Namespace: record.Netns.ID, Path: record.Netns.Path, Process: &rdma.Process{PID: 42, Command: "python3"}},
		},
		{
			Function: vf(3), Driver: "mlx5_core", PF: "0000:3b:00.0", VF: 1, NUMANode: 1, Device: device(2, "mlx5_2"), Chars: chars(2),
			Holder: attachment.Holder{Place: attachment.InNamespace, Namespace: rdma.NamespaceID{Dev: 4, Inode: 4026532001}, Path: "/proc/9/ns/net", ContainerID: strings.Repeat("c", 64), Process: &rdma.Process{PID: 9, Command: "sh"}},
		},
		{Function: vf(4), Driver: "mlx5_core", PF: "0000:3b:00.0", VF: 2, NUMANode: 1, Chars: chars(3), Holder: attachment.Holder{Place: attachment.Unreachable}},
		{Function: vf(5), PF: "0000:3b:00.0", VF: 3, NUMANode: 1, Holder: attachment.Holder{Place: attachment.Nowhere}, Absence: errors.New("no driver is bound to it")},
		{Function: sysfs.Function{Bus: sysfs.Auxiliary, Address: "mlx5_core.sf.4"}, Driver: "mlx5_core.sf", PF: "0000:3b:00.0", VF: -1, NUMANode: -1, Device: device(5, "mlx5_5"), Chars: chars(5), Holder: attachment.Holder{Place: attachment.Home}},
		{VF: -1, NUMANode: -1, Device: device(6, "rxe0"), Holder: attachment.Holder{Place: attachment.Home}},
	}
}

var _ = Describe("list", func() {
	It("has a stable schema and a table", func() {
		rows := listRows(entries(), listFilter{})
		text, err := json.MarshalIndent(rows, "", "  ")
		Expect(err).NotTo(HaveOccurred())
		golden("testdata/list.json", string(text)+"\n")
		var out bytes.Buffer
		listTable(&out, rows)
		golden("testdata/list.txt", out.String())
	})

	DescribeTable("filters", func(f listFilter, want ...string) {
		var got []string
		for _, r := range listRows(entries(), f) {
			got = append(got, r.Address)
		}
		Expect(got).To(Equal(want))
	},
		Entry("by address", listFilter{pci: "0000:3B:00.2"}, "0000:3b:00.2"),
		Entry("by interface", listFilter{netdev: "ens1f0"}, "0000:3b:00.0"),
		Entry("by device", listFilter{device: "mlx5_5"}, "mlx5_core.sf.4"),
		Entry("by pod", listFilter{pod: "training/worker-0"}, "0000:3b:00.2"),
		Entry("by container", listFilter{pod: strings.Repeat("c", 64)}, "0000:3b:00.3"),
	)
})

var _ = Describe("gc", func() {
	verdicts := []attachment.Verdict{
		{
			Name: state.Name{ContainerID: "c1", IfName: "net1", Function: "0000:3b:00.2"}, Action: attachment.Keep, Reason: "the pod is alive: its namespace is at /run/netns/a",
			Record: &state.Record{Key: state.Key{ContainerID: "c1", IfName: "net1"}, Network: "rail", Pod: state.Pod{Namespace: "a", Name: "b"}, Devices: []state.Device{{Name: "mlx5_1"}}},
		},
		{Name: state.Name{ContainerID: "c2", IfName: "net1", Function: "0000:3b:00.3"}, Action: attachment.BringHome, Reason: "the namespace is dead", Report: attachment.Report{Warnings: []string{"RDMA device x is called mlx5_2 again"}}},
		{Name: state.Name{ContainerID: "c3", IfName: "net1", Function: "0000:3b:00.4"}, Action: attachment.Drop, Reason: "the device is at home"},
		{Name: state.Name{ContainerID: "c4", IfName: "net1", Function: "0000:3b:00.5"}, Action: attachment.BringHome, Err: errors.New("EBUSY")},
	}
	for _, c := range []struct {
		name string
		dry  bool
	}{{"gc", false}, {"gc-dry-run", true}} {
		It("has a stable schema and a table: "+c.name, func() {
			t := newTestApp()
			t.format = formatJSON
			Expect(t.printGC(verdicts, c.dry)).To(MatchError(ContainSubstring("1 of 4")))
			golden("testdata/"+c.name+".json", t.out.String())
			t.out.Reset()
			t.format = formatTable
			_ = t.printGC(verdicts, c.dry)
			golden("testdata/"+c.name+".txt", t.out.String())
			Expect(t.err.String()).To(ContainSubstring("called mlx5_2 again"))
		})
	}
})

var _ = Describe("doctor's output", func() {
	findings := []doctor.Finding{
		{Check: "mode", Severity: doctor.Pass, Message: "exclusive"},
		{Check: "port", Severity: doctor.Warn, Device: "mlx5_1", Message: "port 1 is DOWN", Meaning: "No data.", Fix: "Plug it in."},
		{Check: "subsystem", Severity: doctor.Fail, Message: "not loaded", Meaning: "No RDMA.", Fix: "Load it."},
	}
	DescribeTable("has a code", func(code int, o doctorOptions, f []doctor.Finding) {
		t := newTestApp()
		t.format = formatTable
		Expect(exitCode(t.printFindings(f, o))).To(Equal(code))
	},
		Entry("for nothing", codeOK, doctorOptions{}, findings[:1]),
		Entry("for warnings", codeOK, doctorOptions{}, findings[:2]),
		Entry("for warnings, strictly", codeProblem, doctorOptions{strict: true}, findings[:2]),
		Entry("for failures", codeProblem, doctorOptions{}, findings),
	)

	It("is plain text, but for a terminal, and hides what is well", func() {
		t := newTestApp()
		t.format = formatTable
		_ = t.printFindings(findings, doctorOptions{})
		golden("testdata/doctor.txt", t.out.String())
		Expect(t.out.String()).NotTo(ContainSubstring("exclusive"))
		t.out.Reset()
		t.Terminal = true
		_ = t.printFindings(findings, doctorOptions{showPass: true})
		golden("testdata/doctor-terminal.txt", t.out.String())
		t.out.Reset()
		t.format = formatJSON
		_ = t.printFindings(findings[:1], doctorOptions{})
		Expect(t.out.String()).To(Equal("[]\n"))
	})
})

var _ = Describe("mode", func() {
	It("persists only what differs, into a file of its own", func() {
		t := newTestApp()
		t.format = formatTable
		file := filepath.Join(t.dir, modeFile)
		var r modeResult
		Expect(t.persist(rdma.Shared, false, &r)).To(Succeed())
		Expect(file).NotTo(BeAnExistingFile(), "shared is the kernel's default")
		Expect(t.persist(rdma.Exclusive, true, &r)).To(Succeed())
		Expect(r.Written).To(Equal(modeFile))
		Expect(file).NotTo(BeAnExistingFile())
		Expect(t.persist(rdma.Exclusive, false, &r)).To(Succeed())
		text, err := os.ReadFile(file)
		Expect(err).NotTo(HaveOccurred())
		Expect(string(text)).To(HaveSuffix("options ib_core netns_mode=0\n"))
		r = modeResult{}
		Expect(t.persist(rdma.Exclusive, false, &r)).To(Succeed())
		Expect(r.Written).To(BeEmpty())
		other := filepath.Join(t.dir, "etc/modprobe.d/ib_core.conf")
		Expect(os.WriteFile(other, []byte("options ib_core netns_mode=1\n"), 0o644)).To(Succeed())
		Expect(t.persist(rdma.Shared, false, &r)).To(Succeed(), "ours sorts last, so it is what has to change")
		text, err = os.ReadFile(file)
		Expect(err).NotTo(HaveOccurred())
		Expect(string(text)).To(HaveSuffix("options ib_core netns_mode=1\n"))
		names, err := filepath.Glob(filepath.Join(t.dir, "etc/modprobe.d/.*"))
		Expect(err).NotTo(HaveOccurred())
		Expect(names).To(BeEmpty(), "no temporary file is left")
	})

	It("has a stable schema", func() {
		status, err := json.MarshalIndent(modeStatus{
			Live: "shared", AtBoot: "exclusive", AtBootBy: "/etc/modprobe.d/a.conf:1",
			Persisted: doctor.Persisted{Files: []doctor.Setting{{Source: "/etc/modprobe.d/a.conf", Line: 1}}, Initramfs: doctor.Initramfs{Path: "/boot/initrd.img"}},
			Blockers:  []doctor.Blocker{{Namespace: "net:[7]", Mounts: []string{"/run/netns/a"}, Processes: []rdma.Process{{PID: 1, Command: "a"}}}},
		}, "", "  ")
		Expect(err).NotTo(HaveOccurred())
		golden("testdata/mode.json", string(status)+"\n")
		result, err := json.MarshalIndent(modeResult{Wanted: "exclusive", Live: "shared", AtBoot: "exclusive", Outcome: outcomeReboot, Written: modeFile, Steps: []string{"reboot this node"}}, "", "  ")
		Expect(err).NotTo(HaveOccurred())
		golden("testdata/mode-set.json", string(result)+"\n")
	})
})

var _ = Describe("docs/cli.md", func() {
	It("is what the commands say of themselves", func() {
		t := newTestApp()
		root := t.command()
		root.InitDefaultCompletionCmd()
		var text strings.Builder
		text.WriteString("<!-- Made by go test ./cmd/rdma-cni -update; do not edit. -->\n\n# The companion rdma-cni: commands\n")
		document(&text, root)
		golden("../../docs/cli.md", text.String())
	})
})

// document writes a command and those below it as Markdown.
func document(w *strings.Builder, cmd *cobra.Command) {
	if cmd.Hidden {
		return
	}
	fmt.Fprintf(w, "\n## %s\n\n%s\n\n", cmd.CommandPath(), strings.TrimSpace(cmd.Long))
	if cmd.Long == "" {
		fmt.Fprintf(w, "%s\n\n", cmd.Short)
	}
	if cmd.Runnable() {
		fmt.Fprintf(w, "```\n%s\n```\n", cmd.UseLine())
	}
	if len(cmd.Aliases) > 0 {
		fmt.Fprintf(w, "\nAlso: %s.\n", strings.Join(cmd.Aliases, ", "))
	}
	if cmd.Example != "" {
		fmt.Fprintf(w, "\n```sh\n%s\n```\n", strings.ReplaceAll(strings.TrimPrefix(cmd.Example, "  "), "\n  ", "\n"))
	}
	rows := ""
	cmd.NonInheritedFlags().VisitAll(func(f *pflag.Flag) {
		name := "`--" + f.Name + "`"
		if f.Shorthand != "" {
			name = "`-" + f.Shorthand + "`, " + name
		}
		value := f.DefValue
		if f.Value.Type() == "bool" || value == "" || value == "0" {
			value = ""
		} else {
			value = "`" + value + "`"
		}
		rows += fmt.Sprintf("| %s | %s | %s |\n", name, value, f.Usage)
	})
	if rows != "" {
		fmt.Fprintf(w, "\n| flag | default | |\n|---|---|---|\n%s", rows)
	}
	for _, c := range cmd.Commands() {
		document(w, c)
	}
}
