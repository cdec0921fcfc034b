// Command rdma-cni is what a person uses beside the CNI plugin rdma: it shows
// the RDMA devices of a node and who holds them, finds faults, sets the
// namespace mode, cleans up, writes CDI specs, and installs the plugin.
package main

import "os"

func main() {
	os.Exit(exitCode(run(arguments(os.Args), processStreams())))
}
