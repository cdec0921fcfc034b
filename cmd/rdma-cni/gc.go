package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
	"github.com/rdma-cni/rdma-cni/pkg/state"
)

// gcTime bounds a run: a device whose namespace is being torn down takes
// seconds at most, and a kernel that hangs must not hang us.
const gcTime = 2 * time.Minute

func (a *app) gcCommand() *cobra.Command {
	opts := attachment.ReapOptions{Proc: a.proc}
	cmd := &cobra.Command{
		Use:   "gc",
		Short: "End attachments that are over",
		Long: `gc looks at every record of an attachment and ends those that are over without
anybody having said so: their network namespace is dead, that is, no path leads
to it, or only a forgotten file or mount keeps it and no process runs in it. Their
devices come home under their old names, and their records go. So do records
whose device is at home already, such as those of an ADD that was killed.

Attachments of live pods are left, and so are those of which it cannot be proved
that they are over: each is listed with the reason.
` + exitCodes + ` An
attachment that had to be left because its pod is alive is no failure.`,
		Example: `  rdma-cni gc --dry-run
  rdma-cni gc --device 0000:3b:00.2
  rdma-cni gc -o json`,
	}
	cmd.Flags().BoolVar(&opts.DryRun, "dry-run", false, "only say what would be done; takes no lock")
	cmd.Flags().StringVar(&opts.Device, "device", "", "only this function (its address) or RDMA device (its name at home)")
	return a.does(cmd, func(cmd *cobra.Command, _ []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), gcTime)
		defer cancel()
		verdicts, err := a.node.Reap(ctx, opts)
		if err != nil {
			return err
		}
		return a.printGC(verdicts, opts.DryRun)
	})
}

// gcRow is the schema of gc's output.
type gcRow struct {
	Function    string   `json:"function"`
	Devices     []string `json:"devices,omitempty"` // by their names at home
	ContainerID string   `json:"containerID"`
	IfName      string   `json:"ifName"`
	Pod         gcPod    `json:"pod,omitzero"`
	Network     string   `json:"network,omitempty"`
	Action      string   `json:"action"` // keep, drop, bring home
	Done        bool     `json:"done"`   // false in a dry run, for keep, and after an error
	Reason      string   `json:"reason,omitempty"`
	Notes       []string `json:"notes,omitempty"`
	Error       string   `json:"error,omitempty"`
}

type gcPod struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	UID       string `json:"uid,omitempty"`
}

func (a *app) printGC(verdicts []attachment.Verdict, dryRun bool) error {
	rows, failed := gcRows(verdicts, dryRun)
	err := a.print(rows, func(w io.Writer) {
		if len(rows) == 0 {
			_, _ = fmt.Fprintln(w, "No attachment has a record.")
			return
		}
		cells := make([][]string, 0, len(rows))
		for _, r := range rows {
			what := r.Action
			switch {
			case r.Error != "":
				what = "failed"
			case dryRun && r.Action != string(attachment.Keep):
				what = "would " + r.Action
			case r.Action == string(attachment.Drop):
				what = "dropped"
			case r.Action == string(attachment.BringHome):
				what = "brought home"
			}
			reason := r.Reason
			if r.Error != "" {
				reason = r.Error
			}
			cells = append(cells, []string{r.Function, strings.Join(r.Devices, ","), owner(state.Pod(r.Pod), r.ContainerID), r.IfName, what, reason})
		}
		table(w, []string{"FUNCTION", "DEVICE", "OWNER", "INTERFACE", "ACTION", "REASON"}, cells)
	})
	for _, r := range rows {
		for _, note := range r.Notes {
			a.talk("%s: %s", r.Function, note)
		}
	}
	if failed > 0 {
		err = errors.Join(err, fmt.Errorf("%d of %d attachments could not be dealt with", failed, len(rows)))
	}
	return err
}

func gcRows(verdicts []attachment.Verdict, dryRun bool) (rows []gcRow, failed int) {
	rows = []gcRow{}
	for _, v := range verdicts {
		r := gcRow{
			Function: v.Name.Function, ContainerID: v.Name.ContainerID, IfName: v.Name.IfName,
			Action: string(v.Action), Reason: v.Reason,
			Done: !dryRun && v.Err == nil && v.Action != attachment.Keep,
		}
		if v.Record != nil {
			r.ContainerID, r.Pod, r.Network = v.Record.ContainerID, gcPod(v.Record.Pod), v.Record.Network
			for _, d := range v.Record.Devices {
				r.Devices = append(r.Devices, d.Name)
			}
		}
		r.Notes = append(append(r.Notes, v.Report.Warnings...), v.Report.Errors...)
		if v.Err != nil {
			r.Error = v.Err.Error()
			failed++
		}
		rows = append(rows, r)
	}
	return rows, failed
}

// owner names a pod, or a container outside Kubernetes.
func owner(pod state.Pod, containerID string) string {
	if pod.Name != "" {
		return podName(pod.Namespace, pod.Name)
	}
	if len(containerID) > 16 {
		return containerID[:13] + "..."
	}
	return containerID
}

// podName joins the parts; Podman gives a container's name and no namespace.
func podName(namespace, name string) string { return strings.TrimPrefix(namespace+"/"+name, "/") }
