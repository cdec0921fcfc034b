// Package wire is what the runner on the host and the agent in the guest say
// to each other over one virtio-serial port: typed, length-prefixed frames.
package wire

import (
	"encoding/binary"
	"fmt"
	"io"
)

// PortName is the virtio-serial port's name, by which the guest finds it.
const PortName = "bed"

// ShareTag is the mount tag of the 9p share; ShareDir is where the guest mounts it.
const (
	ShareTag = "bed"
	ShareDir = "/bed"
)

// Frame kinds. Guest to host: Ready, Stdout, Stderr, Exit. Host to guest: Start, Blocked.
const (
	Ready   = 'r' // payload empty: booted, waiting for a job
	Start   = 'j' // payload: a Job as JSON
	Stdout  = 'o' // payload: bytes
	Stderr  = 'e' // payload: bytes
	Exit    = 'x' // payload: a Result as JSON
	Blocked = 'w' // payload empty: print blocked tasks on the console
)

// maxPayload bounds what a broken peer can make the reader allocate.
const maxPayload = 16 << 20

// Job is one command to run in the guest.
type Job struct {
	Args []string
	Env  []string // K=V, added to the agent's own
	Dir  string
	Now  int64  // Unix nanoseconds: a resumed guest's clock is stale
	Seed []byte // so that two guests resumed from one image differ
}

// Result is how a job ended. Err says why the command could not be run at all.
type Result struct {
	Code    int
	Seconds float64
	Err     string
}

// Write sends one frame in a single write call.
func Write(w io.Writer, kind byte, payload []byte) error {
	frame := make([]byte, 5, 5+len(payload))
	frame[0] = kind
	binary.LittleEndian.PutUint32(frame[1:], uint32(len(payload)))
	_, err := w.Write(append(frame, payload...))
	return err
}

// Read receives one frame.
func Read(r io.Reader) (kind byte, payload []byte, err error) {
	var head [5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	n := binary.LittleEndian.Uint32(head[1:])
	if n > maxPayload {
		return 0, nil, fmt.Errorf("frame %q of %d bytes", head[0], n)
	}
	payload = make([]byte, n)
	if _, err := io.ReadFull(r, payload); err != nil {
		return 0, nil, err
	}
	return head[0], payload, nil
}
