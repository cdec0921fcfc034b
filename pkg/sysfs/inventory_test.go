package sysfs_test

import (
	"os"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// adapter is a physical function with two virtual ones, of which the first has
// its device in another namespace and the second has no driver, a scalable
// function, a software device, and a network card that has nothing to do with
// RDMA; laid out as the kernel does.
func adapter() sysfs.FS {
	const pci, class = "devices/pci0000:3a/", "class/"
	fs := tree(
		"bus/pci/devices/0000:3b:00.0 -> ../../../devices/pci0000:3a/0000:3b:00.0",
		"bus/pci/devices/0000:3b:00.2 -> ../../../devices/pci0000:3a/0000:3b:00.2",
		"bus/pci/devices/0000:3b:00.3 -> ../../../devices/pci0000:3a/0000:3b:00.3",
		"bus/pci/devices/0000:05:00.0 -> ../../../devices/pci0000:3a/0000:05:00.0",
		"bus/auxiliary/devices/mlx5_core.sf.4 -> ../../../devices/pci0000:3a/0000:3b:00.0/mlx5_core.sf.4",
		"bus/auxiliary/devices/mlx5_core.eth.0 -> ../../../devices/pci0000:3a/0000:3b:00.0/mlx5_core.eth.0",
		pci+"0000:3b:00.0/infiniband/mlx5_0/", pci+"0000:3b:00.0/net/ens1f0/", pci+"0000:3b:00.0/numa_node = 1", pci+"0000:3b:00.0/sriov_numvfs = 2",
		pci+"0000:3b:00.0/class = 0x020000", pci+"0000:3b:00.0/vendor = 0x15b3", pci+"0000:3b:00.0/device = 0x101b",
		pci+"0000:3b:00.0/driver -> ../../../bus/pci/drivers/mlx5_core", pci+"0000:3b:00.0/virtfn0 -> ../0000:3b:00.2", pci+"0000:3b:00.0/virtfn1 -> ../0000:3b:00.3",
		pci+"0000:3b:00.0/mlx5_core.sf.4/infiniband/mlx5_4/", pci+"0000:3b:00.0/mlx5_core.eth.0/",
		"bus/pci/drivers/mlx5_core/module -> ../../../../module/mlx5_core", "module/mlx5_core/", "module/ib_core/holders/mlx5_ib/",
		pci+"0000:3b:00.2/infiniband/", pci+"0000:3b:00.2/physfn -> ../0000:3b:00.0", pci+"0000:3b:00.2/numa_node = -1",
		pci+"0000:3b:00.3/physfn -> ../0000:3b:00.0", pci+"0000:3b:00.3/class = 0x020000",
		pci+"0000:05:00.0/class = 0x020000", pci+"0000:05:00.0/vendor = 0x8086", pci+"0000:05:00.0/net/eno1/",
		class+"infiniband_verbs/abi_version = 6",
		class+"infiniband_verbs/uverbs10/ibdev = mlx5_1", class+"infiniband_verbs/uverbs10/dev = 231:202", class+"infiniband_verbs/uverbs10/device -> ../../../devices/pci0000:3a/0000:3b:00.2",
		class+"infiniband_verbs/uverbs9/ibdev = rxe0", class+"infiniband_verbs/uverbs9/dev = 231:201",
		class+"infiniband_verbs/uverbs3/ibdev = half", // on its way out: no number any more
		class+"infiniband_mad/umad0/ibdev = mlx5_1", class+"infiniband_mad/umad0/dev = 231:0", class+"infiniband_mad/umad0/device -> ../../../devices/pci0000:3a/0000:3b:00.2",
		class+"misc/rdma_cm/dev = 10:124",
		class+"net/ens1f0/mtu = 9000", class+"net/ens1f0/operstate = up", class+"net/ens1f0/master -> ../bond0", class+"net/bond0/bonding/",
		class+"net/eno1/master -> ../br0", class+"net/br0/",
		class+"infiniband/mlx5_0/ports/1/gids/0 = fe80:0000:0000:0000:526b:4bff:fec3:b2a0", class+"infiniband/mlx5_0/ports/1/gids/1 = 0000:0000:0000:0000:0000:0000:0000:0000",
	)
	return fs
}

var _ = Describe("the functions of a node", func() {
	It("are those with an RDMA device anywhere, and those that should have one", func() {
		functions, err := adapter().Functions()
		Expect(err).NotTo(HaveOccurred())
		var addresses []string
		for _, f := range functions {
			addresses = append(addresses, f.Address)
		}
		Expect(addresses).To(Equal([]string{"0000:3b:00.0", "0000:3b:00.2", "0000:3b:00.3", "mlx5_core.sf.4"}))
		Expect(sysfs.FS("/nonexistent").Functions()).To(BeEmpty())
	})

	It("know their physical function, module, NUMA node and parent", func() {
		fs := adapter()
		pf, number, ok := function(fs, "0000:3b:00.3").PhysicalFunction()
		Expect(pf).To(Equal("0000:3b:00.0"))
		Expect(number).To(Equal(1))
		Expect(ok).To(BeTrue())
		f := function(fs, "0000:3b:00.0")
		_, _, ok = f.PhysicalFunction()
		Expect(ok).To(BeFalse())
		Expect(f.VirtualFunctions()).To(Equal(2))
		Expect(f.NUMANode()).To(Equal(1))
		Expect(f.DriverModule()).To(Equal("mlx5_core"))
		Expect(f.Parent()).To(BeEmpty())
		Expect(function(fs, "0000:3b:00.2").NUMANode()).To(Equal(-1))
		Expect(function(fs, "0000:3b:00.3").DriverModule()).To(BeEmpty())
		sf := function(fs, "mlx5_core.sf.4")
		Expect(sf.Parent()).To(Equal("0000:3b:00.0"))
		Expect(sf.NUMANode()).To(Equal(1))
		Expect(sysfs.RDMAModules("mlx5_core")).To(ConsistOf("mlx5_ib"))
		Expect(fs.ModuleHolders("ib_core")).To(ConsistOf("mlx5_ib"))
	})
})

var _ = Describe("the character devices of a node", func() {
	It("are listed with number and function, by kind and number", func() {
		nodes, err := adapter().CharDeviceNodes()
		Expect(err).NotTo(HaveOccurred())
		Expect(nodes).To(HaveExactElements(
			And(HaveField("Name", "uverbs9"), HaveField("Function", ""), HaveField("Device", "rxe0"), HaveField("Number", sysfs.DeviceNumber{Major: 231, Minor: 201})),
			And(HaveField("Name", "uverbs10"), HaveField("Function", "0000:3b:00.2"), HaveField("Device", "mlx5_1")),
			And(HaveField("Name", "umad0"), HaveField("Kind", sysfs.Umad)),
		))
		Expect(nodes[1].CharDevice.Number()).To(Equal(10))
		Expect(nodes[1].Number.String()).To(Equal("231:202"))
		Expect(sysfs.FS("/nonexistent").CharDeviceNodes()).To(BeEmpty())
	})

	It("have a connection manager if its module is loaded", func() {
		Expect(adapter().ConnectionManager()).To(Equal(sysfs.DeviceNumber{Major: 10, Minor: 124}))
		_, err := sysfs.FS("/nonexistent").ConnectionManager()
		Expect(err).To(MatchError(os.ErrNotExist))
		_, err = tree("class/misc/rdma_cm/dev = nonsense").ConnectionManager()
		Expect(err).To(MatchError(ContainSubstring("no device number")))
	})
})

var _ = Describe("interfaces and ports", func() {
	It("are read", func() {
		fs := adapter()
		Expect(fs.NetdevMTU("ens1f0")).To(Equal(9000))
		Expect(fs.NetdevMTU("nope")).To(BeZero())
		Expect(fs.NetdevState("ens1f0")).To(Equal("up"))
		Expect(fs.NetdevState("nope")).To(BeEmpty())
		Expect(fs.BondMaster("ens1f0")).To(Equal("bond0"))
		Expect(fs.BondMaster("eno1")).To(BeEmpty(), "a bridge is no bond")
		used, size, err := fs.GIDUse("mlx5_0", 1)
		Expect(err).NotTo(HaveOccurred())
		Expect([]int{used, size}).To(Equal([]int{1, 2}))
		_, _, err = fs.GIDUse("nope", 1)
		Expect(err).To(MatchError(os.ErrNotExist))
	})

	It("have the cards of the machine, RDMA or not", func() {
		nics, err := adapter().NetworkFunctions()
		Expect(err).NotTo(HaveOccurred())
		Expect(nics).To(ConsistOf(
			sysfs.NetworkFunction{Address: "0000:3b:00.0", Vendor: "0x15b3", Device: "0x101b", Driver: "mlx5_core"},
			sysfs.NetworkFunction{Address: "0000:3b:00.3"},
			sysfs.NetworkFunction{Address: "0000:05:00.0", Vendor: "0x8086"},
		))
	})
})
