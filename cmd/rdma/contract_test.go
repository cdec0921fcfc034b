package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	cniversion "github.com/containernetworking/cni/pkg/version"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/plugin"
	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
)

// env is a complete environment of one call. No function of this address
// exists, so no spec can move a device, whatever machine it runs on.
func env(command string, changes ...string) map[string]string {
	e := map[string]string{
		"CNI_COMMAND": command, "CNI_CONTAINERID": "test-c1", "CNI_NETNS": "/nonexistent/netns", "CNI_IFNAME": "net1", "CNI_PATH": "/opt/cni/bin",
	}
	switch command {
	case "GC", "STATUS", "VERSION":
		e = map[string]string{"CNI_COMMAND": command, "CNI_PATH": "/opt/cni/bin"}
	}
	for _, c := range changes {
		key, value, _ := strings.Cut(c, "=")
		e[key] = value
	}
	return e
}

const missing = "ffff:ff:1f.7"

// result is a prevResult for versions from 1.0.0 on.
const result = `{"cniVersion":"1.1.0","interfaces":[{"name":"net1","mac":"02:00:00:00:00:01","sandbox":"/nonexistent/netns"}]}`

// conf is a complete configuration, with changes as JSON members that override it.
func conf(members ...string) string {
	keys := map[string]json.RawMessage{}
	for _, m := range append([]string{`"cniVersion":"1.1.0","name":"test-roce","type":"rdma","deviceID":"` + missing + `","prevResult":` + result}, members...) {
		Expect(json.Unmarshal([]byte("{"+m+"}"), &keys)).To(Succeed(), m)
	}
	text, err := json.Marshal(keys)
	Expect(err).NotTo(HaveOccurred())
	return string(text)
}

func without(key string) string {
	keys := map[string]json.RawMessage{}
	Expect(json.Unmarshal([]byte(conf()), &keys)).To(Succeed())
	delete(keys, key)
	text, err := json.Marshal(keys)
	Expect(err).NotTo(HaveOccurred())
	return string(text)
}

type outcome struct {
	status         int
	stdout, stderr string
}

