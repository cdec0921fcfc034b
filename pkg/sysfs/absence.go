package sysfs

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Absence says why a function has no RDMA device, and what helps.
type Absence struct {
	Function Function
	Driver   string // the bound driver, "" if none is
	Cause    string
	Fix      string
	// What no wait and no module could change: no driver, one that hands the
	// function to user space, or one of a device that knows no RDMA.
	NoDriver, Userspace, ForeignDriver bool
}

func (a *Absence) Error() string {
	return fmt.Sprintf("%s has no RDMA device: %s; %s", a.Function, a.Cause, a.Fix)
}

// Unwrap makes an Absence an ErrNoRDMADevice.
func (a *Absence) Unwrap() error { return ErrNoRDMADevice }

// rdmaModules names, for the drivers whose RDMA half is another module, that
// module (drivers/infiniband/hw, 6.12).
var rdmaModules = map[string][]string{
	"mlx5_core": {"mlx5_ib"},
	"mlx4_core": {"mlx4_ib"},
	"ice":       {"irdma"},
	"i40e":      {"irdma", "i40iw"},
	"iavf":      {"irdma"},
	"idpf":      {"irdma"},
	"bnxt_en":   {"bnxt_re"},
	"mana":      {"mana_ib"},
	"hns3":      {"hns_roce_hw_v2"},
	"hclgevf":   {"hns_roce_hw_v2"},
	"qede":      {"qedr"},
	"cxgb4":     {"iw_cxgb4"},
	"be2net":    {"ocrdma"},
	"ionic":     {"ionic_rdma"},
}

// userspaceDrivers hand a function to user space (DPDK, virtual machines).
var userspaceDrivers = []string{"vfio-pci", "mlx5_vfio_pci", "uio_pci_generic", "igb_uio"}

// Absence finds out why the function has no RDMA device. Call it when
// RDMADevices said ErrNoRDMADevice.
func (f Function) Absence() (*Absence, error) {
	driver, err := f.Driver()
	if err != nil {
		return nil, err
	}
	a := &Absence{Function: f, Driver: driver}
	modules := rdmaModules[driver]
	loaded := slices.IndexFunc(modules, f.fs.ModuleLoaded)
	switch {
	case driver == "":
		a.NoDriver = true
		a.Cause = "no driver is bound to it"
		a.Fix = "bind its network driver (write the address to /sys/bus/" + string(f.Bus) + "/drivers_probe)"
	case slices.Contains(userspaceDrivers, driver):
		a.Userspace = true
		a.Cause = "it is bound to " + driver + ", which hands it to user space"
		a.Fix = "bind the kernel's network driver (deviceType netdevice in an SR-IOV policy), or leave the rdma plugin out of this network"
	case f.bond() != nil:
		b := f.bond()
		a.Cause = fmt.Sprintf("its netdev %s is bonded into %s, whose RDMA device %s belongs to %s", b.netdev, b.bond, b.device, b.owner)
		a.Fix = "use that function, or take this one out of the bond"
	case len(modules) > 0 && loaded < 0:
		a.Cause = fmt.Sprintf("the RDMA module of its driver %s is not loaded", driver)
		a.Fix = "load it (modprobe " + modules[0] + ") and keep it loaded with a file in /etc/modules-load.d"
	case len(modules) > 0:
		a.Cause = fmt.Sprintf("its driver %s and the module %s are loaded but made none", driver, modules[loaded])
		a.Fix = fmt.Sprintf("see whether RDMA is switched off for it (devlink dev param show %s/%s: enable_roce, enable_rdma) and what the kernel log says", f.Bus, f.Address)
	default:
		a.ForeignDriver = true
		a.Cause = "its driver " + driver + " makes none"
		a.Fix = "use a function of an RDMA adapter, or leave the rdma plugin out of this network"
	}
	return a, nil
}

// bond is a link aggregation whose one RDMA device sits on another function.
type bond struct{ netdev, bond, device, owner string }

// bond finds the RDMA device of the bond that the function's netdev is in, nil
// if there is none.
func (f Function) bond() *bond {
	for _, netdev := range f.Netdevs() {
		master, err := os.Readlink(f.fs.path("class/net", netdev, "master"))
		if err != nil {
			continue
		}
		b := bond{netdev: netdev, bond: filepath.Base(master)}
		slaves, err := os.ReadFile(f.fs.path("class/net", b.bond, "bonding/slaves"))
		if err != nil {
			continue
		}
		for _, slave := range strings.Fields(string(slaves)) {
			if devices := entries(f.fs.path("class/net", slave, "device/infiniband")); len(devices) > 0 {
				owner, _ := os.Readlink(f.fs.path("class/net", slave, "device"))
				b.device, b.owner = devices[0], filepath.Base(owner)
				return &b
			}
		}
	}
	return nil
}
