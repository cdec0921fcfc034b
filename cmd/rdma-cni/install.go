package main

import (
	"context"
	"io"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/install"
)

// entrypoints are the names under which the images of the plugins that this
// one replaces start their installer, and their manifests call it. Called so,
// this program is install.
var entrypoints = []string{"entrypoint.sh", "entrypoint"}

// arguments is the command line of a process.
func arguments(argv []string) []string {
	if slices.Contains(entrypoints, filepath.Base(argv[0])) {
		return append([]string{"install"}, argv[1:]...)
	}
	return argv[1:]
}

func (a *app) installCommand() *cobra.Command {
	plugin := install.Plugin{}
	var noSleep, check, uninstall bool
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Put the CNI plugin into the node's CNI directory (what the image runs)",
		Long: `install copies the plugin into the directory from which the container runtime
starts CNI plugins, and then stays until TERM or INT, so that a DaemonSet can run
it. When it ends, the plugin stays: pods that it attached need it to end.

The file is replaced at once, while plugins run too; at each moment it is the old
program or the new one. A program that is built for another architecture or does
not answer VERSION never gets there. One that is there already is left alone.

With --check it changes nothing, and says whether the directory has exactly this
plugin and whether it runs: a readiness probe. With --uninstall it removes the
plugin, if it is this project's and no attachment is recorded; it has to see the
node's /run/cni and /var/lib/cni for that.

The image has it as /entrypoint.sh, with the flags of k8snetworkplumbingwg/rdma-cni.
` + exitCodes + `
The end by TERM or INT is 0.`,
		Example: `  rdma-cni install --no-sleep
  rdma-cni install --check
  rdma-cni install --cni-bin-dir /opt/cni/bin --uninstall`,
	}
	flags := cmd.Flags()
	flags.StringVar(&plugin.Dir, "cni-bin-dir", "/host/opt/cni/bin", "the node's directory of CNI plugins; in the image, where it is mounted")
	flags.StringVar(&plugin.Source, "rdma-cni-bin-file", "/usr/bin/rdma", "the plugin to install; the name in the directory is the same")
	flags.BoolVar(&noSleep, "no-sleep", false, "end when the plugin is installed, as an init container does")
	flags.BoolVar(&check, "check", false, "only say whether it is installed and runs")
	flags.BoolVar(&uninstall, "uninstall", false, "remove it instead")
	cmd.MarkFlagsMutuallyExclusive("check", "uninstall")
	return a.does(cmd, func(cmd *cobra.Command, _ []string) error {
		if plugin.Dir == "" || plugin.Source == "" {
			return a.misuse("--cni-bin-dir and --rdma-cni-bin-file cannot be empty")
		}
		// As the first process of a container we get no signal that we do not
		// ask for.
		ctx, stop := signal.NotifyContext(cmd.Context(), unix.SIGTERM, unix.SIGINT)
		defer stop()
		do := plugin.Install
		switch {
		case check:
			do = plugin.Check
		case uninstall:
			do = func(ctx context.Context) (install.Result, error) {
				return plugin.Uninstall(ctx, install.Records{State: a.node.State, Upstream: a.node.Upstream})
			}
		}
		r, err := do(ctx)
		if err != nil {
			return err
		}
		if err := a.printInstall(r); err != nil {
			return err
		}
		if !noSleep && !check && !uninstall {
			a.talk("waiting for TERM; the plugin stays when this ends")
			<-ctx.Done()
		}
		return nil
	})
}

func (a *app) printInstall(r install.Result) error {
	return a.print(r, func(w io.Writer) {
		table(w, []string{"FILE", "ACTION", "CNI VERSIONS", "SHA256"}, [][]string{{r.File, string(r.Action), strings.Join(r.CNIVersions, ","), r.SHA256}})
	})
}
