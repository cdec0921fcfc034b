package plugin

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/version"
)

// FuzzConfig: no configuration panics, a function that is accepted is safe as
// an element of a path, and an answer is one JSON document of the right version.
func FuzzConfig(f *testing.F) {
	for _, v := range version.All.SupportedVersions() {
		f.Add(fmt.Appendf(nil, `{"cniVersion":%q,"name":"n","deviceID":"0000:3b:00.2","prevResult":%s}`, v, resultOf(v)))
		f.Add(fmt.Appendf(nil, `{"cniVersion":%q,"prevResult":{}}`, v))
	}
	f.Add([]byte(`{"cniVersion":"1.1.0","prevResult":` + resultOf("1.0.0") + `}`))
	f.Add([]byte(`{"cniVersion":"0.4.0","prevResult":{"interfaces":[null]}}`))
	f.Add([]byte(`{"cniVersion":"0.3.1","prevResult":{"ips":[null]}}`))
	f.Add([]byte(`{"deviceID":"..","pciBusID":".","runtimeConfig":{"deviceID":"a/b"}}`))
	f.Add([]byte(`{"deviceID":"."}`))
	f.Add([]byte(`{"cni.dev/valid-attachments":[null,{"containerID":"c","ifname":"i"}],"args":{"cni":{"debug":{}}}}`))
	f.Add([]byte(`null`))
	f.Add([]byte(``))
	f.Fuzz(func(t *testing.T, stdin []byte) {
		c, err := parse(stdin)
		if c.function != "" && filepath.Dir(filepath.Join("/x", c.function)) != "/x" {
			t.Fatalf("%q leads away", c.function)
		}
		if err != nil {
			if strings.TrimSpace(err.Error()) == "" {
				t.Fatal("an error without text")
			}
			return
		}
		prev, err := c.previous()
		if err != nil || prev == nil {
			return
		}
		_, _ = prev.interfaceOf("net1"), prev.addressesOf("net1")
		out := prev.answer
		var head struct {
			CNIVersion string `json:"cniVersion"`
		}
		if err := json.Unmarshal(out, &head); err != nil {
			t.Fatalf("%s: %v", out, err)
		}
	})
}

// FuzzArgs: whatever CNI_ARGS holds, a log line stays one JSON object.
func FuzzArgs(f *testing.F) {
	f.Add("IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=pod;K8S_POD_UID=u")
	f.Add(";;=;K8S_POD_NAME")
	f.Add("K8S_POD_NAME=\"\n}{\x00\xff")
	f.Fuzz(func(t *testing.T, args string) {
		pod := podOf(args)
		if strings.Contains(pod.Name+pod.Namespace+pod.UID, ";") || len(pod.Name) > len(args) {
			t.Fatalf("%q became %+v", args, pod)
		}
		var stderr bytes.Buffer
		p := Plugin{Stderr: &stderr, Getenv: func(string) string { return "" }}
		p.log(operation{call: call{command: "ADD", args: args}, conf: config{logLevel: slog.LevelInfo}}, nil, nil)
		if strings.Count(stderr.String(), "\n") != 1 || !json.Valid(stderr.Bytes()) {
			t.Fatalf("%q made the line %q", args, stderr.String())
		}
	})
}
