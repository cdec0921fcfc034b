package plugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
	"github.com/rdma-cni/rdma-cni/pkg/state"
)

// logDirectory is a directory below logRoot, which only root may make.
func logDirectory() string {
	GinkgoHelper()
	dir, err := os.MkdirTemp(logRoot, "rdma-cni-test-")
	if errors.Is(err, os.ErrPermission) || errors.Is(err, unix.EROFS) || errors.Is(err, os.ErrNotExist) {
		Skip("needs root to write below " + logRoot)
	}
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(os.RemoveAll, dir)
	return dir
}

// lines decodes a log; each line has to be one JSON object.
func lines(log string) []map[string]any {
	GinkgoHelper()
	var all []map[string]any
	for line := range strings.Lines(log) {
		Expect(line).To(HaveSuffix("\n"))
		var keys map[string]any
		Expect(json.Unmarshal([]byte(line), &keys)).To(Succeed(), line)
		all = append(all, keys)
	}
	return all
}

var _ = Describe("the log", func() {
	var (
		p              *Plugin
		stdout, stderr *bytes.Buffer
		env            map[string]string
		op             operation
	)

	BeforeEach(func() {
		stdout, stderr, env = &bytes.Buffer{}, &bytes.Buffer{}, map[string]string{}
		p = &Plugin{Version: "v1", Stdout: stdout, Stderr: stderr, Getenv: func(key string) string { return env[key] }}
		op = operation{
			begin: time.Now(), conf: config{name: "roce"},
			call: call{command: "ADD", containerID: "c1", ifName: "net1", netns: "/run/netns/blue", args: "K8S_POD_NAMESPACE=ns;K8S_POD_NAME=pod"},
		}
		DeferCleanup(func() { Expect(stdout.String()).To(BeEmpty(), "stdout belongs to the protocol") })
	})

	It("has one line for an operation that succeeded", func() {
		env["TRACEPARENT"] = "00-1-2-01"
		p.log(op, &attachment.Report{Function: "0000:3b:00.2", Devices: []state.Device{{
			Name: "mlx5_3", NameInPod: "mlx5_3", CharDevices: []string{"uverbs3"}, CharDevicesInPod: []string{"uverbs4"},
		}}}, nil)
		all := lines(stderr.String())
		Expect(all).To(HaveLen(1))
		delete(all[0], "time")
		Expect(all[0]).To(HaveKey("durationMs"))
		delete(all[0], "durationMs")
		Expect(all[0]).To(Equal(map[string]any{
			"level": "INFO", "msg": "ADD", "plugin": "rdma", "version": "v1", "command": "ADD", "network": "roce", "containerID": "c1",
			"ifname": "net1", "netns": "/run/netns/blue", "pod": "ns/pod", "traceparent": "00-1-2-01",
			"device": "0000:3b:00.2", "rdmaDevice": "mlx5_3", "before": "uverbs3", "after": "uverbs4",
		}))
	})

	It("has a line for each thing that is odd, before that of the operation", func() {
		p.log(op, &attachment.Report{Warnings: []string{"odd\nvery"}, Errors: []string{"wrong"}}, errors.New("a\nb"))
		var got [][2]any
		all := lines(stderr.String())
		for _, l := range all {
			got = append(got, [2]any{l["level"], l["msg"]})
			Expect(l).To(HaveKeyWithValue("containerID", "c1"))
		}
		Expect(got).To(Equal([][2]any{{"WARN", "odd; very"}, {"ERROR", "wrong"}, {"ERROR", "ADD"}}))
		Expect(all[2]).To(HaveKeyWithValue("error", "a; b"))
	})

	It("keeps its form whatever a pod is called", func() {
		op.call.args = "K8S_POD_NAME=\"}\n{\"level\":\"x\"\x00\xff;K8S_POD_NAMESPACE=\r\n"
		p.log(op, nil, nil)
		all := lines(stderr.String())
		Expect(all).To(HaveLen(1))
		Expect(all[0]).To(HaveKeyWithValue("level", "INFO"))
	})

	It("says no more than it was asked to", func() {
		op.conf.logLevel = slog.LevelError
		p.log(op, &attachment.Report{Warnings: []string{"odd"}}, nil)
		Expect(stderr.String()).To(BeEmpty())
		p.log(op, nil, errors.New("failed"))
		Expect(lines(stderr.String())).To(HaveLen(1))
	})

	It("is silent about a STATUS that is well, since it comes every few seconds", func() {
		op.call.command = "STATUS"
		p.log(op, nil, nil)
		Expect(stderr.String()).To(BeEmpty())
		op.conf.logLevel = slog.LevelDebug
		p.log(op, nil, nil)
		Expect(lines(stderr.String())).To(HaveLen(1))
	})

	It("goes to stderr when the file cannot be used", func() {
		op.conf.logFile = "/etc/rdma.log"
		p.log(op, nil, nil)
		first, rest, _ := strings.Cut(stderr.String(), "\n")
		Expect(first).To(And(ContainSubstring(`"/etc/rdma.log"`), ContainSubstring("not below /var/log")))
		Expect(lines(rest)).To(HaveLen(1))
	})

	It("goes to the file, one line after the other, and nowhere else", func() {
		op.conf.logFile = filepath.Join(logDirectory(), "rdma.log")
		p.log(op, nil, nil)
		p.log(op, nil, errors.New("failed"))
		text, err := os.ReadFile(op.conf.logFile)
		Expect(err).NotTo(HaveOccurred())
		Expect(lines(string(text))).To(HaveLen(2))
		Expect(stderr.String()).To(BeEmpty())
		info, err := os.Stat(op.conf.logFile)
		Expect(err).NotTo(HaveOccurred())
		Expect(info.Mode().Perm()&^0o640).To(BeZero(), "no business of other users")
	})
})

