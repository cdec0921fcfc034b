package plugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
)

// previous is what the plugin looks at in a prevResult.
type previous struct {
	Interfaces []*netInterface
	IPs        []*ipConfig

	// answer is prevResult as ADD has to give it back.
	answer []byte
}

type netInterface struct{ Name, Mac, Sandbox string }

type ipConfig struct {
	Interface *int
	Address   netip.Prefix
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
	var own struct {
		CNIVersion string
		previous
	}
	err := json.Unmarshal(c.prevResult, &own)
	if err != nil || own.CNIVersion != c.cniVersion || c.cniVersion < "0.3.0" { // before that it named no interfaces
		return c.convertPrevious()
	}
	if slices.Contains(own.Interfaces, nil) || slices.Contains(own.IPs, nil) {
		return nil, errNullInResult
	}
	var out bytes.Buffer
	if err := json.Compact(&out, c.prevResult); err != nil {
		return nil, fmt.Errorf("key prevResult: %w", err)
	}
	out.WriteByte('\n')
	own.answer = out.Bytes()
	return &own.previous, nil
}

var errNullInResult = errors.New("key prevResult: one of its interfaces, ips or routes is null")

// convertPrevious decodes a prevResult of another version than the
// configuration's with the library, or says what is wrong with it.
func (c *config) convertPrevious() (*previous, error) {
	// The library takes for granted that no element of these is null; whatever
	// else is wrong with them it says itself.
	var lists struct{ Interfaces, IPs, Routes []*json.RawMessage }
	_ = json.Unmarshal(c.prevResult, &lists)
	if slices.Contains(slices.Concat(lists.Interfaces, lists.IPs, lists.Routes), nil) {
		return nil, errNullInResult
	}
	conf := types.PluginConf{CNIVersion: c.cniVersion}
	if err := json.Unmarshal(c.prevResult, &conf.RawPrevResult); err != nil {
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
		p.Interfaces = append(p.Interfaces, &netInterface{Name: i.Name, Mac: i.Mac, Sandbox: i.Sandbox})
	}
	for _, ip := range r.IPs {
		address, _ := netip.AddrFromSlice(ip.Address.IP)
		ones, _ := ip.Address.Mask.Size()
		p.IPs = append(p.IPs, &ipConfig{Interface: ip.Interface, Address: netip.PrefixFrom(address.Unmap(), ones)})
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
	if err := json.Unmarshal(c.prevResult, &head); err == nil && head.CNIVersion == c.cniVersion {
		if err := json.Compact(&out, c.prevResult); err != nil {
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

// interfaceOf finds an interface in the pod, nil if the result names none such
// (results before 0.3.0 name no interfaces).
func (p *previous) interfaceOf(name string) *netInterface {
	for _, i := range p.Interfaces {
		if i.Name == name && i.Sandbox != "" {
			return i
		}
	}
	return nil
}

// addressesOf lists the addresses that the result gives to an interface.
func (p *previous) addressesOf(ifName string) []netip.Addr {
	var addresses []netip.Addr
	for _, ip := range p.IPs {
		if ip.Interface != nil {
			i := *ip.Interface
			if i < 0 || i >= len(p.Interfaces) || p.Interfaces[i].Name != ifName {
				continue
			}
		}
		if ip.Address.IsValid() {
			addresses = append(addresses, ip.Address.Addr().Unmap())
		}
	}
	return addresses
}
