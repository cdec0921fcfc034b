package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/rdma-cni/rdma-cni/test/vm/wire"
)

const (
	qemuBinary  = "qemu-system-x86_64"
	memory      = "1280M"
	bootTimeout = 3 * time.Minute
)

// The kernel gets only what it needs: the rest is boot time under emulation.
const commandLine = "console=ttyS0 panic=-1 loglevel=4 mitigations=off audit=0 nowatchdog " +
	"tsc=reliable no_timer_check random.trust_cpu=on cryptomgr.notests rcupdate.rcu_expedited=1 apparmor=0"

// guest is a running QEMU.
type guest struct {
	cmd    *exec.Cmd
	qmp    *qmp
	agent  net.Conn
	exited chan struct{} // closed when QEMU has ended
	stderr strings.Builder
}

// machine is the hardware: the same for the boot that is saved and for each
// resume, or the saved state does not fit. Only ram and share differ.
func (b bed) machine(t tree, img image, private bool, console, share string) []string {
	sharing := "on"
	if private {
		sharing = "off" // copy on write: any number of guests resume from one file
	}
	accelerator, cpus := "tcg,thread=multi", "2"
	if b.icount {
		// Two would take turns, each waiting for the other through whole turns.
		accelerator, cpus = "tcg,thread=single", "1"
	}
	args := []string{
		"-nodefaults", "-no-reboot", "-display", "none", "-no-user-config",
		"-machine", "q35,memory-backend=ram,hpet=off,vmport=off,i8042=off,usb=off",
		"-accel", accelerator, "-cpu", "max,la57=off", "-smp", cpus, "-m", memory,
		"-object", fmt.Sprintf("memory-backend-file,id=ram,size=%s,mem-path=%s,share=%s", memory, img.file("ram"), sharing),
		"-kernel", t.image(), "-initrd", img.file("initramfs"), "-append", commandLine,
		"-chardev", "file,id=console,path=" + console, "-serial", "chardev:console",
		"-chardev", "socket,id=qmp,fd=3", "-mon", "chardev=qmp,mode=control",
		"-device", "virtio-serial-pci,id=vs", "-chardev", "socket,id=agent,fd=4",
		"-device", "virtserialport,bus=vs.0,chardev=agent,name=" + wire.PortName,
		"-virtfs", fmt.Sprintf("local,path=%s,mount_tag=%s,security_model=none,multidevs=remap", escape(share), wire.ShareTag),
	}
	if b.icount {
		args = append(args, "-icount", "shift=0,sleep=off")
	}
	for n := range b.pfs {
		args = append(args,
			"-device", fmt.Sprintf("pcie-root-port,id=rp%d,chassis=%d", n, n+1),
			"-netdev", fmt.Sprintf("hubport,hubid=%d,id=net%d", n, n),
			"-device", fmt.Sprintf("igb,bus=rp%d,netdev=net%d,mac=02:be:d0:00:%02x:00,romfile=", n, n, n))
	}
	return args
}

// escape doubles the commas of a value in a QEMU option.
func escape(s string) string { return strings.ReplaceAll(s, ",", ",,") }

// start runs QEMU. It is killed when this process dies, whatever the cause.
func start(args []string) (*guest, error) {
	g := &guest{exited: make(chan struct{})}
	qmpConn, qmpFile, err := socketPair("qmp")
	if err != nil {
		return nil, err
	}
	defer qmpFile.Close()
	agentConn, agentFile, err := socketPair("agent")
	if err != nil {
		return nil, err
	}
	defer agentFile.Close()
	g.agent = agentConn
	g.cmd = exec.Command(qemuBinary, args...)
	g.cmd.Stderr = &g.stderr
	g.cmd.ExtraFiles = []*os.File{qmpFile, agentFile}
	// A process group of its own: Ctrl-C reaches the runner alone, which then
	// ends QEMU. The signal is sent when the starting thread ends, so main
	// stays on its thread.
	g.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := g.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = g.cmd.Wait() // killed, as a rule
		close(g.exited)
	}()
	g.qmp, err = newQMP(qmpConn)
	if err != nil {
		g.kill()
		return nil, fmt.Errorf("%s did not start: %w\n%s", qemuBinary, err, g.stderr.String())
	}
	return g, nil
}

func (g *guest) kill() {
	_ = g.cmd.Process.Kill() // it may have ended
	<-g.exited
}

func socketPair(name string) (net.Conn, *os.File, error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	ours := os.NewFile(uintptr(fds[0]), name)
	defer ours.Close()
	conn, err := net.FileConn(ours)
	return conn, os.NewFile(uintptr(fds[1]), name), err
}

