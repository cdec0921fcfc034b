package rdma

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// message builds a netlink message with the padding that the kernel puts
// between messages of one datagram.
func message(kind, flags int, seq uint32, payload []byte) []byte {
	b := make([]byte, 0, unix.NLMSG_HDRLEN+len(payload))
	b = binary.NativeEndian.AppendUint32(b, uint32(unix.NLMSG_HDRLEN+len(payload)))
	b = binary.NativeEndian.AppendUint16(b, uint16(kind))
	b = binary.NativeEndian.AppendUint16(b, uint16(flags))
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 4711) // port
	b = append(b, payload...)
	return append(b, make([]byte, -len(b)&3)...)
}

// attr builds one attribute with its padding.
func attr(id int, value []byte) []byte {
	b := binary.NativeEndian.AppendUint16(nil, uint16(4+len(value)))
	b = binary.NativeEndian.AppendUint16(b, uint16(id))
	b = append(b, value...)
	return append(b, make([]byte, -len(b)&3)...)
}

func u32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }
func u64(v uint64) []byte { return binary.NativeEndian.AppendUint64(nil, v) }

func status(errno int32) []byte { return u32(uint32(errno)) }

// nldev is the type of every answer of the RDMA subsystem to the given command.
func nldev(command int) int { return nl.RDMA_NL_NLDEV<<nl.RDMA_NL_GET_CLIENT_SHIFT | command }

func device(index uint32, name string) []byte {
	return append(attr(nl.RDMA_NLDEV_ATTR_DEV_INDEX, u32(index)), attr(nl.RDMA_NLDEV_ATTR_DEV_NAME, []byte(name+"\x00"))...)
}

// kernel is the far end of a Conn's socket, in the place of the kernel.
type kernel struct{ fd int }

func (k kernel) send(datagram []byte) {
	GinkgoHelper()
	Expect(unix.Send(k.fd, datagram, 0)).To(Succeed())
}

// newConn gives a Conn whose answers the test writes. Requests cannot be sent
// through it: the socket has no netlink addresses.
func newConn() (*Conn, kernel) {
	GinkgoHelper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func() { _ = errors.Join(unix.Close(fds[0]), unix.Close(fds[1])) })
	// A test that forgets an answer must not hang.
	Expect(unix.SetsockoptTimeval(fds[0], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5})).To(Succeed())
	return &Conn{fd: fds[0], seq: 7, buf: make([]byte, receiveBufferSize)}, kernel{fds[1]}
}

// answer reads until the answer to the last request is complete.
func answer(c *Conn) (replies []attributes, err error) {
	for {
		done, err := c.receive("ask", &replies)
		if done || err != nil {
			return replies, err
		}
	}
}

