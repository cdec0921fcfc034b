package state

import (
	"slices"
	"strconv"
	"strings"
)

// The kernel tells an RDMA device's index to who knows the index, or in a dump
// of all devices, which takes the longer the more there are. But it gives out
// indexes upwards and the numbers of verbs nodes lowest first: devices that
// were registered one after another have one offset between the two. The
// offsets that were found are kept, as guesses: whoever uses one asks the
// kernel whether it holds.
const (
	offsetsFile = "offsets"
	maxOffsets  = 8
)

// Offsets gives the offsets between a device's index and the number of its
// verbs node that were seen on this node, the latest first.
func (s *Store) Offsets() []int {
	data, err := readRegular(s.path(offsetsFile))
	if err != nil {
		return nil
	}
	var offsets []int
	for _, field := range strings.Fields(string(data)) {
		if n, err := strconv.Atoi(field); err == nil && len(offsets) < maxOffsets {
			offsets = append(offsets, n)
		}
	}
	return offsets
}

// RememberOffset makes an offset the latest, while the lock is held. Nothing is
// lost if it fails: a guess less, or one that does not hold.
func (s *Store) RememberOffset(offset int) {
	offsets := append([]int{offset}, slices.DeleteFunc(s.Offsets(), func(n int) bool { return n == offset })...)
	var text []byte
	for _, n := range offsets[:min(len(offsets), maxOffsets)] {
		text = append(strconv.AppendInt(text, int64(n), 10), '\n')
	}
	_ = writeFile(s.path(offsetsFile), text)
}