// save boots a guest and stores it, stopped while its agent waits for a job.
func (b bed) save(t tree, img image) error {
	share, err := os.MkdirTemp("", "bed")
	if err != nil {
		return err
	}
	defer os.RemoveAll(share)
	ram, err := os.Create(img.file("ram"))
	if err != nil {
		return err
	}
	ram.Close()
	g, err := start(b.machine(t, img, false, img.file("boot.log"), share))
	if err != nil {
		return err
	}
	defer g.kill()
	if err := g.awaitReady(); err != nil {
		return err
	}
	if err := g.qmp.do("stop", nil); err != nil {
		return err
	}
	return g.qmp.migrate("migrate", img.file("state"))
}

// boot starts a guest from nothing, for runs that must see the boot itself.
func (b bed) boot(t tree, img image, console, share string) (*guest, error) {
	g, err := start(b.machine(t, img, true, console, share))
	if err != nil {
		return nil, err
	}
	if err := g.awaitReady(); err != nil {
		g.kill()
		return nil, err
	}
	return g, nil
}

// resume starts a guest from the saved image.
func (b bed) resume(t tree, img image, console, share string) (*guest, error) {
	g, err := start(append(b.machine(t, img, true, console, share), "-incoming", "defer"))
	if err != nil {
		return nil, err
	}
	err = g.qmp.migrate("migrate-incoming", img.file("state"))
	if err == nil {
		err = g.qmp.do("cont", nil) // it was stopped when it was saved
	}
	if err != nil {
		g.kill()
		return nil, fmt.Errorf("%w\n%s", err, g.stderr.String())
	}
	return g, nil
}

func (g *guest) awaitReady() error {
	if err := g.agent.SetReadDeadline(time.Now().Add(bootTimeout)); err != nil {
		return err
	}
	defer func() { _ = g.agent.SetReadDeadline(time.Time{}) }()
	kind, _, err := wire.Read(g.agent)
	if err != nil {
		return fmt.Errorf("the guest did not come up: %w %s", err, g.stderr.String())
	}
	if kind != wire.Ready {
		return fmt.Errorf("the guest's first word is %q", kind)
	}
	return nil
}

// qmp is QEMU's control connection.
type qmp struct {
	w io.Writer
	r *bufio.Scanner
}

func newQMP(conn net.Conn) (*qmp, error) {
	q := &qmp{w: conn, r: bufio.NewScanner(conn)}
	if !q.r.Scan() { // the greeting
		return nil, errors.New("no QMP greeting")
	}
	return q, q.do("qmp_capabilities", nil)
}

func (q *qmp) do(command string, arguments any) error {
	_, err := q.call(command, arguments)
	return err
}

func (q *qmp) call(command string, arguments any) (json.RawMessage, error) {
	request := map[string]any{"execute": command}
	if arguments != nil {
		request["arguments"] = arguments
	}
	text, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	if _, err := q.w.Write(append(text, '\n')); err != nil {
		return nil, err
	}
	for q.r.Scan() {
		var reply struct {
			Return json.RawMessage
			Error  *struct{ Desc string }
		}
		if err := json.Unmarshal(q.r.Bytes(), &reply); err != nil {
			return nil, err
		}
		switch {
		case reply.Error != nil:
			return nil, fmt.Errorf("qmp %s: %s", command, reply.Error.Desc)
		case reply.Return != nil:
			return reply.Return, nil
		} // else an event
	}
	return nil, fmt.Errorf("qmp %s: QEMU ended", command)
}

// migrate saves to or loads from a file and waits until that is done. The RAM
// is in its own file and not part of it.
func (q *qmp) migrate(command, file string) error {
	err := q.do("migrate-set-capabilities", map[string]any{
		"capabilities": []any{map[string]any{"capability": "x-ignore-shared", "state": true}},
	})
	if err != nil {
		return err
	}
	if err := q.do(command, map[string]any{"uri": "file:" + file}); err != nil {
		return err
	}
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(3 * time.Millisecond) {
		reply, err := q.call("query-migrate", nil)
		if err != nil {
			return err
		}
		var state struct {
			Status string
			Desc   string `json:"error-desc"`
		}
		if err := json.Unmarshal(reply, &state); err != nil {
			return err
		}
		switch state.Status {
		case "completed":
			return nil
		case "failed", "cancelled":
			return fmt.Errorf("%s %s: %s %s", command, file, state.Status, state.Desc)
		}
	}
	return fmt.Errorf("%s %s: not done within a minute", command, file)
}
