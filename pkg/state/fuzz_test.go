package state

import (
	"encoding/json"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// FuzzDecode: no content panics, and a record that is accepted stays what it
// is when it is written and read again.
func FuzzDecode(f *testing.F) {
	r := record()
	r.Version = Version
	whole, err := r.encode()
	if err != nil {
		f.Fatal(err)
	}
	name := r.Name().file()
	f.Add(whole, name)
	f.Add(whole[:100], name)
	f.Add([]byte(`{"version":"2.1","phase":"attached","containerID":"c","ifName":"i","bus":"auxiliary","function":"a.sf.1","devices":[{"name":"x","nameInPod":"x"}]}`), "c@i@a.sf.1.json")
	f.Add([]byte(`{"version":"3.0"}`), name)
	f.Add([]byte("null"), name)
	f.Add([]byte(""), "")
	f.Fuzz(func(t *testing.T, data []byte, file string) {
		n, ok := parseName(file)
		if !ok {
			return
		}
		r, err := decode(data, n)
		if err != nil {
			return
		}
		_ = r.Owner()
		if r.Name() != n || !n.Is(r.Key) {
			t.Fatalf("%+v was read for %+v", r.Name(), n)
		}
		again, err := r.encode()
		if err != nil {
			t.Fatal(err)
		}
		back, err := decode(again, n)
		if err != nil {
			t.Fatalf("%s became %s: %v", data, again, err)
		}
		third, err := back.encode()
		if err != nil || string(third) != string(again) {
			t.Fatalf("%s became %s", again, third)
		}
	})
}

// FuzzName: a file name that is accepted is the one that its parts make, and
// parts that make a name are found in it again.
func FuzzName(f *testing.F) {
	f.Add("c1@net1@0000:3b:00.2.json", "c1", "net1", "0000:3b:00.2")
	f.Add("@@@.json", "a-b", "@", "mlx5_core.sf.4")
	f.Add(".new", "sha256.00", "a@b@c", "a")
	f.Add("lock", strings.Repeat("c", 200), "i", "a")
	f.Fuzz(func(t *testing.T, file, containerID, ifName, function string) {
		if n, ok := parseName(file); ok && n.file() != file {
			t.Fatalf("%q became %q", file, n.file())
		}
		// What the CNI library lets through as a container ID and an
		// interface name has no separator in the first, no slash in either.
		if containerID == "" || ifName == "" || strings.ContainsAny(containerID, "@/\x00") || strings.ContainsAny(ifName, "/\x00") {
			return
		}
		if sysfs.ValidateAddress(function) != nil {
			return // the function was looked up by its address
		}
		r := Record{Key: Key{containerID, ifName}, Function: function}
		n, ok := parseName(r.Name().file())
		if !ok {
			t.Fatalf("%q is no name of a record", r.Name().file())
		}
		if !reflect.DeepEqual(n, r.Name()) || !n.Is(r.Key) {
			t.Fatalf("%+v became %+v", r.Name(), n)
		}
		if filepath.Dir(filepath.Join("/x", n.file())) != "/x" {
			t.Fatalf("%q leads away", n.file())
		}
	})
}

// FuzzUpstream: no record of another plugin panics.
func FuzzUpstream(f *testing.F) {
	f.Add(`{"version":"1.0","deviceID":"0000:3b:00.2","sandboxRdmaDevName":"a","containerRdmaDevName":"b"}`)
	f.Add(`{"version":"1.0","rdmaQoS":null}`)
	f.Add("[]")
	f.Fuzz(func(t *testing.T, text string) {
		var r UpstreamRecord
		if json.Unmarshal([]byte(text), &r) == nil && r.path != "" {
			t.Fatal("a record chose its own path")
		}
	})
}
