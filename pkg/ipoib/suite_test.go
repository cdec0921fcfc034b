package ipoib

import (
	"testing"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

func TestIPoIB(t *testing.T) {
	RegisterFailHandler(Fail)
	RunSpecs(t, "pkg/ipoib")
}
