package rdma

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// receiveTimeout bounds the wait for an answer. The kernel handles an RDMA
// request inside sendto, so its answer is queued when sendto returns; only a
// kernel that could not allocate the answer makes a receiver wait. The time a
// move takes is spent in sendto, which nothing bounds.
var receiveTimeout = unix.Timeval{Sec: 10}

// receiveBufferSize holds the largest part of a dump the kernel sends at once
// (32 KiB, net/netlink/af_netlink.c, netlink_dump).
const receiveBufferSize = 32 << 10

// A Conn is an RDMA netlink socket. It sees the devices of the network
// namespace in which it was opened, from whichever thread it is asked; what
// changes a device (Rename, Move, MoveAs) must come from a thread that is in
// that namespace. It is not safe for concurrent use.
type Conn struct {
	fd  int
	seq uint32
	buf []byte
}

// Open opens a Conn in the network namespace of the calling thread, which is
// the process's own unless the caller is inside Namespace.Do. It returns
// ErrNoSubsystem where the kernel has no RDMA netlink.
func Open() (*Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_RDMA)
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil, ErrNoSubsystem
	}
	if err != nil {
		return nil, os.NewSyscallError("open an RDMA netlink socket", err)
	}
	c := &Conn{fd: fd, buf: make([]byte, receiveBufferSize)}
	if err := c.configure(); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func (c *Conn) configure() error {
	if err := unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &receiveTimeout); err != nil {
		return os.NewSyscallError("set the receive timeout", err)
	}
	// The kernel's texts are a gain, not a need: kernels without extended
	// ACKs refuse these two options and work as well.
	_ = unix.SetsockoptInt(c.fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1)
	_ = unix.SetsockoptInt(c.fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	return nil
}

// Close closes the socket.
func (c *Conn) Close() error {
	return os.NewSyscallError("close the RDMA netlink socket", unix.Close(c.fd))
}

// get asks for one object and returns its attributes.
func (c *Conn) get(op string, command int, attrs ...*nl.RtAttr) (attributes, error) {
	replies, err := c.request(op, command, 0, attrs)
	if err != nil {
		return nil, err
	}
	if len(replies) != 1 {
		return nil, fmt.Errorf("%s: the kernel sent %d answers instead of one", op, len(replies))
	}
	return replies[0], nil
}

// set asks for a change and waits for the kernel's acknowledgement.
func (c *Conn) set(op string, command int, attrs ...*nl.RtAttr) error {
	_, err := c.request(op, command, unix.NLM_F_ACK, attrs)
	return err
}

// dump asks for all objects of a kind.
func (c *Conn) dump(op string, command int) ([]attributes, error) {
	return c.request(op, command, unix.NLM_F_DUMP, nil)
}

// request sends one request and gathers its answers. It sends once only: a
// repeated move or rename is another request, not the same one again.
func (c *Conn) request(op string, command, flags int, attrs []*nl.RtAttr) ([]attributes, error) {
	c.seq++
	req := nl.NewNetlinkRequest(nl.RDMA_NL_NLDEV<<nl.RDMA_NL_GET_CLIENT_SHIFT|command, flags)
	req.Seq = c.seq
	for _, a := range attrs {
		req.AddData(a)
	}
	if err := unix.Sendto(c.fd, req.Serialize(), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, fmt.Errorf("%s: %w", op, os.NewSyscallError("send the netlink request", err))
	}
	var replies []attributes
	for {
		done, err := c.receive(op, &replies)
		if err != nil || done {
			return replies, err
		}
	}
}

// receive reads one datagram. It reports true when the answer is complete.
func (c *Conn) receive(op string, replies *[]attributes) (bool, error) {
	n, err := c.read()
	if err != nil {
		return false, fmt.Errorf("%s: %w", op, err)
	}
	for data := c.buf[:n]; len(data) > 0; {
		header, payload, rest, err := splitMessage(data)
		if err != nil {
			return false, fmt.Errorf("%s: %w", op, err)
		}
		data = rest
		if header.Seq != c.seq {
			continue // the rest of an answer that an error cut short
		}
		switch {
		case header.Type == unix.NLMSG_DONE, header.Type == unix.NLMSG_ERROR:
			return true, answerError(op, payload, header.Flags)
		default:
			attrs, err := parseAttributes(payload)
			if err != nil {
				return false, fmt.Errorf("%s: %w", op, err)
			}
			*replies = append(*replies, attrs)
		}
		if header.Flags&unix.NLM_F_MULTI == 0 {
			return true, nil
		}
	}
	return false, nil
}

