// Command guest is the guest's init and its agent. As process 1 it boots: it
// mounts, loads modules, makes the VFs. Then it starts itself again as the
// agent, which waits for one job from the runner, and reaps what is left behind.
//
// It is a Go program and not a shell script because each fork costs 5 to 10 ms
// under emulation, and because the agent is the part that is resumed.
package main

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

func main() {
	if os.Getpid() != 1 {
		fail("agent", agent())
	}
	fail("boot", boot())
	fail("init", reapAround("/init"))
}

// fail ends the guest: a panic=-1 kernel whose init exits powers off at once,
// and the runner shows the console.
func fail(what string, err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "bed: %s: %v\n", what, err)
		os.Exit(1)
	}
}

// reapAround runs the agent and collects orphans until the agent ends.
func reapAround(self string) error {
	agent, err := os.StartProcess(self, []string{self, "agent"}, &os.ProcAttr{
		Env:   environment,
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr},
	})
	if err != nil {
		return err
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if pid == agent.Pid {
			return fmt.Errorf("agent ended with status %d", status)
		}
	}
}

var environment = []string{
	"PATH=/bin:/sbin:/usr/bin:/usr/sbin",
	"HOME=/root",
	"TERM=dumb",
	"TMPDIR=/tmp",
}
