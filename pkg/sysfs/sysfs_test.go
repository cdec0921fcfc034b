package sysfs_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/Mellanox/rdmamap"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// tree is a sysfs that a test builds: paths ending in a slash are directories,
// "a -> b" is a symbolic link, "a = b" a file a with the line b.
func tree(items ...string) sysfs.FS {
	GinkgoHelper()
	root := GinkgoT().TempDir()
	add(sysfs.FS(root), items...)
	pci, aux := rdmamap.PciDevDir, rdmamap.AuxDevDir
	rdmamap.PciDevDir = filepath.Join(root, "bus/pci/devices")
	rdmamap.AuxDevDir = filepath.Join(root, "bus/auxiliary/devices")
	DeferCleanup(func() { rdmamap.PciDevDir, rdmamap.AuxDevDir = pci, aux })
	return sysfs.FS(root)
}

// at is a path of a tree.
func at(fs sysfs.FS, path string) string { return filepath.Join(string(fs), path) }

func add(fs sysfs.FS, items ...string) {
	GinkgoHelper()
	for _, item := range items {
		if path, target, ok := strings.Cut(item, " -> "); ok {
			Expect(os.MkdirAll(filepath.Dir(at(fs, path)), 0o755)).To(Succeed())
			Expect(os.Symlink(target, at(fs, path))).To(Succeed())
		} else if path, text, ok := strings.Cut(item, " = "); ok {
			Expect(os.MkdirAll(filepath.Dir(at(fs, path)), 0o755)).To(Succeed())
			Expect(os.WriteFile(at(fs, path), []byte(text+"\n"), 0o644)).To(Succeed())
		} else {
			Expect(os.MkdirAll(at(fs, item), 0o755)).To(Succeed())
		}
	}
}

const (
	vf  = "0000:3b:00.2"
	sf  = "mlx5_core.sf.4"
	dir = "bus/pci/devices/" + vf
)

// home is a VF whose devices are where the kernel put them: the bus directory
// holds links to the directories of the devices.
var home = []string{
	"bus/pci/devices/" + vf + " -> ../../../devices/pci0000:3a/0000:3b:00.2",
	"devices/pci0000:3a/0000:3b:00.2/",
}

func function(fs sysfs.FS, address string) sysfs.Function {
	GinkgoHelper()
	f, err := fs.Function(address)
	Expect(err).NotTo(HaveOccurred())
	return f
}

// linuxDir is for specs that run anywhere: an unreadable directory takes an
// ordinary user.
func skipAsRoot() {
	if os.Geteuid() == 0 {
		Skip("needs an ordinary user: root can read everything")
	}
}

