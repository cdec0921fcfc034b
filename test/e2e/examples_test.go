package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"sigs.k8s.io/yaml"
)

// examplesDir has deployment/examples.
const examplesDir = "/bed/examples"

// standIn is for the plugins sriov and ovs, which cannot be had here.
// host-device does with the function's interface what they do: it moves it into
// the pod as CNI_IFNAME, and back. Their CHECK does nothing.
const standIn = `#!/bin/sh
[ "$CNI_COMMAND" = CHECK ] || exec ${0%/*}/host-device
`

// exampleNetwork is the network of an example on VF number i, as Multus hands it
// to the plugins: the function's address is in each of them.
func exampleNetwork(file string, i int) map[string]any {
	GinkgoHelper()
	text, err := os.ReadFile(filepath.Join(examplesDir, file))
	Expect(err).NotTo(HaveOccurred())
	var definition struct{ Spec struct{ Config string } }
	Expect(yaml.Unmarshal(text, &definition)).To(Succeed())
	var conf map[string]any
	Expect(json.Unmarshal([]byte(definition.Spec.Config), &conf)).To(Succeed())
	for _, p := range conf["plugins"].([]any) {
		plugin := p.(map[string]any)
		plugin["deviceID"], plugin["pciBusID"] = vfs[i], vfs[i]
		if ipam, ok := plugin["ipam"].(map[string]any); ok {
			if ipam["type"] == "nv-ipam" { // cannot be had either
				ipam["type"] = "host-local"
				ipam["ranges"] = []any{[]any{map[string]any{"subnet": "192.168.9.0/24"}}}
			}
			ipam["dataDir"] = "/run/host-local"
		}
	}
	return conf
}

var _ = Describe("an example in deployment/examples", func() {
	// What a pod has of it besides the device.
	inPod := map[string]func(p pod){
		"sriov.yaml":       func(p pod) { Expect(rdmaNames(p.path)).To(ConsistOf(vfDevice(0))) },
		"host-device.yaml": func(p pod) { Expect(rdmaNames(p.path)).To(ConsistOf(vfDevice(0))) },
		"tuning-sbr.yaml": func(p pod) {
			Expect(rdmaNames(p.path)).To(ConsistOf(vfDevice(0)))
			Expect(run("ip", "-n", p.name, "link", "show", "net1")).To(ContainSubstring("mtu 4220"))
			Expect(run("ip", "-n", p.name, "rule")).To(ContainSubstring("from 192.168.9."))
		},
		"rail.yaml": func(p pod) {
			Expect(rdmaNames(p.path)).To(ConsistOf("rdma_rail0"))
			Expect(tos("rdma_rail0", 1)).To(Equal([]string{"96"}))
		},
		"spectrum-x.yaml": func(p pod) {
			Expect(rdmaNames(p.path)).To(ConsistOf("rdma_rail1"))
			Expect(tos("rdma_rail1", 1)).To(Equal([]string{"96"}))
			Expect(run("ip", "netns", "exec", p.name, "unshare", "-m", "sh", "-c", "mount -t sysfs pod /mnt && cat /mnt/class/infiniband/rdma_rail1/tc/1/traffic_class")).To(ContainSubstring("96"))
		},
	}

	It("is one of those that run here, or is run by other specs", func() {
		known := []string{"ib-sriov.yaml", "softroce.yaml"} // see infiniband_test.go and softroce_test.go
		for file := range inPod {
			known = append(known, file)
		}
		Expect(dirNames(examplesDir)).To(ConsistOf(known))
	})

	for file, check := range inPod {
		It("gives a pod what it says: "+file, func() {
			DeferCleanup(os.RemoveAll, "/run/host-local")
			for _, name := range []string{"sriov", "ovs"} {
				Expect(os.WriteFile(filepath.Join(binDir, name), []byte(standIn), 0o755)).To(Succeed())
			}
			replaceDevice(0, "tc=1") // as with an out-of-tree driver
			p, netdev := newPod(), netdevOf(vfs[0])
			n := newNetwork(exampleNetwork(file, 0))
			out, err := n.cnitool("add", p)
			Expect(err).NotTo(HaveOccurred(), out)
			Expect(netdevs(p.path)).To(ContainElement("net1"))
			Expect(rdmaNames(hostNetns)).NotTo(ContainElement(vfDevice(0)))
			check(p)
			out, err = n.cnitool("check", p)
			Expect(err).NotTo(HaveOccurred(), out)
			out, err = n.cnitool("del", p)
			Expect(err).NotTo(HaveOccurred(), out)
			expectHome(0)
			Expect(netdevOf(vfs[0])).To(Equal(netdev))
			Expect(records()).To(BeEmpty())
		})
	}
})
