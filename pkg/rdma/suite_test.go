package rdma

import (
	"fmt"
	"os"
	"testing"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

func TestRDMA(t *testing.T) {
	RegisterFailHandler(Fail)
	RunSpecs(t, "rdma")
}

// envFirstThread makes this test binary the process that firstThread needs.
const envFirstThread = "RDMA_TEST_FIRST_THREAD"

func TestMain(m *testing.M) {
	if os.Getenv(envFirstThread) == "" {
		os.Exit(m.Run())
	}
	if err := firstThread(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
