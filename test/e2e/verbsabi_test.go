package e2e

import (
	"encoding/binary"
	"os"
	"runtime"
	"unsafe"
)

// verbsCommand sends a command without arguments to a verbs node by write(2),
// as ib_user_verbs.h describes it: a header, then where the answer goes.
func verbsCommand(f *os.File, command uint32, answerSize int) error {
	answer := make([]byte, answerSize)
	var pin runtime.Pinner // the kernel writes there while we are in write
	pin.Pin(&answer[0])
	defer pin.Unpin()
	const size = 16
	request := make([]byte, size)
	binary.NativeEndian.PutUint32(request[0:], command)
	binary.NativeEndian.PutUint16(request[4:], size/4)
	binary.NativeEndian.PutUint16(request[6:], uint16(answerSize/4))
	binary.NativeEndian.PutUint64(request[8:], uint64(uintptr(unsafe.Pointer(&answer[0]))))
	_, err := f.Write(request)
	return err
}
