package e2e

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// withContainerd labels specs that need a containerd in the guest (make
// test-containerd). The environment variable CONTAINERD is the folder of its
// programs, CONTAINERD_VERSION how its version starts.
const withContainerd = "containerd"

const (
	containerdSocket = "/run/containerd/containerd.sock"
	pauseImage       = "localhost/pause:bed"
	cniBin           = "/opt/cni/bin"
)

// containerdConfig is of version 2, which containerd 2 reads too. Each VF has a
// runtime handler with a network of its own. The guest's root file system is an
// initramfs, which cannot be pivoted away from.
func containerdConfig() string {
	handler := func(name, confDir string) string {
		return fmt.Sprintf(`[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.%s]
  runtime_type = "io.containerd.runc.v2"
  cni_conf_dir = %q
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.%s.options]
    NoPivotRoot = true
`, name, confDir, name)
	}
	text := fmt.Sprintf(`version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = %q
  disable_apparmor = true
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = %q
  conf_dir = %q
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "native"
  default_runtime_name = "rail0"
`, pauseImage, cniBin, railDir(0))
	for i := range vfs {
		text += handler(rail(i), railDir(i))
	}
	return text + handler(crossed, crossedDir)
}

// rail is the name of the network and of the runtime handler of VF number i.
func rail(i int) string    { return fmt.Sprintf("rail%d", i) }
func railDir(i int) string { return "/etc/cni/" + rail(i) }

// crossed is a network by mistake: the interface of VF 1, the RDMA device of
// VF 0.
const (
	crossed    = "crossed"
	crossedDir = "/etc/cni/crossed"
)

// containerd is a running containerd with its CRI services.
type containerd struct {
	runtimeapi.RuntimeServiceClient
	cmd  *exec.Cmd
	conn *grpc.ClientConn
	log  *safeBuffer
}

// setUpContainerd writes the configuration and the networks.
func setUpContainerd() {
	GinkgoHelper()
	for _, dir := range []string{cniBin, "/etc/containerd", "/var/log/pods"} {
		Expect(os.MkdirAll(dir, 0o755)).To(Succeed())
	}
	for _, name := range []string{"rdma", "host-device", "host-local", "loopback"} {
		run("cp", filepath.Join(binDir, name), cniBin)
	}
	for file, text := range map[string]string{
		"/etc/containerd/config.toml": containerdConfig(),
		"/etc/resolv.conf":            "",
		"/etc/hostname":               "bed\n",
	} {
		Expect(os.WriteFile(file, []byte(text), 0o644)).To(Succeed())
	}
	network := func(dir, name, netdev, device string) {
		conf := chain(cniVersion(), netdev)
		plugins := conf["plugins"].([]any)
		conf["name"] = name
		delete(plugins[0].(map[string]any)["ipam"].(map[string]any), "dataDir") // addresses outlive a reboot
		plugins[1].(map[string]any)["deviceID"] = device
		data, err := json.Marshal(conf)
		Expect(err).NotTo(HaveOccurred())
		Expect(os.MkdirAll(dir, 0o755)).To(Succeed())
		Expect(os.WriteFile(dir+"/net.conflist", data, 0o644)).To(Succeed())
	}
	for i, vf := range vfs {
		network(railDir(i), rail(i), vf, vf)
	}
	network(crossedDir, crossed, vfs[1], vfs[0])
}

// cniVersion is the newest that this containerd's libcni knows.
func cniVersion() string {
	if strings.HasPrefix(os.Getenv("CONTAINERD_VERSION"), "1.") {
		return "1.0.0"
	}
	return "1.1.0"
}

// startContainerd returns when its network is ready.
func startContainerd() *containerd {
	GinkgoHelper()
	c := &containerd{log: &safeBuffer{}}
	c.cmd = exec.Command(filepath.Join(os.Getenv("CONTAINERD"), "containerd"))
	c.cmd.Env = append(os.Environ(), "PATH="+os.Getenv("CONTAINERD")+":"+os.Getenv("PATH"))
	c.cmd.Stdout, c.cmd.Stderr = c.log, c.log
	// The shims outlive it and have its output open.
	c.cmd.WaitDelay = 1
	Expect(c.cmd.Start()).To(Succeed())
	var err error
	// While containerd starts nobody listens; the default waits up to two
	// minutes between tries.
	retry := grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: time.Second / 10, Multiplier: 1.6, MaxDelay: time.Second}}
	c.conn, err = grpc.NewClient("passthrough:///bed", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(retry),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", containerdSocket)
		}))
	Expect(err).NotTo(HaveOccurred())
	c.RuntimeServiceClient = runtimeapi.NewRuntimeServiceClient(c.conn)
	Eventually(func(g Gomega) {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		version, err := c.Version(ctx, &runtimeapi.VersionRequest{})
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(strings.TrimPrefix(version.RuntimeVersion, "v")).To(HavePrefix(os.Getenv("CONTAINERD_VERSION")))
		status, err := c.Status(ctx, &runtimeapi.StatusRequest{})
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(status.Status.Conditions).To(HaveEach(HaveField("Status", true)), "%s", status)
	}, 18*patience).Should(Succeed(), c.log.String)
	return c
}

