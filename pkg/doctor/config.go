package doctor

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// ConfigFacts are the networks of a file: a CNI configuration (.conf,
// .conflist), or a manifest with NetworkAttachmentDefinitions.
type ConfigFacts struct {
	File     string
	Err      string // why it cannot be read
	Networks []NetworkFacts
}

// NetworkFacts is one network.
type NetworkFacts struct {
	Name         string
	Err          string // why its configuration cannot be read
	Manifest     bool   // from a NetworkAttachmentDefinition
	ResourceName string // the annotation that gives a device ID
	CNIVersion   string
	Plugins      []PluginConf
}

// PluginConf is what matters of a plugin's object.
type PluginConf struct {
	Type, DeviceID, PCIBusID string
	Capabilities             map[string]bool
	HasIPAM                  bool
	SoftRoCE                 bool
}

// readConfig reads a file.
func readConfig(file string) *ConfigFacts {
	data, err := os.ReadFile(file)
	if err != nil {
		return &ConfigFacts{File: file, Err: err.Error()}
	}
	return parseConfigFile(file, data)
}

// parseConfigFile reads YAML documents, of which JSON is one kind. Documents
// that are no networks, as in a manifest with other objects, are passed over.
func parseConfigFile(file string, data []byte) *ConfigFacts {
	c := &ConfigFacts{File: file}
	for i, doc := range strings.Split("\n"+string(data), "\n---") {
		if strings.TrimSpace(doc) == "" {
			continue
		}
		var object struct {
			Kind     string
			Metadata struct {
				Name        string
				Annotations map[string]string
			}
			Spec struct{ Config string }
			Type string
		}
		raw, err := yaml.YAMLToJSON([]byte(doc))
		if err == nil {
			err = json.Unmarshal(raw, &object)
		}
		if err != nil {
			c.Err = fmt.Sprintf("document %d: %v", i+1, err)
			return c
		}
		switch {
		case object.Kind == "NetworkAttachmentDefinition":
			n := parseNetwork([]byte(object.Spec.Config))
			n.Manifest, n.Name = true, object.Metadata.Name
			n.ResourceName = object.Metadata.Annotations["k8s.v1.cni.cncf.io/resourceName"]
			c.Networks = append(c.Networks, n)
		case object.Kind == "":
			c.Networks = append(c.Networks, parseNetwork(raw))
		}
	}
	if c.Err == "" && len(c.Networks) == 0 {
		c.Err = "it holds no network configuration and no NetworkAttachmentDefinition"
	}
	return c
}

type pluginObject struct {
	Type         string          `json:"type"`
	DeviceID     string          `json:"deviceID"`
	PCIBusID     string          `json:"pciBusID"`
	Capabilities map[string]bool `json:"capabilities"`
	IPAM         json.RawMessage `json:"ipam"`
	SoftRoCE     any             `json:"softRoCE"`
}

func parseNetwork(config []byte) NetworkFacts {
	var object struct {
		Name       string         `json:"name"`
		CNIVersion string         `json:"cniVersion"`
		Plugins    []pluginObject `json:"plugins"`
		pluginObject
	}
	if err := json.Unmarshal(config, &object); err != nil {
		return NetworkFacts{Err: err.Error()}
	}
	n := NetworkFacts{Name: object.Name, CNIVersion: object.CNIVersion}
	plugins := object.Plugins
	if object.Type != "" {
		plugins = append(plugins, object.pluginObject)
	}
	for _, p := range plugins {
		n.Plugins = append(n.Plugins, PluginConf{
			Type: p.Type, DeviceID: p.DeviceID, PCIBusID: p.PCIBusID, Capabilities: p.Capabilities,
			SoftRoCE: p.SoftRoCE == true,
			HasIPAM:  len(p.IPAM) > 0 && !slices.Contains([]string{"null", "{}"}, string(p.IPAM)),
		})
	}
	if len(n.Plugins) == 0 {
		n.Err = "it names no plugin"
	}
	return n
}

// interfaceMakers are plugins that put a device's interface into a pod.
var interfaceMakers = []string{"sriov", "ib-sriov", "ib-sriov-cni", "host-device", "ovs", "accelerated-bridge", "ovn-k8s-cni-overlay"}

// rdmaTypes are plugins that move the RDMA device themselves.
var rdmaTypes = []string{"rdma"}

