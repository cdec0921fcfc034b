package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
	"github.com/rdma-cni/rdma-cni/pkg/cdi"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

func (a *app) cdiCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cdi",
		Short: "Write CDI specs for containers outside Kubernetes",
		Long: `cdi writes, lists and removes CDI specs, by which Podman, nerdctl and Docker give
a container the character devices of an RDMA function. Flags, file names and kinds
are those of the tool rdma-cdi. The RDMA device itself goes into the container
by the CNI plugin rdma; see docs/outside-kubernetes.md.`,
	}
	cmd.AddCommand(a.cdiGenerateCommand(), a.cdiListCommand(), a.cdiCleanupCommand())
	return a.does(cmd, func(cmd *cobra.Command, _ []string) error { return cmd.Help() })
}

// cdiOptions are the flags of cdi generate.
type cdiOptions struct {
	all                     bool
	pci, ifname, device     string
	prefix, name, dir, spec string
}

func (a *app) cdiGenerateCommand() *cobra.Command {
	var o cdiOptions
	cmd := &cobra.Command{
		Use:   "generate",
		Short: "Write a CDI spec for one or all RDMA functions",
		Long: `generate writes one spec file for each function, with its verbs and management
nodes and that of the connection manager. A runtime refers to its device as
PREFIX/NAME=ADDRESS, which generate prints.

The nodes are those that a device has inside a container: a move keeps a device's
numbers as long as no lower number is free. If one is, generate says so; then move
the device once (rdma-cni doctor --probe DEVICE) and generate again. For a device
that is inside a container now the numbers are those that it has there.
` + exitCodes + `
With --all it goes on after an error. A node without RDMA is no failure with --all.`,
		Example: `  rdma-cni cdi generate --pci 0000:3b:00.2
  rdma-cni cdi generate --all --output-dir /var/run/cdi`,
	}
	flags := cmd.Flags()
	flags.BoolVar(&o.all, "all", false, "for all functions with an RDMA device")
	flags.StringVar(&o.pci, "pci", "", "for the function of this PCI or auxiliary address")
	flags.StringVar(&o.ifname, "ifname", "", "for the function of this network interface")
	flags.StringVar(&o.device, "device", "", "for the function of this RDMA device")
	flags.StringVar(&o.prefix, "prefix", cdi.DefaultPrefix, "vendor part of the kind")
	flags.StringVar(&o.name, "name", "", "class part of the kind (default: derived from the address or interface)")
	flags.StringVar(&o.dir, "output-dir", cdi.DefaultDir, "where the files go")
	flags.Var(choice(&o.spec, "yaml", "yaml", "json"), "format", "format of the files: yaml or json")
	cmd.MarkFlagsMutuallyExclusive("all", "pci", "ifname", "device")
	cmd.MarkFlagsOneRequired("all", "pci", "ifname", "device")
	cmd.MarkFlagsMutuallyExclusive("all", "name")
	return a.does(cmd, func(*cobra.Command, []string) error { return a.cdiGenerate(o) })
}

// cdiRow is the schema of cdi generate, list and cleanup.
type cdiRow struct {
	Path    string   `json:"path"`
	Kind    string   `json:"kind,omitempty"`
	Devices []string `json:"devices,omitempty"` // qualified names, for --device
	Nodes   []string `json:"nodes,omitempty"`
	Problem string   `json:"problem,omitempty"`
}

