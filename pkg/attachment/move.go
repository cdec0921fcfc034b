package attachment

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/state"
)

// move moves a device from home, where this thread is, into the pod, under the
// name that it shall have there and with the quality of service asked for.
func (a *attach) move(d *state.Device) error {
	if err := a.setTrafficClass(d); err != nil {
		return err
	}
	name := a.nameForMove(d)
	if err := a.moveAs(d.Index, d.Name, name); err != nil {
		return a.explainMove(d, err)
	}
	return a.setTOS(d, name)
}

func (a *attach) moveAs(index uint32, name, newName string) error {
	if name == newName {
		return a.conn.Move(index, a.pod)
	}
	return a.conn.MoveAs(index, a.pod, newName)
}

// explainMove says why the kernel refused a move and what helps.
func (a *attach) explainMove(d *state.Device, err error) error {
	driver, _ := a.function.Driver()
	if a.function.Soft() {
		driver = softDriver
	}
	moveErr := &MoveError{Device: d.Name, Driver: driver, Err: err}
	switch {
	case errors.Is(err, unix.EOPNOTSUPP):
		if modeErr := a.requireExclusive(); modeErr != nil {
			return modeErr // it was changed between our look and the move
		}
		if a.function.Soft() {
			moveErr.Hint = softKernelNeeded()
			return moveErr
		}
		moveErr.Hint = "this driver cannot release a device from its users (it has no disassociate_ucontext), so its devices cannot be moved; " +
			"use an adapter and a kernel whose driver can, or leave the rdma plugin out of this network"
	case errors.Is(err, unix.EEXIST):
		return &SettingError{fmt.Errorf("RDMA device %s of %s cannot be called %s in the pod, since that name is taken by %s; "+
			"up to kernel 7.2 RDMA device names are unique on the whole node", d.Name, a.function, d.NameInPod, a.holderOfName(d.NameInPod))}
	case errors.Is(err, unix.EPERM):
		moveErr.Hint = "the plugin needs CAP_NET_ADMIN in the initial user namespace"
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENODEV):
		moveErr.Hint = "the device left this namespace, or its driver removed it, at the same moment"
	}
	return moveErr
}
