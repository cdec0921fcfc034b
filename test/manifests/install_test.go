package manifests

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
)

// The container's command and probes, run as they stand by the real companion.
// Only what the image and the node have elsewhere is replaced.
var _ = Describe("the installing container", Ordered, func() {
	var companion, plugin string
	BeforeAll(func() {
		dir := GinkgoT().TempDir()
		companion, plugin = filepath.Join(dir, "rdma-cni"), filepath.Join(dir, "rdma")
		build := exec.Command("go", "build", "-o", dir+"/", "../../cmd/rdma", "../../cmd/rdma-cni")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		out, err := build.CombinedOutput()
		Expect(err).NotTo(HaveOccurred(), "%s", out)
	})

	for name := range systems {
		It("does what its manifest expects: "+name, func() {
			c := one[*appsv1.DaemonSet](build(filepath.Join(deployment, name)), "DaemonSet").Spec.Template.Spec.Containers[0]
			node := GinkgoT().TempDir()
			run := func(command []string, more ...string) (int, string) {
				GinkgoHelper()
				Expect(command[0]).To(Equal("/usr/bin/rdma-cni"), "the companion's place in the image")
				args := slices.Concat(command[1:], more, []string{"--rdma-cni-bin-file=" + plugin})
				for i := range args {
					args[i] = strings.Replace(args[i], c.VolumeMounts[0].MountPath, node, 1)
				}
				cmd := exec.Command(companion, args...)
				out, err := cmd.CombinedOutput()
				if cmd.ProcessState == nil {
					Expect(err).NotTo(HaveOccurred())
				}
				return cmd.ProcessState.ExitCode(), string(out)
			}
			probe := c.ReadinessProbe.Exec.Command

			code, out := run(probe)
			Expect(code).To(Equal(1), "nothing is installed: %s", out)
			code, out = run(slices.Concat(c.Command, c.Args), "--no-sleep") // or it would stay
			Expect(code).To(BeZero(), out)
			Expect(filepath.Join(node, "rdma")).To(BeARegularFile(), "the name of the plugin")
			code, out = run(probe)
			Expect(code).To(BeZero(), out)
		})
	}
})