func (a *app) cdiGenerate(o cdiOptions) error {
	inv, err := a.node.Inventory(a.proc)
	if err != nil {
		return err
	}
	filter := listFilter{pci: o.pci, netdev: o.ifname, device: o.device}
	_, cmErr := a.node.Sysfs.ConnectionManager()
	rows := []cdiRow{}
	var failures []error
	chosen := 0
	var written []string
	for _, e := range inv.Entries {
		r := listRowOf(e)
		if !filter.admits(r) || len(e.Chars) == 0 && o.all || r.Address != "" && slices.Contains(written, r.Address) {
			continue
		}
		chosen++
		written = append(written, r.Address)
		spec := cdi.Spec{Prefix: o.prefix, Name: o.name, Device: r.Address, Format: o.spec}
		if spec.Device == "" {
			spec.Device = r.Device
		}
		switch {
		case spec.Name != "":
		case o.ifname != "":
			spec.Name = cdi.NameOfInterface(o.ifname)
		case r.Address == "":
			spec.Name = cdi.NameOfInterface(r.Device)
		default:
			spec.Name = cdi.NameOfAddress(r.Address)
		}
		path := ""
		spec.Nodes, err = cdi.Nodes(charsOf(inv.Entries, e), cmErr == nil)
		if err == nil {
			path, err = spec.Write(o.dir)
		}
		if err != nil {
			failures = append(failures, fmt.Errorf("%s: %w", spec.Device, err))
			continue
		}
		rows = append(rows, cdiRow{Path: path, Kind: spec.Kind(), Devices: []string{spec.Qualified()}, Nodes: spec.Nodes})
	}
	if chosen == 0 && !o.all {
		return fmt.Errorf("no RDMA function has %s; rdma-cni list shows those there are: %w", o.wanted(), os.ErrNotExist)
	}
	err = a.print(rows, func(w io.Writer) {
		for _, r := range rows {
			_, _ = fmt.Fprintf(w, "CDI spec written to %s\n  device %s\n", r.Path, strings.Join(r.Devices, ", "))
		}
	})
	if chosen == 0 {
		a.talk("No RDMA devices found.")
	}
	a.warnOfHoles(rows)
	if len(failures) > 0 {
		err = errors.Join(err, fmt.Errorf("%d of %d specs not written: %w", len(failures), chosen, errors.Join(failures...)))
	}
	return err
}

// charsOf are the nodes of all devices of an entry's function: a container that
// gets the function gets them all.
func charsOf(entries []attachment.Entry, of attachment.Entry) []sysfs.CharDeviceNode {
	if of.Function.Address == "" {
		return of.Chars
	}
	var list []sysfs.CharDeviceNode
	for _, e := range entries {
		if e.Function == of.Function {
			list = append(list, e.Chars...)
		}
	}
	return list
}

func (o cdiOptions) wanted() string {
	switch {
	case o.pci != "":
		return "the address " + o.pci
	case o.ifname != "":
		return "the interface " + o.ifname
	default:
		return "the RDMA device " + o.device
	}
}

// warnOfHoles says which of the nodes written will not be those of after a
// move.
func (a *app) warnOfHoles(rows []cdiRow) {
	all, err := a.node.Sysfs.CharDeviceNodes()
	if err != nil {
		return
	}
	var wrong []string
	for _, name := range cdi.Holes(all) {
		if slices.ContainsFunc(rows, func(r cdiRow) bool { return slices.Contains(r.Nodes, "/dev/infiniband/"+name) }) {
			wrong = append(wrong, name)
		}
	}
	if len(wrong) > 0 {
		a.talk("warning: numbers below %s are free, and the first of these devices to move takes one; move the last one once (rdma-cni doctor --probe DEVICE), then generate again", strings.Join(wrong, ", "))
	}
}

func (a *app) cdiListCommand() *cobra.Command {
	var prefix, dir string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the CDI specs of a prefix and whether they are right",
		Long: `list shows the spec files of a prefix with their devices and nodes, and says of each
whether its nodes still are those of its function.
` + exitCodes,
	}
	cmd.Flags().StringVar(&prefix, "prefix", cdi.DefaultPrefix, "vendor part of the kind")
	cmd.Flags().StringVar(&dir, "output-dir", cdi.DefaultDir, "where the files are")
	return a.does(cmd, func(*cobra.Command, []string) error {
		rows, err := a.cdiRows(dir, prefix)
		if err != nil {
			return err
		}
		return a.print(rows, func(w io.Writer) { cdiTable(w, dir, rows) })
	})
}

