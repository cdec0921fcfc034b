// Package release tests the files that make release makes, by other means than
// those that made them: sha256sum, tar, go version -m.
package release

import (
	"debug/elf"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

func TestRelease(t *testing.T) {
	RegisterFailHandler(Fail)
	RunSpecs(t, "test/release")
}

const version = "v1.2.3"

var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64, "ppc64le": elf.EM_PPC64, "s390x": elf.EM_S390}

func run(dir, name string, args ...string) string {
	GinkgoHelper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	Expect(err).NotTo(HaveOccurred(), "%s %s: %s", name, strings.Join(args, " "), out)
	return string(out)
}

// source is a copy of the repository in a folder of another name.
func source() string {
	GinkgoHelper()
	root, err := filepath.Abs("../..")
	Expect(err).NotTo(HaveOccurred())
	dir := filepath.Join(GinkgoT().TempDir(), "elsewhere")
	Expect(os.Mkdir(dir, 0o755)).To(Succeed())
	run(root, "sh", "-c", "git -c safe.directory='*' ls-files -z --cached --others --exclude-standard | tar -c --null --ignore-failed-read -T - | tar -x -C "+dir)
	return dir
}

// makeRelease gives the folder of a release's files.
func makeRelease(dir, umask string) string {
	GinkgoHelper()
	run(dir, "sh", "-c", "umask "+umask+" && make release VERSION="+version+" COMMIT=abc DATE=2026-01-02T03:04:05Z SOURCE_DATE_EPOCH=1700000000")
	return filepath.Join(dir, "build/release")
}

var _ = Describe("a release", Ordered, func() {
	var dir, files string
	BeforeAll(func() {
		dir = source()
		files = makeRelease(dir, "022")
	})

	It("is the same when it is made again, by somebody else, elsewhere", func() {
		first, err := os.ReadFile(filepath.Join(files, "SHA256SUMS"))
		Expect(err).NotTo(HaveOccurred())
		again, err := os.ReadFile(filepath.Join(makeRelease(source(), "077"), "SHA256SUMS"))
		Expect(err).NotTo(HaveOccurred())
		Expect(string(again)).To(Equal(string(first)))
	})

	It("has checksums of all its files", func() {
		Expect(strings.Count(run(files, "sha256sum", "--check", "--strict", "SHA256SUMS"), ": OK")).To(Equal(2 * len(machines)))
		list, err := os.ReadDir(files)
		Expect(err).NotTo(HaveOccurred())
		Expect(list).To(HaveLen(2*len(machines) + 1))
	})

	for arch, machine := range machines {
		It("has what "+arch+" needs", func() {
			name := "rdma-cni-" + version + "-linux-" + arch
			Expect(run(files, "tar", "-t", "-v", "-z", "-f", name+".tar.gz")).To(MatchRegexp(`(?m)^-rwxr-xr-x 0/0 .* %s/rdma-cni$`, name))
			unpacked := GinkgoT().TempDir()
			run(files, "tar", "-x", "-z", "-C", unpacked, "-f", name+".tar.gz")
			for _, file := range []string{"LICENSE", "README.md", "CHANGELOG.md", "docs/install.md", "docs/upgrade.md", "deployment/examples/sriov.yaml"} {
				Expect(filepath.Join(unpacked, name, file)).To(BeARegularFile())
			}
			var bom struct {
				BomFormat    string
				Components   []struct{ Type, Name, Version, Purl string }
				Dependencies []struct {
					Ref       string
					DependsOn []string
				}
			}
			text, err := os.ReadFile(filepath.Join(files, name+".cdx.json"))
			Expect(err).NotTo(HaveOccurred())
			Expect(json.Unmarshal(text, &bom)).To(Succeed())
			Expect(bom.BomFormat).To(Equal("CycloneDX"))
			for _, program := range []string{"rdma", "rdma-cni"} {
				file := filepath.Join(unpacked, name, program)
				f, err := elf.Open(file)
				Expect(err).NotTo(HaveOccurred())
				Expect(f.Machine).To(Equal(machine))
				Expect(f.Close()).To(Succeed())

				modules := []string{}
				for line := range strings.Lines(run(files, "go", "version", "-m", file)) {
					if word := strings.Fields(line); len(word) >= 3 && word[0] == "dep" {
						modules = append(modules, "pkg:golang/"+word[1]+"@"+word[2])
					}
				}
				Expect(modules).NotTo(BeEmpty())
				var named []string
				for _, d := range bom.Dependencies {
					if d.Ref == "program:"+program {
						named = d.DependsOn
					}
				}
				Expect(named).To(ConsistOf(append(modules, "pkg:golang/std@"+strings.TrimPrefix(strings.Fields(run(files, "go", "version", file))[1], "go"))))
				for _, ref := range named {
					Expect(bom.Components).To(ContainElement(HaveField("Purl", ref)))
				}
			}
		})
	}

	It("has programs that say its version", func() {
		unpacked := GinkgoT().TempDir()
		run(files, "sh", "-c", "tar -x -z -C "+unpacked+" -f *-$(go env GOHOSTARCH).tar.gz")
		run(unpacked, "sh", "-c", "./*/rdma -version | grep version:"+version+",")
		run(unpacked, "sh", "-c", "./*/rdma-cni --version | grep "+version)
	})
})

var _ = Describe("make image", func() {
	// tools is a PATH with nothing in it but what the script itself needs.
	tools := func() string {
		GinkgoHelper()
		dir := GinkgoT().TempDir()
		for _, tool := range []string{"sh", "date"} {
			path, err := exec.LookPath(tool)
			Expect(err).NotTo(HaveOccurred())
			Expect(os.Symlink(path, filepath.Join(dir, tool))).To(Succeed())
		}
		return dir
	}

	DescribeTable("says what is missing", func(engine, says string) {
		cmd := exec.Command("../../deployment/build/image.sh", "nowhere", "rdma-cni:test", "amd64")
		cmd.Env = []string{"PATH=" + tools(), "SOURCE_DATE_EPOCH=0", "VERSION=v1", "REVISION=abc", "ENGINE=" + engine}
		out, err := cmd.CombinedOutput()
		Expect(err).To(HaveOccurred())
		Expect(string(out)).To(ContainSubstring(says))
	},
		Entry("nothing to build with", "", "apt-get install buildah"),
		Entry("not the one asked for", "podman", "ENGINE=podman: it is not installed"),
	)
})
