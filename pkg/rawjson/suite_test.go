package rawjson

import (
	"testing"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

func TestRawJSON(t *testing.T) {
	RegisterFailHandler(Fail)
	RunSpecs(t, "rawjson")
}
