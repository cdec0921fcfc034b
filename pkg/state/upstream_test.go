package state

import (
	"os"
	"path/filepath"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
)

var _ = Describe("records of the plugin that this one replaces", func() {
	var u Upstream
	key := Key{ContainerID: "c1", IfName: "net1"}

	BeforeEach(func() { u = Upstream{Dir: GinkgoT().TempDir()} })

	write := func(file, text string) {
		GinkgoHelper()
		Expect(os.WriteFile(filepath.Join(u.Dir, file), []byte(text), 0o600)).To(Succeed())
	}
	const plain = `{"version":"1.0","deviceID":"0000:3b:00.2","sandboxRdmaDevName":"mlx5_3","containerRdmaDevName":"mlx5_9"}`

	DescribeTable("are read", func(text string) {
		write("net-c1-net1", text)
		r, err := u.Load("net", key)
		Expect(err).NotTo(HaveOccurred())
		Expect(r).NotTo(BeNil())
		Expect(r.DeviceID).To(Equal("0000:3b:00.2"))
		Expect(r.HomeName).To(Equal("mlx5_3"))
		Expect(r.NameInside).To(Equal("mlx5_9"))
		Expect(r.Path()).To(Equal(filepath.Join(u.Dir, "net-c1-net1")))
		Expect(r.Delete()).To(Succeed())
		Expect(r.Path()).NotTo(BeAnExistingFile())
		Expect(r.Delete()).To(Succeed(), "a second time is no error")
	},
		Entry("as upstream writes them", plain),
		Entry("as its fork writes them", strings.TrimSuffix(plain, "}")+`,"rdmaQoS":{"tos":96,"tc":24}}`),
		Entry("of a later minor version", strings.Replace(plain, "1.0", "1.1", 1)),
	)

	DescribeTable("that cannot be used are an error, not missing", func(text, want string) {
		write("net-c1-net1", text)
		r, err := u.Load("net", key)
		Expect(r).To(BeNil())
		Expect(err).To(MatchError(And(ContainSubstring("net-c1-net1"), ContainSubstring(want))))
		Expect(err).NotTo(MatchError(os.ErrNotExist))
	},
		Entry("empty", "", "unexpected end"),
		Entry("truncated", plain[:40], "unexpected end"),
		Entry("garbage", "\x00\xff", "invalid character"),
		Entry("of a newer format", strings.Replace(plain, "1.0", "2.0", 1), `version "2.0"`),
		Entry("of a version that begins alike", strings.Replace(plain, "1.0", "10", 1), `version "10"`),
		Entry("without version", `{"deviceID":"0000:3b:00.2"}`, `version ""`),
		Entry("with a device of another type", strings.Replace(plain, `"0000:3b:00.2"`, "5", 1), "deviceID"),
		Entry("huge", strings.Repeat(" ", maxRecordSize+1), "longer than"),
	)

	It("are not read through a symbolic link", func() {
		write("real", plain)
		Expect(os.Symlink("real", filepath.Join(u.Dir, "net-c1-net1"))).To(Succeed())
		Expect(u.Load("net", key)).Error().To(MatchError(unix.ELOOP))
	})

	It("are missing when they are", func() {
		write("net-c2-net1", plain)
		Expect(u.Load("net", key)).To(BeNil())
		Expect(Upstream{Dir: filepath.Join(u.Dir, "missing")}.Load("net", key)).To(BeNil())
		Expect(u.Load(strings.Repeat("n", 253), Key{ContainerID: strings.Repeat("c", 200), IfName: "net1"})).To(BeNil(),
			"a name too long for a file has no file")
	})

	It("are found by the function they claim", func() {
		write("net-c1-net1", plain)
		write("net-c0-net1", plain)
		write("other-c2-net1", strings.Replace(plain, "0000:3b:00.2", "0000:3b:00.3", 1))
		write("net-c3-net1", "garbage")
		Expect(os.Mkdir(filepath.Join(u.Dir, "net-c4-net1"), 0o700)).To(Succeed())
		want := []string{filepath.Join(u.Dir, "net-c0-net1"), filepath.Join(u.Dir, "net-c1-net1")}
		Expect(u.Claimants("0000:3b:00.2")).To(Equal(want))
		Expect(u.Claimants("0000:3B:00.2")).To(Equal(want), "upstream keeps the case of the configuration")
		Expect(u.Claimants("0000:3b:00.4")).To(BeEmpty())
		Expect(Upstream{Dir: filepath.Join(u.Dir, "missing")}.Claimants("0000:3b:00.2")).To(BeEmpty())
	})

	It("tell whether a container was given a device", func() {
		write("a-network-c1-net1", plain)
		Expect(u.Attached("c1", "mlx5_9")).To(BeTrue())
		Expect(u.Attached("c1", "mlx5_3")).To(BeFalse(), "that is its name at home")
		Expect(u.Attached("c2", "mlx5_9")).To(BeFalse())
		Expect(u.Attached("c", "mlx5_9")).To(BeFalse(), "part of an ID is another ID")
		Expect(Upstream{Dir: filepath.Join(u.Dir, "missing")}.Attached("c1", "mlx5_9")).To(BeFalse())
	})
})
