package e2e

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/Mellanox/rdmamap"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/vishvananda/netlink"

	"github.com/rdma-cni/rdma-cni/pkg/rtnl"
)

// network is a conflist on disk, called through cnitool as a runtime would.
type network struct {
	name, dir string
}

func newNetwork(conf map[string]any) network {
	GinkgoHelper()
	dir := GinkgoT().TempDir()
	data, err := json.Marshal(conf)
	Expect(err).NotTo(HaveOccurred())
	Expect(os.WriteFile(filepath.Join(dir, "net.conflist"), data, 0o600)).To(Succeed())
	DeferCleanup(os.RemoveAll, "/var/lib/cni")
	return network{name: conf["name"].(string), dir: dir}
}

// cnitool calls a verb and gives its output; its error has what it and the
// plugins said on stderr.
func (n network) cnitool(verb string, p pod) (string, error) {
	cmd := exec.Command(filepath.Join(binDir, "cnitool"), verb, n.name, p.path)
	cmd.Env = append(os.Environ(), "NETCONFPATH="+n.dir, "CNI_PATH="+binDir, "CNI_IFNAME=net1")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("cnitool %s: %w: %s", verb, err, stderr.String())
	}
	return string(out), err
}

// chain is the network [host-device, rdma] on a VF, with addresses of
// host-local.
func chain(cniVersion, deviceID string) map[string]any {
	return map[string]any{
		"cniVersion": cniVersion, "name": "rail",
		"plugins": []any{
			map[string]any{
				"type": "host-device", "pciBusID": deviceID,
				"ipam": map[string]any{
					"type": "host-local", "dataDir": "/run/host-local",
					"ranges": []any{[]any{map[string]any{"subnet": "192.168.7.0/24"}}},
				},
			},
			map[string]any{"type": "rdma", "deviceID": deviceID},
		},
	}
}

// netdevOf is the name of a VF's netdev at home.
func netdevOf(vf string) string {
	GinkgoHelper()
	names := dirNames(filepath.Join("/sys/bus/pci/devices", vf, "net"))
	Expect(names).To(HaveLen(1), "the netdev of %s at home", vf)
	return names[0]
}

// netdevs lists the interfaces of a namespace.
func netdevs(path string) []string {
	GinkgoHelper()
	var names []string
	inNetns(path, func() {
		links, err := rtnl.Dump(netlink.LinkList)
		Expect(err).NotTo(HaveOccurred())
		for _, l := range links {
			names = append(names, l.Attrs().Name)
		}
	})
	return names
}

// roceV2GIDs lists the RoCEv2 GIDs in a pod's view of a device's first port, as
// addresses. The pod's view is a sysfs that is mounted inside its namespace.
func roceV2GIDs(p pod, device string) []string {
	GinkgoHelper()
	script := `mount -t sysfs pod /mnt && cd /mnt/class/infiniband/` + device + `/ports/1 &&
for f in gids/*; do i=${f#gids/}; t=$(cat gid_attrs/types/$i 2>/dev/null) || continue; [ "$t" = "RoCE v2" ] && cat $f; done; true`
	out := run("ip", "netns", "exec", p.name, "unshare", "-m", "sh", "-c", script)
	var addresses []string
	for gid := range strings.FieldsSeq(out) {
		ip := net.ParseIP(gid)
		Expect(ip).NotTo(BeNil(), "GID %q", gid)
		addresses = append(addresses, ip.String())
	}
	return addresses
}

var _ = Describe("the chain [host-device, rdma]", func() {
	for _, version := range []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		It("attaches, checks and detaches with cniVersion "+version, func() {
			p, vf, netdev := newPod(), vfs[0], netdevOf(vfs[0])
			n := newNetwork(chain(version, vf))
			Expect(rdmamap.GetRdmaDevicesForPcidev(vf)).To(ConsistOf(vfDevice(0)))
			chars := charDevices()

			out, err := n.cnitool("add", p)
			Expect(err).NotTo(HaveOccurred(), out)
			var result struct {
				CNIVersion string
				IPs        []struct{ Address string }
			}
			Expect(json.Unmarshal([]byte(out), &result)).To(Succeed(), out)
			Expect(result.CNIVersion).To(Equal(version))
			Expect(result.IPs).To(HaveLen(1))
			ip, _, err := net.ParseCIDR(result.IPs[0].Address)
			Expect(err).NotTo(HaveOccurred())

			By("the pod has the netdev, the device and its GID, the host has none of them")
			expectIn(p, 0)
			Expect(netdevs(p.path)).To(ContainElement("net1"))
			Expect(netdevs(hostNetns)).NotTo(ContainElement(netdev))
			Expect(rdmaNames(p.path)).To(ConsistOf(vfDevice(0)))
			Eventually(func() []string { return roceV2GIDs(p, vfDevice(0)) }, patience).Should(ContainElement(ip.String()))
			Expect(rdmamap.GetRdmaDevicesForPcidev(vf)).To(BeEmpty())
			Expect(charDevices()).To(Equal(chars), "a single move keeps the numbers")

			if version != "0.3.1" { // has no CHECK
				out, err = n.cnitool("check", p)
				Expect(err).NotTo(HaveOccurred(), out)
			}

			out, err = n.cnitool("del", p)
			Expect(err).NotTo(HaveOccurred(), out)
			expectHome(0)
			Expect(rdmaNames(p.path)).To(BeEmpty())
			Expect(netdevOf(vf)).To(Equal(netdev))
			Expect(records()).To(BeEmpty())
		})
	}

	It("finds the device behind the interface if no deviceID is given", func() {
		p := newPod()
		conf := chain("1.0.0", vfs[1])
		delete(conf["plugins"].([]any)[1].(map[string]any), "deviceID")
		n := newNetwork(conf)
		out, err := n.cnitool("add", p)
		Expect(err).NotTo(HaveOccurred(), out)
		expectIn(p, 1)
		out, err = n.cnitool("check", p)
		Expect(err).NotTo(HaveOccurred(), out)
		out, err = n.cnitool("del", p)
		Expect(err).NotTo(HaveOccurred(), out)
		expectHome(1)
	})

	It("gives up cleanly when its ADD fails: the delegate's DEL still runs", func() {
		p, netdev := newPod(), netdevOf(vfs[0])
		conf := chain("1.0.0", vfs[0])
		conf["plugins"].([]any)[1].(map[string]any)["deviceID"] = "0000:99:00.0"
		n := newNetwork(conf)
		_, err := n.cnitool("add", p)
		Expect(err).To(MatchError(ContainSubstring("0000:99:00.0: no such PCI function")))
		out, err := n.cnitool("del", p)
		Expect(err).NotTo(HaveOccurred(), out)
		Expect(netdevOf(vfs[0])).To(Equal(netdev))
	})

	It("attaches several VFs to one pod", func() {
		p := newPod()
		for i := range 3 {
			a := vfAttachment(p, i)
			a.ifname = fmt.Sprintf("net%d", i)
			a.succeed("ADD")
		}
		Expect(rdmaNames(p.path)).To(ConsistOf(vfDevice(0), vfDevice(1), vfDevice(2)))
		for i := range 3 {
			a := vfAttachment(p, i)
			a.ifname = fmt.Sprintf("net%d", i)
			a.succeed("DEL")
			expectHome(i)
		}
	})
})
