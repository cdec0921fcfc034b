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
	"github.com/rdma-cni/rdma-cni/pkg/rawjson"
	"github.com/rdma-cni/rdma-cni/pkg/state"
	"github.com/rdma-cni/rdma-cni/pkg/sysfs"
)

type object = rawjson.Object

// config is the network configuration of one call. Keys that the plugin does
// not know belong to others and are ignored.
type config struct {
	cniVersion    string
	name          string
	function      string // the one that deviceID, pciBusID and runtimeConfig agree on, "" if none is given
	logLevel      slog.Level
	logFile       string
	prevResult    object // nil if there is none
	rawPrevResult json.RawMessage
	deviceInfo    string // path of the DeviceInfo file that multus keeps for the attachment
	options       attachment.Options
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
func decode(stdin []byte) (object, error) {
	keys, err := rawjson.Parse(stdin)
	if err != nil {
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
	if isDebug(keys) {
		c.logLevel = slog.LevelDebug
	}
	var level string
	err := errors.Join(
		keys.Text("cniVersion", &c.cniVersion),
		keys.Text("name", &c.name),
		keys.Text("logLevel", &level),
		keys.Text("logFile", &c.logFile),
		c.readFunction(keys),
		keys.Object("prevResult", &c.prevResult),
		c.readOptions(keys),
		c.readValidAttachments(keys),
	)
	if c.prevResult != nil {
		c.rawPrevResult = keys["prevResult"]
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
	if err := keys.Object("runtimeConfig", &runtime); err != nil {
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
		if err := source.keys.Text(source.key, &value); err != nil {
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
			return rawjson.WrongType(key, "a list of attachments", raw)
		}
		for _, a := range list {
			c.validAttachments = append(c.validAttachments, state.Key{ContainerID: a.ContainerID, IfName: a.IfName})
		}
		return nil
	}
	return nil
}

// readOneOf reads a word that must be one of two, and tells whether it is the
// second. The first is the default.
func readOneOf(keys object, key, first, second string, isSecond *bool) error {
	var word string
	if err := keys.Text(key, &word); err != nil {
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

// isDebug reads args.cni.debug. Whatever is wrong under args, where an
// annotation of the pod can put things, means no.
func isDebug(keys object) bool {
	debug := podArgs(keys)["debug"]
	return string(debug) == "true" || string(debug) == `"true"`
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
