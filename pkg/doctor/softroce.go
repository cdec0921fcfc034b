package doctor

import (
	"os"
	"slices"
	"strings"
)

// SoftRoCEFacts is what is known of the driver rdma_rxe.
type SoftRoCEFacts struct {
	Loaded    bool // or built in
	Installed bool // modprobe would find it
	// CanMove says whether its devices can be moved, nil if that cannot be told
	// of the driver itself, as long as it is not loaded.
	CanMove *bool
}

func (h Host) softRoCE(kernel string, symbols releasers) SoftRoCEFacts {
	const driver = "rdma_rxe"
	modules := "/lib/modules/" + kernel
	finds := func(file string) bool {
		data, err := os.ReadFile(h.path(modules + "/" + file))
		return err == nil && strings.Contains(string(data), "/"+driver+".ko")
	}
	f := SoftRoCEFacts{Loaded: h.Node.Sysfs.ModuleLoaded(driver) || finds("modules.builtin")}
	f.Installed = f.Loaded || finds("modules.dep")
	if f.Loaded && symbols.known && slices.Contains(symbols.users, driver) {
		can := symbols.modules[driver]
		f.CanMove = &can
	}
	return f
}

// checkSoftRoCE judges whether the node can do what a network with softRoCE
// asks of it.
func checkSoftRoCE(where string, f Facts) []Finding {
	s := f.SoftRoCE
	r, known := parseRelease(f.Kernel)
	const newer = "Use a kernel of release 7.3 or newer on the nodes of this network, or leave softRoCE out."
	switch {
	case !s.Installed:
		return []Finding{fail(where, "it has softRoCE, and kernel "+f.Kernel+" has no module rdma_rxe", "ADD fails: no soft-RoCE device can be made.",
			"Install the module (some distributions have it in a package of extra modules, kernels for clouds often lack it), of a kernel of release 7.3 or newer.")}
	case s.CanMove != nil && !*s.CanMove:
		return []Finding{fail(where, "it has softRoCE, and the rdma_rxe of kernel "+f.Kernel+" cannot release a device from its users", "ADD fails: the kernel refuses to move the device.", newer)}
	case s.CanMove == nil && known && r.before(7, 3):
		return []Finding{fail(where, "it has softRoCE, and kernel "+f.Kernel+" is older than 7.3", "ADD fails: the rdma_rxe of these kernels cannot release a device from its users.", newer)}
	}
	return []Finding{pass(where, "soft-RoCE devices can be made and moved; rdma_cm does not work on them (up to 7.3 at least)")}
}
