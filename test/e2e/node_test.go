package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/rtnl"
)

const (
	simControl = "/dev/rdmasim"
	stateDir   = "/run/cni/rdma"
	// patience is how long the kernel may take for what it does on its own,
	// such as tearing down a namespace.
	patience = 10 * time.Second
)

// vfs are the VFs of the guest's PF that get an RDMA device.
var vfs = []string{"0000:01:10.0", "0000:01:10.2", "0000:01:10.4", "0000:01:10.6"}

// vfDevice is the name of the RDMA device on VF number i at home.
func vfDevice(i int) string { return fmt.Sprintf("sim%d", i) }

// addVFDevices makes them; more are further keys for the test driver.
func addVFDevices(more ...string) {
	GinkgoHelper()
	for i, vf := range vfs {
		sim("add name=%s parent=pci:%s %s", vfDevice(i), vf, strings.Join(more, " "))
	}
}

// besideRXE keeps a device out of the hands of the stock driver rdma_rxe.
const besideRXE = "driver=none"

// sim gives the test driver a command.
func sim(format string, args ...any) {
	GinkgoHelper()
	Expect(trySim(format, args...)).To(Succeed())
}

func trySim(format string, args ...any) error {
	command := fmt.Sprintf(format, args...)
	if err := os.WriteFile(simControl, []byte(command+"\n"), 0); err != nil {
		return fmt.Errorf("rdmasim %q: %w", command, err)
	}
	return nil
}

// run executes a program that has to succeed, and gives its output.
func run(name string, args ...string) string {
	GinkgoHelper()
	out, err := exec.Command(name, args...).CombinedOutput()
	Expect(err).NotTo(HaveOccurred(), "%s %s: %s", name, strings.Join(args, " "), out)
	return string(out)
}

// inNetns runs fn on a thread inside the network namespace at path.
func inNetns(path string, fn func()) {
	GinkgoHelper()
	var err error
	onOwnThread(func() {
		ns, openErr := netns.GetFromPath(path)
		if err = openErr; err != nil {
			return
		}
		defer ns.Close()
		if err = netns.Set(ns); err == nil {
			fn()
		}
	})
	Expect(err).NotTo(HaveOccurred(), "enter %s", path)
}

// onOwnThread runs fn on a thread that ends with it, so that it may go into a
// namespace. The first thread of the process would not end but keep the
// namespace alive; it is held here while another one runs fn.
func onOwnThread(fn func()) {
	done := make(chan any)
	go func() {
		runtime.LockOSThread() // and never unlocked, except for the first one
		if unix.Gettid() == unix.Getpid() {
			defer runtime.UnlockOSThread()
			passed := make(chan any)
			go func() {
				defer func() { passed <- recover() }()
				runtime.LockOSThread()
				fn()
			}()
			done <- <-passed
			return
		}
		defer func() { done <- recover() }()
		fn()
	}()
	if r := <-done; r != nil {
		panic(r)
	}
}

// rdmaDevices lists the RDMA devices of a namespace by name, with their index.
// It uses the netlink library, not our own code. The kernel's dump can miss a
// device while others move, so callers with parallel moves have to know.
func rdmaDevices(path string) map[string]uint32 {
	GinkgoHelper()
	devices := map[string]uint32{}
	inNetns(path, func() {
		links, err := netlink.RdmaLinkList()
		Expect(err).NotTo(HaveOccurred())
		for _, l := range links {
			devices[l.Attrs.Name] = l.Attrs.Index
		}
	})
	return devices
}

func namesOf(devices map[string]uint32) []string { return slices.Sorted(maps.Keys(devices)) }

func rdmaNames(path string) []string { return namesOf(rdmaDevices(path)) }

const hostNetns = "/proc/1/ns/net"

// charDevices maps the host's view of RDMA character devices to the parent
// function and, in its own namespace, the name of their RDMA device.
func charDevices() map[string]string {
	GinkgoHelper()
	nodes := map[string]string{}
	for _, class := range []string{"infiniband_verbs", "infiniband_mad"} {
		entries, err := os.ReadDir(filepath.Join("/sys/class", class))
		Expect(err).NotTo(HaveOccurred())
		for _, e := range entries {
			if e.Name() == "abi_version" {
				continue
			}
			dir := filepath.Join("/sys/class", class, e.Name())
			ibdev, err := os.ReadFile(filepath.Join(dir, "ibdev"))
			if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV) {
				continue // it has gone between the two reads
			}
			Expect(err).NotTo(HaveOccurred())
			function := "" // a software device has no parent
			if parent, err := os.Readlink(filepath.Join(dir, "device")); err == nil {
				function = filepath.Base(parent)
			}
			nodes[e.Name()] = function + " " + strings.TrimSpace(string(ibdev))
		}
	}
	return nodes
}

