package e2e

import (
	"fmt"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
)

// kernelRelease is the version of the running kernel, e.g. 6, 1.
func kernelRelease() (major, minor int) {
	GinkgoHelper()
	var name unix.Utsname
	Expect(unix.Uname(&name)).To(Succeed())
	_, err := fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &major, &minor)
	Expect(err).NotTo(HaveOccurred())
	return major, minor
}

// namesPerNamespace tells whether RDMA device names are unique in a namespace
// only.
func namesPerNamespace() bool {
	major, minor := kernelRelease()
	return major > 7 || major == 7 && minor >= 3
}

// namesPerPod skips a spec about names that are unique in a namespace only.
func namesPerPod() {
	GinkgoHelper()
	if !namesPerNamespace() {
		Skip("before kernel 7.3 names are unique on the node; run on 7.3")
	}
}

// uniqueNames skips a spec about names that are unique on the node.
func uniqueNames() {
	GinkgoHelper()
	if namesPerNamespace() {
		Skip("from kernel 7.3 on names are unique in a namespace only; run on 6.1 and 6.12")
	}
}
