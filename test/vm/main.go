// Command vm is the test bed: it boots a stock Debian kernel under QEMU, with
// SR-IOV functions and simulated RDMA devices, and runs a command in it.
//
//	go run ./test/vm prepare [-kernel 6.1]
//	go run ./test/vm run [flags] -- COMMAND ARG...
//	go run ./test/vm selftest [-kernel 6.1]
//
// README.md beside this file says how it works and what it costs.
package main

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"
)

func init() {
	// QEMU is told to die with the thread that started it: this one.
	runtime.LockOSThread()
}

func main() {
	code, err := command(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		os.Exit(2)
	}
	if err != nil {
		logf("%v", err)
	}
	os.Exit(code)
}

//go:embed selftest.sh
var selftest string

const usage = `usage: go run ./test/vm prepare|run|selftest [flags] [-- COMMAND ARG...]
"run -h" lists the flags`

func command(args []string) (int, error) {
	if len(args) == 0 {
		return 2, errors.New(usage)
	}
	verb := args[0]
	flags := flag.NewFlagSet(verb, flag.ContinueOnError)
	kernelName := flags.String("kernel", kernels[0].name, "which kernel")
	pfs := flags.Int("pfs", 1, "how many physical functions, with 7 virtual functions each")
	icount := flags.Bool("icount", false, "let the guest's clock count its instructions: times say how much is done, however busy this machine is")
	r := request{stdout: os.Stdout, stderr: os.Stderr}
	if verb != "prepare" {
		flags.DurationVar(&r.timeout, "timeout", 5*time.Minute, "when to kill the guest")
		flags.BoolVar(&r.cold, "cold", false, "boot instead of resuming the saved guest")
		flags.BoolVar(&r.verbose, "v", false, "print the guest's console at the end")
	}
	if verb == "run" {
		flags.StringVar(&r.share, "share", "", "folder that the guest sees as "+"/bed, read-write (default: a fresh one)")
		flags.Func("e", "K=V for the command's environment; may be repeated", func(kv string) error {
			if !strings.Contains(kv, "=") {
				return errors.New("want K=V")
			}
			r.env = append(r.env, kv)
			return nil
		})
	}
	if err := flags.Parse(args[1:]); err != nil {
		return 2, flag.ErrHelp
	}
	b, err := newBed(*kernelName, *pfs, *icount)
	if err != nil {
		return codeRunner, err
	}
	r.bed, r.args = b, flags.Args()

	ctx, stop := endOfRunner()
	defer stop()
	switch verb {
	case "prepare":
		if err := b.prepare(); err != nil {
			return codeRunner, err
		}
		return 0, nil
	case "run":
		if len(r.args) == 0 {
			return 2, fmt.Errorf("run: no command\n%s", usage)
		}
		return r.run(ctx)
	case "selftest":
		r.args = []string{"sh", "-c", selftest}
		return r.run(ctx)
	}
	return 2, errors.New(usage)
}

// endOfRunner is a context that ends with SIGINT, SIGTERM or SIGHUP, or when
// the parent dies: `go run` does not pass signals on.
func endOfRunner() (context.Context, context.CancelFunc) {
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	parent := os.Getppid()
	go func() {
		for range time.Tick(time.Second) {
			if os.Getppid() != parent {
				cancel()
			}
		}
	}()
	return ctx, cancel
}
