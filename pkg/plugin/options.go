package plugin

import (
	"errors"
	"fmt"
	"time"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
)

// maxWaitForGID keeps the wait within what runtimes allow for an ADD.
const maxWaitForGID = 20 * time.Second

// readOptions reads what the configuration asks for besides the move. The name
// and the quality of service can also stand under args.cni, where Multus puts
// what the pod's author writes into the annotation cni-args: what the
// administrator has written at top level wins.
func (c *config) readOptions(keys object) error {
	o := &c.options
	for _, read := range []func() error{
		func() error { return readOneOf(keys, "devices", "one", "all", &o.AllDevices) },
		func() error { return readOneOf(keys, "onSharedMode", "fail", "skip", &o.SkipShared) },
		func() error { return readOneOf(keys, "zeroGUID", "warn", "fail", &o.RefuseZeroGUID) },
		func() error { return keys.Bool("optional", &o.SkipNoDevice) },
		func() error { return readSoftRoCE(keys, &o.SoftRoCE) },
		func() error { return c.readWaitForGID(keys) },
		func() error { return c.readDeviceInfo(keys) },
		func() error { return readName(keys, "", o) },
		func() error { return readQoS(keys, "", &o.QoS) },
		func() error {
			args := podArgs(keys)
			if err := readName(args, "args.cni.", o); err != nil {
				return err
			}
			return readQoS(args, "args.cni.", &o.QoS)
		},
	} {
		if err := read(); err != nil {
			return err
		}
	}
	return nil
}

// podArgs is the object args.cni. If it is none, there is nothing in it.
func podArgs(keys object) object {
	var args, cni object
	if keys.Object("args", &args) != nil || args.Object("cni", &cni) != nil {
		return nil
	}
	return cni
}

func readName(keys object, prefix string, o *attachment.Options) error {
	const key = "rdmaDeviceName"
	var name string
	if err := keys.Text(key, &name); err != nil {
		return prefixed(prefix, err)
	}
	if name == "" || o.Name != "" {
		return nil
	}
	if err := attachment.ValidateName(name); err != nil {
		return fmt.Errorf("key %s%s: %w", prefix, key, err)
	}
	o.Name = name
	return nil
}

// readQoS reads {"tos": 0..255, "tc": 0..255, "required": true}. Absent means
// untouched; what is set already stays.
func readQoS(keys object, prefix string, q *attachment.QoS) error {
	const key = "rdmaQoS"
	var qos object
	if err := keys.Object(key, &qos); err != nil {
		return prefixed(prefix, err)
	}
	required := true
	if err := qos.Bool("required", &required); err != nil {
		return prefixed(prefix+key+".", err)
	}
	for _, setting := range []struct {
		key  string
		into **uint8
	}{{"tos", &q.TOS}, {"tc", &q.TrafficClass}} {
		if qos.Null(setting.key) {
			continue
		}
		var number uint64
		if err := qos.Uint(setting.key, 8, &number); err != nil {
			return prefixed(prefix+key+".", err)
		}
		if *setting.into == nil {
			value := uint8(number)
			*setting.into = &value
			q.Optional = q.Optional || !required
		}
	}
	return nil
}

// readSoftRoCE reads the two keys of soft-RoCE. They are the administrator's:
// args.cni has no say in whether the processor does an adapter's work.
func readSoftRoCE(keys object, o *attachment.SoftRoCE) error {
	if err := errors.Join(keys.Bool("softRoCE", &o.Make), keys.Bool("softRoCEOverHardware", &o.OverHardware)); err != nil {
		return err
	}
	if o.OverHardware && !o.Make {
		return errors.New("key softRoCEOverHardware says that softRoCE may leave an adapter's device aside, but softRoCE is not set")
	}
	return nil
}

func prefixed(prefix string, err error) error {
	if prefix == "" || err == nil {
		return err
	}
	return fmt.Errorf("under %s: %w", prefix[:len(prefix)-1], err)
}

func (c *config) readWaitForGID(keys object) error {
	const key = "waitForGID"
	var text string
	if err := keys.Text(key, &text); err != nil || text == "" {
		return err
	}
	wait, err := time.ParseDuration(text)
	if err != nil || wait < 0 || wait > maxWaitForGID {
		return fmt.Errorf("key %s must be a duration from 0s to %s such as \"5s\", not %q", key, maxWaitForGID, text)
	}
	c.options.WaitForGIDs = wait
	return nil
}

func (c *config) readDeviceInfo(keys object) error {
	var runtime object
	if err := keys.Object("runtimeConfig", &runtime); err != nil {
		return err
	}
	return prefixed("runtimeConfig.", runtime.Text("CNIDeviceInfoFile", &c.deviceInfo))
}
