package plugin

import (
	"fmt"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
)

func (p *Plugin) check(c call) error {
	op, err := p.begin(c)
	if err != nil {
		return configError(err)
	}
	report, err := p.verify(op)
	return p.end(op, fmt.Sprintf("check the RDMA device of interface %s", c.ifName), report, err)
}

func (p *Plugin) verify(op operation) (*attachment.Report, error) {
	prev, err := op.conf.previous()
	if err != nil {
		return nil, configError(err)
	}
	if prev == nil {
		return nil, errNoPrevResult
	}
	if i := prev.interfaceOf(op.call.ifName); i == nil || i.sandbox != op.call.netns {
		return nil, types.NewError(types.ErrInvalidNetworkConfig,
			fmt.Sprintf("rdma plugin: prevResult names no interface %s in the network namespace %s", op.call.ifName, op.call.netns), "")
	}
	return p.Node.Verify(op.request())
}