var _ = Describe("a function", func() {
	DescribeTable("is found", func(item, address string, want sysfs.Function, text string) {
		fs := tree(item)
		f, err := fs.Function(address)
		Expect(err).NotTo(HaveOccurred())
		Expect(f.Bus).To(Equal(want.Bus))
		Expect(f.Address).To(Equal(want.Address))
		Expect(f.String()).To(Equal(text))
	},
		Entry("on the PCI bus", "bus/pci/devices/0000:3b:00.2/", "0000:3b:00.2",
			sysfs.Function{Bus: sysfs.PCI, Address: "0000:3b:00.2"}, "PCI function 0000:3b:00.2"),
		Entry("by an address in upper case", "bus/pci/devices/0000:3b:00.2/", "0000:3B:00.2",
			sysfs.Function{Bus: sysfs.PCI, Address: "0000:3b:00.2"}, "PCI function 0000:3b:00.2"),
		Entry("in a domain of five digits", "bus/pci/devices/10000:e1:00.0/", "10000:e1:00.0",
			sysfs.Function{Bus: sysfs.PCI, Address: "10000:e1:00.0"}, "PCI function 10000:e1:00.0"),
		Entry("in a domain of eight digits", "bus/pci/devices/c05e0001:00:02.0/", "C05E0001:00:02.0",
			sysfs.Function{Bus: sysfs.PCI, Address: "c05e0001:00:02.0"}, "PCI function c05e0001:00:02.0"),
		Entry("on the auxiliary bus", "bus/auxiliary/devices/mlx5_core.sf.4/", "mlx5_core.sf.4",
			sysfs.Function{Bus: sysfs.Auxiliary, Address: "mlx5_core.sf.4"}, "auxiliary device mlx5_core.sf.4"),
		Entry("on the auxiliary bus with upper case in its name", "bus/auxiliary/devices/Foo.sf.4/", "Foo.sf.4",
			sysfs.Function{Bus: sysfs.Auxiliary, Address: "Foo.sf.4"}, "auxiliary device Foo.sf.4"),
		Entry("behind the bus's link", "bus/pci/devices/0000:3b:00.2 -> ../../..", "0000:3b:00.2",
			sysfs.Function{Bus: sysfs.PCI, Address: "0000:3b:00.2"}, "PCI function 0000:3b:00.2"),
	)

	DescribeTable("is not found", func(address string, items ...string) {
		_, err := tree(items...).Function(address)
		Expect(err).To(MatchError(sysfs.ErrNoFunction))
		Expect(err).To(MatchError(os.ErrNotExist))
		Expect(err).To(MatchError(ContainSubstring(address)))
	},
		Entry("on an empty bus", vf, "bus/pci/devices/"),
		Entry("without any bus", vf),
		Entry("on a bus of others", vf, "bus/pci/devices/0000:3b:00.3/", "bus/auxiliary/devices/"+sf+"/"),
		Entry("with its domain left out", "3b:00.2", "bus/pci/devices/"+vf+"/"),
		Entry("behind a link to nowhere", vf, dir+" -> nowhere"),
		Entry("on the auxiliary bus in other case", "MLX5_core.sf.4", "bus/auxiliary/devices/"+sf+"/"),
	)

	DescribeTable("is not looked for at an address that is none", func(address string) {
		// Something lies wherever such an address could lead.
		fs := tree("bus/pci/devices/a/", "bus/auxiliary/devices/", "bus/pci/slots/")
		_, err := fs.Function(address)
		Expect(err).To(HaveOccurred())
		Expect(err).NotTo(MatchError(os.ErrNotExist), "it is wrong, not missing")
	},
		Entry("empty", ""),
		Entry("the directory", "."),
		Entry("the parent directory", ".."),
		Entry("a way out", "../slots"),
		Entry("a way out and back", "../devices/a"),
		Entry("an absolute path", "/bus/pci/devices/a"),
		Entry("a path", "a/driver"),
		Entry("two dots inside", "a..b"),
		Entry("a blank", "0000:3b:00.2 "),
		Entry("a newline", "0000:3b:00.2\n"),
		Entry("a zero", "a\x00"),
		Entry("300 characters", strings.Repeat("a", 300)),
		Entry("a separator of record names", "a@b"),
		Entry("a pattern", "0000:3b:00.*"),
		Entry("letters outside ASCII", "０000:3b:00.2"),
		Entry("bytes that are no text", "a\xff"),
	)

	It("has an address of at most 64 characters, which is in the error cut short", func() {
		Expect(sysfs.ValidateAddress(strings.Repeat("a", 64))).To(Succeed())
		err := sysfs.ValidateAddress(strings.Repeat("a", 1<<20))
		Expect(err).To(MatchError(ContainSubstring("too long")))
		Expect(len(err.Error())).To(BeNumerically("<", 200))
	})

	It("may be unreadable, which is not the same as missing", func() {
		skipAsRoot()
		fs := tree("bus/pci/devices/" + vf + "/")
		Expect(os.Chmod(at(fs, "bus/pci/devices"), 0)).To(Succeed())
		DeferCleanup(os.Chmod, at(fs, "bus/pci/devices"), os.FileMode(0o755))
		_, err := fs.Function(vf)
		Expect(err).To(MatchError(os.ErrPermission))
		Expect(err).NotTo(MatchError(os.ErrNotExist))
	})
})

var _ = Describe("the driver of a function", func() {
	It("is where the link leads", func() {
		fs := tree(append(home, "devices/pci0000:3a/0000:3b:00.2/driver -> ../../../bus/pci/drivers/mlx5_core")...)
		Expect(function(fs, vf).Driver()).To(Equal("mlx5_core"))
	})

	It("is none when there is no link", func() {
		Expect(function(tree(home...), vf).Driver()).To(BeEmpty())
	})

	It("is an error when the entry is no link", func() {
		_, err := function(tree(append(home, "devices/pci0000:3a/0000:3b:00.2/driver/")...), vf).Driver()
		Expect(err).To(MatchError(ContainSubstring("driver of PCI function " + vf)))
	})
})

