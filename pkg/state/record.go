// Package state keeps one record file for each attachment, and the lock that
// serialises all moves of RDMA devices on the node.
//
// The files describe namespaces of this boot, so they live on /run and vanish
// with it. Other software has no business in the directory; records of the
// plugin that this one replaces are read from theirs (Upstream).
package state

import (
	"encoding/hex"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/rdma-cni/rdma-cni/pkg/ipoib"
	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// Version is the format of the records written. A higher minor version adds
// fields, a higher major one changes what the old fields mean.
const Version = "2.1"

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
	ContainerID string
	IfName      string
}

func (k Key) String() string { return "container " + k.ContainerID + " interface " + k.IfName }

// Pod names the pod of an attachment, for people; empty outside Kubernetes.
type Pod struct {
	Namespace string
	Name      string
	UID       string
}

// Netns is the network namespace of an attachment.
type Netns struct {
	Path string
	ID   rdma.NamespaceID // zero: not known
}

// NoIndex stands for the index of a device that an ADD is about to make. The
// kernel gives none as high.
const NoIndex = math.MaxUint32

// Device is an RDMA device of an attachment: what it was at home, and what it
// is inside the pod.
type Device struct {
	Index     uint32 // or NoIndex
	Name      string
	NameInPod string
	NodeGUID  rdma.GUID
	// CharDevices are the nodes it had at home, CharDevicesInPod those after
	// the move.
	CharDevices      []string
	CharDevicesInPod []string
	// TOS and TrafficClass are what each port had at home, from port 1 on, if
	// the attachment changes it.
	TOS          []int
	TrafficClass []int
	// Ports are those of a device with InfiniBand ports, from port 1 on. They
	// tell that it is one.
	Ports []Port
}

// Port is an InfiniBand port as it was when its device was attached.
type Port struct {
	GUID rdma.GUID
	PKey uint16 // the first entry of its partition table
}

// KeyText writes the partition key as sysfs does.
func (p Port) KeyText() string { return fmt.Sprintf("%#04x", p.PKey) }

// Record is all that is needed to bring an attachment's device home.
type Record struct {
	Version string
	Phase   Phase
	Key
	Network  string
	Pod      Pod
	Netns    Netns
	Bus      sysfs.Bus
	Function string   // address of the parent function; see sysfs.InterfaceOf for a software device
	Devices  []Device // in the order in which they are moved
	// Interfaces are the IPoIB interfaces of the function as they were before
	// the first move, since each move makes fresh ones.
	Interfaces []ipoib.Interface
	// Foreign: another plugin moved the devices, and brings them home.
	Foreign bool
	Reason  string // of Skipped
	Since   time.Time
}

// InfiniBand tells whether the record is about InfiniBand ports.
func (r *Record) InfiniBand() bool {
	return slices.ContainsFunc(r.Devices, func(d Device) bool { return len(d.Ports) > 0 })
}

// Owner describes whose attachment it is, for error messages.
func (r *Record) Owner() string {
	s := r.Key.String()
	if r.Pod.Name != "" {
		s = fmt.Sprintf("pod %s (%s)", strings.TrimPrefix(r.Pod.Namespace+"/"+r.Pod.Name, "/"), s)
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
