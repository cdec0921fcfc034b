package plugin

import (
	"errors"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
)

func (p *Plugin) status(c call) error {
	op, err := p.begin(c)
	if err == nil {
		err = p.Node.Ready()
	}
	report := &attachment.Report{}
	var mode *attachment.ModeError
	if op.conf.options.SkipShared && errors.As(err, &mode) {
		report.Warnings = append(report.Warnings, "pods get no RDMA device of their own on this node: "+err.Error())
		err = p.Node.State.Writable()
	}
	if err != nil {
		err = types.NewError(p.statusCode(err), oneLine("rdma plugin: "+err.Error()), "")
	}
	return p.end(op, "", report, err)
}

// statusCode says more than "not available" if the mode was changed under
// attachments: in shared mode their devices are open to all pods.
func (p *Plugin) statusCode(err error) uint {
	var mode *attachment.ModeError
	if names, listErr := p.Node.State.Names(); errors.As(err, &mode) && listErr == nil && len(names) > 0 {
		return types.ErrLimitedConnectivity
	}
	return types.ErrPluginNotAvailable
}
