package e2e

import (
	"encoding/binary"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
)

// kernelIsBefore compares the running kernel's release.
func kernelIsBefore(major, minor int) bool {
	GinkgoHelper()
	var u unix.Utsname
	Expect(unix.Uname(&u)).To(Succeed())
	var a, b int
	_, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &a, &b)
	Expect(err).NotTo(HaveOccurred())
	return a < major || a == major && b < minor
}

// allocContext makes the holder of a verbs node a user of its device, as
// ibv_open_device does (ib_user_verbs.h, IB_USER_VERBS_CMD_GET_CONTEXT).
func allocContext(node *os.File) {
	GinkgoHelper()
	response := make([]uint32, 2) // async_fd, num_comp_vectors
	var pin runtime.Pinner
	defer pin.Unpin()
	pin.Pin(&response[0])
	request := binary.NativeEndian.AppendUint32(nil, 0)    // command
	request = binary.NativeEndian.AppendUint16(request, 4) // words in
	request = binary.NativeEndian.AppendUint16(request, 2) // words out
	request = binary.NativeEndian.AppendUint64(request, uint64(uintptr(unsafe.Pointer(&response[0]))))
	_, err := unix.Write(int(node.Fd()), request)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(unix.Close, int(response[0]))
}

// denyDevices attaches a program to a control group that denies every device,
// as a runtime attaches one that allows those of the container.
func denyDevices(cgroup string) {
	GinkgoHelper()
	program := []byte{
		0xb7, 0, 0, 0, 0, 0, 0, 0, // r0 = 0
		0x95, 0, 0, 0, 0, 0, 0, 0, // exit
	}
	license := []byte("GPL\x00")
	var pin runtime.Pinner
	defer pin.Unpin()
	pin.Pin(&program[0])
	pin.Pin(&license[0])
	load := struct {
		kind, instructions   uint32
		program, license     uint64
		logLevel, logSize    uint32
		log                  uint64
		kernelVersion, flags uint32
	}{
		kind: unix.BPF_PROG_TYPE_CGROUP_DEVICE, instructions: 2,
		program: uint64(uintptr(unsafe.Pointer(&program[0]))), license: uint64(uintptr(unsafe.Pointer(&license[0]))),
	}
	fd, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_LOAD, uintptr(unsafe.Pointer(&load)), unsafe.Sizeof(load))
	Expect(errno).To(BeZero(), "load the program")
	defer func() { _ = unix.Close(int(fd)) }()
	dir, err := os.Open(cgroup)
	Expect(err).NotTo(HaveOccurred())
	defer dir.Close()
	attach := struct{ target, program, kind, flags uint32 }{uint32(dir.Fd()), uint32(fd), unix.BPF_CGROUP_DEVICE, 0}
	_, _, errno = unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_ATTACH, uintptr(unsafe.Pointer(&attach)), unsafe.Sizeof(attach))
	Expect(errno).To(BeZero(), "attach the program")
}