func checkConfig(f Facts) []Finding {
	if f.Config == nil {
		return []Finding{pass("", "no file was given (--config FILE)")}
	}
	if f.Config.Err != "" {
		return []Finding{fail(f.Config.File, f.Config.Err, "The file cannot be judged.", "Give a CNI configuration or a manifest with NetworkAttachmentDefinitions.")}
	}
	var list []Finding
	for _, n := range f.Config.Networks {
		where := strings.TrimSuffix(f.Config.File+" network "+n.Name, " network ")
		if n.Err != "" {
			list = append(list, fail(where, n.Err, "A runtime cannot use this network.", "Correct its configuration."))
			continue
		}
		found := checkNetwork(where, n)
		if len(found) == 0 {
			found = []Finding{pass(where, "the plugins are in a good order: "+n.types())}
		}
		list = append(list, found...)
		if slices.ContainsFunc(n.Plugins, func(p PluginConf) bool { return p.SoftRoCE && slices.Contains(rdmaTypes, p.Type) }) {
			list = append(list, checkSoftRoCE(where, f)...)
		}
	}
	return list
}

func (n NetworkFacts) types() string {
	var types []string
	for _, p := range n.Plugins {
		types = append(types, p.Type)
	}
	return strings.Join(types, ", ")
}

func checkNetwork(where string, n NetworkFacts) []Finding {
	isRDMA := func(p PluginConf) bool { return slices.Contains(rdmaTypes, p.Type) }
	at := slices.IndexFunc(n.Plugins, isRDMA)
	if at < 0 {
		return []Finding{warn(where, "it has no rdma plugin: "+n.types(), "Pods of this network get no RDMA device.",
			`Append {"type":"rdma"} to its plugins, if they should.`)}
	}
	var list []Finding
	maker := slices.IndexFunc(n.Plugins, func(p PluginConf) bool { return slices.Contains(interfaceMakers, p.Type) })
	switch {
	case len(n.Plugins) == 1:
		list = append(list, fail(where, "rdma is its only plugin", "rdma makes no interface: ADD fails without the result of a plugin that does.",
			"Make it a list (conflist) with the plugin that moves the interface (sriov, host-device) before rdma."))
	case at == 0 || maker > at:
		list = append(list, fail(where, "rdma comes before the plugin that moves the interface: "+n.types(),
			"ADD fails for want of a previous result, and RoCE devices would lose their addresses.",
			"Put rdma after it: [sriov, rdma], with tuning and the like where you want."))
	case maker < 0 && !n.Plugins[at].SoftRoCE: // any plugin's interface is good for it
		list = append(list, warn(where, "no plugin before rdma is known to move a device's interface: "+n.types(),
			"rdma needs the interface of the RDMA device in the pod, made by a plugin before it.", "Check that one of them does; sriov and host-device do."))
	}
	if slices.IndexFunc(n.Plugins[at+1:], isRDMA) >= 0 {
		list = append(list, fail(where, "it has several rdma plugins", "The second one refuses the device that the first one moved.", "Leave one."))
	}
	if p := n.Plugins[at]; p.DeviceID != "" && p.PCIBusID != "" && !strings.EqualFold(p.DeviceID, p.PCIBusID) {
		list = append(list, fail(where, fmt.Sprintf("deviceID %s and pciBusID %s of rdma differ", p.DeviceID, p.PCIBusID), "ADD is refused.", "Leave one of the two."))
	}
	if n.Manifest && n.ResourceName == "" && n.Plugins[at].DeviceID == "" && !n.Plugins[at].SoftRoCE {
		list = append(list, warn(where, "the annotation k8s.v1.cni.cncf.io/resourceName is missing",
			"Multus passes no device ID, so the device is looked for by way of the interface, and sriov has none at all.",
			"Annotate the NetworkAttachmentDefinition with the resource of the device plugin."))
	}
	if maker >= 0 && maker < at {
		m, r := n.Plugins[maker], n.Plugins[at]
		a, b := m.DeviceID+m.PCIBusID, r.DeviceID+r.PCIBusID
		if a != "" && b != "" && !strings.EqualFold(a, b) {
			list = append(list, fail(where, fmt.Sprintf("%s is given device %s and rdma %s", m.Type, a, b), "Interface and RDMA device in the pod would belong to different functions.", "Give both the same."))
		}
	}
	return list
}

// registersShared tells whether kubelet's checkpoint names resources as the
// shared device plugin registers them by default: rdma/NAME with devices that
// are mere numbers.
func registersShared(checkpoint []byte) bool {
	var c struct {
		Data struct {
			RegisteredDevices map[string][]string
		}
	}
	if err := json.Unmarshal(checkpoint, &c); err != nil {
		return false
	}
	for name, devices := range c.Data.RegisteredDevices {
		if !strings.HasPrefix(name, "rdma/") {
			continue
		}
		if len(devices) > 0 && !slices.ContainsFunc(devices, func(d string) bool { return strings.Trim(d, "0123456789") != "" }) {
			return true
		}
	}
	return false
}
