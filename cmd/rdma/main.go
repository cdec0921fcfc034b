// The runtime would read all of /proc/self/mountinfo at each start, thousands of
// lines on a node full of pods, to learn how much of the processors the plugin
// may use in its few milliseconds.
//
//go:debug containermaxprocs=0
//go:debug updatemaxprocs=0

// Command rdma is the CNI plugin that moves the RDMA device of a function into
// a pod. It comes after the plugin that moves the function's interface.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
	"github.com/rdma-cni/rdma-cni/pkg/plugin"
)

// Set at link time, see the Makefile.
var (
	version = "unknown"
	commit  = "unknown"
	date    = "unknown"
)

func main() {
	growStack()
	if len(os.Args) > 1 {
		os.Exit(arguments(os.Args[1:]))
	}
	// A runtime that dies in the middle must not kill us at the next write: a
	// device would stay on its way.
	signal.Ignore(unix.SIGPIPE)
	time.Local = time.UTC // the log's, for which a time zone would be read at each start
	p := plugin.Plugin{
		Node: attachment.DefaultNode(), Version: version,
		Getenv: os.Getenv, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
	}
	os.Exit(p.Run())
}

// growStack makes room for all that follows while there is next to nothing on
// the stack. Left alone it would be copied whenever it has to double, for the
// last time while the node lock is held.
//
//go:noinline
func growStack() byte {
	var room [14 << 10]byte
	return room[len(os.Args)%len(room)]
}

// arguments answers a person; a runtime passes none.
func arguments(args []string) int {
	switch strings.TrimPrefix(args[0], "-") {
	case "-v", "v", "-version", "version":
		fmt.Printf("rdma-cni cni version:%s, commit:%s, date:%s\n", version, commit, date)
		return 0
	default:
		fmt.Fprintf(os.Stderr, "rdma is a CNI plugin (version %s): a container runtime calls it without arguments; -version prints the version\n", version)
		return 2
	}
}
