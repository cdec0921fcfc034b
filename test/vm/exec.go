package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

func logf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "vm: "+format+"\n", args...)
}

// run runs a tool quietly and shows its output only when it fails.
func run(dir string, argv ...string) error {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(argv, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

// asRoot puts sudo before a command where it is needed.
func asRoot(name string, args ...string) []string {
	argv := append([]string{name}, args...)
	if os.Geteuid() != 0 {
		return append([]string{"sudo"}, argv...)
	}
	return argv
}
