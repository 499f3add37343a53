package cgroup

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Device is a kind of device, or one.
type Device struct {
	// Block: a block device; else a character device.
	Block bool
	// Major and Minor numbers; -1 means any.
	Major, Minor int64
}

// DeviceOf is the device behind a device file.
func DeviceOf(path string) (Device, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return Device{}, fmt.Errorf("looking at the device file %s: %w", path, err)
	}
	d := Device{Major: int64(unix.Major(st.Rdev)), Minor: int64(unix.Minor(st.Rdev))}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFBLK:
		d.Block = true
	case unix.S_IFCHR:
	default:
		return Device{}, fmt.Errorf("%s is not a device file", path)
	}
	return d, nil
}

// ParseDevice reads what String writes.
func ParseDevice(s string) (Device, error) {
	kind, rest, _ := strings.Cut(s, " ")
	major, minor, ok := strings.Cut(rest, ":")
	d := Device{Block: kind == "b"}
	for _, n := range []struct {
		text string
		to   *int64
	}{{major, &d.Major}, {minor, &d.Minor}} {
		if n.text == "*" {
			*n.to = -1
			continue
		}
		v, err := strconv.ParseUint(n.text, 10, 31)
		if err != nil {
			ok = false
		}
		*n.to = int64(v)
	}
	if !ok || kind != "b" && kind != "c" {
		return Device{}, fmt.Errorf("%q is not a device; it should look like \"c 195:0\" or \"b 8:*\"", s)
	}
	return d, nil
}

// String writes the device as the kernel does: "c 195:0", with * for any.
func (d Device) String() string {
	kind, part := "c ", func(n int64) string {
		if n < 0 {
			return "*"
		}
		return strconv.FormatInt(n, 10)
	}
	if d.Block {
		kind = "b "
	}
	return kind + part(d.Major) + ":" + part(d.Minor)
}

// DeviceRules say which devices a group may use (make, read, write).
type DeviceRules struct {
	// Others says what is with devices that are not listed. If true they may be used and the listed ones may not: so are
	// accelerators of other jobs kept away without a list of all that a program may need. If false only the listed
	// ones may be used.
	Others bool
	// Listed devices, at most MaxDevices.
	Listed []Device
}

// MaxDevices bounds the rules of a group: a program of the kernel for them stays below 4,096 instructions. A row of
// docs/limits.md.
const MaxDevices = 800

// Allows reports whether a device may be used.
func (r *DeviceRules) Allows(d Device) bool {
	return r.Others != slices.ContainsFunc(r.Listed, func(rule Device) bool {
		return rule.Block == d.Block && (rule.Major < 0 || rule.Major == d.Major) && (rule.Minor < 0 || rule.Minor == d.Minor)
	})
}

// setDevices applies rules: by files in version 1, by a program in version 2.
func (g *Group) setDevices(r *DeviceRules) (string, error) {
	if len(r.Listed) > MaxDevices {
		return "", fmt.Errorf("limiting devices: %d are listed; at most %d can be", len(r.Listed), MaxDevices)
	}
	dir := g.dir(Devices)
	if dir == "" {
		return noDevices, nil
	}
	if g.h.version == V2 {
		err := attachDevices(dir, r)
		if errors.Is(err, errNoDeviceProgram) {
			return "devices cannot be kept from jobs in cgroup2: " + err.Error(), nil
		}
		return "", err
	}
	file := "devices.deny"
	if !r.Others {
		if err := write(dir, file, "a"); err != nil {
			return "", err
		}
		file = "devices.allow"
	}
	for _, d := range r.Listed {
		if err := write(dir, file, d.String()+" rwm"); err != nil {
			return "", err
		}
	}
	return "", nil
}