// importPause makes the sandboxes' image out of busybox, so that no registry is
// needed.
func importPause() {
	GinkgoHelper()
	busybox, err := os.ReadFile("/bin/busybox")
	Expect(err).NotTo(HaveOccurred())
	type object = map[string]any
	layer := tarOf(map[string][]byte{"bin/busybox": busybox})
	digest := func(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }
	files := map[string][]byte{"oci-layout": []byte(`{"imageLayoutVersion": "1.0.0"}`)}
	blob := func(mediaType string, b []byte) object {
		files["blobs/sha256/"+strings.TrimPrefix(digest(b), "sha256:")] = b
		return object{"mediaType": "application/vnd.oci.image." + mediaType, "digest": digest(b), "size": len(b)}
	}
	document := func(o object) []byte {
		data, err := json.Marshal(o)
		Expect(err).NotTo(HaveOccurred())
		return data
	}
	config := blob("config.v1+json", document(object{
		"architecture": "amd64", "os": "linux",
		"config": object{"Entrypoint": []string{"/bin/busybox", "sleep", "1000000"}},
		"rootfs": object{"type": "layers", "diff_ids": []string{digest(layer)}},
	}))
	manifest := blob("manifest.v1+json", document(object{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
		"config": config, "layers": []object{blob("layer.v1.tar", layer)},
	}))
	manifest["annotations"] = object{"io.containerd.image.name": pauseImage}
	files["index.json"] = document(object{"schemaVersion": 2, "manifests": []object{manifest}})
	archive := filepath.Join(GinkgoT().TempDir(), "pause.tar")
	Expect(os.WriteFile(archive, tarOf(files), 0o600)).To(Succeed())
	run("ctr", "-n", "k8s.io", "images", "import", "--snapshotter", "native", archive)
}

func tarOf(files map[string][]byte) []byte {
	GinkgoHelper()
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	for name, content := range files {
		Expect(w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(content))})).To(Succeed())
		_, err := w.Write(content)
		Expect(err).NotTo(HaveOccurred())
	}
	Expect(w.Close()).To(Succeed())
	return archive.Bytes()
}

// kill ends containerd as a crash does: what it has started goes on.
func (c *containerd) kill() {
	GinkgoHelper()
	Expect(c.cmd.Process.Kill()).To(Succeed())
	_ = c.cmd.Wait() // killed
	Expect(c.conn.Close()).To(Succeed())
}

// sandboxConfig describes a pod as the kubelet does.
func sandboxConfig(name string) *runtimeapi.PodSandboxConfig {
	return &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: name, Uid: name + "-uid", Namespace: "jobs"},
		Hostname:     name,
		LogDirectory: "/var/log/pods/" + name,
		Linux:        &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: &runtimeapi.NamespaceOption{}}},
	}
}

// tryRunPod asks for a sandbox with VF number i.
func (c *containerd) tryRunPod(ctx context.Context, name string, i int) (id string, err error) {
	answer, err := c.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: sandboxConfig(name), RuntimeHandler: rail(i)})
	return answer.GetPodSandboxId(), err
}

// runPod starts a sandbox with VF number i, which has to work.
func (c *containerd) runPod(ctx context.Context, name string, i int) pod {
	GinkgoHelper()
	id, err := c.tryRunPod(ctx, name, i)
	Expect(err).NotTo(HaveOccurred())
	return c.sandbox(ctx, id)
}

// sandbox asks containerd where a sandbox's network namespace is.
func (c *containerd) sandbox(ctx context.Context, id string) pod {
	GinkgoHelper()
	status, err := c.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
	Expect(err).NotTo(HaveOccurred())
	var info struct {
		RuntimeSpec struct {
			Linux struct {
				Namespaces []struct{ Type, Path string }
			}
		}
	}
	Expect(json.Unmarshal([]byte(status.Info["info"]), &info)).To(Succeed())
	for _, n := range info.RuntimeSpec.Linux.Namespaces {
		if n.Type == "network" {
			return pod{name: filepath.Base(n.Path), path: n.Path, id: id}
		}
	}
	Fail("no network namespace in " + status.Info["info"])
	return pod{}
}

func (c *containerd) stop(ctx context.Context, id string) {
	GinkgoHelper()
	_, err := c.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
	Expect(err).NotTo(HaveOccurred())
}

func (c *containerd) remove(ctx context.Context, id string) {
	GinkgoHelper()
	_, err := c.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
	Expect(err).NotTo(HaveOccurred())
}

