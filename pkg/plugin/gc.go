package plugin

import (
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
	report, err := p.Node.Collect(within(gcTimeout), op.conf.name, op.conf.validAttachments)
	return p.end(op, "collect attachments that are over", report, err)
}