var _ = Describe("the RDMA devices of a function", func() {
	DescribeTable("at home are listed by name", func(base, address string, devices ...string) {
		fs := tree(base + address + "/")
		// Made in the order given, listed in another.
		for _, d := range devices {
			add(fs, base+address+"/infiniband/"+d+"/")
		}
		add(fs, base+address+"/infiniband/no_directory = no device")
		Expect(function(fs, address).RDMADevices()).To(ConsistOf(devices))
	},
		Entry("one of a VF", "bus/pci/devices/", vf, "mlx5_3"),
		Entry("several of a VF", "bus/pci/devices/", vf, "mlx5_3", "mlx5_10", "a"),
		Entry("one of a scalable function", "bus/auxiliary/devices/", sf, "mlx5_7"),
	)

	It("are sorted, so that messages stay the same", func() {
		fs := tree(dir+"/infiniband/mlx5_3/", dir+"/infiniband/mlx5_1/", dir+"/infiniband/mlx5_2/")
		Expect(function(fs, vf).RDMADevices()).To(Equal([]string{"mlx5_1", "mlx5_2", "mlx5_3"}))
	})

	DescribeTable("in another namespace leave an empty directory", func(base, address string) {
		names, err := function(tree(base+address+"/infiniband/"), address).RDMADevices()
		Expect(err).To(MatchError(sysfs.ErrElsewhere))
		Expect(err).NotTo(MatchError(sysfs.ErrNoRDMADevice))
		Expect(err).To(MatchError(ContainSubstring(address)))
		Expect(names).To(BeEmpty())
	},
		Entry("of a VF", "bus/pci/devices/", vf),
		Entry("of a scalable function", "bus/auxiliary/devices/", sf),
	)

	DescribeTable("are none without the directory", func(base, address string) {
		_, err := function(tree(base+address+"/net/eth0/"), address).RDMADevices()
		Expect(err).To(MatchError(sysfs.ErrNoRDMADevice))
		Expect(err).NotTo(MatchError(sysfs.ErrElsewhere))
		Expect(err).To(MatchError(ContainSubstring(address)))
	},
		Entry("of a VF", "bus/pci/devices/", vf),
		Entry("of a scalable function", "bus/auxiliary/devices/", sf),
	)

	It("are none of a function that has vanished", func() {
		fs := tree(home...)
		f := function(fs, vf)
		Expect(os.RemoveAll(at(fs, "devices"))).To(Succeed())
		Expect(f.RDMADevices()).Error().To(MatchError(sysfs.ErrNoRDMADevice))
	})

	It("of another bus are not those of a function of the same name", func() {
		fs := tree("bus/auxiliary/devices/"+sf+"/", "bus/pci/devices/"+sf+".x/infiniband/mlx5_0/")
		Expect(function(fs, sf).RDMADevices()).Error().To(MatchError(sysfs.ErrNoRDMADevice))
	})

	It("cannot be told from a directory that cannot be looked at", func() {
		skipAsRoot()
		fs := tree(dir + "/infiniband/mlx5_0/")
		f := function(fs, vf)
		Expect(os.Chmod(at(fs, dir), 0)).To(Succeed())
		DeferCleanup(os.Chmod, at(fs, dir), os.FileMode(0o755))
		_, err := f.RDMADevices()
		Expect(err).To(MatchError(os.ErrPermission))
		Expect(errors.Is(err, sysfs.ErrNoRDMADevice) || errors.Is(err, sysfs.ErrElsewhere)).To(BeFalse())
	})
})

