package doctor

import (
	"testing"

	"github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

// Ginkgo by name, since its Fail is not the severity.
var (
	Describe, It         = ginkgo.Describe, ginkgo.It
	DescribeTable, Entry = ginkgo.DescribeTable, ginkgo.Entry
	GinkgoHelper         = ginkgo.GinkgoHelper
)

func TestDoctor(t *testing.T) {
	RegisterFailHandler(ginkgo.Fail)
	ginkgo.RunSpecs(t, "pkg/doctor")
}
