// Package manifests tests deployment/: what kustomize makes of it is decoded
// strictly into the types of Kubernetes, and has to have the properties that we
// claim for it.
package manifests

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

func TestManifests(t *testing.T) {
	RegisterFailHandler(Fail)
	RunSpecs(t, "manifests")
}

const deployment = "../../deployment"

// objects are what a kustomization makes, by kind.
type objects map[string][]any

// build runs kustomize as kubectl -k does.
func build(dir string) objects {
	GinkgoHelper()
	made, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	Expect(err).NotTo(HaveOccurred())
	all := objects{}
	for _, r := range made.Resources() {
		text, err := r.AsYAML()
		Expect(err).NotTo(HaveOccurred())
		var o any
		switch id := r.GetGvk().String(); id {
		case "DaemonSet.v1.apps":
			o = &appsv1.DaemonSet{}
		case "Deployment.v1.apps":
			o = &appsv1.Deployment{}
		case "ServiceAccount.v1.[noGrp]":
			o = &corev1.ServiceAccount{}
		case "Namespace.v1.[noGrp]":
			o = &corev1.Namespace{}
		case "RoleBinding.v1.rbac.authorization.k8s.io":
			o = &rbacv1.RoleBinding{}
		default:
			Fail(dir + " makes a " + id + ", which this test does not know")
		}
		decode(text, o)
		all[r.GetKind()] = append(all[r.GetKind()], o)
	}
	return all
}

// one is the only object of its kind.
func one[T any](all objects, kind string) T {
	GinkgoHelper()
	Expect(all[kind]).To(HaveLen(1), kind)
	return all[kind][0].(T)
}

// image is the one that all manifests name.
func image() string {
	GinkgoHelper()
	return one[*appsv1.DaemonSet](build(deployment+"/base"), "DaemonSet").Spec.Template.Spec.Containers[0].Image
}

// systems are the kustomizations with a DaemonSet.
var systems = map[string]struct{ namespace, cniBin, seLinuxType string }{
	"base":               {"kube-system", "/opt/cni/bin", ""},
	"overlays/openshift": {"rdma-cni", "/var/lib/cni/bin", "spc_t"},
	"overlays/talos":     {"kube-system", "/opt/cni/bin", ""},
	"overlays/flatcar":   {"kube-system", "/opt/cni/bin", ""},
}

