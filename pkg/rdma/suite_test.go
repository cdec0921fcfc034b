package rdma

import (
	"testing"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

func TestRDMA(t *testing.T) {
	RegisterFailHandler(Fail)
	RunSpecs(t, "rdma")
}
