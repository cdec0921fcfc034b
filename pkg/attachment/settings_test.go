package attachment

import (
	"strings"
	"testing"

	"github.com/onsi/ginkgo/v2" // not by dot: it has a Report too
	. "github.com/onsi/gomega"

	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// What the transaction does to devices is tested on a real kernel, in
// test/e2e. Here is what needs none.
func TestAttachment(t *testing.T) {
	RegisterFailHandler(ginkgo.Fail)
	ginkgo.RunSpecs(t, "attachment")
}

var _ = ginkgo.Describe("a name template", func() {
	request := func(template string) Request {
		return Request{Key: state.Key{ContainerID: "c", IfName: "net1"}, Options: Options{Name: template}}
	}
	vf := sysfs.Function{Bus: sysfs.PCI, Address: "0000:3b:00.2"}

	ginkgo.DescribeTable("is filled in", func(template, want string) {
		Expect(ValidateName(template)).To(Succeed())
		Expect(request(template).nameInPod(vf, "mlx5_3", 1, 2)).To(Equal(want))
	},
		ginkgo.Entry("with the interface and the position", "{ifname}_{index}", "net1_1"),
		ginkgo.Entry("with the function", "{pci}-{index}", "0000-3b-00.2-1"),
		ginkgo.Entry("more than once", "{index}{index}{index}", "111"),
	)

	ginkgo.It("is the name that the device has, if there is none", func() {
		Expect(request("").nameInPod(vf, "mlx5_3", 0, 2)).To(Equal("mlx5_3"))
	})

	ginkgo.It("cannot give several devices one name", func() {
		_, err := request("rail").nameInPod(vf, "mlx5_3", 0, 2)
		Expect(err).To(MatchError(ContainSubstring("{index}")))
		Expect(request("rail").nameInPod(vf, "mlx5_3", 0, 1)).To(Equal("rail"))
	})

	ginkgo.DescribeTable("is refused", func(template string) {
		Expect(ValidateName(template)).NotTo(Succeed())
	},
		ginkgo.Entry("empty", ""),
		ginkgo.Entry("with an unknown word in braces", "{pod}"),
		ginkgo.Entry("with a path", "../{ifname}"),
		ginkgo.Entry("longer than the kernel keeps", strings.Repeat("x", 60)+"{ifname}"),
	)

	ginkgo.It("is refused when it gets too long by what is filled in", func() {
		r := request(strings.Repeat("x", 55) + "{ifname}")
		r.IfName = "a-longer-name-1"
		_, err := r.nameInPod(vf, "mlx5_3", 0, 1)
		Expect(err).To(BeAssignableToTypeOf(&SettingError{}))
	})
})