var _ = Describe("netlink messages", func() {
	const multi = unix.NLM_F_MULTI

	It("splits a datagram at the aligned ends of its messages", func() {
		first := message(nldev(1), multi, 3, []byte{1, 2, 3, 4, 5})
		data := append(first, message(unix.NLMSG_DONE, 0, 4, status(0))...)

		header, payload, rest, err := splitMessage(data)
		Expect(err).NotTo(HaveOccurred())
		Expect(header).To(Equal(unix.NlMsghdr{Len: 21, Type: uint16(nldev(1)), Flags: multi, Seq: 3, Pid: 4711}))
		Expect(payload).To(Equal([]byte{1, 2, 3, 4, 5}), "the padding is not part of the message")

		header, payload, rest, err = splitMessage(rest)
		Expect(err).NotTo(HaveOccurred())
		Expect(header.Type).To(BeEquivalentTo(unix.NLMSG_DONE))
		Expect(header.Seq).To(BeEquivalentTo(4))
		Expect(payload).To(Equal(status(0)))
		Expect(rest).To(BeEmpty())
	})

	It("accepts a last message whose padding was not sent", func() {
		data := message(nldev(1), 0, 3, []byte{1, 2, 3, 4, 5})[:21]
		_, payload, rest, err := splitMessage(data)
		Expect(err).NotTo(HaveOccurred())
		Expect(payload).To(HaveLen(5))
		Expect(rest).To(BeEmpty())
	})

	whole := message(nldev(1), 0, 3, u64(9))
	claiming := func(length uint32) []byte {
		b := append([]byte(nil), whole...)
		binary.NativeEndian.PutUint32(b, length)
		return b
	}
	DescribeTable("refuses", func(data []byte, text string) {
		_, _, _, err := splitMessage(data)
		Expect(err).To(MatchError(ContainSubstring(text)))
	},
		Entry("nothing", nil, "0 bytes is cut short"),
		Entry("one byte", whole[:1], "1 bytes is cut short"),
		Entry("a header that lacks a byte", whole[:15], "15 bytes is cut short"),
		Entry("a payload that lacks a byte", whole[:23], "claims 24 bytes, 23 came"),
		Entry("a length of zero, which would never end", claiming(0), "claims 0 bytes"),
		Entry("a length shorter than the header", claiming(15), "claims 15 bytes"),
		Entry("a length of four gigabytes", claiming(1<<32-1), "claims"),
		Entry("a length one past the end", claiming(25), "claims 25 bytes, 24 came"),
	)

	DescribeTable("attributes that are cut short are an error, not a panic",
		func(payload []byte) {
			Expect(parseAttributes(payload)).Error().To(HaveOccurred())
		},
		Entry("shorter than its own header", []byte{3, 0, 1, 0}),
		Entry("length zero", []byte{0, 0, 1, 0}),
		Entry("longer than the payload", []byte{9, 0, 1, 0, 1, 2, 3, 4}),
		Entry("second one longer than the payload", append(attr(1, u32(5)), 200, 0, 1, 0)),
	)

	It("reads a last attribute whose padding was not sent", func() {
		// Neither the length of an attribute nor that of a message includes
		// the padding, so a message may end here.
		attrs, err := parseAttributes(attr(1, []byte{42})[:5:5])
		Expect(err).NotTo(HaveOccurred())
		v, ok := attrs.uint8(1)
		Expect(ok).To(BeTrue())
		Expect(v).To(BeEquivalentTo(42))
	})

	It("reads no attributes from an empty payload", func() {
		Expect(parseAttributes(nil)).To(BeEmpty())
	})

	It("takes the flags of an attribute's type for no part of its number", func() {
		attrs, err := parseAttributes(attr(unix.NLA_F_NESTED|7, u32(5)))
		Expect(err).NotTo(HaveOccurred())
		v, ok := attrs.uint32(7)
		Expect(ok).To(BeTrue())
		Expect(v).To(BeEquivalentTo(5))
	})

	It("reads numbers only from attributes of exactly their size", func() {
		attrs := attributes{0: nil, 1: {1}, 2: {1, 2}, 3: {1, 2, 3}, 4: u32(4), 5: {1, 2, 3, 4, 5}, 8: u64(8), 9: make([]byte, 9)}
		for id := range uint16(12) {
			v8, ok8 := attrs.uint8(id)
			v32, ok32 := attrs.uint32(id)
			v64, ok64 := attrs.uint64(id)
			Expect(ok8).To(Equal(id == 1), "u8 from %d bytes", id)
			Expect(ok32).To(Equal(id == 4), "u32 from %d bytes", id)
			Expect(ok64).To(Equal(id == 8), "u64 from %d bytes", id)
			if id == 1 {
				Expect(v8).To(BeEquivalentTo(1))
			}
			if id == 4 {
				Expect(v32).To(BeEquivalentTo(4))
			}
			if id == 8 {
				Expect(v64).To(BeEquivalentTo(8))
			}
		}
	})

	DescribeTable("reads text", func(value []byte, want string) {
		Expect(attributes{1: value}.text(1)).To(Equal(want))
	},
		Entry("that is absent", nil, ""),
		Entry("that is empty", []byte{}, ""),
		Entry("that is one zero", []byte{0}, ""),
		Entry("with its zero", []byte("mlx5_0\x00"), "mlx5_0"),
		Entry("without one", []byte("mlx5_0"), "mlx5_0"),
		Entry("up to the first zero", []byte("mlx5_0\x00junk"), "mlx5_0"),
	)
})