func (a *app) cdiRows(dir, prefix string) ([]cdiRow, error) {
	specs, err := cdi.List(dir, prefix)
	if err != nil {
		return nil, err
	}
	all, err := a.node.Sysfs.CharDeviceNodes()
	if err != nil {
		return nil, err
	}
	rows := []cdiRow{}
	for _, s := range specs {
		r := cdiRow{Path: s.Path, Kind: s.Kind, Devices: s.Devices, Nodes: s.Nodes, Problem: s.Problem}
		if r.Problem == "" {
			r.Problem = outdated(s, all)
		}
		rows = append(rows, r)
	}
	return rows, nil
}

// outdated compares a spec's nodes with those of its function now.
func outdated(s cdi.Written, all []sysfs.CharDeviceNode) string {
	for _, d := range s.Devices {
		_, address, _ := strings.Cut(d, "=")
		var now []string
		for _, c := range all {
			if strings.EqualFold(c.Function, address) || c.Function == "" && c.Device == address {
				now = append(now, "/dev/infiniband/"+c.Name)
			}
		}
		if len(now) == 0 {
			return "the function " + address + " has no RDMA device now"
		}
		for _, n := range s.Nodes {
			if n != "/dev/infiniband/rdma_cm" && !slices.Contains(now, n) {
				return fmt.Sprintf("%s is not a node of %s, which has %s; generate it again", n, address, strings.Join(now, ", "))
			}
		}
	}
	return ""
}

func cdiTable(w io.Writer, dir string, rows []cdiRow) {
	if len(rows) == 0 {
		_, _ = fmt.Fprintf(w, "No CDI spec of this prefix is in %s.\n", dir)
		return
	}
	var cells [][]string
	for _, r := range rows {
		state := "ok"
		if r.Problem != "" {
			state = r.Problem
		}
		var nodes []string
		for _, n := range r.Nodes {
			nodes = append(nodes, strings.TrimPrefix(n, "/dev/infiniband/"))
		}
		cells = append(cells, []string{r.Path, strings.Join(r.Devices, ","), strings.Join(nodes, ","), state})
	}
	table(w, []string{"FILE", "DEVICE", "NODES", "STATE"}, cells)
}

func (a *app) cdiCleanupCommand() *cobra.Command {
	var prefix, name, dir string
	var dryRun, force bool
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove CDI specs of a prefix",
		Long: `cleanup removes the spec files of a prefix, or the one with the name. Files of
other prefixes and of other programs are left.
` + exitCodes + `
Nothing to remove is no failure.`,
	}
	flags := cmd.Flags()
	flags.StringVar(&prefix, "prefix", cdi.DefaultPrefix, "vendor part of the kind")
	flags.StringVar(&name, "name", "", "only the spec of this name (class part of the kind)")
	flags.StringVar(&dir, "output-dir", cdi.DefaultDir, "where the files are")
	flags.BoolVar(&dryRun, "dry-run", false, "only say what would be removed")
	flags.BoolVar(&force, "force", false, "accepted for rdma-cdi's sake; cleanup never asks")
	return a.does(cmd, func(*cobra.Command, []string) error {
		specs, err := cdi.List(dir, prefix)
		if err != nil {
			return err
		}
		rows := []cdiRow{}
		var failures []error
		for _, s := range specs {
			if name != "" && s.Kind != prefix+"/"+name {
				continue
			}
			if !dryRun {
				if err := s.Remove(); err != nil {
					failures = append(failures, err)
					continue
				}
			}
			rows = append(rows, cdiRow{Path: s.Path, Kind: s.Kind, Devices: s.Devices, Nodes: s.Nodes, Problem: s.Problem})
		}
		what := "Removed:"
		if dryRun {
			what = "Would remove:"
		}
		err = a.print(rows, func(w io.Writer) {
			for _, r := range rows {
				_, _ = fmt.Fprintf(w, "%s %s\n", what, r.Path)
			}
			if len(rows) == 0 {
				_, _ = fmt.Fprintf(w, "No matching CDI spec is in %s.\n", dir)
			}
		})
		return errors.Join(append(failures, err)...)
	})
}
