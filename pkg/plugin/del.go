package plugin

import (
	"context"
	"errors"
	"fmt"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/rdma-cni/rdma-cni/pkg/state"
)

// del goes by the record. A bad configuration is no reason to leave a device
// in a pod that ends.
func (p *Plugin) del(args *skel.CmdArgs) error {
	op, confErr := p.begin("DEL", args)
	ctx, cancel := context.WithTimeout(context.Background(), delTimeout)
	defer cancel()
	key := state.Key{ContainerID: args.ContainerID, IfName: args.IfName}
	report, err := p.Node.Detach(ctx, op.conf.name, key, args.Netns)
	if confErr != nil && report != nil {
		report.Warnings = append(report.Warnings, confErr.Error())
	}
	err = p.end(op, fmt.Sprintf("bring the RDMA device of interface %s home", args.IfName), report, err)
	var cniErr *types.Error
	if errors.As(err, &cniErr) {
		return forDEL(cniErr)
	}
	return err
}
