package e2e

import (
	"fmt"
	"os"
	"slices"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
)

// kernelSpec labels specs of behaviour that depends on the kernel. They run on
// each kernel of the matrix, all others on the first one only.
const kernelSpec = "kernel"

// matrixVariable names the environment variable with the kernels on which
// these tests are run, as the Makefile lists them.
const matrixVariable = "KERNELS"

func matrix() []string { return strings.Fields(os.Getenv(matrixVariable)) }

// release is the running kernel, as uname -r.
func release() string {
	GinkgoHelper()
	var u unix.Utsname
	Expect(unix.Uname(&u)).To(Succeed())
	return unix.ByteSliceToString(u.Release[:])
}

// onKernel tells whether the running kernel is one of those named, such as 7.3.
func onKernel(names ...string) bool {
	GinkgoHelper()
	r := release()
	return slices.ContainsFunc(names, func(n string) bool { return strings.HasPrefix(r, n+".") })
}

const skipped = "this kernel cannot run it: "

// needKernel skips a spec that cannot run on this kernel. It fails it if nothing
// would ever lift the skip: no kernel of the matrix can run it, or the runs on
// the other ones leave it out.
func needKernel(why string, able ...string) {
	GinkgoHelper()
	if reason, err := skipReason(release(), matrix(), CurrentSpecReport().Labels(), why, able); err != nil {
		Fail(err.Error())
	} else if reason != "" {
		Skip(reason)
	}
}

// namesPerPod skips a spec about names that are unique in a namespace only.
func namesPerPod() {
	GinkgoHelper()
	needKernel("up to 7.2 RDMA device names are unique over all namespaces", "7.3")
}

// uniqueNames skips a spec about names that are unique on the node.
func uniqueNames() {
	GinkgoHelper()
	needKernel("from 7.3 on RDMA device names are unique in a namespace only", "6.1", "6.12")
}

func skipReason(release string, matrix, labels []string, why string, able []string) (reason string, err error) {
	if slices.ContainsFunc(able, func(n string) bool { return strings.HasPrefix(release, n+".") }) {
		return "", nil
	}
	if !slices.ContainsFunc(able, func(n string) bool { return slices.Contains(matrix, n) }) {
		return "", fmt.Errorf("no kernel of the matrix (%s) would lift this skip: %s; able are %s", strings.Join(matrix, ", "), why, strings.Join(able, ", "))
	}
	if !slices.Contains(labels, kernelSpec) {
		return "", fmt.Errorf("the spec lacks the label %q, so the runs on %s leave it out", kernelSpec, strings.Join(able, ", "))
	}
	return skipped + why + "; able are " + strings.Join(able, ", "), nil
}

// No skip is silent, and none is allowed but those of needKernel.
var _ = ReportAfterSuite("skips", func(report Report) {
	for _, s := range report.SpecReports {
		if s.State != types.SpecStateSkipped || s.Failure.Message == "" {
			continue // without a message it was left out by a filter
		}
		fmt.Printf("skipped: %s: %s\n", s.FullText(), s.Failure.Message)
		if !strings.HasPrefix(s.Failure.Message, skipped) {
			Fail("a spec is skipped without naming the kernels that can run it: " + s.FullText())
		}
	}
})

var _ = Describe("a skip", func() {
	DescribeTable("is lifted by a kernel of the matrix, or fails", func(matrix, labels string, able string, want string) {
		reason, err := skipReason("6.1.0-57-amd64", strings.Fields(matrix), strings.Fields(labels), "because", strings.Fields(able))
		if want == "error" {
			Expect(err).To(MatchError(ContainSubstring("because")))
			return
		}
		if want == "label" {
			Expect(err).To(MatchError(ContainSubstring(kernelSpec)))
			return
		}
		Expect(err).NotTo(HaveOccurred())
		if want == "" {
			Expect(reason).To(BeEmpty())
		} else {
			Expect(reason).To(ContainSubstring(want))
		}
	},
		Entry("this kernel can", "6.1 7.3", "", "6.1", ""),
		Entry("6.1 is not 6.12", "6.1 6.12", kernelSpec, "6.12", "because"),
		Entry("another of the matrix can", "6.1 7.3", kernelSpec, "7.3", "7.3"),
		Entry("none of the matrix can", "6.1 6.12", kernelSpec, "7.3", "error"),
		Entry("another can, but its run leaves the spec out", "6.1 7.3", "", "7.3", "label"),
	)
})
