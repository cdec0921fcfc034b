package e2e

import (
	"debug/elf"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

const (
	imageContext = "/bed/image"
	imageName    = "localhost/rdma-cni:v1.2.3"
)

// buildImage builds the image as make image does, and gives the digests of the
// list's images.
func buildImage(engine string, arches ...string) []string {
	GinkgoHelper()
	cmd := exec.Command("sh", append([]string{imageContext + "/image.sh", imageContext, imageName}, arches...)...)
	cmd.Env = append(os.Environ(), "ENGINE="+engine, "VERSION=v1.2.3", "REVISION=abc", "SOURCE_DATE_EPOCH=1700000000")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	Expect(err).NotTo(HaveOccurred(), "%s%s", out, stderr.String())
	var digests []string
	for line := range strings.Lines(string(out)) {
		if strings.HasPrefix(line, "sha256:") {
			digests = append(digests, strings.TrimSpace(line))
		}
	}
	Expect(digests).To(HaveLen(len(arches)), string(out))
	return digests
}

// installer runs the image with the rights that it needs and no more, and
// gives its exit code and what it says.
func installer(args ...string) (int, string) {
	GinkgoHelper()
	restricted := []string{"run", "--rm", "--network", "none", "--read-only", "--read-only-tmpfs=false", "--cap-drop", "all", "--security-opt", "no-new-privileges"}
	cmd := exec.Command("podman", append(restricted, args...)...)
	out, err := cmd.CombinedOutput()
	Expect(cmd.ProcessState).NotTo(BeNil(), "%v", err)
	return cmd.ProcessState.ExitCode(), string(out)
}

// mountImage gives the root file system of an image.
func mountImage(image string) string {
	GinkgoHelper()
	DeferCleanup(func() { podman("image", "unmount", image) })
	return strings.TrimSpace(podman("image", "mount", image))
}

func machineOf(file string) elf.Machine {
	GinkgoHelper()
	f, err := elf.Open(file)
	Expect(err).NotTo(HaveOccurred())
	defer f.Close()
	return f.Machine
}

var _ = Describe("the image", Label(withPodman, "image"), Ordered, func() {
	var bin, mount string
	var digests []string
	BeforeAll(func() {
		setUpPodman()
		digests = buildImage("podman", "amd64", "arm64")
	})
	BeforeEach(func() {
		bin = GinkgoT().TempDir()
		mount = bin + ":/host/opt/cni/bin"
	})
	version := func() string {
		GinkgoHelper()
		cmd := exec.Command(filepath.Join(bin, "rdma"))
		cmd.Env, cmd.Stdin = []string{"CNI_COMMAND=VERSION"}, strings.NewReader(`{"cniVersion": "1.0.0"}`)
		out, err := cmd.CombinedOutput()
		Expect(err).NotTo(HaveOccurred(), string(out))
		return string(out)
	}

	It("has the same digest when it is built again", func() {
		Expect(digests[0]).NotTo(Equal(digests[1]))
		podman("manifest", "rm", imageName)
		Expect(filepath.Walk(imageContext, func(path string, info os.FileInfo, err error) error {
			if err != nil || info.Mode()&os.ModeSymlink != 0 {
				return err
			}
			return os.Chtimes(path, time.Now(), time.Now())
		})).To(Succeed())
		Expect(buildImage("podman", "amd64", "arm64")).To(Equal(digests))
		// Of the same version in Debian 12, so that it can be compared.
		Expect(buildImage("buildah", "arm64", "amd64")).To(ConsistOf(digests))
	})

	It("contains the programs, their licence, and nothing else", func() {
		root := mountImage(imageName)
		Expect(strings.Fields(run("sh", "-c", "cd "+root+" && find . ! -type d | sort"))).To(Equal(
			[]string{"./entrypoint", "./entrypoint.sh", "./licenses/LICENSE", "./usr/bin/rdma", "./usr/bin/rdma-cni"}))
		Expect(os.Readlink(root + "/entrypoint.sh")).To(Equal("/usr/bin/rdma-cni"))

		var inspected []struct {
			Architecture string
			Config       struct {
				User       string
				Entrypoint []string
				Cmd        []string
				Labels     map[string]string
			}
		}
		Expect(json.Unmarshal([]byte(podman("image", "inspect", imageName)), &inspected)).To(Succeed())
		Expect(inspected).To(HaveLen(1))
		image := inspected[0]
		Expect(image.Architecture).To(Equal("amd64"))
		Expect(image.Config.Entrypoint).To(Equal([]string{"/entrypoint.sh"}))
		Expect(image.Config.Cmd).To(BeEmpty())
		Expect(image.Config.User).To(Equal("0:0"))
		Expect(image.Config.Labels).To(And(
			HaveKeyWithValue("org.opencontainers.image.version", "v1.2.3"), HaveKeyWithValue("org.opencontainers.image.revision", "abc"),
			HaveKeyWithValue("org.opencontainers.image.created", "2023-11-14T22:13:20Z"), HaveKeyWithValue("org.opencontainers.image.licenses", "Apache-2.0"),
			HaveKey("org.opencontainers.image.title"), HaveKey("org.opencontainers.image.source")))
	})

	It("has programs for the architecture that it is for", func() {
		machines := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64, "ppc64le": elf.EM_PPC64, "s390x": elf.EM_S390}
		for arch, machine := range machines {
			for _, program := range []string{"rdma", "rdma-cni"} {
				Expect(machineOf(filepath.Join(imageContext, "linux", arch, "usr/bin", program))).To(Equal(machine), arch)
			}
		}
		// Those of the list, by their digests.
		var list struct {
			Manifests []struct {
				Digest   string
				Platform struct{ Architecture string }
			}
		}
		Expect(json.Unmarshal([]byte(podman("manifest", "inspect", imageName)), &list)).To(Succeed())
		Expect(list.Manifests).To(HaveLen(2))
		ids := map[string]string{}
		for line := range strings.Lines(podman("images", "--format", "{{.Digest}} {{.ID}}")) {
			digest, id, _ := strings.Cut(strings.TrimSpace(line), " ")
			ids[digest] = id
		}
		for _, m := range list.Manifests {
			root := mountImage(ids[m.Digest])
			for _, program := range []string{"rdma", "rdma-cni"} {
				Expect(machineOf(root + "/usr/bin/" + program)).To(Equal(machines[m.Platform.Architecture]))
			}
		}
	})

	It("installs the plugin without any capability, and ends", func() {
		code, out := installer("-v", mount, imageName, "--no-sleep")
		Expect(code).To(BeZero(), out)
		Expect(out).To(ContainSubstring("installed"))
		Expect(version()).To(ContainSubstring(`"1.1.0"`))
		Expect(filepath.Glob(bin + "/*")).To(Equal([]string{bin + "/rdma"}))
		Expect(filepath.Glob(bin + "/.*")).To(BeEmpty())
		code, out = installer("-v", mount, imageName, "--no-sleep")
		Expect(code).To(BeZero(), out)
		Expect(out).To(ContainSubstring("unchanged"))
	})

	It("stays as the container's first process, answers the probe, and ends with TERM", func() {
		id := strings.TrimSpace(podman("run", "-d", "--network", "none", "--read-only", "--cap-drop", "all", "-v", mount, imageName))
		DeferCleanup(func() { _ = exec.Command("podman", "rm", "-f", "-t", "0", id).Run() })
		Eventually(func() string { return podman("logs", id) }, patience).Should(ContainSubstring("installed"))
		probe := func() error {
			return exec.Command("podman", "exec", id, "/usr/bin/rdma-cni", "install", "--check").Run()
		}
		Expect(probe()).To(Succeed())
		Expect(os.Truncate(bin+"/rdma", 1000)).To(Succeed())
		Expect(probe()).NotTo(Succeed())
		podman("stop", "-t", "100", id)
		Expect(strings.TrimSpace(podman("inspect", "-f", "{{.State.ExitCode}}", id))).To(Equal("0"), "it was killed")
		Expect(bin + "/rdma").To(BeAnExistingFile())
		code, out := installer("-v", mount, imageName, "--no-sleep")
		Expect(code).To(BeZero(), out)
		Expect(version()).To(ContainSubstring(`"1.1.0"`))
	})

	DescribeTable("says what is wrong, changes nothing, and fails", func(want int, says string, args func() []string) {
		code, out := installer(args()...)
		Expect(code).To(Equal(want), out)
		Expect(out).To(ContainSubstring(says))
		Expect(filepath.Glob(bin + "/*")).To(BeEmpty())
	},
		Entry("no mount", 1, "mount the node's CNI directory at /host/opt/cni/bin", func() []string { return []string{imageName, "--no-sleep"} }),
		Entry("a read-only mount", 1, "/host/opt/cni/bin is read-only", func() []string { return []string{"-v", mount + ":ro", imageName, "--no-sleep"} }),
		Entry("another user", 1, "run the installer as root", func() []string { return []string{"-v", mount, "--user", "1000", imageName, "--no-sleep"} }),
		Entry("a plugin for arm64", 1, "EM_AARCH64", func() []string {
			return []string{"-v", mount, "-v", imageContext + "/linux/arm64/usr/bin/rdma:/arm64/rdma", imageName, "--no-sleep", "--rdma-cni-bin-file=/arm64/rdma"}
		}),
		Entry("an unknown flag", 2, "--frob", func() []string { return []string{imageName, "--frob"} }),
	)

	It("takes the plugin back when it sees that no attachment is recorded", func() {
		code, out := installer("-v", mount, imageName, "--no-sleep")
		Expect(code).To(BeZero(), out)
		code, out = installer("-v", mount, imageName, "--uninstall")
		Expect(code).To(Equal(1), out)
		Expect(out).To(ContainSubstring("mount the node's /run/cni"))
		Expect(bin + "/rdma").To(BeAnExistingFile())
		run("mkdir", "-p", "/run/cni")
		code, out = installer("-v", mount, "-v", "/run/cni:/run/cni", imageName, "--uninstall")
		Expect(code).To(BeZero(), out)
		Expect(filepath.Glob(bin + "/*")).To(BeEmpty())
	})
})
