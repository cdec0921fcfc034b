package plugin

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"

	"github.com/containernetworking/cni/pkg/version"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
	"github.com/rdma-cni/rdma-cni/pkg/state"
)

func parsed(text string) config {
	GinkgoHelper()
	c, err := parse([]byte(text))
	Expect(err).NotTo(HaveOccurred())
	return c
}

var _ = Describe("the network configuration", func() {
	defaults := config{cniVersion: "0.1.0", logLevel: slog.LevelInfo}

	It("is read in full", func() {
		Expect(parsed(`{"cniVersion":"1.1.0","name":"roce","type":"rdma","deviceID":"0000:3b:00.2","logLevel":"warning","logFile":"/var/log/x",
			"prevResult":{"cniVersion":"1.1.0"},"capabilities":{"deviceID":true},"ipam":{},"unknown":[1,{"a":null}]}`)).To(Equal(config{
			cniVersion: "1.1.0", name: "roce", function: "0000:3b:00.2", logLevel: slog.LevelWarn, logFile: "/var/log/x",
			prevResult: object{"cniVersion": json.RawMessage(`"1.1.0"`)}, rawPrevResult: json.RawMessage(`{"cniVersion":"1.1.0"}`),
		}))
	})

	It("may be empty", func() {
		Expect(parsed(`{}`)).To(Equal(defaults))
	})

	DescribeTable("has to be one JSON object", func(text string) {
		_, err := decode([]byte(text))
		Expect(err).To(MatchError(ContainSubstring("not a JSON object")))
	},
		Entry("nothing", ""),
		Entry("blanks", " \n"),
		Entry("a list", "[]"),
		Entry("a list of it", `[{"name":"roce"}]`),
		Entry("a number", "5"),
		Entry("a string", `"{}"`),
		Entry("cut short", `{"name":"roce"`),
		Entry("two of them", "{}{}"),
		Entry("with a comma too much", `{"name":"roce",}`),
		Entry("binary", "\x00\xff"),
	)

	text, object, list := []string{"5", "true", "[]", `{"a":1}`, `["x"]`}, []string{"5", "true", "[]", `"x"`}, []string{"5", "true", "{}", `"x"`, "[1]", `["x"]`, "[[]]", `[{"containerID":5}]`, `[{"ifname":{}}]`}
	wrong := map[string][]string{
		"cniVersion": text, "name": text, "logLevel": text, "logFile": text, "deviceID": text, "pciBusID": text,
		"runtimeConfig": object, "prevResult": object,
		"cni.dev/valid-attachments": list, "cni.dev/attachments": list,
	}
	for key, values := range wrong {
		for _, value := range values {
			It(fmt.Sprintf("names the key %s when its value is %s", key, value), func() {
				_, err := parse(fmt.Appendf(nil, `{"x":1,%q:%s}`, key, value))
				Expect(err).To(MatchError(And(ContainSubstring("key "+key+" must be a"), ContainSubstring("not "+value))))
			})
		}
		if strings.HasPrefix(key, "cni.dev/") {
			continue
		}
		It("takes null for no "+key, func() {
			Expect(parsed(fmt.Sprintf(`{%q:null}`, key))).To(Equal(defaults))
		})
	}

	It("names the key inside runtimeConfig", func() {
		_, err := parse([]byte(`{"runtimeConfig":{"deviceID":5}}`))
		Expect(err).To(MatchError("runtimeConfig.deviceID: key deviceID must be a string, not 5"))
		_, err = parse([]byte(`{"runtimeConfig":{"CNIDeviceInfoFile":5}}`))
		Expect(err).To(MatchError("under runtimeConfig: key CNIDeviceInfoFile must be a string, not 5"))
		Expect(parsed(`{"runtimeConfig":{"deviceID":null,"ips":5}}`)).To(Equal(defaults))
	})

	It("names all that is wrong, and gives what is right", func() {
		c, err := parse([]byte(`{"name":"roce","cniVersion":"1.0.0","logLevel":5,"deviceID":[],"prevResult":"x"}`))
		Expect(err).To(MatchError(And(ContainSubstring("logLevel"), ContainSubstring("deviceID"), ContainSubstring("prevResult"))))
		Expect(c.name).To(Equal("roce"), "DEL works with it all the same")
		Expect(c.cniVersion).To(Equal("1.0.0"))
	})

	It("does not repeat a huge wrong value", func() {
		_, err := parse([]byte(`{"name":[` + strings.Repeat("1,", 1<<20) + `1]}`))
		Expect(err).To(MatchError(ContainSubstring("key name")))
		Expect(len(err.Error())).To(BeNumerically("<", 300))
	})

	DescribeTable("gives the function", func(text, want string) {
		Expect(parsed(text).function).To(Equal(want))
	},
		Entry("none", `{}`, ""),
		Entry("empty everywhere", `{"deviceID":"","pciBusID":"","runtimeConfig":{"deviceID":""}}`, ""),
		Entry("deviceID", `{"deviceID":"0000:3b:00.2"}`, "0000:3b:00.2"),
		Entry("pciBusID", `{"pciBusID":"0000:3b:00.2"}`, "0000:3b:00.2"),
		Entry("runtimeConfig", `{"runtimeConfig":{"deviceID":"mlx5_core.sf.4"}}`, "mlx5_core.sf.4"),
		Entry("all that agree", `{"deviceID":"a","pciBusID":"a","runtimeConfig":{"deviceID":"a"}}`, "a"),
		Entry("one of them empty", `{"deviceID":"","pciBusID":"a"}`, "a"),
	)

	DescribeTable("takes addresses that differ in case for the same", func(text string) {
		Expect(strings.ToLower(parsed(text).function)).To(Equal("0000:3b:00.2"))
	},
		Entry("deviceID and pciBusID", `{"deviceID":"0000:3B:00.2","pciBusID":"0000:3b:00.2"}`),
		Entry("runtimeConfig and deviceID", `{"deviceID":"0000:3b:00.2","runtimeConfig":{"deviceID":"0000:3B:00.2"}}`),
	)

	DescribeTable("refuses two that differ, naming both", func(text, a, b string) {
		_, err := parse([]byte(text))
		Expect(err).To(MatchError(And(ContainSubstring("different devices"), ContainSubstring(a), ContainSubstring(b))))
	},
		Entry("deviceID and pciBusID", `{"deviceID":"0000:3b:00.2","pciBusID":"0000:3b:00.3"}`, `deviceID ("0000:3b:00.2")`, `pciBusID ("0000:3b:00.3")`),
		Entry("runtimeConfig and deviceID", `{"deviceID":"0000:3b:00.2","runtimeConfig":{"deviceID":"0000:3b:00.3"}}`, `deviceID ("0000:3b:00.2")`, `runtimeConfig.deviceID ("0000:3b:00.3")`),
		Entry("runtimeConfig and pciBusID", `{"pciBusID":"0000:3b:00.2","runtimeConfig":{"deviceID":"0000:3b:00.3"}}`, `pciBusID ("0000:3b:00.2")`, `runtimeConfig.deviceID ("0000:3b:00.3")`),
		Entry("the last of three", `{"deviceID":"a","pciBusID":"b","runtimeConfig":{"deviceID":"a"}}`, `deviceID ("a")`, `pciBusID ("b")`),
		Entry("with and without domain", `{"deviceID":"0000:3b:00.2","pciBusID":"3b:00.2"}`, "0000:3b:00.2", `("3b:00.2")`),
	)

	for _, key := range []string{"deviceID", "pciBusID", "runtimeConfig.deviceID"} {
		DescribeTable("refuses in "+key, func(value string) {
			quoted, err := json.Marshal(value)
			Expect(err).NotTo(HaveOccurred())
			text := fmt.Sprintf(`{%q:%s}`, key, quoted)
			if inner, ok := strings.CutPrefix(key, "runtimeConfig."); ok {
				text = fmt.Sprintf(`{"runtimeConfig":{%q:%s}}`, inner, quoted)
			}
			c, err := parse([]byte(text))
			Expect(err).To(MatchError(ContainSubstring("key " + key + ":")))
			Expect(c.function).To(BeEmpty())
		},
			Entry("a path", "a/b"),
			Entry("the way up", ".."),
			Entry("a way out", "../../etc"),
			Entry("the directory", "."),
			Entry("a blank", "0000:3b:00.2 "),
			Entry("a newline", "0000:3b:00.2\n"),
			Entry("a zero", "0000\x00"),
			Entry("300 characters", strings.Repeat("a", 300)),
		)
	}

	DescribeTable("takes from args nothing but a wish for more log", func(args string, want slog.Level) {
		c := parsed(`{"name":"roce","args":` + args + `}`)
		Expect(c.logLevel).To(Equal(want))
		c.logLevel, c.name = defaults.logLevel, ""
		Expect(c).To(Equal(defaults), "the author of a pod can write args")
	},
		Entry("debug", `{"cni":{"debug":true}}`, slog.LevelDebug),
		Entry("debug as the text of an annotation", `{"cni":{"debug":"true"}}`, slog.LevelDebug),
		Entry("no debug", `{"cni":{"debug":false}}`, slog.LevelInfo),
		Entry("debug of another type", `{"cni":{"debug":[1]}}`, slog.LevelInfo),
		Entry("debug null", `{"cni":{"debug":null}}`, slog.LevelInfo),
		Entry("cni of another type", `{"cni":5}`, slog.LevelInfo),
		Entry("args of another type", `5`, slog.LevelInfo),
		Entry("args null", `null`, slog.LevelInfo),
		Entry("paths and devices", `{"cni":{"deviceID":"a","pciBusID":"b","logFile":"/etc/passwd","logLevel":"debug","runtimeConfig":{"deviceID":"c"},"prevResult":{}}}`, slog.LevelInfo),
	)

	It("wants the most log that anyone asked for", func() {
		Expect(parsed(`{"logLevel":"error","args":{"cni":{"debug":true}}}`).logLevel).To(Equal(slog.LevelDebug))
	})

	DescribeTable("has the list of valid attachments", func(text string, listed bool, want ...state.Key) {
		c := parsed(text)
		Expect(c.listed).To(Equal(listed))
		Expect(c.validAttachments).To(HaveLen(len(want)))
		Expect(c.validAttachments).To(ConsistOf(want))
	},
		Entry("absent, which says nothing", `{}`, false),
		Entry("null, which says that none is", `{"cni.dev/valid-attachments":null}`, true),
		Entry("empty", `{"cni.dev/valid-attachments":[]}`, true),
		Entry("of two", `{"cni.dev/valid-attachments":[{"containerID":"c1","ifname":"net1"},{"containerID":"c2","ifname":"net2","x":5}]}`, true,
			state.Key{ContainerID: "c1", IfName: "net1"}, state.Key{ContainerID: "c2", IfName: "net2"}),
		Entry("under its old key", `{"cni.dev/attachments":[{"containerID":"c1","ifname":"net1"}]}`, true, state.Key{ContainerID: "c1", IfName: "net1"}),
		Entry("null under its old key", `{"cni.dev/attachments":null}`, true),
		Entry("under both keys, of which the new one counts", `{"cni.dev/attachments":[{"containerID":"c0","ifname":"net0"}],"cni.dev/valid-attachments":[{"containerID":"c1","ifname":"net1"}]}`, true,
			state.Key{ContainerID: "c1", IfName: "net1"}),
	)
})

