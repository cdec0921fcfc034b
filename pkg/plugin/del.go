package plugin

import (
	"errors"
	"fmt"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/rdma-cni/rdma-cni/pkg/state"
)

// del goes by the record. A bad configuration is no reason to leave a device
// in a pod that ends.
func (p *Plugin) del(c call) error {
	op, confErr := p.begin(c)
	key := state.Key{ContainerID: c.containerID, IfName: c.ifName}
	report, err := p.Node.Detach(within(delTimeout), op.conf.name, key, c.netns)
	if confErr != nil && report != nil {
		report.Warnings = append(report.Warnings, confErr.Error())
	}
	err = p.end(op, fmt.Sprintf("bring the RDMA device of interface %s home", c.ifName), report, err)
	var cniErr *types.Error
	if errors.As(err, &cniErr) {
		return forDEL(cniErr)
	}
	return err
}
