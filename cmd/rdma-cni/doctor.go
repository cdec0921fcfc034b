package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rdma-cni/rdma-cni/pkg/doctor"
)

func (a *app) host() doctor.Host { return doctor.Host{Node: a.node, Proc: a.proc, Root: a.root} }

// doctorOptions are the flags of doctor.
type doctorOptions struct {
	target   doctor.PodTarget
	probe    string
	config   string
	strict   bool
	showPass bool
}

func (a *app) doctorCommand() *cobra.Command {
	var o doctorOptions
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Find what keeps RDMA from working on this node or in a pod",
		Long: `doctor examines the node, or with --pod, --netns or --pid one pod, and says for
each finding what it means and what to do. It changes nothing, and needs no RDMA
device: a node without one is what it explains best. Run it as root in the host's
namespaces.

In a pod it looks at the devices in its network namespace, at their nodes in each
container's /dev, and lets a short-lived process in the container's control group
try to open them.

With --probe it moves an idle device into a fresh network namespace and back, as
an attachment would, and reports times and node numbers. It refuses a device that
is in use, and an InfiniBand device, whose IPoIB interfaces a move destroys.

Exit codes: 0 nothing is wrong, 1 a check failed (with --strict also: warned) or
something could not be done, 2 the command line is wrong.`,
		Example: `  rdma-cni doctor
  rdma-cni doctor --config /etc/cni/net.d/rail.conflist
  rdma-cni doctor --pod training/worker-0 --show-pass
  rdma-cni doctor --probe mlx5_2`,
	}
	flags := cmd.Flags()
	flags.StringVar(&o.target.Pod, "pod", "", "examine this pod (NAMESPACE/NAME)")
	flags.StringVar(&o.target.Netns, "netns", "", "examine the pod of this network namespace (a path)")
	flags.IntVar(&o.target.PID, "pid", 0, "examine the container of this process")
	flags.StringVar(&o.probe, "probe", "", "move this idle RDMA device out and back")
	flags.StringVar(&o.config, "config", "", "also judge this network: a CNI configuration or a manifest with NetworkAttachmentDefinitions")
	flags.BoolVar(&o.strict, "strict", false, "a warning is a failure")
	flags.BoolVar(&o.showPass, "show-pass", false, "also show what is well")
	cmd.MarkFlagsMutuallyExclusive("pod", "netns", "pid", "probe", "config")
	return a.does(cmd, func(cmd *cobra.Command, _ []string) error {
		switch {
		case o.probe != "":
			return a.probe(cmd, o.probe)
		case o.target != (doctor.PodTarget{}):
			facts, err := a.host().GatherPod(cmd.Context(), o.target, []string{"/proc/self/exe", openName})
			if err != nil {
				return err
			}
			return a.printFindings(doctor.ExaminePod(facts), o)
		default:
			facts, err := a.host().Gather(cmd.Context(), o.config)
			if err != nil {
				return err
			}
			return a.printFindings(doctor.Examine(facts), o)
		}
	})
}

func (a *app) printFindings(all []doctor.Finding, o doctorOptions) error {
	findings := []doctor.Finding{}
	count := map[doctor.Severity]int{}
	for _, f := range all {
		count[f.Severity]++
		if f.Severity != doctor.Pass || o.showPass {
			findings = append(findings, f)
		}
	}
	if err := a.print(findings, func(w io.Writer) { a.findingsText(w, findings) }); err != nil {
		return err
	}
	a.talk("%d passed, %d warnings, %d failed", count[doctor.Pass], count[doctor.Warn], count[doctor.Fail])
	if count[doctor.Fail] > 0 || o.strict && count[doctor.Warn] > 0 {
		return &exitError{code: codeProblem, told: true, err: errors.New("checks failed")}
	}
	return nil
}

func (a *app) findingsText(w io.Writer, findings []doctor.Finding) {
	if len(findings) == 0 {
		_, _ = fmt.Fprintln(w, "All checks passed.")
		return
	}
	for _, f := range findings {
		device := ""
		if f.Device != "" {
			device = f.Device + ": "
		}
		_, _ = fmt.Fprintf(w, "%s  %s  %s%s\n", a.severity(f.Severity), f.Check, device, f.Message)
		for _, more := range []struct{ label, text string }{{"meaning", f.Meaning}, {"fix", f.Fix}} {
			if more.text != "" {
				_, _ = fmt.Fprintf(w, "      %s: %s\n", more.label, more.text)
			}
		}
	}
}

// severity is the word, on a terminal with a sign and in colour.
func (a *app) severity(s doctor.Severity) string {
	if !a.Terminal {
		return string(s)
	}
	switch s {
	case doctor.Pass:
		return a.colour(green, "✓ PASS")
	case doctor.Warn:
		return a.colour(yellow, "! WARN")
	default:
		return a.colour(red, "✗ FAIL")
	}
}

// probeResult is the schema of doctor --probe.
type probeResult struct {
	Device   string   `json:"device"`
	Function string   `json:"function,omitempty"`
	OutMs    float64  `json:"outMs"`
	BackMs   float64  `json:"backMs"`
	Before   []string `json:"before"`
	Inside   []string `json:"inside"`
	After    []string `json:"after"`
	Same     bool     `json:"sameNumbers"`
}

func (a *app) probe(cmd *cobra.Command, device string) error {
	report, err := a.node.Probe(cmd.Context(), device)
	if err != nil {
		return err
	}
	r := probeResult{
		Device: device, Function: report.Function, Before: report.Before, Inside: report.Inside, After: report.After,
		OutMs: float64(report.Out.Microseconds()) / 1000, BackMs: float64(report.Back.Microseconds()) / 1000,
	}
	r.Same = strings.Join(r.Before, ",") == strings.Join(r.Inside, ",") && strings.Join(r.Before, ",") == strings.Join(r.After, ",")
	err = a.print(r, func(w io.Writer) {
		table(w, []string{"DEVICE", "FUNCTION", "OUT", "BACK", "NODES BEFORE", "INSIDE", "AFTER"}, [][]string{{
			r.Device, r.Function, fmt.Sprintf("%.1f ms", r.OutMs), fmt.Sprintf("%.1f ms", r.BackMs),
			strings.Join(r.Before, ","), strings.Join(r.Inside, ","), strings.Join(r.After, ","),
		}})
	})
	if !r.Same {
		a.talk("The numbers changed: a lower one was free, or another device moved at the same time (see the check numbering of rdma-cni doctor).")
	}
	return err
}

// openName is the command that doctor runs in a container's control group.
const openName = "open-node"

func (a *app) openCommand() *cobra.Command {
	return a.does(&cobra.Command{
		Use: openName + " PID CGROUP PATH", Hidden: true, Args: cobra.ExactArgs(3),
		Short: "Open a device node as a process of a container would (used by doctor)",
	}, func(_ *cobra.Command, args []string) error {
		pid, err := strconv.Atoi(args[0])
		if err != nil {
			return a.misuse("PID %q: %w", args[0], err)
		}
		return json.NewEncoder(a.Out).Encode(doctor.OpenNode(pid, args[1], args[2]))
	})
}
