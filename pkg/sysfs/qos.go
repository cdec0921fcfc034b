package sysfs

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// TrafficClasses reads the traffic class of each port of one of the function's
// RDMA devices at home (the files "tc/PORT/traffic_class", port 1 first): 0 to
// 255, or -1 if none is set. Only out-of-tree drivers (MLNX_OFED, DOCA) have
// them; where they are absent the error is an os.ErrNotExist. A move keeps the
// values.
func (f Function) TrafficClasses(device string, ports uint32) ([]int, error) {
	classes := make([]int, 0, ports)
	for port := uint32(1); port <= ports; port++ {
		c, err := f.trafficClass(device, port)
		if err != nil {
			return nil, err
		}
		classes = append(classes, c)
	}
	return classes, nil
}

// SetTrafficClasses sets the traffic class of each port and makes sure that the
// driver took it.
func (f Function) SetTrafficClasses(device string, classes []int) error {
	for i, want := range classes {
		port := uint32(i + 1)
		path := f.trafficClassFile(device, port)
		if err := os.WriteFile(path, strconv.AppendInt(nil, int64(want), 10), 0); err != nil {
			return fmt.Errorf("set the traffic class of RDMA device %s port %d: %w", device, port, err)
		}
		got, err := f.trafficClass(device, port)
		if err != nil {
			return err
		}
		if got != want {
			return fmt.Errorf("set the traffic class of RDMA device %s port %d to %d: %s reads %d afterwards", device, port, want, path, got)
		}
	}
	return nil
}

func (f Function) trafficClassFile(device string, port uint32) string {
	return f.path("infiniband", device, "tc", strconv.FormatUint(uint64(port), 10), "traffic_class")
}

func (f Function) trafficClass(device string, port uint32) (int, error) {
	path := f.trafficClassFile(device, port)
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("read the traffic class of RDMA device %s port %d: %w", device, port, err)
	}
	return parseTrafficClass(path, string(data))
}

// parseTrafficClass reads the first line of the file, "Global tclass=96". Lines
// for single addresses can follow; an empty file means that none is set.
func parseTrafficClass(path, data string) (int, error) {
	if strings.TrimSpace(data) == "" {
		return -1, nil
	}
	line, _, _ := strings.Cut(data, "\n")
	_, value, ok := strings.Cut(line, "tclass=")
	if !ok {
		value = line
	}
	v, err := strconv.Atoi(strings.TrimSpace(value))
	if err != nil || v < -1 || v > 255 {
		return 0, fmt.Errorf("%s holds no traffic class: %q", path, line)
	}
	return v, nil
}
