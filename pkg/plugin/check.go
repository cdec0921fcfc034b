package plugin

import (
	"fmt"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
)

func (p *Plugin) check(args *skel.CmdArgs) error {
	op, err := p.begin("CHECK", args)
	if err != nil {
		return configError(err)
	}
	report, err := p.verify(op)
	return p.end(op, fmt.Sprintf("check the RDMA device of interface %s", args.IfName), report, err)
}

func (p *Plugin) verify(op operation) (*attachment.Report, error) {
	result, err := op.conf.result()
	if err != nil {
		return nil, configError(err)
	}
	if result == nil {
		return nil, errNoPrevResult
	}
	if i := interfaceOf(result, op.args.IfName); i == nil || i.Sandbox != op.args.Netns {
		return nil, types.NewError(types.ErrInvalidNetworkConfig,
			fmt.Sprintf("rdma plugin: prevResult names no interface %s in the network namespace %s", op.args.IfName, op.args.Netns), "")
	}
	return p.Node.Verify(op.request())
}
