package state

import (
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

func TestState(t *testing.T) {
	RegisterFailHandler(Fail)
	RunSpecs(t, "state")
}

// The specs of the lock start this test binary again as other processes.
const (
	envDir   = "STATE_TEST_DIR"
	envCount = "STATE_TEST_COUNT"
)

func TestMain(m *testing.M) {
	dir := os.Getenv(envDir)
	if dir == "" {
		os.Exit(m.Run())
	}
	if err := child(NewStore(dir)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// child counts in a file under the lock as often as it is told to; told
// nothing, it holds the lock until its stdin ends.
func child(s *Store) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	count, err := strconv.Atoi(os.Getenv(envCount))
	if err == nil {
		for range count {
			if err := increment(ctx, s); err != nil {
				return err
			}
		}
		return nil
	}
	l, err := s.Lock(ctx, time.Hour, "ADD of a test")
	if err != nil {
		return err
	}
	fmt.Println("held")
	_, _ = io.Copy(io.Discard, os.Stdin)
	return l.Release()
}

// increment is a read and a write that others would spoil if they came between.
func increment(ctx context.Context, s *Store) error {
	l, err := s.Lock(ctx, time.Hour, "counting")
	if err != nil {
		return err
	}
	path := s.path("counter")
	text, _ := os.ReadFile(path)
	n, _ := strconv.Atoi(string(text))
	time.Sleep(100 * time.Microsecond) // makes room for those who do not wait
	if err := os.WriteFile(path, []byte(strconv.Itoa(n+1)), 0o600); err != nil {
		return err
	}
	return l.Release()
}
