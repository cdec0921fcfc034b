package doctor

import (
	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// Facts is what the checks of a node judge.
type Facts struct {
	Root   bool   // we are root, so what we did not see is not there
	Kernel string // release
	// Stable is the stable release that a distribution's kernel is made from,
	// where that is not part of its own release; "" if not known.
	Stable string

	Subsystem error           // why there is no RDMA netlink, nil if there is
	Modules   map[string]bool // of rdmaModules: loaded or built in
	Live      *rdma.Mode      // nil: cannot be told
	LiveError error
	Persisted Persisted
	Blockers  []Blocker

	SoftRoCE SoftRoCEFacts

	Devices []DeviceFacts // RDMA devices, and functions that lack theirs
	NICs    []sysfs.NetworkFunction
	Chars   []CharFacts
	CM      *CharFacts // /dev/infiniband/rdma_cm, nil without rdma_ucm

	SharedPlugin []string // signs that the shared device plugin is on the node
	Records      []RecordFacts
	Plugins      []PluginFacts
	Runtimes     []RuntimeFacts
	Config       *ConfigFacts // of --config
}

// DeviceFacts is an RDMA device, or a function that should have one.
type DeviceFacts struct {
	Name     string // of the device, "" if there is none
	Function string // address, "" for a software device
	Kind     string // pf, vf, sf, software
	Driver   string
	PF       string // address
	VF       int
	VFs      int    // virtual functions of a physical one
	Place    string // home, pod, namespace, unreachable, none
	Holder   string // in words
	Absence  string // why there is no device

	NodeGUID    rdma.GUID
	LinkLayer   string
	Protocol    string
	Ports       []PortFacts
	AdminMAC    string // of a VF, as its PF's driver knows it; "" if not known
	PFNetdevMTU int    // of a VF's PF, 0 if not known
	// Movable says whether the driver can release a device from its users, nil
	// if that cannot be told.
	Movable       *bool
	MovableModule string // the module that was looked at
}

// PortFacts is a port of a device.
type PortFacts struct {
	Number  int
	State   string
	Active  bool
	Netdev  string
	MTU     int    // of the netdev, 0 if not known
	Oper    string // state of the netdev
	Bond    string // that the netdev is in
	GIDs    int    // in use; -1 if not known
	GIDSize int
	RoCEv2  int         // GIDs of RoCE v2
	IB      *state.Port // nil: it is no InfiniBand port
}

// CharFacts is a character device and its node below /dev.
type CharFacts struct {
	Name     string
	Kind     sysfs.Kind
	Index    int // the number in its name
	Function string
	Number   sysfs.DeviceNumber
	Node     *sysfs.DeviceNumber // of /dev/infiniband/NAME, nil if it is not a character device
	NodeErr  string              // why it cannot be looked at
}

// RecordFacts is what gc would do with a record.
type RecordFacts struct {
	Function, Owner, Action, Reason string
	Err                             string
}

// PluginFacts is a CNI directory and the plugin in it.
type PluginFacts struct {
	Dir     string
	Exists  bool   // the directory
	Err     string // why it cannot be looked at
	Binary  bool   // DIR/rdma is there
	Mode    uint32 // permission bits
	UID     int
	Version string // what it says with -version
	Ours    bool   // it is this project's
	Arch    string // of its ELF header
	Problem string // of its execution
	DirMode uint32
	DirUID  int
}

// RuntimeFacts is a running container runtime and what it passes on.
type RuntimeFacts struct {
	Command string
	PID     int
	Memlock uint64 // soft limit in bytes
	NoLimit bool
	Err     string
}
