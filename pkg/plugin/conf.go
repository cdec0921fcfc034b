// Package plugin is the CNI face of the attachment: it reads what a runtime
// sends, calls pkg/attachment, and answers as the CNI specification asks.
package plugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/rdma-cni/rdma-cni/pkg/attachment"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

// config is the network configuration of one call. Keys that the plugin does
// not know belong to others and are ignored.
type config struct {
	cniVersion string
	name       string
	function   string // the one that deviceID, pciBusID and runtimeConfig agree on, "" if none is given
	logLevel   slog.Level
	logFile    string
	prevResult json.RawMessage
	deviceInfo string // path of the DeviceInfo file that multus keeps for the attachment
	options    attachment.Options
	// validAttachments of a GC; listed is false if the key is absent, which
	// is not the same as an empty list.
	validAttachments []state.Key
	listed           bool
}

// The keys that libcni and the runtimes put into a configuration.
const (
	keyValid       = "cni.dev/valid-attachments"
	keyValidLegacy = "cni.dev/attachments"
)

// decode reads the JSON object on stdin.
func decode(stdin []byte) (keys object, err error) {
	if err := json.Unmarshal(stdin, &keys); err != nil {
		return nil, fmt.Errorf("the network configuration is not a JSON object: %w", err)
	}
	return keys, nil
}

// parseConfig reads a network configuration. Wrong types are errors that name
// key and value; under args.cni, where the author of a pod can write, only those
// of keys that ask for something. It does no IO. With an error it returns what
// it could read, which is enough for the verbs that have to work all the same.
func parseConfig(keys object) (config, error) {
	c := config{cniVersion: unversioned, logLevel: slog.LevelInfo}
	if isDebug(keys["args"]) {
		c.logLevel = slog.LevelDebug
	}
	var level string
	err := errors.Join(
		keys.text("cniVersion", &c.cniVersion),
		keys.text("name", &c.name),
		keys.text("logLevel", &level),
		keys.text("logFile", &c.logFile),
		c.readFunction(keys),
		keys.object("prevResult", nil),
		c.readOptions(keys),
		c.readValidAttachments(keys),
	)
	if !isNull(keys["prevResult"]) {
		c.prevResult = keys["prevResult"]
	}
	if level != "" && c.logLevel != slog.LevelDebug {
		c.logLevel = parseLevel(level)
	}
	return c, err
}

// readFunction takes the address of the function from the three keys that can
// give it. Two that differ are an error: the delegate could have taken the
// other one.
func (c *config) readFunction(keys object) error {
	var runtime object
	if err := keys.object("runtimeConfig", &runtime); err != nil {
		return err
	}
	var given, from string
	for _, source := range []struct {
		keys      object
		key, path string
	}{
		{runtime, "deviceID", "runtimeConfig.deviceID"},
		{keys, "deviceID", "deviceID"},
		{keys, "pciBusID", "pciBusID"},
	} {
		var value string
		if err := source.keys.text(source.key, &value); err != nil {
			if source.path != source.key {
				return fmt.Errorf("%s: %w", source.path, err)
			}
			return err
		}
		if value == "" {
			continue
		}
		if err := sysfs.ValidateAddress(value); err != nil {
			return fmt.Errorf("key %s: %w", source.path, err)
		}
		if given != "" && !strings.EqualFold(given, value) {
			return fmt.Errorf("keys %s (%q) and %s (%q) name different devices", from, given, source.path, value)
		}
		given, from = value, source.path
	}
	c.function = given
	return nil
}

// readValidAttachments tells an absent list from null and []: the first says
// nothing, the others say that no attachment is valid.
func (c *config) readValidAttachments(keys object) error {
	for _, key := range []string{keyValid, keyValidLegacy} {
		raw, ok := keys[key]
		if !ok {
			continue
		}
		c.listed = true
		var list []struct {
			ContainerID string `json:"containerID"`
			IfName      string `json:"ifname"`
		}
		if err := json.Unmarshal(raw, &list); err != nil {
			return wrongType(key, "a list of attachments", raw)
		}
		for _, a := range list {
			c.validAttachments = append(c.validAttachments, state.Key{ContainerID: a.ContainerID, IfName: a.IfName})
		}
		return nil
	}
	return nil
}

// object is a JSON object whose values are not decoded yet.
type object map[string]json.RawMessage

func (o object) text(key string, into *string) error {
	if isNull(o[key]) {
		return nil
	}
	if err := json.Unmarshal(o[key], into); err != nil {
		return wrongType(key, "a string", o[key])
	}
	return nil
}

// object decodes an object, or just makes sure that it is one.
func (o object) object(key string, into *object) error {
	if isNull(o[key]) {
		return nil
	}
	var value object
	if err := json.Unmarshal(o[key], &value); err != nil {
		return wrongType(key, "an object", o[key])
	}
	if into != nil {
		*into = value
	}
	return nil
}

// objects decodes a list of objects, none of which may be null.
func (o object) objects(key string, each func(object) error) error {
	if isNull(o[key]) {
		return nil
	}
	var list []object
	if err := json.Unmarshal(o[key], &list); err != nil {
		return wrongType(key, "a list of objects", o[key])
	}
	for _, element := range list {
		if element == nil {
			return errNullInResult
		}
		if err := each(element); err != nil {
			return err
		}
	}
	return nil
}

func (o object) boolean(key string, into *bool) error {
	if isNull(o[key]) {
		return nil
	}
	if err := json.Unmarshal(o[key], into); err != nil {
		return wrongType(key, "true or false", o[key])
	}
	return nil
}

// oneOf reads a word that must be one of two, and tells whether it is the
// second. The first is the default.
func (o object) oneOf(key, first, second string, isSecond *bool) error {
	var word string
	if err := o.text(key, &word); err != nil {
		return err
	}
	switch word {
	case "", first:
	case second:
		*isSecond = true
	default:
		return fmt.Errorf("key %s must be %q or %q, not %q", key, first, second, word)
	}
	return nil
}

func isNull(raw json.RawMessage) bool { return len(raw) == 0 || string(raw) == "null" }

func wrongType(key, want string, got json.RawMessage) error {
	return fmt.Errorf("key %s must be %s, not %.100s", key, want, got)
}

// isDebug reads args.cni.debug. Whatever is wrong under args, where an
// annotation of the pod can put things, means no.
func isDebug(args json.RawMessage) bool {
	var a struct {
		CNI struct {
			Debug any `json:"debug"`
		} `json:"cni"`
	}
	return json.Unmarshal(args, &a) == nil && (a.CNI.Debug == true || a.CNI.Debug == "true")
}

// parseLevel reads logLevel with the words of the sriov plugin; what it does
// not know means info.
func parseLevel(level string) slog.Level {
	switch strings.ToLower(level) {
	case "panic", "error":
		return slog.LevelError
	case "warning", "warn":
		return slog.LevelWarn
	case "debug":
		return slog.LevelDebug
	default:
		return slog.LevelInfo
	}
}

// podOf reads the pod from CNI_ARGS, for records and logs only: nothing in
// there decides anything, so nothing in there is an error.
func podOf(args string) state.Pod {
	var pod state.Pod
	for pair := range strings.SplitSeq(args, ";") {
		key, value, _ := strings.Cut(pair, "=")
		switch key {
		case "K8S_POD_NAMESPACE":
			pod.Namespace = value
		case "K8S_POD_NAME":
			pod.Name = value
		case "K8S_POD_UID":
			pod.UID = value
		}
	}
	return pod
}
