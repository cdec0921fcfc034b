// Package state keeps one record file for each attachment, and the lock that
// serialises all moves of RDMA devices on the node.
//
// The files describe namespaces of this boot, so they live on /run and vanish
// with it. Other software has no business in the directory; records of the
// plugin that this one replaces are read from theirs (Upstream).
package state

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"strings"
	"time"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// Version is the format of the records written. A higher minor version adds
// fields, a higher major one changes what the old fields mean.
const Version = "2.0"

// Phase says how far an attachment has come.
type Phase string

const (
	// Intended: the device is about to move, may have moved, or is on its way
	// back.
	Intended Phase = "intended"
	// Attached: the device has been seen inside the pod.
	Attached Phase = "attached"
	// Skipped: the configuration allowed to go without a device, and there was
	// none to attach.
	Skipped Phase = "skipped"
)

// Key identifies an attachment, as the CNI specification does.
type Key struct {
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"`
}

func (k Key) String() string { return "container " + k.ContainerID + " interface " + k.IfName }

// Pod names the pod of an attachment, for people; empty outside Kubernetes.
type Pod struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	UID       string `json:"uid,omitempty"`
}

// Netns is the network namespace of an attachment.
type Netns struct {
	Path string           `json:"path"`
	ID   rdma.NamespaceID `json:"id"` // zero: not known
}

// Device is an RDMA device of an attachment: what it was at home, and what it
// is inside the pod.
type Device struct {
	Index     uint32    `json:"index"`
	Name      string    `json:"name"`
	NameInPod string    `json:"nameInPod"`
	NodeGUID  rdma.GUID `json:"nodeGUID"`
	// CharDevices are the nodes it had at home, CharDevicesInPod those after
	// the move.
	CharDevices      []string `json:"charDevices"`
	CharDevicesInPod []string `json:"charDevicesInPod,omitempty"`
	// TOS and TrafficClass are what each port had at home, from port 1 on, if
	// the attachment changes it.
	TOS          []int `json:"tos,omitempty"`
	TrafficClass []int `json:"trafficClass,omitempty"`
}

// Record is all that is needed to bring an attachment's device home.
type Record struct {
	Version string `json:"version"`
	Phase   Phase  `json:"phase"`
	Key
	Network  string    `json:"network"`
	Pod      Pod       `json:"pod,omitzero"`
	Netns    Netns     `json:"netns"`
	Bus      sysfs.Bus `json:"bus"`
	Function string    `json:"function"`         // address of the parent function
	Devices  []Device  `json:"devices"`          // in the order in which they are moved
	Reason   string    `json:"reason,omitempty"` // of Skipped
	Since    time.Time `json:"since"`
}

// Owner describes whose attachment it is, for error messages.
func (r *Record) Owner() string {
	s := r.Key.String()
	if r.Pod.Name != "" {
		s = fmt.Sprintf("pod %s/%s (%s)", r.Pod.Namespace, r.Pod.Name, s)
	}
	if r.Network != "" {
		s += " of network " + r.Network
	}
	if !r.Since.IsZero() {
		s += " since " + r.Since.UTC().Format(time.RFC3339)
	}
	return s
}

// Name is what the name of a record file says. It holds both keys by which a
// record is looked for, so that no file has to be read to find one, and enough
// to bring the device home if the file cannot be read.
type Name struct {
	ContainerID string // or its digest, see Record.Name
	IfName      string
	Function    string
}

// The parts are joined by a character that neither a container ID nor an
// address can contain.
const (
	separator = "@"
	suffix    = ".json"
)

// maxFileName is the limit of Linux file systems, in bytes.
const maxFileName = 255

// digest stands for a container ID that would make the file name too long. It
// is not a cryptographic one, which would double the plugin's start: IDs are
// the runtime's, and a record holds the whole ID.
func digest(containerID string) string {
	h := fnv.New128a()
	_, _ = h.Write([]byte(containerID))
	return "fnv128a." + hex.EncodeToString(h.Sum(nil))
}

// Name is the name of the record's file.
func (r *Record) Name() Name {
	n := Name{ContainerID: r.ContainerID, IfName: r.IfName, Function: r.Function}
	if len(n.file()) > maxFileName {
		n.ContainerID = digest(r.ContainerID)
	}
	return n
}

// Is tells whether the file is that of an attachment.
func (n Name) Is(k Key) bool {
	return n.IfName == k.IfName && (n.ContainerID == k.ContainerID || n.ContainerID == digest(k.ContainerID))
}

func (n Name) file() string {
	return n.ContainerID + separator + n.IfName + separator + n.Function + suffix
}

// parseName reads a file name, false if it is not that of a record.
func parseName(file string) (Name, bool) {
	base, ok := strings.CutSuffix(file, suffix)
	if !ok {
		return Name{}, false
	}
	containerID, rest, ok := strings.Cut(base, separator)
	i := strings.LastIndex(rest, separator) // an interface name can contain it
	if !ok || i < 0 {
		return Name{}, false
	}
	n := Name{ContainerID: containerID, IfName: rest[:i], Function: rest[i+1:]}
	return n, n.ContainerID != "" && n.IfName != "" && sysfs.ValidateAddress(n.Function) == nil
}

// DamagedError is a record that is there but cannot be used. It is not an
// os.ErrNotExist: its attachment exists.
type DamagedError struct {
	Name Name
	Path string
	Err  error
}

func (e *DamagedError) Error() string { return fmt.Sprintf("record %s is unusable: %v", e.Path, e.Err) }

// Unwrap gives the cause.
func (e *DamagedError) Unwrap() error { return e.Err }

// decode reads a record and compares it with its file's name.
func decode(data []byte, n Name) (*Record, error) {
	var head struct {
		Version string `json:"version"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return nil, err
	}
	if major, _, _ := strings.Cut(head.Version, "."); major != "2" {
		return nil, fmt.Errorf("its version is %q, this plugin reads 2.x", head.Version)
	}
	var r Record
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, err
	}
	switch {
	case r.Name() != n:
		return nil, fmt.Errorf("it describes %s on %s", r.Key, r.Function)
	case r.Phase == Skipped:
		return &r, nil
	case r.Phase != Intended && r.Phase != Attached:
		return nil, fmt.Errorf("it has the unknown phase %q", r.Phase)
	case r.Bus != sysfs.PCI && r.Bus != sysfs.Auxiliary:
		return nil, fmt.Errorf("it has the unknown bus %q", r.Bus)
	case len(r.Devices) == 0:
		return nil, errors.New("it names no device")
	}
	for _, d := range r.Devices {
		if err := errors.Join(rdma.ValidateName(d.Name), rdma.ValidateName(d.NameInPod)); err != nil {
			return nil, err
		}
	}
	return &r, nil
}
