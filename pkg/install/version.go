package install

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// versionTime bounds the run of a plugin that says which versions it supports.
const versionTime = 10 * time.Second

// askVersion runs a plugin with the verb VERSION, which needs nothing of the
// node: a plugin that answers can be started by a runtime.
func askVersion(ctx context.Context, file string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, versionTime)
	defer cancel()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, file) //nolint:forbidigo // it is what is installed: does it run?
	cmd.Env = []string{"CNI_COMMAND=VERSION"}
	cmd.Stdin = strings.NewReader(`{"cniVersion": "1.0.0"}`)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = time.Second // should it leave children that hold its output
	if err := cmd.Run(); err != nil {
		hint := ""
		if ctx.Err() != nil {
			err = fmt.Errorf("it was ended: %w", ctx.Err())
		}
		if errors.Is(err, unix.EACCES) {
			hint = "; is its file system mounted noexec, or does SELinux forbid it?"
		}
		return nil, fmt.Errorf("run %s with CNI_COMMAND=VERSION: %w%s%s", file, err, said(stdout.String()+stderr.String()), hint)
	}
	var answer struct {
		SupportedVersions []string `json:"supportedVersions"`
	}
	if err := json.Unmarshal(stdout.Bytes(), &answer); err != nil || len(answer.SupportedVersions) == 0 {
		return nil, fmt.Errorf("run %s with CNI_COMMAND=VERSION: it names no version that it supports, so it is no CNI plugin%s", file, said(stdout.String()))
	}
	return answer.SupportedVersions, nil
}

func said(output string) string {
	output = strings.TrimSpace(output)
	if output == "" {
		return ""
	}
	return fmt.Sprintf(" (it says %.200q)", output)
}