// sandboxes lists what containerd knows, by its id.
func (c *containerd) sandboxes(ctx context.Context) map[string]*runtimeapi.PodSandbox {
	GinkgoHelper()
	list, err := c.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	Expect(err).NotTo(HaveOccurred())
	all := map[string]*runtimeapi.PodSandbox{}
	for _, s := range list.Items {
		all[s.Id] = s
	}
	return all
}

// removeAll ends all sandboxes, each at the first try.
func (c *containerd) removeAll(ctx context.Context) {
	GinkgoHelper()
	for id := range c.sandboxes(ctx) {
		c.stop(ctx, id)
		c.remove(ctx, id)
	}
}

// slowMove makes the next move of VF number i take its time. The function that
// it gives waits until the plugin that containerd has called is in the middle of
// that move, and gives its process.
func slowMove(i int) func() int {
	GinkgoHelper()
	const fault = "remove-delay-ms=5000"
	sim("fault %s %s", vfDevice(i), fault)
	return func() (pid int) {
		GinkgoHelper()
		Eventually(func(g Gomega) {
			devices, err := os.ReadFile(simControl)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(string(devices)).NotTo(ContainSubstring(fault), "the move has not begun")
			pid = pluginProcess()
			g.Expect(threadStates(pid)).To(ContainSubstring("D"), "the plugin is inside the move")
		}, 6*patience).Should(Succeed())
		return pid
	}
}

// pluginProcess is the process of the plugin, 0 if there is none.
func pluginProcess() int {
	for _, name := range dirNames("/proc") {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if program, err := os.Readlink("/proc/" + name + "/exe"); err == nil && program == cniBin+"/rdma" {
			return pid
		}
	}
	return 0
}

// pluginCall is what a runtime gave to the plugin.
type pluginCall struct {
	env  map[string]string
	conf map[string]any
}

// spyOnPlugin puts a script before the plugin, which writes down what it is
// called with. It ends with the spec.
func spyOnPlugin() func() []pluginCall {
	GinkgoHelper()
	dir := GinkgoT().TempDir()
	script := fmt.Sprintf(`#!/bin/sh
call=%s/$(ls %s | wc -l)
env | grep ^CNI_ >$call.env
cat >$call
exec %s/rdma <$call
`, dir, dir, binDir)
	replacePlugin(script)
	return func() (calls []pluginCall) {
		GinkgoHelper()
		for n := 0; ; n += 2 { // two files a call
			name := fmt.Sprintf("%s/%d", dir, n)
			env, err := os.ReadFile(name + ".env")
			if err != nil {
				return calls
			}
			call := pluginCall{env: map[string]string{}}
			for line := range strings.Lines(string(env)) {
				key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
				call.env[key] = value
			}
			conf, err := os.ReadFile(name)
			Expect(err).NotTo(HaveOccurred())
			Expect(json.Unmarshal(conf, &call.conf)).To(Succeed())
			calls = append(calls, call)
		}
	}
}

// replacePlugin installs another one until the spec ends.
func replacePlugin(script string) {
	GinkgoHelper()
	Expect(os.Remove(cniBin + "/rdma")).To(Succeed())
	Expect(os.WriteFile(cniBin+"/rdma", []byte(script), 0o755)).To(Succeed())
	DeferCleanup(func() {
		Expect(os.Remove(cniBin + "/rdma")).To(Succeed())
		run("cp", filepath.Join(binDir, "rdma"), cniBin)
	})
}

// upstreamPlugin installs what does in ADD what the upstream plugin does: it
// moves the device, writes a record of its format, and gives prevResult back.
func upstreamPlugin() {
	replacePlugin(`#!/bin/sh
set -e
conf=$(cat)
key() { echo "$conf" | sed "s/\"prevResult\":.*,//; s/.*\"$1\":\"\([^\"]*\)\".*/\1/"; }
case $CNI_COMMAND in
VERSION) echo '{"cniVersion": "1.1.0", "supportedVersions": ["1.0.0", "1.1.0"]}' ;;
ADD)
	pci=$(key deviceID)
	device=$(ls /sys/bus/pci/devices/$pci/infiniband)
	rdma dev set $device netns $(basename $CNI_NETNS)
	mkdir -p -m 700 /var/lib/cni/rdma
	echo "{\"version\":\"1.0\",\"deviceID\":\"$pci\",\"sandboxRdmaDevName\":\"$device\",\"containerRdmaDevName\":\"$device\"}" \
		>/var/lib/cni/rdma/$(key name)-$CNI_CONTAINERID-$CNI_IFNAME
	echo "$conf" | sed 's/.*"prevResult":\(.*\),"type":"rdma".*/\1/' ;;
esac
`)
}

// upstreamRecord is the file of the upstream plugin for VF number i.
func upstreamRecord(id string, i int) string {
	return fmt.Sprintf("/var/lib/cni/rdma/%s-%s-eth0", rail(i), id)
}
