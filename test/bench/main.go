// Command bench measures the plugin on a real kernel, inside the guest of
// test/vm, next to what it cannot be faster than: the kernel's move alone, and
// a Go program that does nothing. Absolute times of a guest without hardware
// acceleration mean little; the ratios of one run do.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
)

func main() {
	rounds := flag.Int("n", 50, "measurements of each kind")
	bin := flag.String("bin", "/tmp/bin", "folder of the programs")
	only := flag.Int("devices", 0, "only with so many RDMA devices (0: 1, 64 and 512)")
	base := flag.String("base", "", "another build of the plugin to compare with")
	flag.Parse()
	if err := run(*rounds, *bin, *base, *only); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// bench is a node with a number of RDMA devices, each on a function of its own.
type bench struct {
	bin     string
	base    string // another build of the plugin, "" if none
	rounds  int
	devices int
	last    cost     // of the latest process
	netns   []string // one for each of the first parallel devices
}

// parallel is how many calls run at once in the crowded measurement.
const parallel = 16

func run(rounds int, bin, base string, only int) error {
	counts := []int{1, 64, 512}
	if only > 0 {
		counts = []int{only}
	}
	first := map[string]time.Duration{}
	for _, devices := range counts {
		b := &bench{bin: bin, base: base, rounds: rounds, devices: devices}
		results, err := b.measure()
		if err != nil {
			return fmt.Errorf("with %d devices: %w", devices, err)
		}
		b.print(results, first)
	}
	return nil
}

// result is what one kind of measurement gave.
type result struct {
	name  string
	times []time.Duration
	costs []cost
	peak  int64 // KiB, 0 where it is not measured
	calls int   // system calls, 0 where they are not counted
}

// cost is what a process used: processor time of all its threads, page faults,
// context switches.
type cost struct {
	cpu              time.Duration
	faults, switches int64
}

func (r result) median() time.Duration { return r.quantile(50) }

func (r result) quantile(percent int) time.Duration {
	sorted := slices.Sorted(slices.Values(r.times))
	return sorted[min(len(sorted)*percent/100, len(sorted)-1)]
}

// kind is one kind of measurement.
type kind struct {
	name string
	do   func() (time.Duration, error)
}

// measure takes all kinds in turn, round by round, so that a machine that
// becomes slower does so for all of them.
func (b *bench) measure() ([]result, error) {
	if err := b.setUp(); err != nil {
		return nil, err
	}
	defer b.tearDown()
	kinds := []kind{
		{"move out", func() (time.Duration, error) { return b.move(true) }},
		{"move back", func() (time.Duration, error) { return b.move(false) }},
		{"empty program", func() (time.Duration, error) { return b.process("empty", nil, nil) }},
		{"rdma dev set, out", func() (time.Duration, error) {
			return b.process("/bin/rdma", nil, nil, "dev", "set", "par0", "netns", filepath.Base(b.netns[0]))
		}},
		{"restore", func() (time.Duration, error) { return b.move(false) }},
		{"VERSION", func() (time.Duration, error) { return b.verb("VERSION", 0) }},
		{"STATUS", func() (time.Duration, error) { return b.verb("STATUS", 0) }},
		{"ADD", func() (time.Duration, error) { return b.verb("ADD", 0) }},
		{"CHECK", func() (time.Duration, error) { return b.verb("CHECK", 0) }},
		{"DEL", func() (time.Duration, error) { return b.verb("DEL", 0) }},
	}
	if b.base != "" {
		for _, verb := range []string{"STATUS", "ADD", "CHECK", "DEL"} {
			kinds = append(kinds, kind{verb + " (base)", func() (time.Duration, error) { return b.call(b.base, verb, 0) }})
		}
	}
	results := make([]result, len(kinds))
	for round := range b.rounds + 1 {
		for i, k := range kinds {
			b.last = cost{}
			took, err := k.do()
			if err != nil {
				return nil, fmt.Errorf("%s: %w", k.name, err)
			}
			if round == 0 {
				results[i].name = k.name
				continue // warm-up
			}
			results[i].times = append(results[i].times, took)
			results[i].costs = append(results[i].costs, b.last)
		}
	}
	results = slices.DeleteFunc(results, func(r result) bool { return r.name == "restore" })
	if err := b.peaks(results); err != nil {
		return nil, err
	}
	held, err := b.trace(results)
	if err != nil {
		return nil, err
	}
	results = append(results, held...)
	if b.devices < parallel {
		return results, nil
	}
	crowd, err := b.crowd()
	return append(results, crowd...), err
}

// peaks adds the peak memory of the programs.
func (b *bench) peaks(results []result) (err error) {
	for i := range results {
		switch r := &results[i]; r.name {
		case "empty program":
			r.peak, err = b.peak(filepath.Join(b.bin, "empty"), nil, nil)
		case "VERSION", "STATUS", "ADD", "CHECK", "DEL":
			var stdin []byte
			var env []string
			if stdin, env, err = b.cniCall(r.name, 0); err == nil {
				r.peak, err = b.peak(filepath.Join(b.bin, "rdma"), stdin, env)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// trace counts the system calls of the programs, and gives the time for which
// an ADD and a DEL hold the node lock.
func (b *bench) trace(results []result) ([]result, error) {
	held := []result{{name: "lock held by ADD"}, {name: "lock held by DEL"}}
	which := allCalls
	for round := range 1 + max(b.rounds/5, 3) {
		for i := range results {
			program := "rdma"
			do := func() error {
				_, err := b.verb(results[i].name, 0)
				return err
			}
			switch results[i].name {
			case "empty program":
				program = "empty"
				do = func() error {
					_, err := b.process("empty", nil, nil)
					return err
				}
			case "VERSION", "STATUS", "ADD", "CHECK", "DEL":
			default:
				continue
			}
			t, err := traceCalls(program, which, do)
			if err != nil {
				return nil, fmt.Errorf("trace %s: %w", results[i].name, err)
			}
			switch {
			case round == 0:
				results[i].calls = t.calls
			case results[i].name == "ADD":
				held[0].times = append(held[0].times, t.held)
			case results[i].name == "DEL":
				held[1].times = append(held[1].times, t.held)
			}
		}
		which = lockCalls
	}
	return held, nil
}

// crowd measures 16 ADDs at once, and 16 DELs, against 16 bare moves one after
// another.
func (b *bench) crowd() ([]result, error) {
	names := []string{"16 moves in a row", "16 ADDs at once", "16 DELs at once", "16 empty at once"}
	results := make([]result, len(names))
	for i, name := range names {
		results[i].name = name
	}
	for range max(b.rounds/5, 3) {
		took, err := b.moves(parallel, true)
		if err != nil {
			return nil, err
		}
		results[0].times = append(results[0].times, took)
		if _, err := b.moves(parallel, false); err != nil {
			return nil, err
		}
		for k, verb := range []string{"ADD", "DEL"} {
			took, err := atOnce(func(i int) (time.Duration, error) { return b.verb(verb, i) })
			if err != nil {
				return nil, err
			}
			results[k+1].times = append(results[k+1].times, took)
		}
		took, err = atOnce(func(int) (time.Duration, error) { return b.process("empty", nil, nil) })
		if err != nil {
			return nil, err
		}
		results[3].times = append(results[3].times, took)
	}
	return results, nil
}

func atOnce(do func(i int) (time.Duration, error)) (time.Duration, error) {
	failures := make([]error, parallel)
	var all sync.WaitGroup
	start := time.Now()
	for i := range parallel {
		all.Go(func() { _, failures[i] = do(i) })
	}
	all.Wait()
	return time.Since(start), errors.Join(failures...)
}

func (b *bench) setUp() error {
	if err := sim("add name=par%%d parent=aux:rdmasim.sf.%%d count=%d", b.devices); err != nil {
		return err
	}
	for i := range min(parallel, b.devices) {
		name := fmt.Sprintf("bench%d", i)
		if out, err := exec.Command("ip", "netns", "add", name).CombinedOutput(); err != nil {
			return fmt.Errorf("ip netns add: %w: %s", err, out)
		}
		b.netns = append(b.netns, "/run/netns/"+name)
	}
	return nil
}

func (b *bench) tearDown() {
	_ = sim("del *")
	for _, path := range b.netns {
		_ = exec.Command("ip", "netns", "del", filepath.Base(path)).Run()
	}
}

func sim(format string, args ...any) error {
	command := fmt.Sprintf(format, args...)
	if err := os.WriteFile("/dev/rdmasim", []byte(command+"\n"), 0); err != nil {
		return fmt.Errorf("rdmasim %q: %w", command, err)
	}
	return nil
}

// move times the kernel's move of the first device: one netlink request of a
// process that runs already.
func (b *bench) move(out bool) (time.Duration, error) { return b.moves(1, out) }

// moves times the moves of the first devices, one after another.
func (b *bench) moves(devices int, out bool) (took time.Duration, err error) {
	for i := range devices {
		one, err := b.moveDevice(i, out)
		if err != nil {
			return 0, err
		}
		took += one
	}
	return took, nil
}

func (b *bench) moveDevice(i int, out bool) (took time.Duration, err error) {
	home, err := rdma.OwnNamespace()
	if err != nil {
		return 0, err
	}
	pod, err := rdma.OpenNamespace(b.netns[i])
	if err != nil {
		return 0, errors.Join(err, home.Close())
	}
	defer func() { err = errors.Join(err, home.Close(), pod.Close()) }()
	from, to := home, pod
	if !out {
		from, to = pod, home
	}
	err = from.Do(func(c *rdma.Conn) error {
		d, err := c.DeviceByName(fmt.Sprintf("par%d", i))
		if err != nil {
			return err
		}
		start := time.Now()
		err = c.Move(d.Index, to)
		took = time.Since(start)
		return err
	})
	return took, err
}

// verb times one call of the plugin for device number i, as a runtime makes it.
func (b *bench) verb(verb string, i int) (time.Duration, error) {
	return b.call("rdma", verb, i)
}

func (b *bench) call(program, verb string, i int) (time.Duration, error) {
	stdin, env, err := b.cniCall(verb, i)
	if err != nil {
		return 0, err
	}
	took, err := b.process(program, stdin, env)
	var exit *exec.ExitError
	if verb == "CHECK" && errors.As(err, &exit) {
		// The devices have no netdev, which CHECK says; its time is the same.
		err = nil
	}
	return took, err
}

// cniCall is what a runtime passes for a verb.
func (b *bench) cniCall(verb string, i int) (stdin []byte, env []string, err error) {
	netns, id := b.netns[i], fmt.Sprintf("container%d", i)
	stdin, err = json.Marshal(map[string]any{
		"cniVersion": "1.1.0", "name": "bench", "type": "rdma", "deviceID": fmt.Sprintf("rdmasim.sf.%d", i),
		"prevResult": map[string]any{"cniVersion": "1.1.0", "interfaces": []any{map[string]any{"name": "net1", "sandbox": netns}}},
	})
	return stdin, []string{"CNI_COMMAND=" + verb, "CNI_CONTAINERID=" + id, "CNI_NETNS=" + netns, "CNI_IFNAME=net1", "CNI_PATH=" + b.bin}, err
}

// process times a whole process.
func (b *bench) process(program string, stdin []byte, env []string, args ...string) (time.Duration, error) {
	if !filepath.IsAbs(program) {
		program = filepath.Join(b.bin, program)
	}
	cmd := exec.Command(program, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.Env = bytes.NewReader(stdin), &stdout, &stderr, append(os.Environ(), env...)
	start := time.Now()
	err := cmd.Run()
	took := time.Since(start)
	if usage, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
		b.last = cost{cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime(), usage.Minflt, usage.Nvcsw + usage.Nivcsw}
	}
	if err != nil {
		err = fmt.Errorf("%w: %s%s", err, stdout.String(), stderr.String())
	}
	return took, err
}

// peak runs a program once more below a small parent, since a process begins
// with the peak of the one that made it, and gives its peak memory in KiB.
func (b *bench) peak(program string, stdin []byte, env []string, args ...string) (int64, error) {
	cmd := exec.Command("busybox", append([]string{"time", "-f", "peak=%M", program}, args...)...)
	var stderr bytes.Buffer
	cmd.Stdin, cmd.Stderr, cmd.Env = bytes.NewReader(stdin), &stderr, append(os.Environ(), env...)
	err := cmd.Run()
	_, text, ok := strings.Cut(stderr.String(), "peak=")
	if !ok {
		return 0, fmt.Errorf("peak memory of %s: %w: %s", program, err, stderr.String())
	}
	kib, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	return kib / 4, err // busybox takes the KiB for pages of 4 KiB
}

// print writes the table. first keeps the medians of the smallest number of
// devices, for the growth.
func (b *bench) print(results []result, first map[string]time.Duration) {
	floors, least := floorsOf(results, result.median), floorsOf(results, func(r result) time.Duration { return r.quantile(0) })
	for _, r := range results {
		if _, ok := first[r.name]; !ok {
			first[r.name] = r.median()
		}
	}
	fmt.Printf("\n%d RDMA devices, %d rounds\n%-20s %9s %9s %9s %9s %6s %6s %6s %8s %6s %6s %6s\n", b.devices, b.rounds,
		"", "least", "median", "p99", "processor", "calls", "faults", "switch", "peak KiB", "ratio", "least", "growth")
	for _, r := range results {
		growth := ""
		if b.devices > 1 {
			growth = ratio(r.median(), first[r.name])
		}
		used := r.used()
		fmt.Printf("%-20s %9s %9s %9s %9s %6s %6s %6s %8s %6s %6s %6s\n", r.name, millis(r.quantile(0)), millis(r.median()), millis(r.quantile(99)),
			millis(used.cpu), count(int64(r.calls)), count(used.faults), count(used.switches), count(r.peak),
			ratio(r.median(), floors[r.name]), ratio(r.quantile(0), least[r.name]), growth)
	}
}

// floorsOf gives what each kind is compared with: the bare move and an empty
// program, of which a call cannot have less.
func floorsOf(results []result, of func(result) time.Duration) map[string]time.Duration {
	at := map[string]time.Duration{}
	for _, r := range results {
		at[r.name] = of(r)
	}
	return map[string]time.Duration{
		"ADD":              at["move out"] + at["empty program"],
		"DEL":              at["move back"] + at["empty program"],
		"CHECK":            at["empty program"],
		"STATUS":           at["empty program"],
		"VERSION":          at["empty program"],
		"ADD (base)":       at["move out"] + at["empty program"],
		"DEL (base)":       at["move back"] + at["empty program"],
		"CHECK (base)":     at["empty program"],
		"STATUS (base)":    at["empty program"],
		"16 ADDs at once":  at["16 moves in a row"],
		"16 DELs at once":  at["16 moves in a row"],
		"16 empty at once": at["16 moves in a row"],
		"lock held by ADD": at["move out"],
		"lock held by DEL": at["move back"],
	}
}

func ratio(a, b time.Duration) string {
	if a == 0 || b == 0 {
		return ""
	}
	return fmt.Sprintf("%.2f", float64(a)/float64(b))
}

// used gives the median of each cost.
func (r result) used() cost {
	if len(r.costs) == 0 {
		return cost{}
	}
	median := func(of func(cost) int64) int64 {
		all := make([]int64, 0, len(r.costs))
		for _, c := range r.costs {
			all = append(all, of(c))
		}
		slices.Sort(all)
		return all[len(all)/2]
	}
	return cost{
		cpu:      time.Duration(median(func(c cost) int64 { return int64(c.cpu) })),
		faults:   median(func(c cost) int64 { return c.faults }),
		switches: median(func(c cost) int64 { return c.switches }),
	}
}

// count and millis print what was not measured as nothing.
func count(n int64) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatInt(n, 10)
}

func millis(d time.Duration) string {
	if d == 0 {
		return ""
	}
	return fmt.Sprintf("%.2f ms", float64(d)/float64(time.Millisecond))
}
