package sysfs_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// FuzzValidateAddress: an address that passes is one element of a path, below
// the directory that it is put into.
func FuzzValidateAddress(f *testing.F) {
	for _, address := range []string{vf, sf, "10000:e1:00.0", "", ".", "..", "a/b", "a b", "a\n", "a@b", strings.Repeat("a", 65)} {
		f.Add(address)
	}
	f.Fuzz(func(t *testing.T, address string) {
		if sysfs.ValidateAddress(address) != nil {
			return
		}
		if len(address) > 64 || filepath.Join("/x", address) != "/x/"+address || filepath.Dir(filepath.Join("/x", address)) != "/x" {
			t.Fatalf("%q passed", address)
		}
	})
}