var _ = Describe("the kernel's refusal", func() {
	// request is what the kernel repeats of a request: its header, and without
	// NLM_F_CAPPED the rest of it.
	request := message(nldev(nl.RDMA_NLDEV_CMD_SET), unix.NLM_F_REQUEST|unix.NLM_F_ACK, 7, attr(1, u32(3)))
	// text is an extended ACK with an offset before the message, as a kernel
	// that points at a bad attribute sends it.
	text := append(attr(unix.NLMSGERR_ATTR_OFFS, u32(16)), attr(unix.NLMSGERR_ATTR_MSG, []byte("device is busy\x00"))...)
	join := func(parts ...[]byte) (b []byte) {
		for _, p := range parts {
			b = append(b, p...)
		}
		return b
	}
	const tlvs, capped = unix.NLM_F_ACK_TLVS, unix.NLM_F_CAPPED

	DescribeTable("keeps errno and text",
		func(payload []byte, flags int, errno unix.Errno, message string) {
			err := answerError("move RDMA device 3", payload, uint16(flags))
			var e *Error
			Expect(errors.As(err, &e)).To(BeTrue())
			Expect(*e).To(Equal(Error{Op: "move RDMA device 3", Errno: errno, Message: message}))
			Expect(err).To(MatchError(errno))
		},
		Entry("a bare errno", status(-int32(unix.EBUSY)), 0, unix.EBUSY, ""),
		Entry("with the header of the request", join(status(-int32(unix.EPERM)), request[:16]), capped, unix.EPERM, ""),
		Entry("with the whole request", join(status(-int32(unix.EINVAL)), request), 0, unix.EINVAL, ""),
		Entry("with a text behind the header", join(status(-int32(unix.EBUSY)), request[:16], text), tlvs|capped, unix.EBUSY, "device is busy"),
		Entry("with a text behind the whole request", join(status(-int32(unix.EBUSY)), request, text), tlvs, unix.EBUSY, "device is busy"),
		Entry("with a text that is not announced", join(status(-int32(unix.EBUSY)), request[:16], text), capped, unix.EBUSY, ""),
		Entry("with a text that is cut short", join(status(-int32(unix.EBUSY)), request[:16], text[:20]), tlvs|capped, unix.EBUSY, ""),
		Entry("with a request that claims more than was sent", join(status(-int32(unix.EBUSY)), u32(4000), request[4:], text), tlvs, unix.EBUSY, ""),
		Entry("with a request that claims four gigabytes", join(status(-int32(unix.EBUSY)), u32(1<<32-1), request[4:], text), tlvs, unix.EBUSY, ""),
	)

	DescribeTable("is none", func(payload []byte) {
		Expect(answerError("ask", payload, 0)).To(Succeed())
	},
		Entry("when the status is zero", status(0)),
		Entry("when the status is zero and the request follows", join(status(0), request)),
		Entry("at the end of a dump without a status", nil),
	)

	It("is an os.ErrPermission for EPERM and EACCES, and says so under any wrapping", func() {
		for _, errno := range []unix.Errno{unix.EPERM, unix.EACCES} {
			err := errors.Join(errors.New("other"), answerError("move", status(-int32(errno)), 0))
			Expect(errors.Is(err, os.ErrPermission)).To(BeTrue())
			Expect(errors.Is(err, errno)).To(BeTrue())
			Expect(errors.Is(err, unix.EBUSY)).To(BeFalse())
		}
	})

	It("reads well", func() {
		Expect(&Error{Op: "move RDMA device 3", Errno: unix.ENODEV}).
			To(MatchError("move RDMA device 3: no such device (ENODEV)"))
		Expect(&Error{Op: "move RDMA device 3", Errno: unix.EBUSY, Message: "in use"}).
			To(MatchError("move RDMA device 3: device or resource busy (EBUSY), kernel says: in use"))
	})

	It("does not trip over an errno that is none", func() {
		for _, v := range []int32{1, 1 << 30, -1 << 31} {
			Expect(answerError("ask", status(v), 0).Error()).To(HavePrefix("ask: "))
		}
	})
})

