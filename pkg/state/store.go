package state

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// DefaultDir is where the records are.
const DefaultDir = "/run/cni/rdma"

// tempFile is a record that is being written.
const tempFile = ".new"

const (
	dirMode       = 0o700
	fileMode      = 0o600
	maxRecordSize = 64 << 10
)

// Store is the directory of the records. Whoever changes it holds its lock.
type Store struct{ dir string }

// NewStore gives the store in a directory, which need not exist yet.
func NewStore(dir string) *Store { return &Store{dir: dir} }

// Dir is the store's directory.
func (s *Store) Dir() string { return s.dir }

func (s *Store) path(file string) string { return filepath.Join(s.dir, file) }

// prepare makes the directory, or makes sure that it is ours alone.
func (s *Store) prepare() error {
	var st unix.Stat_t
	err := unix.Lstat(s.dir, &st)
	if errors.Is(err, os.ErrNotExist) {
		if err := os.MkdirAll(filepath.Dir(s.dir), 0o755); err != nil {
			return fmt.Errorf("create state directory: %w", err)
		}
		if err := os.Mkdir(s.dir, dirMode); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("create state directory: %w", err)
		}
		err = unix.Lstat(s.dir, &st)
	}
	switch {
	case err != nil:
		return &os.PathError{Op: "check state directory", Path: s.dir, Err: err}
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return fmt.Errorf("state directory %s is not a directory (mode %#o); remove it", s.dir, st.Mode)
	case int(st.Uid) != os.Geteuid():
		return fmt.Errorf("state directory %s belongs to user %d instead of %d; remove it or change its owner", s.dir, st.Uid, os.Geteuid())
	case st.Mode&0o777 != dirMode:
		if err := os.Chmod(s.dir, dirMode); err != nil {
			return fmt.Errorf("restrict state directory: %w", err)
		}
	}
	return nil
}

// Writable tells whether a record could be written now. It takes no lock.
func (s *Store) Writable() error {
	if err := s.prepare(); err != nil {
		return err
	}
	probe := s.path(".probe-" + strconv.Itoa(os.Getpid()))
	if err := errors.Join(writeFile(probe, make([]byte, 1024)), removeIfThere(probe)); err != nil {
		return fmt.Errorf("write to state directory: %w", err)
	}
	return nil
}

// Names lists the record files. A directory that does not exist has none.
func (s *Store) Names() ([]Name, error) {
	list, err := os.ReadDir(s.dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read state directory: %w", err)
	}
	var names []Name
	for _, e := range list {
		if n, ok := parseName(e.Name()); ok {
			names = append(names, n)
		}
	}
	return names, nil
}

// Load reads a record. A file that is gone is an os.ErrNotExist, one that
// cannot be used a *DamagedError.
func (s *Store) Load(n Name) (*Record, error) {
	data, err := s.Read(n)
	if err != nil {
		return nil, err
	}
	return s.Decode(n, data)
}

// Read reads the file of a record, with the errors of Load.
func (s *Store) Read(n Name) ([]byte, error) {
	path := s.path(n.file())
	data, err := readRegular(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("load record: %w", err)
	}
	if err != nil {
		return nil, &DamagedError{Name: n, Path: path, Err: err}
	}
	return data, nil
}

// Decode decodes what Read gave.
func (s *Store) Decode(n Name, data []byte) (*Record, error) {
	r, err := decode(data, n)
	if err != nil {
		return nil, &DamagedError{Name: n, Path: s.path(n.file()), Err: err}
	}
	return r, nil
}

// readRegular reads a file that must be a plain one of a sane size.
func readRegular(path string) (_ []byte, err error) {
	fd, err := open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, fmt.Errorf("it is no regular file (mode %#o)", st.Mode)
	}
	if st.Size > maxRecordSize {
		return nil, fmt.Errorf("it is longer than %d bytes", maxRecordSize)
	}
	// A record never changes: another one takes its name.
	data := make([]byte, st.Size)
	n, err := unix.Read(fd, data)
	if err != nil {
		return nil, &os.PathError{Op: "read", Path: path, Err: err}
	}
	return data[:n], nil
}

// Save writes a record: it is there whole or as it was before.
func (s *Store) Save(r *Record) error {
	r.Version = Version
	data, err := r.encode()
	if err != nil {
		return fmt.Errorf("encode record: %w", err)
	}
	if len(data) > maxRecordSize {
		return fmt.Errorf("the record of %s is longer than %d bytes, so it could not be read again", r.Key, maxRecordSize)
	}
	// The lock is held, so one name for the temporary file is enough.
	temp := s.path(tempFile)
	if err := writeFile(temp, data); err != nil {
		return errors.Join(fmt.Errorf("write record: %w", err), removeIfThere(temp))
	}
	path := s.path(r.Name().file())
	if err := unix.Rename(temp, path); err != nil {
		return errors.Join(fmt.Errorf("write record: %w", &os.LinkError{Op: "rename", Old: temp, New: path, Err: err}), removeIfThere(temp))
	}
	return nil
}

// open opens a file without what the os package adds to it: it takes each file
// for one that could make a reader wait, for five more system calls.
func open(path string, flags int, mode uint32) (int, error) {
	for {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, mode)
		switch {
		case err == nil:
			return fd, nil
		case !errors.Is(err, unix.EINTR):
			return -1, &os.PathError{Op: "open", Path: path, Err: err}
		}
	}
}

func writeFile(path string, data []byte) error {
	fd, err := open(path, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC|unix.O_NOFOLLOW, fileMode)
	if err != nil {
		return err
	}
	n, err := unix.Write(fd, data)
	if err == nil && n < len(data) {
		err = unix.ENOSPC // the next write would say so
	}
	if err != nil {
		err = &os.PathError{Op: "write", Path: path, Err: err}
	}
	return errors.Join(err, unix.Close(fd))
}

// Delete removes a record file; one that is gone already is no error.
func (s *Store) Delete(n Name) error {
	if err := removeIfThere(s.path(n.file())); err != nil {
		return fmt.Errorf("remove record: %w", err)
	}
	return nil
}

func removeIfThere(path string) error {
	if err := unix.Unlink(path); err != nil && !errors.Is(err, unix.ENOENT) {
		return &os.PathError{Op: "remove", Path: path, Err: err}
	}
	return nil
}