var _ = Describe("a log file", func() {
	DescribeTable("is refused outside /var/log", func(path string) {
		f, err := openLog(path)
		Expect(err).To(MatchError("it is not below /var/log"))
		Expect(f).To(BeNil())
	},
		Entry("elsewhere", "/etc/rdma.log"),
		Entry("in a directory that begins alike", "/var/logs/rdma.log"),
		Entry("by the way up", "/var/log/../../etc/rdma.log"),
		Entry("by the way up from below", "/var/log/a/../../rdma.log"),
		Entry("relative", "rdma.log"),
		Entry("relative by the way up", "../var/log/rdma.log"),
		Entry("the directory itself", "/var/log"),
		Entry("the directory itself with a slash", "/var/log/"),
		Entry("the directory above", "/var"),
		Entry("the root", "/"),
		Entry("/dev/stdout, which is the protocol's", "/dev/stdout"),
	)

	It("has its directory made, but only one level", func() {
		dir := logDirectory()
		Expect(os.Remove(dir)).To(Succeed())
		Expect(openLog(dir + "/a/rdma.log")).Error().To(MatchError(os.ErrNotExist))
		Expect(dir).NotTo(BeADirectory())
		f, err := openLog(dir + "/rdma.log")
		Expect(err).NotTo(HaveOccurred())
		Expect(f.Close()).To(Succeed())
	})

	It("is appended to", func() {
		path := logDirectory() + "/rdma.log"
		for range 2 {
			f, err := openLog(path)
			Expect(err).NotTo(HaveOccurred())
			_, err = f.WriteString("x\n")
			Expect(errors.Join(err, f.Close())).To(Succeed())
		}
		Expect(os.ReadFile(path)).To(BeEquivalentTo("x\nx\n"))
	})

	DescribeTable("is refused when it leads elsewhere", func(path func(dir, other string) string) {
		dir, other := logDirectory(), GinkgoT().TempDir()
		victim := other + "/victim"
		Expect(os.WriteFile(victim, []byte("precious"), 0o600)).To(Succeed())
		f, err := openLog(path(dir, other))
		Expect(err).To(HaveOccurred())
		Expect(f).To(BeNil())
		Expect(os.ReadFile(victim)).To(BeEquivalentTo("precious"))
		Expect(os.ReadDir(other)).To(HaveLen(1), "nothing may be made there")
	},
		Entry("a symbolic link", func(dir, other string) string {
			Expect(os.Symlink(other+"/victim", dir+"/rdma.log")).To(Succeed())
			return dir + "/rdma.log"
		}),
		Entry("a symbolic link to what does not exist", func(dir, other string) string {
			Expect(os.Symlink(other+"/new", dir+"/rdma.log")).To(Succeed())
			return dir + "/rdma.log"
		}),
		Entry("a symbolic link on the way", func(dir, other string) string {
			Expect(os.Symlink(other, dir+"/link")).To(Succeed())
			return dir + "/link/rdma.log"
		}),
		Entry("a symbolic link on the way to a directory that does not exist", func(dir, other string) string {
			Expect(os.Symlink(other, dir+"/link")).To(Succeed())
			return dir + "/link/new/rdma.log"
		}),
	)

	DescribeTable("is refused when it is no plain file of its own", func(make func(path string)) {
		path := logDirectory() + "/rdma.log"
		make(path)
		f, err := openLog(path)
		Expect(err).To(HaveOccurred())
		Expect(f).To(BeNil())
	},
		Entry("a directory", func(path string) { Expect(os.Mkdir(path, 0o755)).To(Succeed()) }),
		Entry("a FIFO that nobody reads, which must not block", func(path string) { Expect(unix.Mkfifo(path, 0o600)).To(Succeed()) }),
		Entry("a second name of another file", func(path string) {
			Expect(os.WriteFile(path+".other", []byte("precious"), 0o600)).To(Succeed())
			Expect(os.Link(path+".other", path)).To(Succeed())
		}),
	)
})
