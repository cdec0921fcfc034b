package plugin

import (
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

var _ = DescribeTable("the hardware address in an answer", func(answer, want string) {
	Expect(string(withMAC([]byte(answer), "net1", "80:00:00:12"))).To(Equal(want))
},
	Entry("is put where the interface is, and nothing else is touched",
		`{"cniVersion":"1.0.0","extra":{"a":1},"interfaces":[{"name":"net1","mac":"old"},{"mac":"80:00:00:11","mtu":9,"name":"net1","sandbox":"/x"},{"mac":"m","name":"eth0","sandbox":"/x"}]}`,
		`{"cniVersion":"1.0.0","extra":{"a":1},"interfaces":[{"mac":"old","name":"net1"},{"mac":"80:00:00:12","mtu":9,"name":"net1","sandbox":"/x"},{"mac":"m","name":"eth0","sandbox":"/x"}]}`+"\n"),
	Entry("is not added", `{"interfaces":[{"name":"net1","sandbox":"/x"}]}`, `{"interfaces":[{"name":"net1","sandbox":"/x"}]}`),
	Entry("that is right already leaves the answer as it is", `{ "interfaces":[{"name":"net1","mac":"80:00:00:12","sandbox":"/x"}]}`, `{ "interfaces":[{"name":"net1","mac":"80:00:00:12","sandbox":"/x"}]}`),
	Entry("has no place in a result before 0.3.0", `{"ip4":{}}`, `{"ip4":{}}`),
)
