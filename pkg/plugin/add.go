package plugin

import (
	"errors"
	"fmt"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
)

func (p *Plugin) add(c call) error {
	op, err := p.begin(c)
	if err != nil {
		return configError(err)
	}
	report, err := p.attach(op)
	return p.end(op, fmt.Sprintf("attach %s to the pod as part of %s", op.device(), c.ifName), report, err)
}

func (p *Plugin) attach(op operation) (*attachment.Report, error) {
	prev, err := op.conf.previous()
	if err != nil {
		return nil, configError(err)
	}
	if prev == nil {
		return nil, errNoPrevResult
	}
	req := op.request()
	if i := prev.interfaceOf(op.call.ifName); i != nil {
		req.MAC = i.mac
	}
	req.Addresses = prev.addressesOf(op.call.ifName)
	report, err := p.Node.Attach(within(addTimeout), req)
	if err != nil {
		return report, err
	}
	if report.HardwareAddr != "" {
		prev.answer = withMAC(prev.answer, op.call.ifName, report.HardwareAddr)
	}
	updateDeviceInfo(op.conf.deviceInfo, report)
	// Last of all: who cannot be told of the attachment will not end it.
	if _, err := p.Stdout.Write(prev.answer); err != nil {
		err = types.NewError(types.ErrIOFailure, fmt.Sprintf("rdma plugin: print the result: %v; the attachment is undone", err), "")
		_, undoErr := p.Node.Detach(within(delTimeout), req.Network, req.Key, req.Netns)
		return report, errors.Join(err, undoErr)
	}
	return report, nil
}
