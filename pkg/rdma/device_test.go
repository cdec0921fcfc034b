package rdma

import (
	"encoding/json"
	"os"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/vishvananda/netlink/nl"
)

var _ = Describe("a GUID", func() {
	DescribeTable("is written as the kernel writes it, and read back", func(guid GUID, text string) {
		Expect(guid.String()).To(Equal(text))
		data, err := json.Marshal(guid)
		Expect(err).NotTo(HaveOccurred())
		Expect(data).To(MatchJSON(`"` + text + `"`))
		var back GUID
		Expect(json.Unmarshal(data, &back)).To(Succeed())
		Expect(back).To(Equal(guid))
	},
		Entry("usual", GUID(0x505400fffe123457), "5054:00ff:fe12:3457"),
		Entry("zero", GUID(0), "0000:0000:0000:0000"),
		Entry("all ones", ^GUID(0), "ffff:ffff:ffff:ffff"),
		Entry("leading zeros", GUID(1), "0000:0000:0000:0001"),
	)

	DescribeTable("is not read from", func(text string) {
		guid := GUID(42)
		Expect(guid.UnmarshalText([]byte(text))).To(MatchError(ContainSubstring("is not a GUID")))
		Expect(guid).To(Equal(GUID(42)), "a failed read changes nothing")
	},
		Entry("nothing", ""),
		Entry("three parts", "5054:00ff:fe12"),
		Entry("five parts", "5054:00ff:fe12:3457:0000"),
		Entry("short parts", "54:ff:12:57"),
		Entry("other digits", "5054:00fg:fe12:3457"),
		Entry("other separators", "5054-00ff-fe12-3457"),
		Entry("a blank at the end", "5054:00ff:fe12:3457 "),
		Entry("a blank in the place of a digit", " 054:00ff:fe12:3457"),
		Entry("parts of the wrong length", "054:000ff:fe12:3457"),
	)
})

var _ = Describe("a device name", func() {
	DescribeTable("is accepted", func(name string) {
		Expect(ValidateName(name)).To(Succeed())
	},
		Entry("of a driver", "mlx5_0"),
		Entry("of udev", "rocep59s0f0v2"),
		Entry("with a dot and a dash", "a.b-c"),
		Entry("with a dot first", ".a"),
		Entry("of three dots", "..."),
		Entry("of one character", "r"),
		Entry("of 63 characters", strings.Repeat("a", 63)),
	)

	DescribeTable("is refused", func(name, text string) {
		Expect(ValidateName(name)).To(MatchError(ContainSubstring(text)))
	},
		Entry("empty", "", "cannot be empty"),
		Entry("64 characters, of which the kernel keeps 63", strings.Repeat("a", 64), "64 characters"),
		Entry("the directory", ".", "cannot be"),
		Entry("the parent directory", "..", "cannot be"),
		Entry("a path", "a/b", "only letters"),
		Entry("a way out", "../b", "only letters"),
		Entry("a blank", "a b", "only letters"),
		Entry("a newline", "a\n", "only letters"),
		Entry("a zero", "a\x00", "only letters"),
		Entry("a pattern, which the kernel would number", "mlx5_%d", "only letters"),
		Entry("a letter outside ASCII", "gerät", "only letters"),
		Entry("bytes that are no text", "a\xff", "only letters"),
	)
})

var _ = Describe("what the kernel says of a device", func() {
	It("is read in full", func() {
		Expect(deviceFrom(attributes{
			nl.RDMA_NLDEV_ATTR_DEV_INDEX:  u32(3),
			nl.RDMA_NLDEV_ATTR_DEV_NAME:   []byte("mlx5_3\x00"),
			nl.RDMA_NLDEV_ATTR_PORT_INDEX: u32(2),
			nl.RDMA_NLDEV_ATTR_NODE_GUID:  u64(0x505400fffe123457),
			attrDevProtocol:               []byte("roce\x00"),
		})).To(Equal(Device{Index: 3, Name: "mlx5_3", NodeGUID: 0x505400fffe123457, Protocol: "roce", Ports: 2}))
	})

	It("may lack everything but the index", func() {
		Expect(deviceFrom(attributes{nl.RDMA_NLDEV_ATTR_DEV_INDEX: u32(0)})).To(Equal(Device{}))
	})

	DescribeTable("is refused", func(index []byte) {
		_, err := deviceFrom(attributes{
			nl.RDMA_NLDEV_ATTR_DEV_INDEX: index,
			nl.RDMA_NLDEV_ATTR_DEV_NAME:  []byte("mlx5_3\x00"),
		})
		Expect(err).To(MatchError(ContainSubstring("without its index")))
	},
		Entry("without an index", nil),
		Entry("with an index of two bytes", []byte{1, 2}),
		Entry("with an index of eight bytes", u64(1)),
	)
})

var _ = DescribeTable("a mode is written", func(m Mode, text string) {
	Expect(m.String()).To(Equal(text))
},
	Entry("exclusive", Exclusive, "exclusive"),
	Entry("shared", Shared, "shared"),
	Entry("as its number when it is new", Mode(2), "mode 2"),
	Entry("as its number when it is the last", Mode(255), "mode 255"),
)

var _ = It("ErrDeviceNotFound is an os.ErrNotExist", func() {
	Expect(ErrDeviceNotFound).To(MatchError(os.ErrNotExist))
})
