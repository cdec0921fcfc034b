package rtnl_test

import (
	"errors"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/rdma-cni/rdma-cni/pkg/rtnl"
)

func TestDump(t *testing.T) {
	for _, test := range []struct {
		name         string
		interrupted  int
		then         error
		wantErr      error
		wantAttempts int
	}{
		{"whole at once", 0, nil, nil, 1},
		{"interrupted twice", 2, nil, nil, 3},
		{"interrupted for ever", 1 << 30, nil, netlink.ErrDumpInterrupted, 10},
		{"refused", 1, errors.ErrUnsupported, errors.ErrUnsupported, 2},
	} {
		asked := 0
		got, err := rtnl.Dump(func() (int, error) {
			asked++
			if asked <= test.interrupted {
				return asked, netlink.ErrDumpInterrupted
			}
			return asked, test.then
		})
		if !errors.Is(err, test.wantErr) || asked != test.wantAttempts || got != asked {
			t.Errorf("%s: got %d, %v after %d attempts; want %v after %d", test.name, got, err, asked, test.wantErr, test.wantAttempts)
		}
	}
}
