package main

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// traced is what the kernel saw of one process.
type traced struct {
	calls int           // system calls
	held  time.Duration // from the node lock's being taken to its being let go, 0 if it was not taken
}

const tracing = "/sys/kernel/tracing"

// allCalls and lockCalls choose what is recorded: each record takes time.
var (
	allCalls  = "id >= 0"
	lockCalls = fmt.Sprintf("id == %d || id == %d", unix.SYS_FLOCK, unix.SYS_CLOSE)
)

// traceCalls has the kernel record those system calls of a program of that name
// while do runs (tracefs, events raw_syscalls).
func traceCalls(comm, which string, do func() error) (t traced, err error) {
	if _, err := os.Stat(filepath.Join(tracing, "trace")); err != nil {
		if err := unix.Mount("tracefs", tracing, "tracefs", 0, ""); err != nil {
			return t, fmt.Errorf("mount tracefs: %w", err)
		}
	}
	filter := fmt.Sprintf("comm == %q && (%s)", comm, which)
	for _, setting := range [][2]string{
		{"trace_clock", "mono"},
		{"buffer_size_kb", "4096"},
		{"trace", ""},
		{"events/raw_syscalls/sys_enter/filter", filter},
		{"events/raw_syscalls/sys_exit/filter", filter},
		{"events/raw_syscalls/enable", "1"},
	} {
		if err := os.WriteFile(filepath.Join(tracing, setting[0]), []byte(setting[1]), 0); err != nil {
			return t, fmt.Errorf("tracefs: %w", err)
		}
	}
	err = do()
	if off := os.WriteFile(filepath.Join(tracing, "events/raw_syscalls/enable"), []byte("0"), 0); err == nil {
		err = off
	}
	if err != nil {
		return t, err
	}
	return readTrace()
}

// e.g. "  rdma-152 [001] ..... 12.345678: sys_enter: NR 73 (8, 6, 0, 0, 0, 0)".
var traceLine = regexp.MustCompile(`(\d+)\.(\d{6}): sys_(enter|exit): NR (\d+) (?:\((\w+)|= (-?\w+))`)

func readTrace() (t traced, err error) {
	f, err := os.Open(filepath.Join(tracing, "trace"))
	if err != nil {
		return t, err
	}
	defer f.Close()
	var lock string // the descriptor of the lock, as the kernel prints it
	var taken time.Duration
	for lines := bufio.NewScanner(f); lines.Scan(); {
		m := traceLine.FindStringSubmatch(lines.Text())
		if m == nil {
			continue
		}
		seconds, _ := strconv.Atoi(m[1])
		micros, _ := strconv.Atoi(m[2])
		at := time.Duration(seconds)*time.Second + time.Duration(micros)*time.Microsecond
		enter, number := m[3] == "enter", m[4]
		if enter {
			t.calls++
		}
		switch number {
		case strconv.Itoa(unix.SYS_FLOCK):
			if enter {
				lock = m[5]
			} else if m[6] == "0" || m[6] == "0x0" {
				taken = at
			}
		case strconv.Itoa(unix.SYS_CLOSE):
			if enter && taken > 0 && strings.EqualFold(m[5], lock) {
				t.held, taken = t.held+at-taken, 0
			}
		}
	}
	return t, nil
}
