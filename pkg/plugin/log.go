package plugin

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
)

// logRoot confines logFile: a network's author must not make root write
// elsewhere.
const logRoot = "/var/log"

// operation is one call of a verb, for the log.
type operation struct {
	call  call
	conf  config
	begin time.Time
}

// log writes one line about the operation, preceded by one line for each thing
// that is wrong or odd although the operation may have succeeded. What goes
// wrong with the log fails nothing.
func (p *Plugin) log(op operation, report *attachment.Report, err error) {
	out, done := p.logOutput(op.conf.logFile)
	defer done()
	pod := podOf(op.call.args)
	logger := slog.New(slog.NewJSONHandler(out, &slog.HandlerOptions{Level: op.conf.logLevel})).With(
		"plugin", "rdma", "version", p.Version, "command", op.call.command, "network", op.conf.name,
		"containerID", op.call.containerID, "ifname", op.call.ifName, "netns", op.call.netns,
		"pod", strings.Trim(pod.Namespace+"/"+pod.Name, "/"))
	if trace := p.Getenv("TRACEPARENT"); trace != "" {
		logger = logger.With("traceparent", trace)
	}
	var details []any
	if report != nil {
		for _, w := range report.Warnings {
			logger.Warn(oneLine(w))
		}
		for _, e := range report.Errors {
			logger.Error(oneLine(e))
		}
		var names, before, after []string
		for _, d := range report.Devices {
			names = append(names, d.NameInPod)
			before, after = append(before, d.CharDevices...), append(after, d.CharDevicesInPod...)
		}
		details = append(details, "device", report.Function, "rdmaDevice", strings.Join(names, ","), "before", strings.Join(before, ","), "after", strings.Join(after, ","))
	}
	details = append(details, "durationMs", time.Since(op.begin).Milliseconds())
	level := slog.LevelInfo
	switch {
	case err != nil:
		level = slog.LevelError
		details = append(details, "error", oneLine(err.Error()))
	case op.call.command == "STATUS": // called every few seconds
		level = slog.LevelDebug
	}
	logger.Log(context.Background(), level, op.call.command, details...)
}

// logOutput is the log file, or stderr if there is none or it cannot be used.
func (p *Plugin) logOutput(path string) (io.Writer, func()) {
	if path == "" {
		return p.Stderr, func() {}
	}
	f, err := openLog(path)
	if err != nil {
		_, _ = fmt.Fprintf(p.Stderr, "rdma: log to stderr, since logFile %q cannot be used: %v\n", path, err)
		return p.Stderr, func() {}
	}
	return f, func() { _ = f.Close() }
}

// openLog opens a plain file below logRoot for appending; nowhere on the way is
// a symbolic link followed.
func openLog(path string) (*os.File, error) {
	rel, err := filepath.Rel(logRoot, path)
	if err != nil || rel == "." || strings.HasPrefix(rel, "..") {
		return nil, fmt.Errorf("it is not below %s", logRoot)
	}
	root, err := unix.Open(logRoot, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: logRoot, Err: err}
	}
	defer func() { _ = unix.Close(root) }()
	if dir, name := filepath.Split(rel); dir != "" && name != "" && strings.Count(dir, "/") == 1 {
		// One level is made for the user. Further down, mkdirat could follow a
		// symbolic link.
		_ = unix.Mkdirat(root, dir, 0o755)
	}
	fd, err := unix.Openat2(root, rel, &unix.OpenHow{
		Flags:   unix.O_WRONLY | unix.O_APPEND | unix.O_CREAT | unix.O_CLOEXEC | unix.O_NOFOLLOW | unix.O_NONBLOCK,
		Mode:    0o640,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Nlink != 1 {
		_ = f.Close()
		return nil, fmt.Errorf("it is no plain file of its own (mode %#o, %d links)", st.Mode, st.Nlink)
	}
	return f, nil
}