// read receives one datagram, again when a signal interrupts it: with a
// receive timeout set the kernel does not restart the call by itself.
func (c *Conn) read() (int, error) {
	for {
		n, _, flags, _, err := unix.Recvmsg(c.fd, c.buf, nil, 0)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			return 0, fmt.Errorf("no answer from the kernel within %ds", receiveTimeout.Sec)
		case err != nil:
			return 0, os.NewSyscallError("receive the kernel's answer", err)
		case flags&unix.MSG_TRUNC != 0:
			return 0, fmt.Errorf("the kernel's answer is longer than %d bytes", len(c.buf))
		default:
			return n, nil
		}
	}
}

// splitMessage cuts the first netlink message off data.
func splitMessage(data []byte) (header unix.NlMsghdr, payload, rest []byte, err error) {
	if len(data) < unix.NLMSG_HDRLEN {
		return header, nil, nil, fmt.Errorf("netlink message of %d bytes is cut short", len(data))
	}
	header = unix.NlMsghdr{
		Len:   binary.NativeEndian.Uint32(data[0:]),
		Type:  binary.NativeEndian.Uint16(data[4:]),
		Flags: binary.NativeEndian.Uint16(data[6:]),
		Seq:   binary.NativeEndian.Uint32(data[8:]),
		Pid:   binary.NativeEndian.Uint32(data[12:]),
	}
	length := int(header.Len)
	if length < unix.NLMSG_HDRLEN || length > len(data) {
		return header, nil, nil, fmt.Errorf("netlink message claims %d bytes, %d came", length, len(data))
	}
	return header, data[unix.NLMSG_HDRLEN:length], data[align(length, len(data)):], nil
}

// align gives where the next message or attribute begins: the padding of the
// last one need not be there.
func align(length, available int) int {
	return min((length+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1), available)
}

// answerError reads the errno, and the kernel's text if it sent one, that
// ends an answer. The text follows the header of the request, which is all
// that NETLINK_CAP_ACK leaves of it.
func answerError(op string, payload []byte, flags uint16) error {
	if len(payload) < 4 {
		return nil // a dump's end without a status
	}
	errno := int32(binary.NativeEndian.Uint32(payload))
	if errno == 0 {
		return nil
	}
	e := &Error{Op: op, Errno: unix.Errno(-errno)}
	if flags&unix.NLM_F_ACK_TLVS != 0 && len(payload) > 4+unix.NLMSG_HDRLEN {
		skip := 4 + unix.NLMSG_HDRLEN
		if flags&unix.NLM_F_CAPPED == 0 {
			skip = 4 + int(binary.NativeEndian.Uint32(payload[4:]))
		}
		if skip <= len(payload) {
			if attrs, err := parseAttributes(payload[skip:]); err == nil {
				e.Message = attrs.text(unix.NLMSGERR_ATTR_MSG)
			}
		}
	}
	return e
}

// attributes are the attributes of one message, by their number.
type attributes map[uint16][]byte

// parseAttributes copies payload, which is part of a buffer that the next
// datagram overwrites.
func parseAttributes(payload []byte) (attributes, error) {
	attrs := attributes{}
	err := eachAttribute(bytes.Clone(payload), func(id uint16, value []byte) error {
		attrs[id] = value
		return nil
	})
	if err != nil {
		return nil, err
	}
	return attrs, nil
}

// eachAttribute calls fn for each attribute of payload in turn; a nest can hold
// several of one number.
func eachAttribute(payload []byte, fn func(id uint16, value []byte) error) error {
	for rest := payload; len(rest) > 0; {
		if len(rest) < unix.SizeofNlAttr {
			return fmt.Errorf("parse netlink attributes: one of %d bytes is cut short", len(rest))
		}
		length := int(binary.NativeEndian.Uint16(rest))
		if length < unix.SizeofNlAttr || length > len(rest) {
			return fmt.Errorf("parse netlink attributes: one claims %d bytes, %d came", length, len(rest))
		}
		if err := fn(binary.NativeEndian.Uint16(rest[2:])&nl.NLA_TYPE_MASK, rest[unix.SizeofNlAttr:length]); err != nil {
			return err
		}
		rest = rest[align(length, len(rest)):]
	}
	return nil
}

func (a attributes) text(id uint16) string { return unix.ByteSliceToString(a[id]) }

func (a attributes) uint8(id uint16) (uint8, bool) {
	if len(a[id]) != 1 {
		return 0, false
	}
	return a[id][0], true
}

func (a attributes) uint32(id uint16) (uint32, bool) {
	if len(a[id]) != 4 {
		return 0, false
	}
	return binary.NativeEndian.Uint32(a[id]), true
}

func (a attributes) uint64(id uint16) (uint64, bool) {
	if len(a[id]) != 8 {
		return 0, false
	}
	return binary.NativeEndian.Uint64(a[id]), true
}

func uint32Attr(id int, v uint32) *nl.RtAttr { return nl.NewRtAttr(id, nl.Uint32Attr(v)) }

func textAttr(id int, s string) *nl.RtAttr { return nl.NewRtAttr(id, nl.ZeroTerminated(s)) }
