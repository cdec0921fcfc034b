package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
)

// vfConfigs are the VFs' configuration spaces before the guest was saved.
//
// QEMU (10.0) saves the PF and not its VFs: a resumed VF has lost its command
// register and its MSI-X switch. Both are put back before the job starts. The
// rest needs nothing: the addresses are the PF's to give, and the MSI-X table
// is written when the netdev is set up, which it was not yet.
type vfConfigs map[string][]byte

const (
	pciCommand      = 0x04
	pciCapabilities = 0x34
	pciCapMSIX      = 0x11
)

func saveVFs() (vfConfigs, error) {
	vfs, err := filepath.Glob("/sys/bus/pci/devices/*/physfn")
	if err != nil {
		return nil, err
	}
	saved := vfConfigs{}
	for _, vf := range vfs {
		file := filepath.Join(filepath.Dir(vf), "config")
		if saved[file], err = os.ReadFile(file); err != nil {
			return nil, err
		}
	}
	return saved, nil
}

func (saved vfConfigs) restore() error {
	for file, config := range saved {
		if err := restoreVF(file, config); err != nil {
			return fmt.Errorf("restore %s: %w", file, err)
		}
	}
	return nil
}

func restoreVF(file string, config []byte) error {
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	var now [2]byte
	if _, err := f.ReadAt(now[:], pciCommand); err != nil {
		return err
	}
	if binary.LittleEndian.Uint16(now[:]) == binary.LittleEndian.Uint16(config[pciCommand:]) {
		return nil // a cold boot
	}
	if _, err := f.WriteAt(config[pciCommand:pciCommand+2], pciCommand); err != nil {
		return err
	}
	for at := int(config[pciCapabilities]); at != 0; at = int(config[at+1]) {
		if config[at] == pciCapMSIX {
			_, err := f.WriteAt(config[at+2:at+4], int64(at+2))
			return err
		}
	}
	return nil
}