var _ = Describe("a Conn's answers", func() {
	const multi = unix.NLM_F_MULTI

	It("are one object for a get", func() {
		c, k := newConn()
		k.send(message(nldev(1), 0, 7, device(3, "mlx5_3")))
		replies, err := answer(c)
		Expect(err).NotTo(HaveOccurred())
		Expect(replies).To(HaveLen(1))
		Expect(deviceFrom(replies[0])).To(Equal(Device{Index: 3, Name: "mlx5_3"}))
	})

	It("are all objects of a dump, over several datagrams, up to its end", func() {
		c, k := newConn()
		k.send(append(message(nldev(1), multi, 7, device(0, "a")), message(nldev(1), multi, 7, device(1, "b"))...))
		k.send(message(nldev(1), multi, 7, device(2, "c")))
		k.send(message(unix.NLMSG_DONE, multi, 7, status(0)))
		k.send(message(nldev(1), 0, 8, device(9, "of the next request")))
		replies, err := answer(c)
		Expect(err).NotTo(HaveOccurred())
		var names []string
		for _, r := range replies {
			names = append(names, r.text(nl.RDMA_NLDEV_ATTR_DEV_NAME))
		}
		Expect(names).To(Equal([]string{"a", "b", "c"}))
	})

	It("are empty for a dump of nothing", func() {
		c, k := newConn()
		k.send(message(unix.NLMSG_DONE, multi, 7, status(0)))
		Expect(answer(c)).To(BeEmpty())
	})

	It("carry the error that ends a dump", func() {
		c, k := newConn()
		k.send(message(nldev(1), multi, 7, device(0, "a")))
		k.send(message(unix.NLMSG_DONE, multi, 7, status(-int32(unix.ENOMEM))))
		_, err := answer(c)
		Expect(err).To(MatchError(unix.ENOMEM))
	})

	It("do not come from an earlier request", func() {
		c, k := newConn()
		k.send(message(nldev(1), 0, 6, device(1, "stale")))
		k.send(message(unix.NLMSG_ERROR, 0, 6, status(-int32(unix.EBUSY))))
		k.send(message(nldev(1), 0, 7, device(2, "fresh")))
		replies, err := answer(c)
		Expect(err).NotTo(HaveOccurred())
		Expect(replies).To(HaveLen(1))
		Expect(replies[0].text(nl.RDMA_NLDEV_ATTR_DEV_NAME)).To(Equal("fresh"))
	})

	DescribeTable("are refused when they are malformed", func(datagram []byte, text string) {
		c, k := newConn()
		k.send(datagram)
		_, err := answer(c)
		Expect(err).To(MatchError(And(HavePrefix("ask: "), ContainSubstring(text))))
	},
		Entry("shorter than a header", []byte{1, 2, 3}, "cut short"),
		Entry("a second message cut short", append(message(nldev(1), multi, 7, nil), 1, 2), "cut short"),
		Entry("bad attributes", message(nldev(1), 0, 7, []byte{1, 0, 1, 0}), "parse netlink attributes"),
		Entry("longer than the buffer", make([]byte, receiveBufferSize+1), "longer than 32768 bytes"),
	)

	It("fill the buffer to the last byte", func() {
		c, k := newConn()
		k.send(message(nldev(1), 0, 7, attr(200, make([]byte, receiveBufferSize-unix.NLMSG_HDRLEN-4))))
		Expect(answer(c)).To(HaveLen(1))
	})

	It("have to come in time", func() {
		c, _ := newConn()
		Expect(unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 1000})).To(Succeed())
		Expect(answer(c)).Error().To(MatchError(ContainSubstring("no answer from the kernel")))
	})

	It("are awaited through signals", func() {
		c, k := newConn()
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		tid := unix.Gettid()
		go func() {
			// The runtime itself sends this signal to its threads and ignores
			// those it did not ask for. It must find the thread asleep.
			for sent := 0; sent < 20; runtime.Gosched() {
				stat, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/stat", tid))
				if err != nil || strings.Contains(string(stat), ") S ") {
					_ = unix.Tgkill(os.Getpid(), tid, unix.SIGURG)
					sent++
				}
			}
			_ = unix.Send(k.fd, message(nldev(1), 0, 7, device(3, "mlx5_3")), 0)
		}()
		Expect(answer(c)).To(HaveLen(1))
	})

	It("end with the socket's error", func() {
		c := &Conn{fd: -1, seq: 7, buf: make([]byte, 16)}
		Expect(answer(c)).Error().To(MatchError(unix.EBADF))
	})
})

