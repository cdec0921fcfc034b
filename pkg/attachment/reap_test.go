package attachment

import (
	"github.com/onsi/ginkgo/v2" // not by dot: it has a Report too
	. "github.com/onsi/gomega"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
)

var _ = ginkgo.Describe("what gc does with a record", func() {
	alive, dead := namespaceState{alive: true, why: "at /run/netns/a"}, namespaceState{why: "no path"}
	attached, intended := &state.Record{Phase: state.Attached}, &state.Record{Phase: state.Intended}
	ginkgo.DescribeTable("is decided by", func(p place, ns namespaceState, r *state.Record, want Action, says string) {
		action, reason := decide(p, ns, r, "")
		Expect(action).To(Equal(want))
		Expect(reason).To(ContainSubstring(says))
	},
		ginkgo.Entry("a live pod with its device", elsewhere, alive, attached, Keep, "alive"),
		ginkgo.Entry("an ADD that was killed after its move", elsewhere, alive, intended, Keep, "alive"),
		ginkgo.Entry("an ADD that was killed before its move", atHome, alive, intended, Drop, "at home"),
		ginkgo.Entry("a live pod that lost its device", atHome, alive, attached, Keep, "has lost its device"),
		ginkgo.Entry("a live pod whose driver was reloaded", replaced, alive, attached, Keep, "has lost its device"),
		ginkgo.Entry("a live pod whose function is gone", absent, alive, attached, Keep, "has lost its device"),
		ginkgo.Entry("a dead pod, device at home", atHome, dead, attached, Drop, "at home"),
		ginkgo.Entry("a dead pod, device away", elsewhere, dead, attached, BringHome, "dead"),
		ginkgo.Entry("a dead pod, new device", replaced, dead, attached, Drop, "new device"),
		ginkgo.Entry("a dead pod, no device", absent, dead, attached, Drop, "no RDMA device"),
		ginkgo.Entry("a damaged record, device at home", atHome, namespaceState{}, nil, Drop, "at home"),
	)

	ginkgo.It("names what keeps a namespace", func() {
		Expect(keepers(rdma.Holders{Mounts: []string{"/m"}, Files: []rdma.Process{{PID: 7, Command: "agent"}}})).
			To(Equal("a mount at /m, a file of process 7 (agent)"))
	})
})

var _ = ginkgo.Describe("the words for a holder", func() {
	record := &state.Record{Key: state.Key{ContainerID: "c", IfName: "net1"}, Pod: state.Pod{Namespace: "a", Name: "b"}}
	ginkgo.DescribeTable("say where a device is and whose", func(h Holder, says string) {
		Expect(h.Describe()).To(ContainSubstring(says))
	},
		ginkgo.Entry("home", Holder{Place: Home}, "home"),
		ginkgo.Entry("none", Holder{Place: Nowhere}, "no RDMA device"),
		ginkgo.Entry("pod", Holder{Place: InPod, Record: record, Process: &rdma.Process{PID: 4, Command: "x"}}, "pod a/b (container c interface net1), process 4 (x)"),
		ginkgo.Entry("stranger", Holder{Place: InNamespace, Path: "/p", ContainerID: "id", PodUID: "uid", Upstream: []string{"/u"}}, "no record, container id, pod UID uid, record of another rdma plugin /u"),
		ginkgo.Entry("unreachable", Holder{Place: Unreachable, Record: record}, "no path leads to, attached to pod a/b"),
	)
})