var _ = Describe("the character devices of a function", func() {
	node := func(class, name, device string) string {
		return dir + "/" + class + "/" + name + "/ibdev = " + device
	}

	It("are listed by kind and number", func() {
		fs := tree(
			node("infiniband_verbs", "uverbs10", "mlx5_3"),
			node("infiniband_verbs", "uverbs2", "mlx5_4"),
			node("infiniband_mad", "umad11", "mlx5_3"),
			node("infiniband_mad", "umad3", "mlx5_3"),
			node("infiniband_mad", "issm11", "mlx5_3"),
			node("infiniband_mad", "issm3", "mlx5_3"),
		)
		Expect(function(fs, vf).CharDevices()).To(Equal([]sysfs.CharDevice{
			{Name: "uverbs2", Kind: sysfs.Uverbs, Device: "mlx5_4"},
			{Name: "uverbs10", Kind: sysfs.Uverbs, Device: "mlx5_3"},
			{Name: "umad3", Kind: sysfs.Umad, Device: "mlx5_3"},
			{Name: "umad11", Kind: sysfs.Umad, Device: "mlx5_3"},
			{Name: "issm3", Kind: sysfs.Issm, Device: "mlx5_3"},
			{Name: "issm11", Kind: sysfs.Issm, Device: "mlx5_3"},
		}))
	})

	It("do not include foreign entries nor nodes that are just going", func() {
		fs := tree(
			node("infiniband_verbs", "uverbs2", "mlx5_3"),
			node("infiniband_verbs", "ucm2", "mlx5_3"),
			node("infiniband_verbs", "uverbs2x", "mlx5_3"),
			node("infiniband_verbs", "xuverbs2", "mlx5_3"),
			dir+"/infiniband_verbs/abi_version = 6",
			dir+"/infiniband_verbs/uverbs3/", // its ibdev is gone already
			dir+"/infiniband/mlx5_3/ports/1/",
		)
		Expect(function(fs, vf).CharDevices()).To(Equal([]sysfs.CharDevice{{Name: "uverbs2", Kind: sysfs.Uverbs, Device: "mlx5_3"}}))
	})

	It("may be none", func() {
		Expect(function(tree(dir+"/infiniband/mlx5_0/"), vf).CharDevices()).To(BeEmpty())
	})

	It("are those of scalable functions too", func() {
		fs := tree("bus/auxiliary/devices/" + sf + "/infiniband_verbs/uverbs7/ibdev = mlx5_9")
		Expect(function(fs, sf).CharDevices()).To(Equal([]sysfs.CharDevice{{Name: "uverbs7", Kind: sysfs.Uverbs, Device: "mlx5_9"}}))
	})

	It("are an error when the class is no directory", func() {
		_, err := function(tree(dir+"/infiniband_verbs = a file"), vf).CharDevices()
		Expect(err).To(MatchError(ContainSubstring("character devices of PCI function " + vf)))
	})
})

