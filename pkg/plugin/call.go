package plugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
)

// call is what a runtime passes to the plugin: a verb, the environment
// variables that go with it, and the network configuration on stdin.
//
// The library's own dispatcher (cni/pkg/skel) is not used: the packages that it
// brings along, and its three passes over the configuration, were a tenth of
// what the plugin adds to an empty process (docs/performance.md).
type call struct {
	command     string
	containerID string
	netns       string
	ifName      string
	args        string // CNI_ARGS
	keys        object // the network configuration
}

// verb is a command of the CNI specification.
type verb struct {
	run   func(*Plugin, call) error
	needs []string // environment variables without which it cannot be done
	since string   // the first version of the specification that has it, "" for all
}

// verbOf finds a verb; ok is false if there is none of that name. A function,
// since a table would be made at each start.
func verbOf(command string) (v verb, ok bool) {
	switch command {
	case "ADD":
		return verb{run: (*Plugin).add, needs: []string{"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"}}, true
	case "DEL":
		return verb{run: (*Plugin).del, needs: []string{"CNI_CONTAINERID", "CNI_IFNAME", "CNI_PATH"}}, true
	case "CHECK":
		return verb{run: (*Plugin).check, needs: []string{"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"}, since: "0.4.0"}, true
	case "GC":
		return verb{run: (*Plugin).gc, needs: []string{"CNI_PATH"}, since: "1.1.0"}, true
	case "STATUS":
		return verb{run: (*Plugin).status, needs: []string{"CNI_PATH"}, since: "1.1.0"}, true
	}
	return verb{}, false
}

// serve answers one call. All versions that libcni knows are accepted, since a
// refused version would refuse DEL too and with it the DEL of the plugins
// before this one.
func (p *Plugin) serve() error {
	command := p.Getenv("CNI_COMMAND")
	switch command {
	case "":
		_, _ = fmt.Fprintf(p.Stderr, "CNI plugin rdma %s\nCNI protocol versions supported: %s\n",
			p.Version, strings.Join(version.All.SupportedVersions(), ", "))
		return nil
	case "VERSION":
		if err := version.All.Encode(p.Stdout); err != nil {
			return types.NewError(types.ErrIOFailure, fmt.Sprintf("rdma plugin: print the versions: %v", err), "")
		}
		return nil
	}
	v, ok := verbOf(command)
	if !ok {
		return badEnvironment("CNI_COMMAND is %q, which is none of ADD, DEL, CHECK, GC, STATUS, VERSION", command)
	}
	c, err := p.readCall(command, v.needs)
	if err != nil {
		return err
	}
	if err := p.checkConfig(c, v.since); err != nil {
		return err
	}
	return v.run(p, c)
}

func badEnvironment(format string, args ...any) error {
	return types.NewError(types.ErrInvalidEnvironmentVariables, "rdma plugin: "+fmt.Sprintf(format, args...), "")
}

// deadline is a context that ends by its deadline alone. The waits of an
// operation go by that, and one that has not to wait needs no timer, whose
// making starts the runtime's poller.
type deadline struct {
	context.Context
	at time.Time
}

func within(d time.Duration) context.Context {
	return deadline{context.Background(), time.Now().Add(d)}
}

// Deadline gives the time at which the operation has to be over.
func (d deadline) Deadline() (time.Time, bool) { return d.at, true }

// readCall reads the environment and stdin.
func (p *Plugin) readCall(command string, needs []string) (call, error) {
	c := call{
		command: command, containerID: p.Getenv("CNI_CONTAINERID"), netns: p.Getenv("CNI_NETNS"),
		ifName: p.Getenv("CNI_IFNAME"), args: p.Getenv("CNI_ARGS"),
	}
	var missing []string
	for _, name := range needs {
		if p.Getenv(name) == "" {
			missing = append(missing, name)
		}
	}
	switch {
	case len(missing) > 0:
		return c, badEnvironment("%s needs the environment variables %s, which are not set", command, strings.Join(missing, ", "))
	case slices.Contains(needs, "CNI_CONTAINERID") && !validName(c.containerID):
		return c, badEnvironment("CNI_CONTAINERID is %q; it may contain letters, digits and, after the first, also . _ -", c.containerID)
	case slices.Contains(needs, "CNI_IFNAME") && !validInterface(c.ifName):
		return c, badEnvironment("CNI_IFNAME is %q, which cannot be an interface name: at most 15 characters, without / : and blanks", c.ifName)
	}
	stdin, err := io.ReadAll(p.Stdin)
	if err != nil {
		return c, types.NewError(types.ErrIOFailure, fmt.Sprintf("rdma plugin: read the network configuration from stdin: %v", err), "")
	}
	if c.keys, err = decode(stdin); err != nil {
		return c, types.NewError(types.ErrDecodingFailure, "rdma plugin: "+err.Error(), "")
	}
	return c, nil
}

// checkConfig makes sure of what every configuration must have: a name, and a
// version of the specification that has the verb.
func (p *Plugin) checkConfig(c call, since string) error {
	cniVersion, name := unversioned, ""
	if err := errors.Join(c.keys.Text("cniVersion", &cniVersion), c.keys.Text("name", &name)); err != nil {
		return types.NewError(types.ErrDecodingFailure, oneLine("rdma plugin: "+err.Error()), "")
	}
	if cniVersion == "" {
		cniVersion = unversioned
	}
	p.cniVersion = cniVersion
	if !validName(name) {
		return types.NewError(types.ErrInvalidNetworkConfig,
			fmt.Sprintf("rdma plugin: the network's name is %q; it must be there, and may contain letters, digits and, after the first, also . _ -", name), "")
	}
	supported := version.All.SupportedVersions()
	at := slices.Index(supported, cniVersion)
	if at < 0 {
		return types.NewError(types.ErrIncompatibleCNIVersion, fmt.Sprintf("rdma plugin: the network configuration is of CNI version %q, which is none of %s",
			cniVersion, strings.Join(supported, ", ")), "")
	}
	if at < slices.Index(supported, since) {
		return types.NewError(types.ErrIncompatibleCNIVersion, fmt.Sprintf("rdma plugin: CNI version %s, of which the network configuration is, has no %s; %s is the first that has",
			cniVersion, c.command, since), "")
	}
	return nil
}

// unversioned is the version of a configuration that names none.
const unversioned = "0.1.0"

// validName tells whether s can be a container ID or the name of a network.
func validName(s string) bool {
	for i, r := range s {
		letter := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
		if !letter && (i == 0 || !strings.ContainsRune("._-", r)) {
			return false
		}
	}
	return s != ""
}

// validInterface tells whether the kernel would take s for an interface name.
func validInterface(s string) bool {
	return s != "" && len(s) <= 15 && s != "." && s != ".." &&
		!strings.ContainsFunc(s, func(r rune) bool { return r == '/' || r == ':' || unicode.IsSpace(r) })
}
