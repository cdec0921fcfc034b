package state

import (
	"os"
	"path/filepath"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

var _ = Describe("offsets", func() {
	var s *Store
	var file string

	BeforeEach(func() {
		s = NewStore(GinkgoT().TempDir())
		file = filepath.Join(s.Dir(), "offsets")
	})

	It("are none at first, and no records", func() {
		Expect(s.Offsets()).To(BeEmpty())
		s.RememberOffset(65)
		Expect(s.Names()).To(BeEmpty())
	})

	It("are kept, the latest first, each once, some", func() {
		for _, n := range []int{1, 2, -3, 4, 5, 6, 7, 8, 9, 2, 9} {
			s.RememberOffset(n)
		}
		Expect(s.Offsets()).To(Equal([]int{9, 2, 8, 7, 6, 5, 4, -3}))
	})

	DescribeTable("are what can be read of them", func(text string, want []int) {
		Expect(os.WriteFile(file, []byte(text), 0o600)).To(Succeed())
		Expect(s.Offsets()).To(Equal(want))
	},
		Entry("half written", "12\n-", []int{12}),
		Entry("other things", "a 5 \x00 99999999999999999999", []int{5}),
		Entry("too many", strings.Repeat("7 ", 100), []int{7, 7, 7, 7, 7, 7, 7, 7}),
		Entry("far too many", strings.Repeat("7 ", 100_000), nil),
	)

	It("follow no link and fail in silence", func() {
		other := filepath.Join(GinkgoT().TempDir(), "other")
		Expect(os.WriteFile(other, []byte("5"), 0o600)).To(Succeed())
		Expect(os.Symlink(other, file)).To(Succeed())
		s.RememberOffset(6)
		Expect(s.Offsets()).To(BeEmpty())
		Expect(os.ReadFile(other)).To(BeEquivalentTo("5"))
		NewStore(filepath.Join(s.Dir(), "missing")).RememberOffset(6)
	})
})