var _ = DescribeTable("a log level is read", func(text string, want slog.Level) {
	Expect(parseLevel(text)).To(Equal(want))
},
	Entry("panic", "panic", slog.LevelError),
	Entry("error", "error", slog.LevelError),
	Entry("warning", "warning", slog.LevelWarn),
	Entry("warn", "warn", slog.LevelWarn),
	Entry("info", "info", slog.LevelInfo),
	Entry("debug", "debug", slog.LevelDebug),
	Entry("in upper case", "DEBUG", slog.LevelDebug),
	Entry("none", "", slog.LevelInfo),
	Entry("unknown", "verbose", slog.LevelInfo),
)

var _ = DescribeTable("the pod is read from CNI_ARGS", func(args string, want state.Pod) {
	Expect(podOf(args)).To(Equal(want))
},
	Entry("as runtimes write them", "IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=pod;K8S_POD_INFRA_CONTAINER_ID=c1;K8S_POD_UID=u-1",
		state.Pod{Namespace: "ns", Name: "pod", UID: "u-1"}),
	Entry("none", "", state.Pod{}),
	Entry("only separators", ";;=;=;;", state.Pod{}),
	Entry("no value", "K8S_POD_NAME", state.Pod{}),
	Entry("an equals sign in a value", "K8S_POD_NAME=a=b;K8S_POD_UID=c==", state.Pod{Name: "a=b", UID: "c=="}),
	Entry("keys that look alike", "k8s_pod_name=a;K8S_POD_NAME =b;XK8S_POD_NAME=c", state.Pod{}),
	Entry("a newline and a quote", "K8S_POD_NAME=a\n\"b", state.Pod{Name: "a\n\"b"}),
	Entry("other keys with the names of options", "deviceID=0000:3b:00.2;logFile=/etc/passwd", state.Pod{}),
)