var _ = Describe("deployment", func() {
	It("has no folder that is not tested here", func() {
		folders := []string{"overlays/sriov-network-operator", "overlays/network-operator"}
		for name := range systems {
			folders = append(folders, name)
		}
		found, err := filepath.Glob(deployment + "/overlays/*")
		Expect(err).NotTo(HaveOccurred())
		for i := range found {
			found[i], err = filepath.Rel(deployment, found[i])
			Expect(err).NotTo(HaveOccurred())
		}
		Expect(append(found, "base")).To(ConsistOf(folders))
	})

	for name, system := range systems {
		Describe(name, func() {
			var all objects
			var set *appsv1.DaemonSet
			var pod corev1.PodSpec
			var c corev1.Container
			BeforeEach(func() {
				all = build(filepath.Join(deployment, name))
				set = one[*appsv1.DaemonSet](all, "DaemonSet")
				pod = set.Spec.Template.Spec
				Expect(pod.InitContainers).To(BeEmpty())
				Expect(pod.Containers).To(HaveLen(1))
				c = pod.Containers[0]
			})

			It("is one DaemonSet in its namespace, whose selector fits its pods", func() {
				Expect(set.Namespace).To(Equal(system.namespace))
				selector, err := metav1.LabelSelectorAsSelector(set.Spec.Selector)
				Expect(err).NotTo(HaveOccurred())
				Expect(selector.Empty()).To(BeFalse())
				Expect(set.Spec.Template.Labels).To(HaveKeyWithValue("app.kubernetes.io/name", "rdma-cni"))
				for key, value := range set.Spec.Selector.MatchLabels {
					Expect(set.Spec.Template.Labels).To(HaveKeyWithValue(key, value))
				}
			})

			It("is given no more than it needs", func() {
				Expect(pod.HostNetwork).To(BeFalse())
				Expect(pod.HostPID).To(BeFalse())
				Expect(pod.HostIPC).To(BeFalse())
				Expect(pod.AutomountServiceAccountToken).To(HaveValue(BeFalse()))
				Expect(pod.SecurityContext.SeccompProfile).To(HaveValue(HaveField("Type", corev1.SeccompProfileTypeRuntimeDefault)))
				Expect(c.SecurityContext.Privileged).To(HaveValue(BeFalse()))
				Expect(c.SecurityContext.AllowPrivilegeEscalation).To(HaveValue(BeFalse()))
				Expect(c.SecurityContext.ReadOnlyRootFilesystem).To(HaveValue(BeTrue()))
				Expect(c.SecurityContext.Capabilities).To(HaveValue(Equal(corev1.Capabilities{Drop: []corev1.Capability{"ALL"}})))
				Expect(c.Env).To(BeEmpty())
				Expect(c.EnvFrom).To(BeEmpty())
				Expect(c.Ports).To(BeEmpty())
				if system.seLinuxType == "" {
					Expect(c.SecurityContext.SELinuxOptions).To(BeNil())
				} else {
					Expect(c.SecurityContext.SELinuxOptions).To(HaveValue(Equal(corev1.SELinuxOptions{Type: system.seLinuxType})))
				}
			})

			It("has an account without rights on the API", func() {
				account := one[*corev1.ServiceAccount](all, "ServiceAccount")
				Expect(account.Name).To(Equal(pod.ServiceAccountName))
				Expect(account.Namespace).To(Equal(system.namespace))
				Expect(account.AutomountServiceAccountToken).To(HaveValue(BeFalse()))
				for _, o := range all["RoleBinding"] {
					binding := o.(*rbacv1.RoleBinding)
					Expect(binding.RoleRef.Name).To(HavePrefix("system:openshift:scc:"), "the right to use a constraint, none else")
					Expect(binding.Namespace).To(Equal(system.namespace))
					Expect(binding.Subjects).To(ConsistOf(rbacv1.Subject{Kind: "ServiceAccount", Name: account.Name, Namespace: system.namespace}))
				}
			})

			It("comes onto every node and stays there", func() {
				Expect(pod.PriorityClassName).To(Equal("system-node-critical"))
				Expect(pod.Tolerations).To(ConsistOf(corev1.Toleration{Operator: corev1.TolerationOpExists}))
				Expect(pod.NodeSelector).To(Equal(map[string]string{"kubernetes.io/os": "linux"}))
				Expect(set.Spec.UpdateStrategy.Type).To(Equal(appsv1.RollingUpdateDaemonSetStrategyType))
				Expect(set.Spec.UpdateStrategy.RollingUpdate.MaxUnavailable).NotTo(BeNil())
			})

			It("has requests that are its limits", func() {
				Expect(c.Resources.Requests).To(HaveLen(2))
				Expect(c.Resources.Requests).To(Equal(c.Resources.Limits))
				Expect(c.Resources.Limits.Cpu().MilliValue()).To(BeNumerically(">=", 100), "a probe that is throttled runs into its timeout")
			})

			It("names an image of one version", func() {
				Expect(c.Image).To(MatchRegexp(`^\S+(:v\d+\.\d+\.\d+|@sha256:[0-9a-f]{64})$`))
				Expect(c.Image).To(Equal(image()))
			})

			It("installs into the mount of the node's CNI directory, and probes the same", func() {
				Expect(pod.Volumes).To(HaveLen(1))
				Expect(pod.Volumes[0].HostPath).To(HaveValue(And(
					HaveField("Path", system.cniBin), HaveField("Type", HaveValue(Equal(corev1.HostPathDirectory))))))
				Expect(c.VolumeMounts).To(ConsistOf(corev1.VolumeMount{Name: pod.Volumes[0].Name, MountPath: "/host/opt/cni/bin"}))
				Expect(c.Command).To(Equal([]string{"/usr/bin/rdma-cni", "install"}))
				into := "--cni-bin-dir=" + c.VolumeMounts[0].MountPath
				Expect(c.Args).To(Equal([]string{into}))
				check := slices.Concat(c.Command, []string{"--check", into})
				Expect(c.StartupProbe.Exec.Command).To(Equal(check))
				Expect(c.ReadinessProbe.Exec.Command).To(Equal(check))
				Expect(c.LivenessProbe).To(BeNil(), "two installers would replace each other's plugin for ever")
			})
		})
	}

	It("lets OpenShift admit the pod, and nothing but our account use the constraint", func() {
		all := build(deployment + "/overlays/openshift")
		namespace := one[*corev1.Namespace](all, "Namespace")
		Expect(namespace.Name).To(Equal("rdma-cni"))
		Expect(namespace.Labels).To(HaveKeyWithValue("pod-security.kubernetes.io/enforce", "privileged"))
		Expect(namespace.Annotations).To(HaveKeyWithValue("openshift.io/node-selector", ""))
		Expect(all["RoleBinding"]).To(HaveLen(1))
	})

	It("tells the SR-IOV network operator the image, and nothing else", func() {
		all := build("testdata/sriov-network-operator")
		Expect(all).To(HaveLen(1))
		env := one[*appsv1.Deployment](all, "Deployment").Spec.Template.Spec.Containers[0].Env
		Expect(env).To(ConsistOf(
			corev1.EnvVar{Name: "RDMA_CNI_IMAGE", Value: image()},
			corev1.EnvVar{Name: "SRIOV_CNI_IMAGE", Value: "sriov-cni:test"},
			corev1.EnvVar{Name: "SRIOV_CNI_BIN_PATH"}))
	})

	It("tells it to the charts of both operators", func() {
		type images struct {
			RDMACNI string `json:"rdmaCni"`
		}
		var sriov struct {
			Images images `json:"images"`
		}
		decodeFile("overlays/sriov-network-operator/values.yaml", &sriov)
		Expect(sriov.Images.RDMACNI).To(Equal(image()))
		var nvidia struct {
			Enable struct {
				Enabled bool `json:"enabled"`
			} `json:"sriovNetworkOperator"`
			SRIOV struct {
				Images images `json:"images"`
			} `json:"sriov-network-operator"`
		}
		decodeFile("overlays/network-operator/values.yaml", &nvidia)
		Expect(nvidia.SRIOV.Images.RDMACNI).To(Equal(image()))
		Expect(nvidia.Enable.Enabled).To(BeTrue())
	})
})