// call runs the plugin with nothing but the given environment.
func call(env map[string]string, stdin string, prepare ...func(*exec.Cmd)) outcome {
	GinkgoHelper()
	cmd := exec.Command(binary)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.Env = strings.NewReader(stdin), &stdout, &stderr, []string{}
	for key, value := range env {
		cmd.Env = append(cmd.Env, key+"="+value)
	}
	for _, p := range prepare {
		p(cmd)
	}
	Expect(cmd.Start()).To(Succeed())
	// A plugin that hangs must not hang the specs.
	watchdog := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
	err := cmd.Wait()
	Expect(watchdog.Stop()).To(BeTrue(), "the plugin hung")
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		Expect(err).NotTo(HaveOccurred())
	}
	Expect(cmd.ProcessState.Exited()).To(BeTrue(), "killed: %s", cmd.ProcessState)
	Expect(stderr.String()).NotTo(ContainSubstring("goroutine "), "a panic")
	return outcome{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

// failure is the one error document of a call that failed.
func (o outcome) failure() types.Error {
	GinkgoHelper()
	Expect(o.status).NotTo(BeZero())
	decoder := json.NewDecoder(strings.NewReader(o.stdout))
	decoder.DisallowUnknownFields()
	var e struct {
		CNIVersion string `json:"cniVersion"`
		types.Error
	}
	Expect(decoder.Decode(&e)).To(Succeed(), "stdout: %q", o.stdout)
	Expect(decoder.Decode(&struct{}{})).To(MatchError(io.EOF), "more than one document: %q", o.stdout)
	Expect(e.Code).NotTo(BeZero())
	Expect(e.Msg).NotTo(BeEmpty())
	Expect(e.Msg).NotTo(ContainSubstring("\n"))
	return e.Error
}

func (o outcome) expectSilentSuccess() {
	GinkgoHelper()
	Expect(o.status).To(BeZero(), o.stdout)
	Expect(o.stdout).To(BeEmpty())
	for line := range strings.Lines(o.stderr) {
		Expect(json.Valid([]byte(line))).To(BeTrue(), "%q", line)
	}
}

// hasRDMA tells whether this machine could serve an ADD as far as its kernel goes.
func hasRDMA() bool {
	c, err := rdma.Open()
	if err != nil {
		return false
	}
	_ = c.Close()
	return true
}

var _ = Describe("the plugin's contract", func() {
	// No spec changes the state directory; a machine in use has records there.
	var before []state.Name
	BeforeEach(func() {
		before, _ = state.NewStore(state.DefaultDir).Names()
		DeferCleanup(func() {
			after, _ := state.NewStore(state.DefaultDir).Names()
			Expect(after).To(Equal(before))
		})
	})

	It("answers VERSION with all versions of the library", func() {
		for _, stdin := range []string{`{"cniVersion":"1.0.0"}`, "", "garbage"} {
			o := call(env("VERSION"), stdin)
			Expect(o.status).To(BeZero())
			var v struct {
				CNIVersion        string   `json:"cniVersion"`
				SupportedVersions []string `json:"supportedVersions"`
			}
			Expect(json.Unmarshal([]byte(o.stdout), &v)).To(Succeed())
			Expect(v.CNIVersion).To(Equal(cniversion.Current()))
			Expect(v.SupportedVersions).To(Equal(cniversion.All.SupportedVersions()))
		}
	})

	It("introduces itself when no runtime calls it", func() {
		o := call(nil, "")
		Expect(o.status).To(BeZero())
		Expect(o.stdout).To(BeEmpty())
		Expect(o.stderr).To(And(ContainSubstring("CNI plugin rdma v1.2.3"), ContainSubstring("0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0")))
	})

	DescribeTable("prints its version for", func(arg string) {
		o := call(env("ADD"), conf(), func(c *exec.Cmd) { c.Args = append(c.Args, arg) })
		Expect(o).To(Equal(outcome{stdout: "rdma-cni cni version:v1.2.3, commit:abc, date:today\n"}))
	}, Entry(nil, "-v"), Entry(nil, "--v"), Entry(nil, "-version"), Entry(nil, "--version"), Entry(nil, "version"))

	It("explains itself for any other argument", func() {
		o := call(env("ADD"), conf(), func(c *exec.Cmd) { c.Args = append(c.Args, "--help") })
		Expect(o.status).To(Equal(2))
		Expect(o.stdout).To(BeEmpty())
		Expect(o.stderr).To(ContainSubstring("CNI plugin"))
	})

	DescribeTable("names what is wrong with the environment", func(command string, text string, changes ...string) {
		o := call(env(command, changes...), conf())
		e := o.failure()
		Expect(e.Code).To(Equal(types.ErrInvalidEnvironmentVariables))
		Expect(e.Msg + e.Details).To(ContainSubstring(text))
	},
		Entry("an unknown command", "FLY", "FLY"),
		Entry("ADD without container", "ADD", "CNI_CONTAINERID", "CNI_CONTAINERID="),
		Entry("ADD without namespace", "ADD", "CNI_NETNS", "CNI_NETNS="),
		Entry("ADD without interface", "ADD", "CNI_IFNAME", "CNI_IFNAME="),
		Entry("ADD without path", "ADD", "CNI_PATH", "CNI_PATH="),
		Entry("ADD with a container that is a path", "ADD", "../../etc", "CNI_CONTAINERID=../../etc"),
		Entry("ADD with an interface that is a path", "ADD", "interface name", "CNI_IFNAME=a/b"),
		Entry("ADD with an interface name too long", "ADD", "at most 15 characters", "CNI_IFNAME=0123456789abcdef"),
		Entry("CHECK without namespace", "CHECK", "CNI_NETNS", "CNI_NETNS="),
		Entry("DEL without container", "DEL", "CNI_CONTAINERID", "CNI_CONTAINERID="),
		Entry("DEL without interface", "DEL", "CNI_IFNAME", "CNI_IFNAME="),
		Entry("GC without path", "GC", "CNI_PATH", "CNI_PATH="),
		Entry("STATUS without path", "STATUS", "CNI_PATH", "CNI_PATH="),
	)

	for _, command := range []string{"ADD", "CHECK", "DEL", "GC", "STATUS"} {
		DescribeTable(command+" answers a bad stdin with one error", func(want uint, stdin func() string) {
			Expect(call(env(command), stdin()).failure().Code).To(Equal(want))
		},
			Entry("empty", types.ErrDecodingFailure, func() string { return "" }),
			Entry("malformed", types.ErrDecodingFailure, func() string { return conf()[1:] }),
			Entry("cut short", types.ErrDecodingFailure, func() string { return conf()[:40] }),
			Entry("a list", types.ErrDecodingFailure, func() string { return "[" + conf() + "]" }),
			Entry("two documents", types.ErrDecodingFailure, func() string { return conf() + conf() }),
			Entry("binary", types.ErrDecodingFailure, func() string { return "\x7fELF\x00\xff" }),
			Entry("null", types.ErrInvalidNetworkConfig, func() string { return "null" }),
			Entry("no name", types.ErrInvalidNetworkConfig, func() string { return without("name") }),
			Entry("a name that is a path", types.ErrInvalidNetworkConfig, func() string { return conf(`"name":"../../etc"`) }),
			Entry("a name of another type", types.ErrDecodingFailure, func() string { return conf(`"name":5`) }),
			Entry("a version of another type", types.ErrDecodingFailure, func() string { return conf(`"cniVersion":1.1`) }),
			Entry("a version that does not exist", types.ErrIncompatibleCNIVersion, func() string { return conf(`"cniVersion":"9.9.9"`) }),
		)
	}

	for _, command := range []string{"ADD", "CHECK"} {
		DescribeTable(command+" names what is wrong with the configuration", func(text string, members ...string) {
			e := call(env(command), conf(members...)).failure()
			Expect(e.Code).To(Equal(types.ErrInvalidNetworkConfig))
			Expect(e.Msg).To(ContainSubstring(text))
		},
			Entry("deviceID a number", "key deviceID must be a string, not 5", `"deviceID":5`),
			Entry("deviceID a list", "key deviceID must be a string, not []", `"deviceID":[]`),
			Entry("pciBusID an object", "key pciBusID must be a string, not {}", `"pciBusID":{}`),
			Entry("runtimeConfig a string", `key runtimeConfig must be an object, not "x"`, `"runtimeConfig":"x"`),
			Entry("runtimeConfig.deviceID a number", "runtimeConfig.deviceID", `"runtimeConfig":{"deviceID":5}`),
			Entry("logLevel a number", "key logLevel must be a string, not 5", `"logLevel":5`),
			Entry("logFile a bool", "key logFile must be a string, not true", `"logFile":true`),
			Entry("prevResult a string", `key prevResult must be an object, not "x"`, `"prevResult":"x"`),
			Entry("prevResult a list", "key prevResult must be an object, not []", `"prevResult":[]`),
			Entry("prevResult of a newer version", "prevResult is no result of CNI version 1.1.0", `"prevResult":{"cniVersion":"2.0.0"}`),
			Entry("prevResult null", "prevResult", `"prevResult":null`),
			Entry("deviceID with a slash", "key deviceID", `"deviceID":"a/b"`),
			Entry("deviceID with two dots", "key deviceID", `"deviceID":"../../../etc"`),
			Entry("deviceID with a blank", "key deviceID", `"deviceID":"0000:3b:00.2 "`),
			Entry("deviceID with a newline", "key deviceID", `"deviceID":"0000:3b:00.2\n"`),
			Entry("deviceID of 300 characters", "too long", `"deviceID":"`+strings.Repeat("a", 300)+`"`),
			Entry("deviceID and pciBusID differ", "name different devices", `"pciBusID":"ffff:ff:1f.6"`),
			Entry("deviceID and runtimeConfig differ", "name different devices", `"runtimeConfig":{"deviceID":"ffff:ff:1f.6"}`),
			Entry("a list of valid attachments of another type", "cni.dev/valid-attachments", `"cni.dev/valid-attachments":5`),
		)
	}

	It("names the missing prevResult of an ADD, in each version", func() {
		for _, v := range cniversion.All.SupportedVersions() {
			o := call(env("ADD"), strings.Replace(without("prevResult"), `"1.1.0"`, fmt.Sprintf("%q", v), 1))
			Expect(o.failure().Msg).To(ContainSubstring("no prevResult"))
			var e struct{ CNIVersion string }
			Expect(json.Unmarshal([]byte(o.stdout), &e)).To(Succeed())
			Expect(e.CNIVersion).To(Equal(v))
		}
	})

	DescribeTable("refuses an ADD", func(namespace func() string, code uint, text string) {
		e := call(env("ADD", "CNI_NETNS="+namespace()), conf()).failure()
		if !hasRDMA() {
			Expect(e.Code).To(Equal(plugin.CodeUnavailable))
			Expect(e.Msg).To(ContainSubstring("ib_core"))
			return
		}
		Expect(e.Code).To(BeElementOf(code, plugin.CodeUnavailable), "or shared mode, which is found first")
		if e.Code == code {
			Expect(e.Msg).To(ContainSubstring(text))
		}
	},
		Entry("to a namespace that does not exist", func() string { return "/nonexistent/netns" }, types.ErrInvalidNetNS, "no such file"),
		Entry("to a directory", func() string { return GinkgoT().TempDir() }, types.ErrInvalidNetNS, "not a network namespace"),
		Entry("to a regular file", func() string { return binary }, types.ErrInvalidNetNS, "not a network namespace"),
		Entry("to a FIFO", func() string {
			path := filepath.Join(GinkgoT().TempDir(), "netns")
			Expect(unix.Mkfifo(path, 0o600)).To(Succeed())
			return path
		}, types.ErrInvalidNetNS, "not a network namespace"),
		Entry("to a namespace of another type", func() string { return "/proc/self/ns/mnt" }, types.ErrInvalidNetNS, "not a network namespace"),
		Entry("to its own namespace", func() string { return "/proc/self/ns/net" }, types.ErrInvalidNetNS, "the namespace that this plugin runs in"),
	)

	It("reads a stdin of megabytes, and names the length of no key in it", func() {
		huge := conf(`"unknown":"`+strings.Repeat("x", 8<<20)+`"`, `"deviceID":5`)
		e := call(env("ADD"), huge).failure()
		Expect(e.Msg).To(ContainSubstring("key deviceID"))
		Expect(len(e.Msg)).To(BeNumerically("<", 500))
	})

	It("takes the longest names there are for valid", func() {
		e := env("DEL", "CNI_CONTAINERID="+strings.Repeat("c", 200), "CNI_IFNAME=0123456789abcde")
		stdin := conf(`"name":"` + strings.Repeat("n", 253) + `"`)
		call(e, stdin).expectSilentSuccess()

		e["CNI_COMMAND"] = "ADD"
		Expect(call(e, stdin).failure().Code).To(BeElementOf(plugin.CodeUnavailable, types.ErrInvalidNetNS), "not of the names")
	})

	DescribeTable("DEL of nothing succeeds and prints nothing", func(stdin func() string, changes ...string) {
		for range 2 {
			call(env("DEL", changes...), stdin()).expectSilentSuccess()
		}
	},
		Entry("complete", func() string { return conf() }),
		Entry("without namespace", func() string { return conf() }, "CNI_NETNS="),
		Entry("in a directory", func() string { return conf() }, "CNI_NETNS=/tmp"),
		Entry("in its own namespace", func() string { return conf() }, "CNI_NETNS=/proc/self/ns/net"),
		Entry("without prevResult", func() string { return without("prevResult") }),
		Entry("without deviceID", func() string { return without("deviceID") }),
		Entry("without cniVersion", func() string { return without("cniVersion") }),
		Entry("with a prevResult that is garbage", func() string { return conf(`"prevResult":"garbage"`) }),
		Entry("with a prevResult of a newer version", func() string { return conf(`"prevResult":{"cniVersion":"9.9.9"}`) }),
		Entry("with a deviceID that is a path", func() string { return conf(`"deviceID":"../../etc"`) }),
		Entry("with deviceIDs that differ", func() string { return conf(`"pciBusID":"ffff:ff:1f.6"`) }),
		Entry("with wrong types everywhere", func() string {
			return conf(`"deviceID":5,"pciBusID":[],"runtimeConfig":"x","logLevel":{},"logFile":7,"args":3,"prevResult":true,"cni.dev/valid-attachments":1`)
		}),
		Entry("with CNI_ARGS of a pod's author", func() string { return conf() }, "CNI_ARGS=K8S_POD_NAME=../../x\n;deviceID=a;;="),
	)

	for _, v := range cniversion.All.SupportedVersions() {
		It("DEL of nothing succeeds in version "+v, func() {
			call(env("DEL"), conf(fmt.Sprintf(`"cniVersion":%q`, v))).expectSilentSuccess()
		})
	}

	DescribeTable("refuses verbs that the version does not know", func(command, v string) {
		Expect(call(env(command), conf(fmt.Sprintf(`"cniVersion":%q`, v))).failure().Code).To(Equal(types.ErrIncompatibleCNIVersion))
	},
		Entry("CHECK before 0.4.0", "CHECK", "0.3.1"),
		Entry("GC before 1.1.0", "GC", "1.0.0"),
		Entry("STATUS before 1.1.0", "STATUS", "1.0.0"),
	)

	It("GC without list succeeds, changes nothing and says so", func() {
		o := call(env("GC"), conf())
		o.expectSilentSuccess()
		Expect(o.stderr).To(ContainSubstring("cni.dev/valid-attachments"))
	})

	It("GC of a network without attachments succeeds, whatever the list", func() {
		for _, list := range []string{"null", "[]", `[{"containerID":"c1","ifname":"net1"}]`} {
			call(env("GC", "CNI_CONTAINERID=", "CNI_NETNS=", "CNI_IFNAME=", "CNI_ARGS="),
				conf(`"cni.dev/valid-attachments":`+list, `"cni.dev/attachments":`+list)).expectSilentSuccess()
		}
	})

	It("STATUS is 50 without an RDMA subsystem", func() {
		if hasRDMA() {
			Skip("this machine has an RDMA subsystem")
		}
		e := call(env("STATUS"), conf()).failure()
		Expect(e.Code).To(Equal(types.ErrPluginNotAvailable))
		Expect(e.Msg).To(ContainSubstring("ib_core"))
		Expect(state.DefaultDir).NotTo(BeADirectory(), "looking makes nothing")
	})

	DescribeTable("survives a stdout that nobody reads, and says that it failed", func(command string) {
		reader, writer, err := os.Pipe()
		Expect(err).NotTo(HaveOccurred())
		Expect(reader.Close()).To(Succeed())
		DeferCleanup(writer.Close)
		o := call(env(command), without("prevResult"), func(c *exec.Cmd) { c.Stdout = writer })
		Expect(o.status).To(Equal(1), "not killed by SIGPIPE")
		Expect(o.stderr).To(ContainSubstring("broken pipe"))
	}, Entry(nil, "VERSION"), Entry(nil, "ADD"))

	It("survives a stderr that nobody reads", func() {
		reader, writer, err := os.Pipe()
		Expect(err).NotTo(HaveOccurred())
		Expect(reader.Close()).To(Succeed())
		DeferCleanup(writer.Close)
		o := call(env("GC"), conf(), func(c *exec.Cmd) { c.Stderr = writer })
		Expect(o.status).To(BeZero(), "a log that fails fails nothing")
		o = call(env("ADD"), without("prevResult"), func(c *exec.Cmd) { c.Stderr = writer })
		Expect(o.failure().Code).To(Equal(types.ErrInvalidNetworkConfig))
	})

	It("writes no log where the author of a network must not write", func() {
		dir := GinkgoT().TempDir()
		o := call(env("DEL"), conf(`"logFile":"`+dir+`/log"`))
		Expect(o.status).To(BeZero())
		Expect(o.stderr).To(ContainSubstring("not below /var/log"))
		Expect(os.ReadDir(dir)).To(BeEmpty())
	})

	It("logs each operation as one JSON object with what identifies it", func() {
		e := env("ADD", "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=pod")
		maps.Copy(e, map[string]string{"TRACEPARENT": "00-aa-bb-01"})
		var line map[string]any
		Expect(json.Unmarshal([]byte(call(e, conf()).stderr), &line)).To(Succeed())
		for key, value := range map[string]any{
			"command": "ADD", "network": "test-roce", "containerID": "test-c1", "ifname": "net1", "netns": "/nonexistent/netns",
			"pod": "ns/pod", "traceparent": "00-aa-bb-01", "level": "ERROR", "version": "v1.2.3",
		} {
			Expect(line).To(HaveKeyWithValue(key, value))
		}
	})
})
