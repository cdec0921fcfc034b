package plugin

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

var _ = Describe("an error's code", func() {
	cause := errors.New("cause")

	DescribeTable("is found at any depth", func(want uint, err error) {
		Expect(code(err)).To(Equal(want))
		deep := fmt.Errorf("undo: %w", errors.Join(cause, fmt.Errorf("a: %w", fmt.Errorf("b: %w", err))))
		Expect(code(deep)).To(Equal(want))
		e := cniError("attach", deep)
		Expect(e.Code).To(Equal(want))
		Expect(e.Msg).To(HavePrefix("attach: undo: cause; a: b: "))
		Expect(e.Msg).NotTo(ContainSubstring("\n"))
	},
		Entry("the lock was not free: try again", types.ErrTryAgainLater, &state.LockTimeoutError{Wait: time.Second, Holder: "x"}),
		Entry("the device is somebody else's: try again", types.ErrTryAgainLater, &attachment.BusyError{}),
		Entry("the namespace cannot be used", types.ErrInvalidNetNS, &attachment.NetnsError{Err: os.ErrNotExist}),
		Entry("the namespace's path cannot be opened", types.ErrInvalidNetNS, &attachment.NetnsError{Err: &fs.PathError{Op: "open", Path: "x", Err: unix.ENOENT}}),
		Entry("shared mode", CodeUnavailable, &attachment.ModeError{Mode: rdma.Shared}),
		Entry("no RDMA subsystem", CodeUnavailable, rdma.ErrNoSubsystem),
		Entry("no such function", CodeFunction, &attachment.FunctionError{Err: sysfs.ErrNoFunction}),
		Entry("no RDMA device", CodeFunction, &attachment.FunctionError{Err: &sysfs.Absence{}}),
		Entry("the kernel refused", CodeMove, &attachment.MoveError{Err: &rdma.Error{Op: "move", Errno: unix.EOPNOTSUPP}}),
		Entry("not what it should be", CodeMismatch, &attachment.MismatchError{Err: cause}),
		Entry("a damaged record", types.ErrIOFailure, &state.DamagedError{Err: cause}),
		Entry("a file", types.ErrIOFailure, &fs.PathError{Op: "open", Path: "x", Err: unix.EIO}),
		Entry("a rename", types.ErrIOFailure, &os.LinkError{Op: "rename", Err: unix.EIO}),
		Entry("anything else", types.ErrInternal, cause),
	)

	It("is that of the CNI error inside, whose words are kept", func() {
		inner := types.NewError(types.ErrInvalidNetworkConfig, "message", "details")
		e := cniError("attach", fmt.Errorf("a: %w", errors.Join(cause, inner)))
		Expect(e.Code).To(Equal(types.ErrInvalidNetworkConfig))
		Expect(e.Msg).To(ContainSubstring("message"))
	})

	It("does not hide that an undo failed", func() {
		// Who reads that the attachment is undone must be told when it is not.
		e := cniError("attach", errors.Join(types.NewError(types.ErrIOFailure, "print the result", ""), errors.New("the undo failed")))
		Expect(e.Code).To(Equal(types.ErrIOFailure))
		Expect(e.Msg).To(And(ContainSubstring("print the result"), ContainSubstring("the undo failed")))
	})

	It("keeps the errno in reach through every layer", func() {
		err := fmt.Errorf("undo: %w", errors.Join(cause, &attachment.MoveError{Err: &rdma.Error{Op: "move", Errno: unix.EPERM}}))
		Expect(errors.Is(err, unix.EPERM)).To(BeTrue())
		Expect(errors.Is(err, os.ErrPermission)).To(BeTrue())
	})
})

var _ = Describe("an error of DEL", func() {
	It("has no phrase that a runtime takes for success", func() {
		e := forDEL(cniError("detach", errors.Join(
			&os.PathError{Op: "open", Path: "/run/x", Err: unix.ENOENT}, errors.New("device not found"), errors.New("and not found again"))))
		Expect(e.Msg).NotTo(ContainSubstring("not found"))
		Expect(e.Msg).NotTo(ContainSubstring("no such file or directory"))
		Expect(e.Error()).NotTo(Or(ContainSubstring("not found"), ContainSubstring("no such file or directory")))
		Expect(e.Msg).To(And(ContainSubstring("ENOENT"), ContainSubstring("device missing"), ContainSubstring("/run/x")))
		Expect(e.Code).To(Equal(types.ErrIOFailure))
	})

	It("is otherwise what it was", func() {
		e := types.NewError(types.ErrTryAgainLater, "the lock is not free", "details")
		Expect(forDEL(e)).To(Equal(types.NewError(types.ErrTryAgainLater, "the lock is not free", "details")))
	})
})
