// Package rtnl asks the kernel for network interfaces, addresses and routes.
package rtnl

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// attempts is how often a dump is asked for that changes interrupt.
const attempts = 10

// Dump asks again while the kernel says that its answer is not of one piece,
// because something in the namespace changed meanwhile (NLM_F_DUMP_INTR): on a
// node where pods start all the time that is nothing unusual.
func Dump[T any](ask func() (T, error)) (list T, err error) {
	for range attempts {
		if list, err = ask(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return list, err
}
