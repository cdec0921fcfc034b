package doctor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/rdma-cni/rdma-cni/pkg/rdma"
)

// parseMemlock reads the soft limit "Max locked memory" of /proc/PID/limits.
func parseMemlock(limits string) (bytes uint64, unlimited bool, err error) {
	for line := range strings.Lines(limits) {
		rest, ok := strings.CutPrefix(line, "Max locked memory")
		if !ok {
			continue
		}
		fields := strings.Fields(rest)
		if len(fields) == 0 {
			break
		}
		if fields[0] == "unlimited" {
			return 0, true, nil
		}
		n, err := strconv.ParseUint(fields[0], 10, 64)
		return n, false, err
	}
	return 0, false, errors.New("it names no limit of locked memory")
}

func readMemlock(proc rdma.Proc, pid int) (bytes uint64, unlimited bool, err error) {
	text, err := os.ReadFile(filepath.Join(string(proc), strconv.Itoa(pid), "limits"))
	if err != nil {
		return 0, false, err
	}
	return parseMemlock(string(text))
}

// enoughMemlock is a limit that lets a program register real buffers. The usual
// defaults are 64 KiB and 8 MiB.
const enoughMemlock = 1 << 30

func megabytes(n uint64) string {
	if n < 1<<20 {
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return fmt.Sprintf("%d MiB", n>>20)
}
