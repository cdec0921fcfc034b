package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
	"github.com/rdma-cni/rdma-cni/pkg/rdma"
)

// Set at link time, see the Makefile.
var (
	version = "unknown"
	commit  = "unknown"
	date    = "unknown"
)

// streams are what a run reads and writes.
type streams struct {
	Out, Err io.Writer
	Terminal bool // Out is one, and wants colour
}

func processStreams() streams {
	_, err := unix.IoctlGetTermios(int(os.Stdout.Fd()), unix.TCGETS)
	return streams{Out: os.Stdout, Err: os.Stderr, Terminal: err == nil && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"}
}

// Exit codes.
const (
	codeOK         = 0
	codeProblem    = 1 // something failed, or a check did
	codeUsage      = 2
	codeReboot     = 3 // mode set
	codeImpossible = 4 // mode set
)

const exitCodes = `
Exit codes: 0 done, 1 something failed (a message is on standard error), 2 the command line is wrong.`

// exitError is an error with an exit code of its own. Told means that the user
// has been told already.
type exitError struct {
	code int
	told bool
	err  error
}

func (e *exitError) Error() string { return e.err.Error() }

// Unwrap gives the cause.
func (e *exitError) Unwrap() error { return e.err }

func exitCode(err error) int {
	var e *exitError
	switch {
	case err == nil:
		return codeOK
	case errors.As(err, &e):
		return e.code
	default:
		return codeProblem
	}
}

// app is one run: what the commands share.
type app struct {
	streams
	node   *attachment.Node
	proc   rdma.Proc
	root   string // "" but in tests: where /etc, /boot, /lib, /dev and the rest are
	format string
	began  bool // a command's own code was reached, so the command line was good
}

// run executes one command line. What went wrong has been told on Err when it
// returns.
func run(args []string, s streams) error {
	a := &app{streams: s, node: attachment.DefaultNode(), proc: rdma.DefaultProc}
	return a.execute(args)
}

func (a *app) execute(args []string) error {
	root := a.command()
	root.SetArgs(args)
	root.SetOut(a.Out)
	root.SetErr(a.Err)
	err := root.Execute()
	var e *exitError
	if err != nil && (!errors.As(err, &e) || !e.told) {
		_, _ = fmt.Fprintf(a.Err, "rdma-cni: %v\n", err)
	}
	if err != nil && !a.began {
		_, _ = fmt.Fprintln(a.Err, "See 'rdma-cni --help'.")
		return &exitError{code: codeUsage, told: true, err: err}
	}
	return err
}

// command builds the tree of commands.
func (a *app) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "rdma-cni",
		Short: "See, check and repair the RDMA devices of a node and of its pods",
		Long: `rdma-cni shows the RDMA devices of a node and who holds them, finds what is
wrong with a node or a pod, sets the RDMA namespace mode, ends attachments that
are over, writes CDI specs for containers outside Kubernetes, and installs the
CNI plugin rdma, whose companion it is.

Data goes to standard output, talk to standard error.
` + exitCodes,
		Args:          cobra.NoArgs,
		SilenceErrors: true,
		SilenceUsage:  true,
		Version:       fmt.Sprintf("%s (commit %s, date %s)", version, commit, date),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cmd.Help()
		},
	}
	root.SetVersionTemplate("rdma-cni {{.Version}}\n")
	root.PersistentFlags().VarP(choice(&a.format, formatTable, formatTable, formatJSON, formatYAML), "output", "o", "output format: table, json or yaml")
	_ = root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{formatTable, formatJSON, formatYAML}, cobra.ShellCompDirectiveNoFileComp))
	root.AddCommand(a.listCommand(), a.doctorCommand(), a.modeCommand(), a.gcCommand(), a.cdiCommand(), a.installCommand(), a.openCommand())
	return root
}

// does makes fn the work of a command.
func (a *app) does(cmd *cobra.Command, fn func(cmd *cobra.Command, args []string) error) *cobra.Command {
	if cmd.Args == nil {
		cmd.Args = cobra.NoArgs
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		a.began = true
		return fn(cmd, args)
	}
	return cmd
}

// misuse marks an error about the command line that only a command's own code
// can see.
func (a *app) misuse(format string, args ...any) error {
	a.began = false
	return fmt.Errorf(format, args...)
}

// talk writes a line for a person.
func (a *app) talk(format string, args ...any) {
	_, _ = fmt.Fprintf(a.Err, format+"\n", args...)
}

// choiceValue is a flag that takes one of a few words.
type choiceValue struct {
	target *string
	words  []string
}

func choice(target *string, otherwise string, words ...string) *choiceValue {
	*target = otherwise
	return &choiceValue{target, words}
}

// Set takes a word.
func (c *choiceValue) Set(s string) error {
	for _, w := range c.words {
		if strings.EqualFold(s, w) {
			*c.target = w
			return nil
		}
	}
	return fmt.Errorf("it can be %s", strings.Join(c.words, ", "))
}

func (c *choiceValue) String() string { return *c.target }

// Type is what help shows.
func (c *choiceValue) Type() string { return strings.Join(c.words, "|") }
