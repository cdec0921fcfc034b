package plugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
	"github.com/rdma-cni/rdma-cni/pkg/rawjson"
)

// updateDeviceInfo writes the names of the RDMA devices inside the pod into the
// DeviceInfo file of the attachment (device-info specification 1.1.0), which
// Multus shows in the pod's network-status. The device plugin wrote the file
// before the move and does not know them. Whatever goes wrong is a warning: the
// file is information, not the attachment.
func updateDeviceInfo(path string, report *attachment.Report) {
	if path == "" || len(report.Devices) == 0 {
		return
	}
	if err := rewriteDeviceInfo(path, report); err != nil {
		report.Warnings = append(report.Warnings, fmt.Sprintf("update the DeviceInfo file: %v", err))
	}
}

func rewriteDeviceInfo(path string, report *attachment.Report) (err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is no regular file", path)
	}
	data, err := io.ReadAll(io.LimitReader(f, 1<<20))
	if err != nil {
		return err
	}
	// Only one key is changed; what is not known here stays as it is.
	top, err := rawjson.Parse(data)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	var pci object
	if err := top.Object("pci", &pci); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if pci == nil {
		return fmt.Errorf("%s describes no PCI device", path)
	}
	names := make([]string, 0, len(report.Devices))
	for _, d := range report.Devices {
		names = append(names, d.NameInPod)
	}
	if pci["rdma-device"], err = json.Marshal(strings.Join(names, ",")); err != nil {
		return err
	}
	if top["pci"], err = json.Marshal(pci); err != nil {
		return err
	}
	if data, err = json.Marshal(top); err != nil {
		return err
	}
	return replaceFile(path, data, info.Mode().Perm())
}

func replaceFile(path string, data []byte, mode os.FileMode) error {
	temp, err := os.CreateTemp(filepath.Dir(path), ".rdma-")
	if err != nil {
		return err
	}
	_, err = temp.Write(data)
	if err = errors.Join(err, temp.Chmod(mode), temp.Close()); err == nil {
		err = os.Rename(temp.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temp.Name()))
	}
	return nil
}