// Another netlink family answers a request for the RDMA subsystem with an
// errno. That takes sending, acknowledgements and sequence numbers through a
// real kernel, on machines without RDMA.
var _ = Describe("a Conn on another netlink family", func() {
	var c *Conn

	BeforeEach(func() {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
		Expect(err).NotTo(HaveOccurred())
		c = &Conn{fd: fd, buf: make([]byte, receiveBufferSize)}
		DeferCleanup(func() { Expect(c.Close()).To(Succeed()) })
		Expect(c.configure()).To(Succeed())
	})

	It("keeps the errno in every call", func() {
		own, err := OwnNamespace()
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(own.Close)
		calls := map[string]func() error{
			"read the RDMA namespace mode":    func() error { _, err := c.Mode(); return err },
			"look up RDMA device 3":           func() error { _, err := c.Device(3); return err },
			"list RDMA devices":               func() error { _, err := c.Devices(); return err },
			"rename RDMA device 3 to mlx5_7":  func() error { return c.Rename(3, "mlx5_7") },
			"move RDMA device 3":              func() error { return c.Move(3, own) },
			"look up port 2 of RDMA device 3": func() error { _, err := c.Port(3, 2); return err },
		}
		for op, call := range calls {
			err := call()
			var e *Error
			Expect(errors.As(err, &e)).To(BeTrue(), "%s: %v", op, err)
			Expect(e.Op).To(Equal(op))
			Expect(err).To(MatchError(unix.EOPNOTSUPP))
		}
		Expect(c.seq).To(BeEquivalentTo(len(calls)), "each request has its own number and is sent once")
	})

	It("takes EOPNOTSUPP for a device without verbs node", func() {
		_, err := c.Uverbs(3)
		Expect(err).To(MatchError(ErrDeviceNotFound))
		Expect(err).To(MatchError(os.ErrNotExist))
		Expect(err).To(MatchError(unix.EOPNOTSUPP), "the cause is kept")
	})

	It("sends no rename to a name that the kernel would spoil", func() {
		Expect(c.Rename(3, "a/b")).To(MatchError(ContainSubstring("only letters")))
		Expect(c.seq).To(BeZero())
	})
})

var _ = Describe("Open", func() {
	It("works, or says that there is no RDMA subsystem", func() {
		c, err := Open()
		if err != nil {
			Expect(err).To(MatchError(ErrNoSubsystem))
			Expect(strings.ToLower(err.Error())).To(ContainSubstring("ib_core"))
			return
		}
		Expect(c.Close()).To(Succeed())
	})
})