// results are what an earlier plugin gives in each version, with what the
// library does not know or would write otherwise.
func resultOf(v string) string {
	switch v {
	case "0.1.0", "0.2.0":
		return fmt.Sprintf(`{ "unknown" : {"b":1.50,"a":"<\u00e4>"}, "cniVersion":%q, "ip4":{"ip":"10.0.0.2/24"}, "dns":{} }`, v)
	case "0.3.0", "0.3.1", "0.4.0":
		return fmt.Sprintf(`{ "unknown" : {"b":1.50,"a":"<\u00e4>"}, "cniVersion":%q, "interfaces":[{"name":"net1","mac":"02:00:00:00:00:01","sandbox":"/run/netns/blue"}],
			"ips":[{"version":"4","interface":0,"address":"10.0.0.2/24"}], "dns":{} }`, v)
	default:
		return fmt.Sprintf(`{ "unknown" : {"b":1.50,"a":"<\u00e4>"}, "cniVersion":%q, "interfaces":[{"name":"net1","mac":"02:00:00:00:00:01","mtu":1500,"sandbox":"/run/netns/blue"}],
			"ips":[{"interface":0,"address":"10.0.0.2/24"}] }`, v)
	}
}

var _ = Describe("softRoCE", func() {
	It("is off, and can be on", func() {
		Expect(parsed(`{}`).options.SoftRoCE).To(Equal(attachment.SoftRoCE{}))
		Expect(parsed(`{"softRoCE":true}`).options.SoftRoCE).To(Equal(attachment.SoftRoCE{Make: true}))
		Expect(parsed(`{"softRoCE":true,"softRoCEOverHardware":true}`).options.SoftRoCE).To(Equal(attachment.SoftRoCE{Make: true, OverHardware: true}))
	})

	It("is none of the pod's author's affairs", func() {
		Expect(parsed(`{"args":{"cni":{"softRoCE":true}}}`).options.SoftRoCE).To(Equal(attachment.SoftRoCE{}))
	})

	DescribeTable("is refused as", func(conf string) {
		_, err := parse([]byte(conf))
		Expect(err).To(MatchError(ContainSubstring("softRoCE")))
	},
		Entry("a word", `{"softRoCE":"true"}`),
		Entry("a number", `{"softRoCEOverHardware":1}`),
		Entry("half of it", `{"softRoCEOverHardware":true}`),
	)
})

