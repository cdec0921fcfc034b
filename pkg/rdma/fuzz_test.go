package rdma

import (
	"bytes"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// FuzzMessages: whatever comes from the socket, nothing panics, no message is
// larger than what came, and each step makes the rest shorter.
func FuzzMessages(f *testing.F) {
	f.Add([]byte{}, uint16(0))
	f.Add(message(nldev(1), 0, 7, device(3, "mlx5_3")), uint16(unix.NLM_F_CAPPED))
	f.Add(message(nldev(1), 0, 7, attr(1, []byte{42})[:5]), uint16(0))
	f.Add(append(message(nldev(1), unix.NLM_F_MULTI, 7, device(3, "a")), message(unix.NLMSG_DONE, 0, 7, status(0))...), uint16(0))
	f.Add(message(unix.NLMSG_ERROR, unix.NLM_F_ACK_TLVS, 7, append(status(-int32(unix.EBUSY)), message(1, 0, 7, attr(1, []byte("text\x00")))...)), uint16(unix.NLM_F_ACK_TLVS))
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, uint16(0))
	f.Fuzz(func(t *testing.T, data []byte, flags uint16) {
		// A copy without spare capacity: reading past the end must not go
		// unseen.
		for rest := bytes.Clone(data)[:len(data):len(data)]; len(rest) > 0; {
			header, payload, next, err := splitMessage(rest)
			if err != nil {
				break
			}
			if len(payload)+unix.NLMSG_HDRLEN != int(header.Len) || len(next) >= len(rest) {
				t.Fatalf("message of %d bytes: payload %d, rest %d of %d", header.Len, len(payload), len(next), len(rest))
			}
			payload = bytes.Clone(payload)
			payload = payload[:len(payload):len(payload)]
			if err := answerError("ask", payload, flags); err != nil && err.Error() == "" {
				t.Fatal("an error without text")
			}
			if attrs, err := parseAttributes(payload); err == nil {
				for _, v := range attrs {
					if len(v) > len(payload) {
						t.Fatal("an attribute larger than its message")
					}
				}
				_, _ = deviceFrom(attrs)
			}
			rest = next
		}
	})
}

// FuzzGUID: what is read is written the same.
func FuzzGUID(f *testing.F) {
	f.Add("5054:00ff:fe12:3457")
	f.Add("ABCD:ef01:0000:ffff")
	f.Add(" 054:00ff:fe12:3457")
	f.Add("+054:00ff:fe12:3457")
	f.Add("0x54:00ff:fe12:3457")
	f.Fuzz(func(t *testing.T, text string) {
		var guid GUID
		if guid.UnmarshalText([]byte(text)) == nil && guid.String() != strings.ToLower(text) {
			t.Fatalf("%q was read as %s", text, guid)
		}
	})
}

// FuzzValidateName: a name that passes is one path element and fits.
func FuzzValidateName(f *testing.F) {
	for _, name := range []string{"mlx5_0", "..", "a/b", "a b", "", strings.Repeat("a", 64), "a\x00"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		if ValidateName(name) == nil && (name == "" || name == "." || name == ".." || len(name) > 63 || strings.ContainsAny(name, "/ \t\n\x00%")) {
			t.Fatalf("%q passed", name)
		}
	})
}

// escape writes a path as the kernel does in mountinfo (fs/proc_namespace.c).
func escape(path string) string {
	return strings.NewReplacer(" ", `\040`, "\t", `\011`, "\n", `\012`, `\`, `\134`).Replace(path)
}

// FuzzMountinfo: no text panics, and the mount point that the kernel would
// write is found whatever it is called and whatever stands before it.
func FuzzMountinfo(f *testing.F) {
	f.Add("/run/netns/blue", "22 1 0:21 / /proc rw - proc proc rw\n")
	f.Add(`/run/netns/\040`, "")
	f.Add("/run/netns/a b\tc\nd\\e", "junk\n\n")
	f.Add(`/\\134`, "1 2 3 net:[1]\n")
	f.Fuzz(func(t *testing.T, path, before string) {
		_ = namespaceMounts(strings.NewReader(before))
		if got := unescape(escape(path)); got != path {
			t.Fatalf("%q became %q", path, got)
		}
		if path == "" || len(strings.Fields(escape(path))) != 1 || strings.TrimSpace(escape(path)) != escape(path) {
			return // blanks that the kernel does not escape
		}
		paths := namespaceMounts(strings.NewReader("201 25 0:4 net:[4026532281] " + escape(path) + " rw - nsfs nsfs rw\n"))
		if len(paths) != 1 || paths[0] != path {
			t.Fatalf("%q became %q", path, paths)
		}
	})
}
