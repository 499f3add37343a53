package cgroup

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// ask runs a program as the kernel would for one question. It knows the instructions that programs here have.
func ask(t *testing.T, program []insn, d Device) bool {
	t.Helper()
	kind := uint64(unix.BPF_DEVCG_DEV_CHAR)
	if d.Block {
		kind = unix.BPF_DEVCG_DEV_BLOCK
	}
	context := map[int16]uint64{0: unix.BPF_DEVCG_ACC_READ<<16 | kind, 4: uint64(d.Major), 8: uint64(d.Minor)}
	registers := make(map[uint8]uint64)
	for at := 0; at < len(program); at++ {
		i := program[at]
		switch i.code {
		case opLoad:
			registers[i.dst] = context[i.off]
		case opAnd:
			registers[i.dst] &= uint64(i.imm)
		case opMove:
			registers[i.dst] = uint64(i.imm)
		case opJump:
			if registers[i.dst] != uint64(i.imm) {
				at += int(i.off)
			}
		case opLeave:
			return registers[0] == 1
		default:
			t.Fatalf("instruction %d has code %#x", at, i.code)
		}
	}
	t.Fatal("the program has no end")
	return false
}

func TestProgramDecidesAsTheRulesDo(t *testing.T) {
	devices := []Device{{Major: 195, Minor: 0}, {Major: 195, Minor: 1}, {Major: 195, Minor: 255}, {Block: true, Major: 195, Minor: 0},
		{Major: 1, Minor: 3}, {Block: true, Major: 8, Minor: 1}, {Major: 1<<31 - 1, Minor: 1 << 20}}
	rules := [][]Device{nil, {{Major: 195, Minor: 0}}, {{Major: 195, Minor: -1}, {Major: -1, Minor: 3}}, {{Block: true, Major: -1, Minor: -1}},
		{{Major: 1<<31 - 1, Minor: 1 << 20}, {Major: 195, Minor: 255}, {Major: 195, Minor: 1}}}
	for _, others := range []bool{true, false} {
		for _, listed := range rules {
			r := &DeviceRules{Others: others, Listed: listed}
			for _, d := range devices {
				if got, want := ask(t, deviceProgram(r), d), r.Allows(d); got != want {
					t.Errorf("others %v, listed %v, device %v: %v, want %v", others, listed, d, got, want)
				}
			}
		}
	}
	if !(&DeviceRules{Others: true, Listed: rules[1]}).Allows(devices[1]) || (&DeviceRules{Others: true, Listed: rules[1]}).Allows(devices[0]) ||
		(&DeviceRules{Listed: rules[1]}).Allows(devices[1]) || !(&DeviceRules{Listed: rules[1]}).Allows(devices[0]) {
		t.Error("the rules themselves are wrong")
	}
}

func TestKernelTakesTheLargestProgram(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to load programs")
	}
	if err := deviceProgramWorks(); err != nil {
		t.Skipf("this kernel takes none: %v", err)
	}
	r := &DeviceRules{Others: true}
	for i := range MaxDevices {
		r.Listed = append(r.Listed, Device{Major: 195, Minor: int64(i)})
	}
	if n := len(deviceProgram(r)); n > 4096 {
		t.Errorf("%d instructions", n)
	}
	f, err := loadDevices(r)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

func TestDevicesAreReadAsTheyAreWritten(t *testing.T) {
	for _, s := range []string{"c 195:0", "b 8:*", "c *:3", "c *:*"} {
		if d, err := ParseDevice(s); err != nil || d.String() != s {
			t.Errorf("%q became %q, error %v", s, d, err)
		}
	}
	for _, s := range []string{"", "c", "c 195", "d 1:2", "c 1:x", "c -1:2", "c 1:4294967296", "c 1:2 rwm"} {
		if d, err := ParseDevice(s); err == nil {
			t.Errorf("%q became %v", s, d)
		}
	}
}