var _ = Describe("the reason why a function has no RDMA device", func() {
	driver := func(name string) string { return dir + "/driver -> ../../../../bus/pci/drivers/" + name }

	DescribeTable("names the function, the cause and what helps",
		func(cause, fix string, noDriver, userspace bool, items ...string) {
			f := function(tree(append(items, dir+"/net/eth2/")...), vf)
			a, err := f.Absence()
			Expect(err).NotTo(HaveOccurred())
			Expect(a).To(MatchError(sysfs.ErrNoRDMADevice))
			Expect(a.Error()).To(HavePrefix("PCI function " + vf + " has no RDMA device: "))
			Expect(a.Error()).To(Equal("PCI function " + vf + " has no RDMA device: " + a.Cause + "; " + a.Fix))
			Expect(a.Cause).To(Equal(cause))
			Expect(a.Fix).To(ContainSubstring(fix))
			Expect(a.NoDriver).To(Equal(noDriver))
			Expect(a.Userspace).To(Equal(userspace))
		},
		Entry("no driver", "no driver is bound to it", "/sys/bus/pci/drivers_probe", true, false),
		Entry("a driver for virtual machines", "it is bound to vfio-pci, which hands it to user space", "deviceType netdevice", false, true,
			driver("vfio-pci")),
		Entry("a vendor's driver for virtual machines", "it is bound to mlx5_vfio_pci, which hands it to user space", "deviceType netdevice", false, true,
			driver("mlx5_vfio_pci")),
		Entry("a driver for DPDK", "it is bound to igb_uio, which hands it to user space", "deviceType netdevice", false, true,
			driver("igb_uio")),
		Entry("the RDMA module is missing", "the RDMA module of its driver mlx5_core is not loaded", "modprobe mlx5_ib", false, false,
			driver("mlx5_core"), "module/mlx5_core/"),
		Entry("the RDMA module of another driver is there", "the RDMA module of its driver ice is not loaded", "modprobe irdma", false, false,
			driver("ice"), "module/mlx5_ib/"),
		Entry("the module made no device", "its driver mlx5_core and the module mlx5_ib are loaded but made none", "devlink dev param show pci/"+vf, false, false,
			driver("mlx5_core"), "module/mlx5_ib/"),
		Entry("the second of two possible modules made none", "its driver i40e and the module i40iw are loaded but made none", "kernel log", false, false,
			driver("i40e"), "module/i40iw/"),
		Entry("a driver without RDMA", "its driver virtio_net makes none", "function of an RDMA adapter", false, false,
			driver("virtio_net")),
		Entry("bonded into another function", "its netdev eth2 is bonded into bond0, whose RDMA device mlx5_bond_0 belongs to 0000:3b:00.0", "out of the bond", false, false,
			driver("mlx5_core"), "module/mlx5_ib/",
			"class/net/eth2/master -> ../bond0", "class/net/bond0/bonding/slaves = eth1 eth2",
			"class/net/eth1/device -> ../../../bus/pci/devices/0000:3b:00.0", "bus/pci/devices/0000:3b:00.0/infiniband/mlx5_bond_0/"),
		Entry("bonded into one without RDMA", "its driver mlx5_core and the module mlx5_ib are loaded but made none", "devlink", false, false,
			driver("mlx5_core"), "module/mlx5_ib/",
			"class/net/eth2/master -> ../bond0", "class/net/bond0/bonding/slaves = eth1 eth2", "class/net/eth1/"),
		Entry("in a bridge, which is no bond", "its driver mlx5_core and the module mlx5_ib are loaded but made none", "devlink", false, false,
			driver("mlx5_core"), "module/mlx5_ib/", "class/net/eth2/master -> ../br0", "class/net/br0/bridge/"),
	)

	It("names the bus of a scalable function", func() {
		a, err := function(tree("bus/auxiliary/devices/"+sf+"/"), sf).Absence()
		Expect(err).NotTo(HaveOccurred())
		Expect(a).To(MatchError(And(HavePrefix("auxiliary device "+sf), ContainSubstring("/sys/bus/auxiliary/drivers_probe"))))
	})

	It("is an error when the driver cannot be read", func() {
		_, err := function(tree(dir+"/driver/"), vf).Absence()
		Expect(err).To(MatchError(ContainSubstring("driver of")))
	})

	It("knows a module by the kernel's spelling of its name", func() {
		fs := tree("module/vfio_pci/")
		Expect(fs.ModuleLoaded("vfio-pci")).To(BeTrue())
		Expect(fs.ModuleLoaded("vfio_pci")).To(BeTrue())
		Expect(fs.ModuleLoaded("vfio")).To(BeFalse())
	})
})

var _ = It("the default is the machine's own sysfs, and so is that of the library below", func() {
	// One of the two alone would look at two different trees.
	Expect(filepath.Join(string(sysfs.Default), "bus/pci/devices")).To(Equal(rdmamap.PciDevDir))
	Expect(filepath.Join(string(sysfs.Default), "bus/auxiliary/devices")).To(Equal(rdmamap.AuxDevDir))
})

var _ = Describe("an InfiniBand port", func() {
	const port = "class/infiniband/mlx5_3/ports/1/"

	It("has a GUID and a partition", func() {
		fs := tree(port+"gids/0 = fe80:0000:0000:0000:0002:c903:0000:0001", port+"pkeys/0 = 0x8005")
		Expect(fs.IBPort("mlx5_3", 1)).To(Equal(sysfs.IBPort{GUID: 0x2c90300000001, PKey: 0x8005}))
	})

	DescribeTable("that cannot be read is an error", func(says string, items ...string) {
		_, err := tree(items...).IBPort("mlx5_3", 1)
		Expect(err).To(MatchError(And(ContainSubstring("mlx5_3 port 1"), ContainSubstring(says))))
	},
		Entry("no port", "no such file", port),
		Entry("no GID", "is none", port+"gids/0 = x", port+"pkeys/0 = 0xffff"),
		Entry("a GID of another kind", "is none", port+"gids/0 = 10.0.0.1", port+"pkeys/0 = 0xffff"),
		Entry("no partition", "no such file", port+"gids/0 = fe80::1"),
		Entry("a partition that is none", "partition key", port+"gids/0 = fe80::1", port+"pkeys/0 = 0x10000"),
	)
})