// state is all that an attachment could leave behind.
type state struct {
	Devices []string
	Chars   map[string]string
	Netdevs []string
	Records []string
	Netns   []string
}

func snapshot() state {
	GinkgoHelper()
	links, err := rtnl.Dump(netlink.LinkList)
	Expect(err).NotTo(HaveOccurred())
	var netdevs []string
	for _, l := range links {
		netdevs = append(netdevs, l.Attrs().Name)
	}
	slices.Sort(netdevs)
	return state{
		Devices: rdmaNames(hostNetns), Chars: charDevices(), Netdevs: netdevs,
		Records: records(), Netns: namespaces(),
	}
}

func dirNames(dir string) []string {
	entries, _ := os.ReadDir(dir)
	names := []string{}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// hostName is the host's namespace below /run/netns, for iproute2, which knows
// namespaces by such names only.
const hostName = "host"

// namespaces lists the named namespaces besides the host's.
func namespaces() []string {
	return slices.DeleteFunc(dirNames("/run/netns"), func(name string) bool { return name == hostName })
}

// records lists the record files, without the lock and the offsets, which stay.
func records() []string {
	return slices.DeleteFunc(dirNames(stateDir), func(name string) bool { return name == "lock" || name == "offsets" })
}

// expectNothingLeft also takes away what a failed spec has left, so that the
// next one does not suffer.
func expectNothingLeft() {
	GinkgoHelper()
	defer func() {
		_ = os.RemoveAll(stateDir)
		_ = os.RemoveAll("/var/lib/cni")
		for _, name := range namespaces() {
			run("ip", "netns", "del", name)
		}
	}()
	Expect(records()).To(BeEmpty())
	Expect(namespaces()).To(BeEmpty())
	if lock, err := os.Open(filepath.Join(stateDir, "lock")); err == nil {
		Expect(unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)).To(Succeed(), "the node lock must be free")
		Expect(lock.Close()).To(Succeed())
	}
}

// pod is a network namespace with a name below /run/netns.
type pod struct {
	name, path, id string // id is the container's
}

var pods atomic.Int64

func newPod() pod {
	GinkgoHelper()
	n := pods.Add(1)
	p := pod{name: fmt.Sprintf("pod%d", n), id: fmt.Sprintf("container%d", n)}
	p.path = "/run/netns/" + p.name
	run("ip", "netns", "add", p.name)
	DeferCleanup(p.remove)
	return p
}

// remove deletes the namespace's name, and with it the namespace if nothing
// else holds it.
func (p pod) remove() {
	GinkgoHelper()
	if _, err := os.Stat(p.path); err == nil {
		run("ip", "netns", "del", p.name)
	}
}

// takeNetdev moves the netdev of VF number i into the pod as net1, as a delegate
// does, and gives it back after the spec.
func (p pod) takeNetdev(i int) {
	GinkgoHelper()
	netdev := netdevOf(vfs[i])
	run("ip", "link", "set", netdev, "netns", p.name, "name", "net1")
	DeferCleanup(func() {
		// Without a namespace it has come home by itself, under a name that
		// depends on what was free.
		if _, err := os.Stat(p.path); err == nil {
			run("ip", "-n", p.name, "link", "set", "net1", "netns", hostName, "name", netdev)
			return
		}
		Eventually(func() []string { return dirNames("/sys/bus/pci/devices/" + vfs[i] + "/net") }, patience).Should(HaveLen(1))
		run("ip", "link", "set", netdevOf(vfs[i]), "name", netdev)
	})
}

// attachment is how a runtime calls the plugin for one interface of a pod.
type attachment struct {
	id, netns, ifname string
	conf              map[string]any // the plugin's object in the network
	args              string
	env               []string
}

// vfAttachment asks for the RDMA device of VF number i as net1 of p.
func vfAttachment(p pod, i int) attachment {
	return attachment{id: p.id, netns: p.path, ifname: "net1", conf: map[string]any{
		"cniVersion": "1.1.0", "name": "rail", "type": "rdma", "deviceID": vfs[i],
		"prevResult": map[string]any{
			"cniVersion": "1.1.0",
			"interfaces": []any{map[string]any{"name": "net1", "sandbox": p.path, "mac": "02:00:00:00:00:99"}},
		},
	}}
}

