package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
)

// watch bounds what should take a moment.
const watch = time.Minute

// goBuild builds a program and gives its path, whose last part is name.
func goBuild(pkg, name, version string) string {
	GinkgoHelper()
	file := filepath.Join(GinkgoT().TempDir(), name)
	build := exec.Command("go", "build", "-o", file, "-ldflags", "-X main.version="+version, pkg)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	Expect(err).NotTo(HaveOccurred(), string(out))
	return file
}

var _ = Describe("install", Ordered, func() {
	var (
		companion, slow string
		plugins         [2]string
		dir             string
	)
	BeforeAll(func() {
		companion = goBuild(".", "rdma-cni", "v1")
		slow = goBuild("./testdata/slow", "rdma", "")
		for i := range plugins {
			plugins[i] = goBuild("../rdma", "rdma", fmt.Sprintf("v%d", i))
		}
	})
	BeforeEach(func() { dir = GinkgoT().TempDir() })

	// run executes a program and gives its exit code and what it says.
	run := func(program string, args ...string) (int, string) {
		GinkgoHelper()
		cmd := exec.Command(program, args...)
		out, err := cmd.CombinedOutput()
		Expect(cmd.ProcessState).NotTo(BeNil(), "%v", err)
		return cmd.ProcessState.ExitCode(), string(out)
	}
	temps := func() []string {
		list, _ := filepath.Glob(filepath.Join(dir, ".rdma-cni-install.*"))
		return list
	}

	DescribeTable("is what the program does under the names of others' entry points", func(name, form string) {
		entry := filepath.Join(GinkgoT().TempDir(), name)
		Expect(os.Symlink(companion, entry)).To(Succeed())
		args := []string{"--cni-bin-dir" + form + dir, "--rdma-cni-bin-file" + form + plugins[0], "--no-sleep"}
		code, out := run(entry, strings.Fields(strings.Join(args, " "))...)
		Expect(code).To(BeZero(), out)
		Expect(filepath.Join(dir, "rdma")).To(BeAnExistingFile())
		code, out = run(entry, "--help")
		Expect(code).To(BeZero())
		Expect(out).To(ContainSubstring("--no-sleep"))
		code, _ = run(entry, "-h")
		Expect(code).To(BeZero())
		code, out = run(entry, "--frob")
		Expect(code).To(Equal(codeUsage))
		Expect(out).To(ContainSubstring("--frob"))
	},
		Entry("upstream", "entrypoint.sh", "="),
		Entry("NVIDIA's fork", "entrypoint", " "),
	)

	DescribeTable("stays until it is told to end, and leaves the plugin", func(signal os.Signal) {
		cmd := exec.Command(companion, "install", "--cni-bin-dir", dir, "--rdma-cni-bin-file", plugins[0])
		stderr, err := cmd.StderrPipe()
		Expect(err).NotTo(HaveOccurred())
		Expect(cmd.Start()).To(Succeed())
		watchdog := time.AfterFunc(watch, func() { _ = cmd.Process.Kill() })
		line, err := bufio.NewReader(stderr).ReadString('\n')
		Expect(err).NotTo(HaveOccurred())
		Expect(line).To(ContainSubstring("waiting for TERM"))
		Expect(unix.Kill(cmd.Process.Pid, 0)).To(Succeed())
		Expect(cmd.Process.Signal(signal)).To(Succeed())
		Expect(cmd.Wait()).To(Succeed())
		Expect(watchdog.Stop()).To(BeTrue(), "it hung")
		Expect(filepath.Join(dir, "rdma")).To(BeAnExistingFile())
		code, out := run(companion, "install", "--check", "--cni-bin-dir", dir, "--rdma-cni-bin-file", plugins[0])
		Expect(code).To(BeZero(), out)
		code, _ = run(companion, "install", "--check", "--cni-bin-dir", dir, "--rdma-cni-bin-file", plugins[1])
		Expect(code).To(Equal(codeProblem))
	},
		Entry("TERM", unix.SIGTERM),
		Entry("INT", unix.SIGINT),
	)

	It("leaves the file of an installation that is at work, and removes that of one that was killed", func() {
		DeferCleanup(func() { _ = os.WriteFile(filepath.Join(dir, "go-on"), nil, 0o644) }) // ends the orphan
		first := exec.Command(companion, "install", "--no-sleep", "--cni-bin-dir", dir, "--rdma-cni-bin-file", slow)
		Expect(first.Start()).To(Succeed())
		Eventually(temps, watch).Should(HaveLen(1))
		temp := temps()[0]

		second := exec.Command(companion, "install", "--no-sleep", "--cni-bin-dir", dir, "--rdma-cni-bin-file", plugins[0])
		Expect(second.Start()).To(Succeed())
		Consistently(temps, "300ms").Should(ContainElement(temp))
		Expect(first.Process.Kill()).To(Succeed())
		_ = first.Wait()
		Expect(second.Wait()).To(Succeed())
		Expect(temps()).To(BeEmpty())
		code, out := run(companion, "install", "--check", "--cni-bin-dir", dir, "--rdma-cni-bin-file", plugins[0])
		Expect(code).To(BeZero(), out)
	})

	It("lets no execution of the plugin fail: 1000 of them, during 100 installations", func() {
		install := func(n int) error {
			out, err := exec.Command(companion, "install", "--no-sleep", "--cni-bin-dir", dir, "--rdma-cni-bin-file", plugins[n%2]).CombinedOutput()
			if err != nil {
				return fmt.Errorf("installation %d: %w: %s", n, err, out)
			}
			return nil
		}
		execute := func(n int) error {
			cmd := exec.Command(filepath.Join(dir, "rdma"))
			cmd.Env, cmd.Stdin = []string{"CNI_COMMAND=VERSION"}, strings.NewReader("{}")
			out, err := cmd.CombinedOutput()
			if err != nil || !bytes.Contains(out, []byte("supportedVersions")) {
				return fmt.Errorf("execution %d: %w: %s", n, err, out)
			}
			return nil
		}
		Expect(install(0)).To(Succeed())
		const installs, executions = 100, 1000
		var installed, executed atomic.Int32
		var failed atomic.Bool
		failures := make(chan error, 4)
		var workers sync.WaitGroup
		// Both go on until both are through, so that they overlap.
		loop := func(count *atomic.Int32, fn func(int) error) {
			workers.Go(func() {
				for !failed.Load() && (installed.Load() < installs || executed.Load() < executions) {
					if err := fn(int(count.Add(1))); err != nil {
						failed.Store(true)
						failures <- err
					}
				}
			})
		}
		for range 2 {
			loop(&installed, install)
			loop(&executed, execute)
		}
		workers.Wait()
		close(failures)
		for err := range failures {
			Expect(err).NotTo(HaveOccurred())
		}
		_, _ = fmt.Fprintf(GinkgoWriter, "%d installations, %d executions\n", installed.Load(), executed.Load())
		Expect(temps()).To(BeEmpty())
	})

	It("fails if its output cannot be written", func() {
		t := newTestApp()
		t.Out = failing{}
		Expect(t.exec("install", "--no-sleep", "--cni-bin-dir", dir, "--rdma-cni-bin-file", plugins[0])).To(Equal(codeProblem))
		_, _ = io.WriteString(GinkgoWriter, t.err.String())
	})

	It("is taken back when no attachment is recorded", func() {
		t := newTestApp()
		Expect(t.exec("install", "--no-sleep", "-o", "json", "--cni-bin-dir", dir, "--rdma-cni-bin-file", plugins[0])).To(BeZero())
		Expect(t.out.String()).To(And(ContainSubstring(`"action": "installed"`), ContainSubstring(`"sha256"`), ContainSubstring(`"1.1.0"`)))
		Expect(t.exec("install", "--uninstall", "--cni-bin-dir", dir)).To(Equal(codeProblem))
		Expect(t.err.String()).To(ContainSubstring(filepath.Join(t.dir, "run/cni")))
		Expect(os.MkdirAll(filepath.Join(t.dir, "run/cni"), 0o755)).To(Succeed())
		Expect(t.exec("install", "--uninstall", "--cni-bin-dir", dir)).To(BeZero(), t.err.String())
		Expect(filepath.Join(dir, "rdma")).NotTo(BeAnExistingFile())
	})
})
