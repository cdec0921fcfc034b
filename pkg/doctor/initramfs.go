package doctor

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
	"github.com/ulikunitz/xz/lzma"
)

// Initramfs is what the boot image of the running kernel holds about ib_core.
// A module that is loaded from there takes its options from there.
type Initramfs struct {
	Path    string    `json:"path,omitempty"` // "" if none was found
	IBCore  bool      `json:"ibCore"`         // the module is in it
	Options []Setting `json:"options,omitempty"`
	// Problem says what could not be read. What was found until then counts,
	// what was not found proves nothing.
	Problem string `json:"problem,omitempty"`
}

// initramfsPaths are where distributions put the image, %s being the kernel's
// release: Debian and Ubuntu, Fedora and Red Hat, SUSE, ostree.
var initramfsPaths = []string{
	"boot/initrd.img-%s", "boot/initramfs-%s.img", "boot/initrd-%s",
	"lib/modules/%s/initramfs.img", "usr/lib/modules/%s/initramfs.img", "lib/modules/%s/initrd",
}

// readInitramfs finds and reads the image of a kernel below root.
func readInitramfs(root, release string) Initramfs {
	for _, p := range initramfsPaths {
		name := "/" + fmt.Sprintf(p, release)
		f, err := os.Open(filepath.Join(root, name))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return Initramfs{Path: name, Problem: err.Error()}
		}
		i := parseInitramfs(f)
		i.Path = name
		_ = f.Close()
		return i
	}
	return Initramfs{Problem: "no image for kernel " + release + " was found in /boot or /lib/modules"}
}

// parseInitramfs reads an image: cpio archives one after the other, the later
// of which are usually compressed.
func parseInitramfs(image io.Reader) Initramfs {
	var i Initramfs
	var files []configFile
	if err := i.segments(bufio.NewReaderSize(image, 1<<16), 0, &files); err != nil {
		i.Problem = err.Error()
	}
	i.Options = settingsOf(files)
	return i
}

// maxNesting is how deep compressed parts are followed; an image has one level.
const maxNesting = 3

func (i *Initramfs) segments(r *bufio.Reader, depth int, files *[]configFile) error {
	if depth > maxNesting {
		return errors.New("the image is compressed too often")
	}
	for {
		if err := skipZeros(r); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read the image: %w", err)
		}
		magic, err := r.Peek(6)
		if err != nil {
			return fmt.Errorf("the image ends in the middle of a part: %w", err)
		}
		if string(magic) == "070701" || string(magic) == "070702" {
			if err := i.archive(r, files); err != nil {
				return fmt.Errorf("read the cpio archive of the image: %w", err)
			}
			continue
		}
		inner, err := decompressor(r, magic)
		if err != nil {
			return err
		}
		return i.segments(bufio.NewReaderSize(inner, 1<<16), depth+1, files)
	}
}

func skipZeros(r *bufio.Reader) error {
	for {
		b, err := r.ReadByte()
		if err != nil {
			return err
		}
		if b != 0 {
			return r.UnreadByte()
		}
	}
}

func decompressor(r io.Reader, magic []byte) (io.Reader, error) {
	switch {
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		return gzip.NewReader(r)
	case bytes.HasPrefix(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		d, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1))
		if err != nil {
			return nil, err
		}
		return d.IOReadCloser(), nil
	case bytes.HasPrefix(magic, []byte{0xfd, '7', 'z', 'X', 'Z', 0}):
		return xz.NewReader(r)
	case bytes.HasPrefix(magic, []byte{0x5d, 0, 0}):
		return lzma.NewReader(r)
	case bytes.HasPrefix(magic, []byte("BZh")):
		return bzip2.NewReader(r), nil
	case bytes.HasPrefix(magic, []byte{0x02, 0x21, 0x4c, 0x18}):
		return nil, errors.New("it is compressed with lz4, which is not read here; look with lsinitramfs or lsinitrd")
	case bytes.HasPrefix(magic, []byte{0x89, 'L', 'Z', 'O'}):
		return nil, errors.New("it is compressed with lzo, which is not read here; look with lsinitramfs or lsinitrd")
	}
	return nil, fmt.Errorf("a part of it begins with the unknown bytes %x", magic)
}

const (
	cpioHeader  = 110
	cpioTrailer = "TRAILER!!!"
	// maxConfigFile bounds what is read of a file in modprobe.d.
	maxConfigFile = 1 << 20
)

// archive reads one archive in the "newc" format up to its end.
func (i *Initramfs) archive(r *bufio.Reader, files *[]configFile) error {
	header := make([]byte, cpioHeader)
	for {
		if _, err := io.ReadFull(r, header); err != nil {
			return err
		}
		if m := string(header[:6]); m != "070701" && m != "070702" {
			return fmt.Errorf("an entry begins with %q", m)
		}
		size, err := cpioField(header, 6)
		if err != nil {
			return err
		}
		nameSize, err := cpioField(header, 11)
		if err != nil {
			return err
		}
		if nameSize > 1<<16 {
			return fmt.Errorf("a name of %d bytes", nameSize)
		}
		name := make([]byte, nameSize)
		if _, err := io.ReadFull(r, name); err != nil {
			return err
		}
		if err := discard(r, padding(cpioHeader+nameSize)); err != nil {
			return err
		}
		file := strings.TrimRight(string(name), "\x00")
		if file == cpioTrailer {
			return nil
		}
		content := int64(0)
		if path.Base(path.Dir(file)) == "modprobe.d" && strings.HasSuffix(file, ".conf") && size <= maxConfigFile {
			text := make([]byte, size)
			if _, err := io.ReadFull(r, text); err != nil {
				return err
			}
			content = size
			*files = append(*files, configFile{path: "/" + strings.TrimLeft(strings.TrimPrefix(file, "."), "/"), text: string(text)})
		}
		if isIBCore(file) {
			i.IBCore = true
		}
		if err := discard(r, size-content+padding(size)); err != nil {
			return err
		}
	}
}

// isIBCore tells whether a path is that of the module, whatever compresses it.
func isIBCore(file string) bool {
	base := path.Base(file)
	return base == "ib_core.ko" || strings.HasPrefix(base, "ib_core.ko.")
}

func cpioField(header []byte, n int) (int64, error) {
	v, err := strconv.ParseUint(string(header[6+8*n:14+8*n]), 16, 32)
	if err != nil {
		return 0, fmt.Errorf("an entry's header: %w", err)
	}
	return int64(v), nil
}

func padding(n int64) int64 { return (4 - n%4) % 4 }

func discard(r *bufio.Reader, n int64) error {
	_, err := io.CopyN(io.Discard, r, n)
	return err
}