// with gives a copy whose configuration has other keys; nil removes a key.
func (a attachment) with(key string, value any) attachment {
	a.conf = maps.Clone(a.conf)
	if value == nil {
		delete(a.conf, key)
	} else {
		a.conf[key] = value
	}
	return a
}

// answer is what a call gave back.
type answer struct {
	exit           int
	stdout, stderr string
}

func (a attachment) call(command string) answer {
	GinkgoHelper()
	return a.command(command, a.stdin()).finish()
}

func (a attachment) stdin() []byte {
	GinkgoHelper()
	stdin, err := json.Marshal(a.conf)
	Expect(err).NotTo(HaveOccurred())
	return stdin
}

// command prepares a call; finish runs it.
func (a attachment) command(command string, stdin []byte) *call {
	c := &call{Cmd: exec.Command(filepath.Join(binDir, "rdma"))}
	c.Stdin, c.Cmd.Stdout, c.Cmd.Stderr = bytes.NewReader(stdin), &c.stdout, &c.stderr
	c.Env = append(append(os.Environ(), "CNI_COMMAND="+command, "CNI_CONTAINERID="+a.id, "CNI_NETNS="+a.netns,
		"CNI_IFNAME="+a.ifname, "CNI_ARGS="+a.args, "CNI_PATH="+binDir), a.env...)
	return c
}

type call struct {
	*exec.Cmd
	stdout, stderr bytes.Buffer
}

func (c *call) finish() answer {
	GinkgoHelper()
	err := c.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		Expect(err).NotTo(HaveOccurred())
	}
	return answer{exit: c.ProcessState.ExitCode(), stdout: c.stdout.String(), stderr: c.stderr.String()}
}

// succeed calls a verb that has to work.
func (a attachment) succeed(command string) answer {
	GinkgoHelper()
	got := a.call(command)
	Expect(got.exit).To(BeZero(), "%s: stdout %s stderr %s", command, got.stdout, got.stderr)
	return got
}

// cniError is the error object of the CNI specification.
type cniError struct {
	CNIVersion string `json:"cniVersion"`
	Code       int    `json:"code"`
	Msg        string `json:"msg"`
}

// fail calls a verb that has to fail, with exactly one error object.
func (a attachment) fail(command string) cniError {
	GinkgoHelper()
	return a.call(command).failure()
}

func (got answer) failure() cniError {
	GinkgoHelper()
	Expect(got.exit).NotTo(BeZero(), "stdout %s stderr %s", got.stdout, got.stderr)
	var e cniError
	decoder := json.NewDecoder(strings.NewReader(got.stdout))
	Expect(decoder.Decode(&e)).To(Succeed(), "stdout %q stderr %q", got.stdout, got.stderr)
	Expect(decoder.More()).To(BeFalse(), "more than one document on stdout: %s", got.stdout)
	Expect(e.Msg).NotTo(BeEmpty())
	Expect(e.Msg).NotTo(ContainSubstring("\n"))
	return e
}

// logged gives the messages that a call logged at a level.
func (got answer) logged(level string) []string {
	GinkgoHelper()
	var messages []string
	for line := range strings.Lines(got.stderr) {
		var entry struct{ Level, Msg string }
		Expect(json.Unmarshal([]byte(line), &entry)).To(Succeed(), "stderr line %q", line)
		if entry.Level == level {
			messages = append(messages, entry.Msg)
		}
	}
	return messages
}

// setMode changes the node's RDMA namespace mode, which the kernel allows once
// the last pod's namespace is torn down.
func setMode(mode string) {
	GinkgoHelper()
	Eventually(func() string {
		out, err := exec.Command("rdma", "system", "set", "netns", mode).CombinedOutput()
		if err != nil {
			return string(out)
		}
		return ""
	}, patience).Should(BeEmpty())
}

// expectHome makes sure that VF number i has its device at home, under its old
// name.
func expectHome(i int) {
	GinkgoHelper()
	Expect(rdmaNames(hostNetns)).To(ContainElement(vfDevice(i)))
	Expect(dirNames(filepath.Join("/sys/bus/pci/devices", vfs[i], "infiniband"))).To(ConsistOf(vfDevice(i)))
}

// expectIn makes sure that VF number i has its device in the pod and not at
// home.
func expectIn(p pod, i int) {
	GinkgoHelper()
	Expect(rdmaNames(p.path)).To(ContainElement(vfDevice(i)))
	Expect(rdmaNames(hostNetns)).NotTo(ContainElement(vfDevice(i)))
	Expect(dirNames(filepath.Join("/sys/bus/pci/devices", vfs[i], "infiniband"))).To(BeEmpty())
}
