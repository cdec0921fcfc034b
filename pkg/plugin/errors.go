package plugin

import (
	"errors"
	"io/fs"
	"os"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
	"github.com/rdma-cni/rdma-cni/pkg/rdma"
	"github.com/rdma-cni/rdma-cni/pkg/state"
)

// Error codes of this plugin, besides those of the CNI specification.
const (
	CodeUnavailable uint = 101 // the node's RDMA subsystem is missing or in shared mode
	CodeFunction    uint = 102 // the function has no RDMA device that could be attached
	CodeMove        uint = 103 // the kernel refused the move
	CodeMismatch    uint = 104 // the attachment is not what it should be
	CodeSetting     uint = 105 // the name, quality of service or GID that was asked for cannot be had
)

// cniError makes the one CNI error of an operation. Its message has to tell
// the whole story: it is all that kubectl describe shows.
func cniError(doing string, err error) *types.Error {
	if e, ok := err.(*types.Error); ok { //nolint:errorlint // one that is wrapped or joined must not hide the rest
		return e
	}
	return types.NewError(code(err), oneLine(doing+": "+err.Error()), "")
}

func oneLine(s string) string { return strings.ReplaceAll(s, "\n", "; ") }

func code(err error) uint {
	var (
		made      *types.Error
		timeout   *state.LockTimeoutError
		busy      *attachment.BusyError
		netns     *attachment.NetnsError
		mode      *attachment.ModeError
		function  *attachment.FunctionError
		move      *attachment.MoveError
		carried   *attachment.InterfaceError
		refused   *rdma.Error
		setting   *attachment.SettingError
		different *attachment.MismatchError
		damaged   *state.DamagedError
		path      *fs.PathError
		link      *os.LinkError
	)
	switch {
	case errors.As(err, &made):
		return made.Code
	case errors.As(err, &timeout), errors.As(err, &busy):
		return types.ErrTryAgainLater
	case errors.As(err, &netns):
		return types.ErrInvalidNetNS
	case errors.As(err, &mode), errors.Is(err, rdma.ErrNoSubsystem), errors.Is(err, rdma.ErrNoModes):
		return CodeUnavailable
	case errors.As(err, &function):
		return CodeFunction
	case errors.As(err, &setting):
		return CodeSetting
	case errors.As(err, &move), errors.As(err, &carried):
		return CodeMove
	case errors.As(err, &different):
		return CodeMismatch
	case errors.As(err, &refused):
		return CodeMove
	case errors.As(err, &damaged), errors.As(err, &path), errors.As(err, &link):
		return types.ErrIOFailure
	default:
		return types.ErrInternal
	}
}

// forDEL keeps two phrases out of an error: some runtimes take a DEL error with
// them for success and forget the attachment.
func forDEL(e *types.Error) *types.Error {
	e.Msg = strings.NewReplacer("no such file or directory", "ENOENT", "not found", "missing").Replace(e.Msg)
	return e
}