// decode is as strict as an API server that is asked to be: unknown keys, keys
// that are there twice, and keys in the wrong case are errors.
func decode(text []byte, into any) {
	GinkgoHelper()
	data, err := yaml.YAMLToJSONStrict(text)
	Expect(err).NotTo(HaveOccurred(), "%s", text)
	strict, err := kjson.UnmarshalStrict(data, into)
	Expect(err).NotTo(HaveOccurred(), "%s", text)
	Expect(strict).To(BeEmpty(), "%s", text)
}

// decodeFile decodes a file below deployment/.
func decodeFile(file string, into any) {
	GinkgoHelper()
	text, err := os.ReadFile(filepath.Join(deployment, file))
	Expect(err).NotTo(HaveOccurred())
	decode(text, into)
}

// networkAttachmentDefinition is the type of k8s.cni.cncf.io/v1.
type networkAttachmentDefinition struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Config string `json:"config"`
	} `json:"spec"`
}

// pluginKeys are the keys that each plugin of the examples knows, by its own
// documentation; of rdma, docs/configuration.md. What the CNI library takes is
// left out.
var pluginKeys = map[string][]string{
	"sriov":       {"type", "ipam", "vlan", "spoofchk", "trust", "link_state"},
	"ib-sriov":    {"type", "ipam", "link_state", "rdmaIsolation", "pkey"},
	"host-device": {"type", "ipam"},
	"ovs":         {"type", "ipam", "bridge", "interface_type"},
	"macvlan":     {"type", "ipam", "master", "mode", "mtu"},
	"tuning":      {"type", "sysctl", "mtu"},
	"sbr":         {"type"},
	"rdma":        {"type", "args", "devices", "rdmaDeviceName", "rdmaQoS", "waitForGID", "onSharedMode", "optional", "zeroGUID", "logLevel", "logFile", "softRoCE", "softRoCEOverHardware"},
}

// movers are the plugins that bring the interface into the pod.
var movers = []string{"sriov", "ib-sriov", "host-device", "ovs", "macvlan"}

var _ = Describe("deployment/examples", func() {
	files, err := filepath.Glob(deployment + "/examples/*.yaml")
	It("are there", func() {
		Expect(err).NotTo(HaveOccurred())
		Expect(len(files)).To(BeNumerically(">=", 6))
	})

	for _, file := range files {
		DescribeTable("are NetworkAttachmentDefinitions whose networks have the plugins in order: "+filepath.Base(file), func(text string) {
			var definition networkAttachmentDefinition
			decode([]byte(text), &definition)
			Expect(definition.TypeMeta).To(Equal(metav1.TypeMeta{APIVersion: "k8s.cni.cncf.io/v1", Kind: "NetworkAttachmentDefinition"}))
			if soft := strings.Contains(definition.Spec.Config, "softRoCE"); soft {
				Expect(definition.Annotations).NotTo(HaveKey("k8s.v1.cni.cncf.io/resourceName"), "it needs no device of the node")
			} else {
				Expect(definition.Annotations).To(HaveKeyWithValue("k8s.v1.cni.cncf.io/resourceName", MatchRegexp(`^[a-z.]+/[a-z0-9_]+$`)))
			}

			list, err := libcni.NetworkConfFromBytes([]byte(definition.Spec.Config))
			Expect(err).NotTo(HaveOccurred())
			Expect(list.Name).To(Equal(definition.Name))
			var types []string
			for _, p := range list.Plugins {
				types = append(types, p.Network.Type)
				var keys map[string]any
				Expect(json.Unmarshal(p.Bytes, &keys)).To(Succeed())
				delete(keys, "cniVersion")
				delete(keys, "name")
				for key := range keys {
					Expect(pluginKeys[p.Network.Type]).To(ContainElement(key), "%s of %s", key, p.Network.Type)
				}
			}
			Expect(movers).To(ContainElement(types[0]), "first the interface")
			rdma := slices.Index(types, "rdma")
			Expect(rdma).To(BeNumerically(">", 0))
		}, documents(file))
	}
})

// documents makes a table entry of each YAML document of a file.
func documents(file string) (entries []TableEntry) {
	text, err := os.ReadFile(file)
	if err != nil {
		panic(err) // the specs are still being made
	}
	for i, document := range strings.Split(string(text), "\n---\n") {
		entries = append(entries, Entry(fmt.Sprintf("document %d", i+1), document))
	}
	return entries
}
