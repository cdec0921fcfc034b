// Command ib-sriov stands in for the plugin of that name as the delegate before
// rdma. It does to the interface of a VF what that one does, in the same order,
// and nothing to the VF itself, which here has no subnet manager:
//
//	ADD  rdmaIsolation: the RDMA device goes into the pod first. The IPoIB
//	     interface goes into the pod, is called CNI_IFNAME, is set up, and gets
//	     IPAM's addresses and routes
//	DEL  IPAM; the interface is looked for in the pod as CNI_IFNAME, goes home
//	     under its old name; with rdmaIsolation the RDMA device goes home
//
// Without an interface of that name in the pod its DEL fails, as the real one's.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/containernetworking/plugins/pkg/ipam"
	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"

	"github.com/rdma-cni/rdma-cni/pkg/rtnl"
)

const cacheDir = "/run/ib-sriov"

type conf struct {
	types.NetConf
	DeviceID      string `json:"deviceID"`
	RDMAIsolation bool   `json:"rdmaIsolation"`
	MTU           int    `json:"mtu"`
}

// cache is what ADD leaves for DEL.
type cache struct {
	Netdev, RDMADevice string
	IPAM               string
}

func cacheFile(args *skel.CmdArgs) string {
	return filepath.Join(cacheDir, args.ContainerID+"-"+args.IfName)
}

func main() {
	runtime.LockOSThread() // an RDMA device is moved by a thread inside its namespace
	skel.PluginMainFuncs(skel.CNIFuncs{Add: add, Del: del, Check: func(*skel.CmdArgs) error { return nil }}, version.All, "ib-sriov stand-in")
}

// only gives the one entry of a folder of the function.
func only(device, folder string) (string, error) {
	for _, bus := range []string{"pci", "auxiliary"} {
		list, err := os.ReadDir(filepath.Join("/sys/bus", bus, "devices", device, folder))
		if err != nil {
			continue
		}
		for _, e := range list {
			if folder != "net" {
				return e.Name(), nil
			}
			link, err := netlink.LinkByName(e.Name())
			if err == nil && link.Type() == "ipoib" && link.Attrs().ParentIndex == 0 {
				return e.Name(), nil
			}
		}
	}
	return "", fmt.Errorf("%s has nothing in %s", device, folder)
}

func add(args *skel.CmdArgs) (err error) {
	var c conf
	if err := json.Unmarshal(args.StdinData, &c); err != nil {
		return err
	}
	pod, err := ns.GetNS(args.Netns)
	if err != nil {
		return err
	}
	defer pod.Close()
	saved := cache{IPAM: c.IPAM.Type}
	if saved.Netdev, err = only(c.DeviceID, "net"); err != nil {
		return err
	}
	var link netlink.Link
	if c.RDMAIsolation {
		if saved.RDMADevice, err = only(c.DeviceID, "infiniband"); err != nil {
			return err
		}
		if err := moveRDMA(saved.RDMADevice, pod); err != nil {
			return err
		}
		// Where the kernel has made the fresh one depends on the kernel.
		if saved.Netdev, err = only(c.DeviceID, "net"); err != nil {
			err = pod.Do(func(ns.NetNS) error {
				link, err = firstIPoIB()
				return err
			})
			if err != nil {
				return err
			}
			saved.Netdev = link.Attrs().Name
		}
	}
	if link == nil {
		if link, err = netlink.LinkByName(saved.Netdev); err != nil {
			return err
		}
		if err := netlink.LinkSetNsFd(link, int(pod.Fd())); err != nil {
			return err
		}
	}
	result := &types100.Result{CNIVersion: types100.ImplementedSpecVersion}
	if c.IPAM.Type != "" {
		r, err := ipam.ExecAdd(c.IPAM.Type, args.StdinData)
		if err != nil {
			return err
		}
		if result, err = types100.NewResultFromResult(r); err != nil {
			return err
		}
	}
	err = pod.Do(func(ns.NetNS) error {
		link, err := netlink.LinkByName(saved.Netdev)
		if err != nil {
			return err
		}
		if err := netlink.LinkSetName(link, args.IfName); err != nil {
			return err
		}
		if c.MTU != 0 {
			if err := netlink.LinkSetMTU(link, c.MTU); err != nil {
				return err
			}
		}
		if err := netlink.LinkSetUp(link); err != nil {
			return err
		}
		result.Interfaces = []*types100.Interface{{Name: args.IfName, Sandbox: args.Netns, Mac: link.Attrs().HardwareAddr.String()}}
		for _, ip := range result.IPs {
			ip.Interface = types100.Int(0)
		}
		if c.IPAM.Type == "" {
			return nil
		}
		return ipam.ConfigureIface(args.IfName, result)
	})
	if err != nil {
		return err
	}
	data, err := json.Marshal(saved)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(cacheDir, 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(cacheFile(args), data, 0o600); err != nil {
		return err
	}
	return types.PrintResult(result, c.CNIVersion)
}

func firstIPoIB() (netlink.Link, error) {
	links, err := rtnl.Dump(netlink.LinkList)
	if err != nil {
		return nil, err
	}
	for _, l := range links {
		if l.Type() == "ipoib" {
			return l, nil
		}
	}
	return nil, errors.New("no IPoIB interface")
}

func moveRDMA(device string, to ns.NetNS) error {
	link, err := netlink.RdmaLinkByName(device)
	if err != nil {
		return err
	}
	return netlink.RdmaLinkSetNsFd(link, uint32(to.Fd()))
}

func del(args *skel.CmdArgs) error {
	data, err := os.ReadFile(cacheFile(args))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var saved cache
	if err := json.Unmarshal(data, &saved); err != nil {
		return err
	}
	if saved.IPAM != "" {
		if err := ipam.ExecDel(saved.IPAM, args.StdinData); err != nil {
			return err
		}
	}
	if args.Netns == "" {
		return os.Remove(cacheFile(args))
	}
	pod, err := ns.GetNS(args.Netns)
	if errors.As(err, new(ns.NSPathNotExistErr)) {
		return os.Remove(cacheFile(args))
	}
	if err != nil {
		return err
	}
	defer pod.Close()
	err = pod.Do(func(home ns.NetNS) error {
		link, err := netlink.LinkByName(args.IfName)
		if err != nil {
			return fmt.Errorf("interface %q: %w", args.IfName, err)
		}
		if err := netlink.LinkSetDown(link); err != nil {
			return err
		}
		if err := netlink.LinkSetName(link, saved.Netdev); err != nil {
			return err
		}
		if err := netlink.LinkSetNsFd(link, int(home.Fd())); err != nil {
			return err
		}
		if saved.RDMADevice == "" {
			return nil
		}
		return moveRDMA(saved.RDMADevice, home)
	})
	if err != nil {
		return err
	}
	return os.Remove(cacheFile(args))
}
