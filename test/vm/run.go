package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"github.com/rdma-cni/rdma-cni/test/vm/wire"
)

// Exit codes of a run that did not end with the command's own. The command's
// code wins whenever there is one and the kernel is well.
const (
	codeTimeout = 124 // killed at the deadline
	codeKernel  = 125 // the kernel complained, or the guest ended early
	codeRunner  = 126 // the bed could not be prepared or started
)

// request is what one run asks for.
type request struct {
	bed
	share   string // empty: a fresh folder, removed afterwards
	timeout time.Duration
	cold    bool
	verbose bool
	env     []string
	args    []string
	stdout  io.Writer
	stderr  io.Writer
}

// run runs the command in a guest and returns its exit code.
func (r request) run(ctx context.Context) (int, error) {
	begin := time.Now()
	img, unlock, err := r.prepared()
	if err != nil {
		return codeRunner, err
	}
	defer func() { unlock() }()
	share, scratch, err := r.folders()
	if err != nil {
		return codeRunner, err
	}
	defer os.RemoveAll(scratch)
	console := filepath.Join(scratch, "console.log")

	prepared := time.Now()
	g, err := r.start(img, console, share)
	if err != nil {
		return codeRunner, fmt.Errorf("%w\n%s", err, consoleTail(console))
	}
	defer g.kill()
	started := time.Now()
	unlock() // QEMU has the image's files open
	unlock = func() {}

	result, err := r.converse(ctx, g)
	code := result.Code
	switch complaint := findComplaint(console); {
	case errors.Is(err, context.DeadlineExceeded):
		g.printBlocked()
		code, err = codeTimeout, fmt.Errorf("killed after %v: the command did not end. Blocked tasks, if any, are below.\n%s", r.timeout, consoleTail(console))
	case errors.Is(err, context.Canceled):
		code, err = codeKernel, errors.New("interrupted; the guest was killed")
	case complaint != "":
		code, err = codeKernel, fmt.Errorf("the guest's kernel complained: %s (command's exit code %d)\n%s", complaint, code, consoleTail(console))
	case err != nil:
		code, err = codeKernel, fmt.Errorf("the guest ended before the command did: %w %s\n%s", err, g.stderr.String(), consoleTail(console))
	case result.Err != "":
		code, err = 127, fmt.Errorf("%q was not run: %s", r.args, result.Err)
	}
	if r.verbose {
		fmt.Fprintf(r.stderr, "%s", consoleTail(console))
	}
	how := "resume"
	if r.cold {
		how = "boot"
	}
	logf("kernel %s: %s %.2f s, command %.2f s, total %.2f s, exit code %d",
		r.kernel.name, how, started.Sub(prepared).Seconds(), result.Seconds, time.Since(begin).Seconds(), code)
	return code, err
}

// folders returns the folder to share and a scratch folder for the console log.
func (r request) folders() (share, scratch string, err error) {
	if scratch, err = os.MkdirTemp("", "bed"); err != nil {
		return "", "", err
	}
	if r.share == "" {
		share = filepath.Join(scratch, "share")
		return share, scratch, os.Mkdir(share, 0o755)
	}
	share, err = filepath.Abs(r.share)
	if err == nil && !exists(share) {
		err = fmt.Errorf("-share %s: no such folder", share)
	}
	return share, scratch, err
}

func (r request) start(img image, console, share string) (*guest, error) {
	t, err := loadTree(filepath.Join(r.cache, "kernel-"+r.kernel.name))
	if err != nil {
		return nil, err
	}
	if r.cold {
		return r.boot(t, img, console, share)
	}
	return r.resume(t, img, console, share)
}

// converse hands over the job and passes its output on until it ends.
func (r request) converse(ctx context.Context, g *guest) (wire.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = g.agent.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	result, err := r.exchange(g)
	if ctx.Err() != nil && err != nil {
		err = ctx.Err()
	}
	return result, err
}

func (r request) exchange(g *guest) (result wire.Result, err error) {
	job := wire.Job{Args: r.args, Env: r.env, Dir: wire.ShareDir, Now: time.Now().UnixNano(), Seed: make([]byte, 64)}
	if _, err := rand.Read(job.Seed); err != nil {
		return result, err
	}
	payload, err := json.Marshal(job)
	if err != nil {
		return result, err
	}
	if err := wire.Write(g.agent, wire.Start, payload); err != nil {
		return result, err
	}
	for {
		kind, payload, err := wire.Read(g.agent)
		if err != nil {
			return result, err
		}
		switch kind {
		case wire.Stdout:
			_, err = r.stdout.Write(payload)
		case wire.Stderr:
			_, err = r.stderr.Write(payload)
		case wire.Exit:
			return result, json.Unmarshal(payload, &result)
		default:
			err = fmt.Errorf("frame of kind %q", kind)
		}
		if err != nil {
			return result, err
		}
	}
}

// printBlocked asks a guest that is about to be killed what it is stuck in.
func (g *guest) printBlocked() {
	if wire.Write(g.agent, wire.Blocked, nil) == nil {
		select {
		case <-g.exited:
		case <-time.After(time.Second): // the console is slow, and a dead kernel prints nothing
		}
	}
}

var complaints = regexp.MustCompile(`(?m)^.*(Kernel panic|BUG:|WARNING:|Oops:|general protection fault|INFO: task .* blocked|refcount_t:|UBSAN:|KASAN:|unregister_netdevice: waiting).*$`)

// findComplaint returns the first line in which the kernel reports a defect.
func findComplaint(console string) string {
	text, err := os.ReadFile(console)
	if err != nil {
		return err.Error()
	}
	return string(bytes.TrimSpace(complaints.Find(text)))
}

// consoleTail returns the end of a console log, framed.
func consoleTail(console string) string {
	text, err := os.ReadFile(console)
	if err != nil {
		return ""
	}
	lines := bytes.SplitAfter(bytes.TrimSpace(text), []byte("\n"))
	if n := len(lines) - 60; n > 0 {
		lines = lines[n:]
	}
	return fmt.Sprintf("--- console\n%s\n---\n", bytes.Join(lines, nil))
}
