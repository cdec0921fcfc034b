package attachment

import (
	"bytes"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// ahead is what a DEL finds out about its attachment before it has the node
// lock, so that others need not wait for that: the record, its function, and the
// pod's namespace with a Conn in it. Under the lock each is used only for what
// it was then; anything else is found out anew.
type ahead struct {
	data     []byte // of the record's file
	record   *state.Record
	function sysfs.Function
	netns    string // the path of pod
	pod      *rdma.Namespace
}

// lookAhead fills s.ahead as far as it can. What goes wrong here will do so
// again under the lock, where it counts.
func (s *session) lookAhead(key state.Key, netnsPath string) {
	if s.conn == nil {
		return
	}
	names, err := s.State.Names()
	if err != nil {
		return
	}
	for _, name := range names {
		if !name.Is(key) {
			continue
		}
		data, err := s.State.Read(name)
		if err != nil {
			return
		}
		r, err := s.State.Decode(name, data)
		if err != nil {
			return
		}
		f, err := s.functionOf(name.Function)
		if err != nil {
			return
		}
		pod := s.live(netnsPath, r.Netns.ID)
		if pod != nil {
			_, _ = pod.Conn()
		}
		s.ahead = ahead{data: data, record: r, function: f, netns: netnsPath, pod: pod}
		return
	}
}

// load loads a record; one that is as it was seen ahead is not decoded again.
func (s *session) load(name state.Name) (*state.Record, error) {
	data, err := s.State.Read(name)
	if err != nil {
		return nil, err
	}
	if s.ahead.record != nil && s.ahead.record.Name() == name && bytes.Equal(data, s.ahead.data) {
		return s.ahead.record, nil
	}
	return s.State.Decode(name, data)
}

// take hands over the pod's namespace, nil if it was opened by another path or
// is not the one with that ID.
func (a *ahead) take(path string, id rdma.NamespaceID) *rdma.Namespace {
	if a.pod == nil || a.netns != path || a.pod.ID() != id {
		return nil
	}
	pod := a.pod
	a.pod = nil
	return pod
}

func (a *ahead) close() {
	if a.pod != nil {
		_ = a.pod.Close()
	}
}
