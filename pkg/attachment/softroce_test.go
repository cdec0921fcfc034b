package attachment

import (
	"net"

	"github.com/onsi/ginkgo/v2" // not by dot: it has an Entry too
	. "github.com/onsi/gomega"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

var _ = ginkgo.Describe("a soft-RoCE device", func() {
	ginkgo.DescribeTable("has the node GUID of a MAC", func(mac string, guid string) {
		address, err := net.ParseMAC(mac)
		Expect(err).NotTo(HaveOccurred())
		Expect(guidOfMAC(address).String()).To(Equal(guid))
	},
		// As Linux 7.3 said of devices on these MACs.
		ginkgo.Entry("locally administered", "a6:0c:df:87:e4:2f", "a40c:dfff:fe87:e42f"),
		ginkgo.Entry("another", "46:b6:4d:14:f8:f8", "44b6:4dff:fe14:f8f8"),
		ginkgo.Entry("none that tells anything", "00:00:00:00:00:00", "0000:0000:0000:0000"),
		ginkgo.Entry("of InfiniBand's length", "00:01:02:03:04:05:06:07", "0000:0000:0000:0000"),
	)

	ginkgo.DescribeTable("gets a name that the kernel takes", func(ifName, template, name string) {
		a := attach{
			req:      Request{Options: Options{Name: template}},
			function: sysfs.Default.InterfaceFunction(sysfs.RXE, sysfs.Interface{Netns: 4026532345, Index: 3}),
		}
		a.req.IfName = ifName
		got, err := a.linkName()
		Expect(err).NotTo(HaveOccurred())
		Expect(got).To(Equal(name))
		Expect(rdma.ValidateName(got)).To(Succeed())
	},
		ginkgo.Entry("from the interface", "net1", "", "rxe_net1"),
		ginkgo.Entry("with what an RDMA device's cannot have", "net@1:a b", "", "rxe_net_1_a_b"),
		ginkgo.Entry("with a brace, which is no template", "{pci}", "", "rxe__pci_"),
		ginkgo.Entry("from a template", "net1", "rail-{ifname}", "rail-net1"),
		ginkgo.Entry("with dots", "eth0.5", "", "rxe_eth0.5"),
	)

	ginkgo.It("cannot have a name of a template that gives none", func() {
		a := attach{req: Request{Options: Options{Name: "{ifname}"}}}
		a.req.IfName = "net@1"
		_, err := a.linkName()
		Expect(err).To(BeAssignableToTypeOf(&SettingError{}))
	})
})
