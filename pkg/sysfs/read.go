package sysfs

import (
	"errors"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// maxAttribute is the longest attribute that sysfs gives.
const maxAttribute = 4096

// readAttribute reads a file of sysfs, without the blanks around its text. It
// makes three system calls; os.ReadFile takes each file for one that could make
// a reader wait, and makes nine.
func readAttribute(dir int, name string) (string, error) {
	fd, err := openat(dir, name, 0)
	if err != nil {
		return "", err
	}
	var buf [maxAttribute]byte
	n, err := retry(func() (int, error) { return unix.Read(fd, buf[:]) })
	_ = unix.Close(fd)
	if err != nil {
		return "", &os.PathError{Op: "read", Path: name, Err: err}
	}
	return strings.TrimSpace(string(buf[:n])), nil
}

// eachEntry opens a directory and calls fn for each name in it, with the open
// directory.
func eachEntry(path string, fn func(dir int, name string) error) error {
	dir, err := openat(unix.AT_FDCWD, path, unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(dir) }()
	var names []string
	var buf [2048]byte
	for {
		n, err := retry(func() (int, error) { return unix.Getdents(dir, buf[:]) })
		if err != nil {
			return &os.PathError{Op: "read directory", Path: path, Err: err}
		}
		if n == 0 {
			break
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names)
	}
	for _, name := range names {
		if err := fn(dir, name); err != nil {
			return err
		}
	}
	return nil
}

func openat(dir int, path string, flags int) (int, error) {
	fd, err := retry(func() (int, error) { return unix.Openat(dir, path, unix.O_RDONLY|unix.O_CLOEXEC|flags, 0) })
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, nil
}

// retry repeats a call that a signal interrupts.
func retry(call func() (int, error)) (int, error) {
	for {
		if n, err := call(); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}
