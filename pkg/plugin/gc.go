package plugin

import (
	"context"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
)

func (p *Plugin) gc(c call) error {
	op, err := p.begin(c)
	if err != nil {
		return configError(err)
	}
	if !op.conf.listed {
		report := &attachment.Report{Warnings: []string{"the runtime sent no list of valid attachments (key " + keyValid + "), so nothing is collected"}}
		return p.end(op, "", report, nil)
	}
	ctx, cancel := context.WithTimeout(context.Background(), gcTimeout)
	defer cancel()
	report, err := p.Node.Collect(ctx, op.conf.name, op.conf.validAttachments)
	return p.end(op, "collect attachments that are over", report, err)
}
