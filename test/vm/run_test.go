package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestFindComplaint(t *testing.T) {
	for _, tc := range []struct{ name, console, want string }{
		{"quiet", "[    6.7] igb 0000:01:00.0 eth0: igb: eth0 NIC Link is Up\n", ""},
		{"warning", "x\n[    6.7] WARNING: CPU: 1 PID: 117 at fs/seq_file.c:61\ny\n", "[    6.7] WARNING: CPU: 1 PID: 117 at fs/seq_file.c:61"},
		{"hung task", "[  240.1] INFO: task rdma:118 blocked for more than 120 seconds.\n", "[  240.1] INFO: task rdma:118 blocked for more than 120 seconds."},
		{"panic", "[    8.5] Kernel panic - not syncing: oops\r\n", "[    8.5] Kernel panic - not syncing: oops"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "console")
			if err := os.WriteFile(file, []byte(tc.console), 0o600); err != nil {
				t.Fatal(err)
			}
			if got := findComplaint(file); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

func TestModuleName(t *testing.T) {
	for file, want := range map[string]string{
		"kernel/drivers/net/igb-x/rdma-rxe.ko.xz": "rdma_rxe",
		"ib_core":                         "ib_core",
		"kernel/net/9p/9pnet_virtio.ko\n": "9pnet_virtio",
	} {
		if got := moduleName(file); got != want {
			t.Errorf("moduleName(%q) = %q, want %q", file, got, want)
		}
	}
}
