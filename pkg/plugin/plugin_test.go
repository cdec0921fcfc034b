package plugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errors.New("broken pipe") }

var _ = Describe("the plugin", func() {
	var (
		p              *Plugin
		stdout, stderr *bytes.Buffer
		args           call
	)

	BeforeEach(func() {
		dir := GinkgoT().TempDir()
		stdout, stderr = &bytes.Buffer{}, &bytes.Buffer{}
		p = &Plugin{
			Node: &attachment.Node{
				State:    state.NewStore(filepath.Join(dir, "state")),
				Upstream: state.Upstream{Dir: filepath.Join(dir, "upstream")},
				Sysfs:    sysfs.FS(filepath.Join(dir, "sys")),
			},
			Stdout: stdout, Stderr: stderr, Getenv: func(string) string { return "" },
		}
		args = call{containerID: "c1", ifName: "net1", netns: "/nonexistent", keys: keysOf([]byte(`{"cniVersion":"1.1.0","name":"roce"}`))}
	})

	codeOf := func(err error) uint {
		GinkgoHelper()
		var e *types.Error
		Expect(errors.As(err, &e)).To(BeTrue(), "%v", err)
		return e.Code
	}

	It("refuses an ADD that is first in its chain, and says where it belongs", func() {
		err := p.add(args)
		Expect(codeOf(err)).To(Equal(types.ErrInvalidNetworkConfig))
		Expect(err).To(MatchError(And(ContainSubstring("prevResult"), ContainSubstring("after the plugin"))))
	})

	It("refuses a CHECK without a prevResult, or with one of another interface or namespace", func() {
		Expect(codeOf(p.check(args))).To(Equal(types.ErrInvalidNetworkConfig))
		for _, i := range []string{`{"name":"net2","sandbox":"/nonexistent"}`, `{"name":"net1","sandbox":"/other"}`, `{"name":"net1"}`} {
			args.keys = keysOf([]byte(`{"cniVersion":"1.1.0","name":"roce","prevResult":{"cniVersion":"1.1.0","interfaces":[` + i + `]}}`))
			err := p.check(args)
			Expect(codeOf(err)).To(Equal(types.ErrInvalidNetworkConfig))
			Expect(err).To(MatchError(ContainSubstring("no interface net1")))
		}
	})

	DescribeTable("answers a bad configuration with one that names the key", func(verb func(*Plugin) func(call) error, want uint) {
		args.keys = keysOf([]byte(`{"cniVersion":"1.1.0","name":"roce","deviceID":5,"logFile":[]}`))
		err := verb(p)(args)
		Expect(codeOf(err)).To(Equal(want))
		Expect(err).To(MatchError(And(ContainSubstring("key deviceID must be a string, not 5"), ContainSubstring("key logFile"), Not(ContainSubstring("\n")))))
		Expect(stdout.String()).To(BeEmpty())
	},
		Entry("ADD", func(p *Plugin) func(call) error { return p.add }, types.ErrInvalidNetworkConfig),
		Entry("CHECK", func(p *Plugin) func(call) error { return p.check }, types.ErrInvalidNetworkConfig),
		Entry("GC", func(p *Plugin) func(call) error { return p.gc }, types.ErrInvalidNetworkConfig),
		Entry("STATUS", func(p *Plugin) func(call) error { return p.status }, types.ErrPluginNotAvailable),
	)

	It("has nothing to do for a DEL without record, whatever the configuration, and says what was wrong with that", func() {
		args.keys = keysOf([]byte(`{"cniVersion":"1.1.0","name":"roce","deviceID":5,"prevResult":"garbage"}`))
		Expect(p.del(args)).To(Succeed())
		Expect(stdout.String()).To(BeEmpty())
		Expect(stderr.String()).To(ContainSubstring("key deviceID must be a string, not 5"))
		Expect(p.Node.State.Dir()).NotTo(BeADirectory())
	})

	It("collects nothing when it is not told what is valid", func() {
		lock, err := p.Node.State.Lock(GinkgoT().Context(), time.Minute, "making the directory")
		Expect(err).NotTo(HaveOccurred())
		Expect(lock.Release()).To(Succeed())
		r := &state.Record{
			Phase: state.Attached, Key: state.Key{ContainerID: "c1", IfName: "net1"}, Network: "roce",
			Bus: sysfs.PCI, Function: "0000:3b:00.2", Devices: []state.Device{{Name: "mlx5_3", NameInPod: "mlx5_3"}},
		}
		Expect(p.Node.State.Save(r)).To(Succeed())

		Expect(p.gc(call{keys: args.keys})).To(Succeed())
		Expect(p.Node.State.Names()).To(HaveLen(1))
		Expect(stderr.String()).To(ContainSubstring(keyValid))

		By("nor what is valid, nor what is another network's")
		for _, stdin := range []string{
			`{"cniVersion":"1.1.0","name":"roce","cni.dev/valid-attachments":[{"containerID":"c1","ifname":"net1"}]}`,
			`{"cniVersion":"1.1.0","name":"other","cni.dev/valid-attachments":[]}`,
			`{"cniVersion":"1.1.0","name":"other","cni.dev/valid-attachments":null}`,
		} {
			Expect(p.gc(call{keys: keysOf([]byte(stdin))})).To(Succeed())
			Expect(p.Node.State.Names()).To(HaveLen(1), stdin)
		}

		By("but what is over: the function of this record does not exist")
		Expect(p.gc(call{keys: keysOf([]byte(`{"cniVersion":"1.1.0","name":"roce","cni.dev/valid-attachments":null}`))})).To(Succeed())
		Expect(p.Node.State.Names()).To(BeEmpty())
		Expect(stdout.String()).To(BeEmpty())
	})

	It("says 51 instead of 50 when shared mode opens the devices of attachments to all", func() {
		mode := &attachment.ModeError{Mode: rdma.Shared}
		Expect(p.statusCode(mode)).To(Equal(types.ErrPluginNotAvailable))
		Expect(os.MkdirAll(p.Node.State.Dir(), 0o700)).To(Succeed())
		Expect(os.WriteFile(filepath.Join(p.Node.State.Dir(), "c1@net1@0000:3b:00.2.json"), nil, 0o600)).To(Succeed())
		Expect(p.statusCode(mode)).To(Equal(types.ErrLimitedConnectivity))
		Expect(p.statusCode(rdma.ErrNoSubsystem)).To(Equal(types.ErrPluginNotAvailable))
	})

	It("prints an error as one JSON document with the version of the configuration", func() {
		p.cniVersion = "1.0.0"
		Expect(p.fail(types.NewError(7, "message", "details"))).To(Equal(1))
		Expect(stdout.String()).To(MatchJSON(`{"cniVersion":"1.0.0","code":7,"msg":"message","details":"details"}`))
		Expect(stdout.String()).To(HaveSuffix("}\n"))
	})

	It("tells stderr of an error that stdout does not take", func() {
		p.Stdout = brokenWriter{}
		Expect(p.fail(types.NewError(7, "message", ""))).To(Equal(1))
		Expect(stderr.String()).To(And(ContainSubstring("broken pipe"), ContainSubstring("message")))
	})

	It("makes an error document of a panic", func() {
		p.Stdin = strings.NewReader(`{"cniVersion":"1.1.0","name":"roce"}`)
		env := map[string]string{"CNI_COMMAND": "DEL", "CNI_CONTAINERID": "c1", "CNI_IFNAME": "net1", "CNI_PATH": "/x"}
		p.Getenv = func(key string) string { return env[key] }
		p.Node = nil // which no code expects
		Expect(p.Run()).To(Equal(1))
		var e types.Error
		Expect(json.Unmarshal(stdout.Bytes(), &e)).To(Succeed(), "one document: %s", stdout)
		Expect(e.Code).To(Equal(types.ErrInternal))
		Expect(e.Msg).To(ContainSubstring("please report it"))
		Expect(stderr.String()).To(ContainSubstring("del.go"), "the stack is for the report")
	})
})
