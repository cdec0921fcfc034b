package plugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
	"github.com/rdma-cni/rdma-cni/pkg/state"
)

// Plugin answers one call of a runtime.
type Plugin struct {
	Node    *attachment.Node
	Version string
	Getenv  func(string) string
	Stdin   io.Reader
	Stdout  io.Writer
	Stderr  io.Writer

	cniVersion string // of the configuration, for the error object
}

// Limits of a whole operation. Runtimes allow more, but not for each plugin of
// each network of a pod.
const (
	addTimeout = 30 * time.Second
	delTimeout = 30 * time.Second
	gcTimeout  = 25 * time.Second
)

// Run serves the call that the CNI environment variables and stdin describe,
// and returns the exit status. Stdout gets one JSON document or nothing.
func (p *Plugin) Run() (status int) {
	defer func() {
		if r := recover(); r != nil {
			_, _ = fmt.Fprintf(p.Stderr, "panic: %v\n%s", r, debug.Stack())
			status = p.fail(types.NewError(types.ErrInternal, fmt.Sprintf("rdma plugin: internal error, please report it: %v", r), ""))
		}
	}()
	err := p.serve()
	if err == nil {
		return 0
	}
	var cniErr *types.Error
	if !errors.As(err, &cniErr) {
		cniErr = types.NewError(types.ErrInternal, oneLine("rdma plugin: "+err.Error()), "")
	}
	return p.fail(cniErr)
}

// fail prints the error object, with the cniVersion that the specification
// wants in it and the library leaves out.
func (p *Plugin) fail(e *types.Error) int {
	out, err := json.Marshal(struct {
		CNIVersion string `json:"cniVersion,omitempty"`
		*types.Error
	}{p.cniVersion, e})
	if err == nil {
		_, err = p.Stdout.Write(append(out, '\n'))
	}
	if err != nil {
		_, _ = fmt.Fprintf(p.Stderr, "rdma: print the error: %v; the error was: %v\n", err, e)
	}
	return 1
}

// begin reads the configuration for a verb.
func (p *Plugin) begin(c call) (operation, error) {
	conf, err := parseConfig(c.keys)
	p.cniVersion = conf.cniVersion
	return operation{call: c, conf: conf, begin: time.Now()}, err
}

// end logs the operation and makes its CNI error.
func (p *Plugin) end(op operation, doing string, report *attachment.Report, err error) error {
	var cniErr *types.Error
	if err != nil {
		cniErr = cniError("rdma plugin: "+doing, err)
		p.log(op, report, cniErr)
		return cniErr
	}
	p.log(op, report, nil)
	return nil
}

func configError(err error) error {
	return types.NewError(types.ErrInvalidNetworkConfig, oneLine("rdma plugin: "+err.Error()), "")
}

// request makes the attachment's request of a call.
func (op operation) request() attachment.Request {
	return attachment.Request{
		Key:      state.Key{ContainerID: op.call.containerID, IfName: op.call.ifName},
		Network:  op.conf.name,
		Pod:      podOf(op.call.args),
		Netns:    op.call.netns,
		Function: op.conf.function,
		Options:  op.conf.options,
	}
}

func (op operation) device() string {
	if op.conf.function == "" {
		return "the RDMA device behind interface " + op.call.ifName
	}
	return "the RDMA device of " + op.conf.function
}

var errNoPrevResult = types.NewError(types.ErrInvalidNetworkConfig,
	"rdma plugin: the configuration has no prevResult: this plugin takes no part in making an interface, so it must come after the plugin that does (sriov, ib-sriov, host-device ...) in the plugins of a network", "")
