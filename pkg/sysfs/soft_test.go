package sysfs_test

import (
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

var _ = Describe("an interface that stands for a function", func() {
	It("has an address from which it can be read again", func() {
		for _, bus := range []sysfs.Bus{sysfs.Netdev, sysfs.RXE} {
			i := sysfs.Interface{Netns: 4026532345, Index: 3}
			f := tree().InterfaceFunction(bus, i)
			Expect(f.Soft()).To(BeTrue())
			Expect(sysfs.ValidateAddress(f.Address)).To(Succeed(), "it is part of a file's name")
			gotBus, got, ok := sysfs.InterfaceOf(f.Address)
			Expect(ok).To(BeTrue())
			Expect(gotBus).To(Equal(bus))
			Expect(got).To(Equal(i))
		}
	})

	DescribeTable("is no other address", func(address string) {
		_, _, ok := sysfs.InterfaceOf(address)
		Expect(ok).To(BeFalse())
		Expect(sysfs.Function{Bus: sysfs.PCI, Address: address}.Soft()).To(BeFalse())
	},
		Entry("PCI", "0000:3b:00.2"), Entry("auxiliary", "mlx5_core.sf.4"), Entry("empty", ""),
		Entry("no numbers", "rxe.a.b"), Entry("negative", "rxe.1.-1"), Entry("too long", "rxe.1.2.3"),
		Entry("too large", "rxe.1.4294967296"), Entry("another driver's", "siw.1.2"),
	)

	It("has no function in sysfs", func() {
		_, err := tree().Function("rxe.4026532345.3")
		Expect(err).To(MatchError(sysfs.ErrNoFunction))
	})
})

var _ = Describe("soft-RoCE devices", func() {
	It("are those that name their interface", func() {
		Expect(tree("class/infiniband/mlx5_0/", "class/infiniband/rxe0/parent = net1").SoftDevices()).
			To(Equal([]sysfs.SoftDevice{{Name: "rxe0", Netdev: "net1"}}))
	})

	It("are none without an RDMA subsystem", func() {
		Expect(tree().SoftDevices()).To(BeEmpty())
	})
})
