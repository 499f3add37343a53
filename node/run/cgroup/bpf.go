package cgroup

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// In version 2 the kernel asks a BPF program of the group before a device is made or opened. The program reads struct
// bpf_cgroup_dev_ctx {u32 access_type, major, minor}, with the kind of device in the low half of access_type, and
// answers 1 or 0. Programs of groups above are asked, too (BPF_F_ALLOW_MULTI). It goes with its group.

// insn is an instruction: code, registers, offset of a jump, constant.
type insn struct {
	code     uint8
	dst, src uint8
	off      int16
	imm      int32
}

// Instructions that the program uses.
const (
	opLoad  = unix.BPF_LDX | unix.BPF_MEM | unix.BPF_W
	opAnd   = 0x07 | unix.BPF_AND | unix.BPF_K // 0x07: 64-bit arithmetic
	opMove  = 0x07 | 0xb0 | unix.BPF_K
	opJump  = unix.BPF_JMP | 0x50 | unix.BPF_K // if not equal
	opLeave = unix.BPF_JMP | 0x90
)

// deviceProgram is the program for rules. Registers: 1 the context, 2 the kind, 4 major, 5 minor, 0 the answer.
func deviceProgram(r *DeviceRules) []insn {
	answer := func(yes bool) []insn {
		n := int32(0)
		if yes {
			n = 1
		}
		return []insn{{code: opMove, dst: 0, imm: n}, {code: opLeave}}
	}
	p := []insn{
		{code: opLoad, dst: 2, src: 1, off: 0}, {code: opAnd, dst: 2, imm: 0xffff},
		{code: opLoad, dst: 4, src: 1, off: 4}, {code: opLoad, dst: 5, src: 1, off: 8},
	}
	for _, d := range r.Listed {
		kind := int32(unix.BPF_DEVCG_DEV_CHAR)
		if d.Block {
			kind = unix.BPF_DEVCG_DEV_BLOCK
		}
		tests := []insn{{code: opJump, dst: 2, imm: kind}}
		if d.Major >= 0 {
			tests = append(tests, insn{code: opJump, dst: 4, imm: int32(d.Major)})
		}
		if d.Minor >= 0 {
			tests = append(tests, insn{code: opJump, dst: 5, imm: int32(d.Minor)})
		}
		for i := range tests { // To the next rule: behind the tests that follow and the answer.
			tests[i].off = int16(len(tests) - i - 1 + 2)
		}
		p = append(append(p, tests...), answer(!r.Others)...)
	}
	return append(p, answer(r.Others)...)
}

// encode is the kernel's form: eight bytes each.
func encode(p []insn) []byte {
	b := make([]byte, 0, 8*len(p))
	for _, i := range p {
		registers := i.dst | i.src<<4
		if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 { // big endian: the two bit fields change places
			registers = i.src | i.dst<<4
		}
		b = append(b, i.code, registers)
		b = binary.NativeEndian.AppendUint16(b, uint16(i.off))
		b = binary.NativeEndian.AppendUint32(b, uint32(i.imm))
	}
	return b
}

// errNoDeviceProgram means that this process, or this kernel, has no such programs.
var errNoDeviceProgram = errors.New("the kernel does not take BPF programs from this process")

// loadDevices gives the program to the kernel.
func loadDevices(r *DeviceRules) (*os.File, error) {
	code, licence := encode(deviceProgram(r)), []byte("Apache-2.0\x00")
	attr := struct {
		kind, count      uint32
		code, licence    uint64
		logLevel, logLen uint32
		log              uint64
		version, flags   uint32
		name             [16]byte
		ifindex, attach  uint32
	}{
		kind: unix.BPF_PROG_TYPE_CGROUP_DEVICE, count: uint32(len(code) / 8),
		code: address(code), licence: address(licence), attach: unix.BPF_CGROUP_DEVICE,
	}
	copy(attr.name[:], "muster_devices")
	fd, err := bpf(unix.BPF_PROG_LOAD, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	runtime.KeepAlive(code)
	runtime.KeepAlive(licence)
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.ENOSYS):
		return nil, fmt.Errorf("%w: %w", errNoDeviceProgram, err)
	case err != nil:
		return nil, fmt.Errorf("giving the kernel a program about devices: %w", err)
	}
	return os.NewFile(uintptr(fd), "bpf"), nil
}

// attachDevices makes the kernel ask the program before processes of the group use a device.
func attachDevices(dir string, r *DeviceRules) error {
	program, err := loadDevices(r)
	if err != nil {
		return err
	}
	defer program.Close()
	group, err := os.OpenFile(dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return fmt.Errorf("limiting devices: %w", err)
	}
	defer group.Close()
	attr := struct{ group, program, kind, flags, replaced uint32 }{
		group: uint32(group.Fd()), program: uint32(program.Fd()), kind: unix.BPF_CGROUP_DEVICE, flags: unix.BPF_F_ALLOW_MULTI,
	}
	if _, err := bpf(unix.BPF_PROG_ATTACH, unsafe.Pointer(&attr), unsafe.Sizeof(attr)); err != nil {
		if errors.Is(err, unix.EPERM) {
			return fmt.Errorf("%w: %w", errNoDeviceProgram, err)
		}
		return fmt.Errorf("limiting the devices of %s: %w", dir, err)
	}
	return nil
}

// deviceProgramWorks tries a program.
func deviceProgramWorks() error {
	f, err := loadDevices(&DeviceRules{Others: true})
	if err != nil {
		return err
	}
	return f.Close()
}

func bpf(command uintptr, attr unsafe.Pointer, size uintptr) (int, error) {
	for {
		n, _, e := unix.Syscall(unix.SYS_BPF, command, uintptr(attr), size)
		if e == unix.EAGAIN || e == unix.EINTR { // the verifier was interrupted
			continue
		}
		if e != 0 {
			return 0, e
		}
		return int(n), nil
	}
}

// address of a slice whose bytes the kernel reads; the caller keeps it alive.
func address(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