// answered is what ADD prints for a prevResult.
func answered(cniVersion, prevResult string) ([]byte, error) {
	GinkgoHelper()
	c := parsed(fmt.Sprintf(`{"name":"n","cniVersion":%q,"prevResult":%s}`, cniVersion, prevResult))
	prev, err := c.previous()
	if err != nil {
		return nil, err
	}
	_, _ = prev.interfaceOf("net1"), prev.addressesOf("net1")
	return prev.answer, nil
}

var _ = Describe("prevResult", func() {
	for _, v := range version.All.SupportedVersions() {
		It("of version "+v+" comes back as it is in a configuration of that version", func() {
			var want bytes.Buffer
			Expect(json.Compact(&want, []byte(resultOf(v)))).To(Succeed())
			out, err := answered(v, resultOf(v))
			Expect(err).NotTo(HaveOccurred())
			Expect(string(out)).To(Equal(want.String()+"\n"), "no key lost, moved or written otherwise")
		})

		It("without version is of the configuration's version "+v, func() {
			bare := strings.Replace(resultOf(v), fmt.Sprintf(`"cniVersion":%q,`, v), "", 1)
			out, err := answered(v, bare)
			Expect(err).NotTo(HaveOccurred())
			var got map[string]any
			Expect(json.Unmarshal(out, &got)).To(Succeed())
			Expect(got).To(HaveKeyWithValue("cniVersion", v), "which the answer has to name")
			Expect(string(out)).To(ContainSubstring("10.0.0.2/24"))
		})

		It("of any version is answered in version "+v+", or refused", func() {
			for _, from := range version.All.SupportedVersions() {
				out, err := answered(v, resultOf(from))
				if err != nil {
					Expect(err).To(MatchError(ContainSubstring("prevResult")), "%s in %s", from, v)
					continue
				}
				var got map[string]any
				Expect(json.Unmarshal(out, &got)).To(Succeed())
				Expect(got).To(HaveKeyWithValue("cniVersion", v), "%s in %s", from, v)
			}
		})

		DescribeTable("with holes is no panic in version "+v, func(prevResult string) {
			Expect(func() { _, _ = answered(v, prevResult) }).NotTo(Panic())
		},
			Entry("an interface that is null", `{"interfaces":[null]}`),
			Entry("an interface that is null under a key in upper case", `{"INTERFACES":[null]}`),
			Entry("an address that is null", `{"ips":[null]}`),
			Entry("a route that is null", `{"routes":[null]}`),
			Entry("lists that are null", `{"interfaces":null,"ips":null,"routes":null,"dns":null}`),
			Entry("an address of no interface", `{"ips":[{"interface":7,"address":"10.0.0.2/24"}]}`),
			Entry("nothing", `{}`),
		)
	}

	It("of version 1.0.0 is converted for a configuration of 1.1.0, nothing known lost", func() {
		out, err := answered("1.1.0", resultOf("1.0.0"))
		Expect(err).NotTo(HaveOccurred())
		Expect(out).To(MatchJSON(`{"cniVersion":"1.1.0","interfaces":[{"name":"net1","mac":"02:00:00:00:00:01","mtu":1500,"sandbox":"/run/netns/blue"}],
			"ips":[{"interface":0,"address":"10.0.0.2/24"}]}`))
	})

	DescribeTable("is refused", func(cniVersion, prevResult string) {
		_, err := answered(cniVersion, prevResult)
		Expect(err).To(MatchError(HavePrefix("key prevResult")))
	},
		Entry("of a version that does not exist", "1.1.0", `{"cniVersion":"9.9.9"}`),
		Entry("of a newer version than the configuration", "0.4.0", resultOf("1.0.0")),
		Entry("with an address that is none", "1.0.0", `{"ips":[{"address":"x"}]}`),
		Entry("with interfaces of another type", "1.0.0", `{"interfaces":"x"}`),
		Entry("with a version of another type", "1.0.0", `{"cniVersion":5}`),
	)

	It("may be absent", func() {
		for _, text := range []string{`{}`, `{"prevResult":null}`} {
			c := parsed(text)
			Expect(c.previous()).To(BeNil())
		}
	})

	It("names the interface in the pod, not one of the same name on the host", func() {
		c := parsed(`{"cniVersion":"1.0.0","prevResult":{"cniVersion":"1.0.0","interfaces":[{"name":"net1","mac":"02:00:00:00:00:01"},
			{"name":"net1","mac":"02:00:00:00:00:02","sandbox":"/run/netns/blue"},{"name":"net2","sandbox":"/run/netns/blue"}]}}`)
		prev, err := c.previous()
		Expect(err).NotTo(HaveOccurred())
		Expect(prev.interfaceOf("net1").mac).To(Equal("02:00:00:00:00:02"))
		Expect(prev.interfaceOf("net3")).To(BeNil())
	})
})

// parse is what a verb makes of stdin.
func parse(stdin []byte) (config, error) {
	keys, err := decode(stdin)
	if err != nil {
		return config{}, err
	}
	return parseConfig(keys)
}

// keysOf decodes a configuration that must be an object.
func keysOf(stdin []byte) object {
	GinkgoHelper()
	keys, err := decode(stdin)
	Expect(err).NotTo(HaveOccurred())
	return keys
}
