package sysfs_test

import (
	"testing"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

func TestSysfs(t *testing.T) {
	RegisterFailHandler(Fail)
	RunSpecs(t, "sysfs")
}
