package plugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/rdma-cni/rdma-cni/pkg/rawjson"
)

// previous is what the plugin looks at in a prevResult.
type previous struct {
	interfaces []netInterface
	ips        []ipConfig
	answer     []byte // prevResult as ADD has to give it back
}

type netInterface struct{ name, mac, sandbox string }

type ipConfig struct {
	netIf   int // its place among the interfaces, -1 if it names none
	address netip.Prefix
}

// previous decodes prevResult, nil if there is none.
//
// One of the configuration's own version, as runtimes send it, is decoded here
// and answered byte for byte, so that nothing in it gets lost. The library,
// which decodes and encodes it several times over, is asked about all others.
func (c *config) previous() (*previous, error) {
	if c.prevResult == nil {
		return nil, nil
	}
	var cniVersion string
	if c.prevResult.Text("cniVersion", &cniVersion) != nil ||
		cniVersion != c.cniVersion || cniVersion < "0.3.0" { // before that it named no interfaces
		return c.convertPrevious()
	}
	p := &previous{}
	var out bytes.Buffer
	err := errors.Join(p.readInterfaces(c.prevResult), p.readIPs(c.prevResult), json.Compact(&out, c.rawPrevResult))
	if err != nil {
		return nil, fmt.Errorf("key prevResult: %w", err)
	}
	out.WriteByte('\n')
	p.answer = out.Bytes()
	return p, nil
}

func (p *previous) readInterfaces(keys object) error {
	const key = "interfaces"
	return keys.Objects(key, func(o object) error {
		var i netInterface
		err := errors.Join(o.Text("name", &i.name), o.Text("mac", &i.mac), o.Text("sandbox", &i.sandbox))
		p.interfaces = append(p.interfaces, i)
		return prefixed(key+".", err)
	})
}

func (p *previous) readIPs(keys object) error {
	const key = "ips"
	return keys.Objects(key, func(o object) error {
		ip := ipConfig{netIf: -1}
		var address string
		if err := o.Text("address", &address); err != nil {
			return prefixed(key+".", err)
		}
		var err error
		if ip.address, err = netip.ParsePrefix(address); err != nil {
			return prefixed(key+".", rawjson.WrongType("address", "an IP address with its prefix length", o["address"]))
		}
		if !o.Null("interface") {
			if ip.netIf, err = strconv.Atoi(string(o["interface"])); err != nil {
				return prefixed(key+".", rawjson.WrongType("interface", "a whole number", o["interface"]))
			}
		}
		p.ips = append(p.ips, ip)
		return nil
	})
}

var errNullInResult = errors.New("one of its interfaces, ips or routes is null")

// convertPrevious decodes a prevResult of another version than the
// configuration's with the library, or says what is wrong with it.
func (c *config) convertPrevious() (*previous, error) {
	// The library takes for granted that no element of these is null; whatever
	// else is wrong with them it says itself.
	var lists struct{ Interfaces, IPs, Routes []*json.RawMessage }
	_ = json.Unmarshal(c.rawPrevResult, &lists)
	if slices.Contains(slices.Concat(lists.Interfaces, lists.IPs, lists.Routes), nil) {
		return nil, fmt.Errorf("key prevResult: %w", errNullInResult)
	}
	conf := types.PluginConf{CNIVersion: c.cniVersion}
	if err := json.Unmarshal(c.rawPrevResult, &conf.RawPrevResult); err != nil {
		return nil, fmt.Errorf("key prevResult: %w", err)
	}
	if err := version.ParsePrevResult(&conf); err != nil {
		return nil, fmt.Errorf("key prevResult is no result of CNI version %s: %w", c.cniVersion, err)
	}
	r, err := types100.NewResultFromResult(conf.PrevResult)
	if err != nil {
		return nil, fmt.Errorf("key prevResult: %w", err)
	}
	p := &previous{}
	if p.answer, err = c.answer(conf.PrevResult); err != nil {
		return nil, err
	}
	for _, i := range r.Interfaces {
		p.interfaces = append(p.interfaces, netInterface{name: i.Name, mac: i.Mac, sandbox: i.Sandbox})
	}
	for _, from := range r.IPs {
		ip := ipConfig{netIf: -1}
		if from.Interface != nil {
			ip.netIf = *from.Interface
		}
		address, _ := netip.AddrFromSlice(from.Address.IP)
		ones, _ := from.Address.Mask.Size()
		ip.address = netip.PrefixFrom(address, ones)
		p.ips = append(p.ips, ip)
	}
	return p, nil
}

// answer prints a result in the configuration's version; one that is of it
// already byte for byte.
func (c *config) answer(result types.Result) ([]byte, error) {
	var head struct {
		CNIVersion string `json:"cniVersion"`
	}
	var out bytes.Buffer
	if err := json.Unmarshal(c.rawPrevResult, &head); err == nil && head.CNIVersion == c.cniVersion {
		if err := json.Compact(&out, c.rawPrevResult); err != nil {
			return nil, err
		}
		out.WriteByte('\n')
		return out.Bytes(), nil
	}
	converted, err := result.GetAsVersion(c.cniVersion)
	if err != nil {
		return nil, fmt.Errorf("convert prevResult to CNI version %s: %w", c.cniVersion, err)
	}
	if err := converted.PrintTo(&out); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// withMAC gives an answer in which an interface has the hardware address that it
// has now. An answer that says nothing of it stays as it is.
func withMAC(answer []byte, ifName, mac string) []byte {
	var result map[string]json.RawMessage
	var interfaces []map[string]json.RawMessage
	if json.Unmarshal(answer, &result) != nil || json.Unmarshal(result["interfaces"], &interfaces) != nil {
		return answer
	}
	changed := false
	for _, i := range interfaces {
		var name, sandbox, old string
		_, _, _ = json.Unmarshal(i["name"], &name), json.Unmarshal(i["sandbox"], &sandbox), json.Unmarshal(i["mac"], &old)
		if name == ifName && sandbox != "" && old != "" && old != mac {
			i["mac"], changed = json.RawMessage(strconv.Quote(mac)), true
		}
	}
	if !changed {
		return answer
	}
	var err error
	if result["interfaces"], err = json.Marshal(interfaces); err != nil {
		return answer
	}
	out, err := json.Marshal(result)
	if err != nil {
		return answer
	}
	return append(out, '\n')
}

// interfaceOf finds an interface in the pod, nil if the result names none such
// (results before 0.3.0 name no interfaces).
func (p *previous) interfaceOf(name string) *netInterface {
	for i := range p.interfaces {
		if p.interfaces[i].name == name && p.interfaces[i].sandbox != "" {
			return &p.interfaces[i]
		}
	}
	return nil
}

// addressesOf lists the addresses that the result gives to an interface.
func (p *previous) addressesOf(ifName string) []netip.Addr {
	var addresses []netip.Addr
	for _, ip := range p.ips {
		if ip.netIf != -1 && (ip.netIf < 0 || ip.netIf >= len(p.interfaces) || p.interfaces[ip.netIf].name != ifName) {
			continue
		}
		if ip.address.IsValid() {
			addresses = append(addresses, ip.address.Addr().Unmap())
		}
	}
	return addresses
}
