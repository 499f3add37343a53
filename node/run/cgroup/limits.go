package cgroup

import (
	"errors"
	"fmt"
	"math/bits"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/muster-hpc/muster/proto/notation"
)

// MinPIDs is the least limit of processes: below it not even the stage that executes a task would fit. A row of
// docs/limits.md.
const MinPIDs = 64

// Limits of a group. A zero value limits nothing.
type Limits struct {
	// CPUs are those that its processes may run on: bit i of word w is CPU 64w+i. Empty means all of the parent's.
	CPUs []uint64
	// CPUShares is its weight against its neighbours when CPUs are short: 1024 for each CPU is usual, 2 to 262,144.
	CPUShares uint64
	// MemoryMB is the most memory in MiB.
	MemoryMB uint64
	// SwapMB is the most swap in MiB; with a limit of memory 0 means none.
	SwapMB uint64
	// PIDs is the most processes and threads; less than MinPIDs counts as that.
	PIDs uint64
	// Devices are those that may be used; nil means all. To be applied once to a group, not again.
	Devices *DeviceRules
}

// Apply sets the limits. It returns a sentence for each that this machine does not offer; an error means that one that it
// offers could not be set.
func (g *Group) Apply(l Limits) (missing []string, err error) {
	var errs []error
	note := func(sentence string, err error) {
		if sentence != "" && !slices.Contains(missing, sentence) {
			missing = append(missing, sentence)
		}
		errs = append(errs, err)
	}
	if len(l.CPUs) > 0 {
		note(g.setCPUs(l.CPUs))
	}
	if l.CPUShares > 0 {
		note(g.setShares(min(max(l.CPUShares, 2), 262144)))
	}
	if l.MemoryMB > 0 {
		note(g.setMemory(l.MemoryMB, l.SwapMB))
	}
	if l.PIDs > 0 {
		note(g.set(PIDs, "pids.max", strconv.FormatUint(max(l.PIDs, MinPIDs), 10), noPIDs))
	}
	if l.Devices != nil {
		note(g.setDevices(l.Devices))
	}
	return missing, errors.Join(errs...)
}

// Sentences about what a machine does not offer.
const (
	noCPUSet  = "no cgroup controller cpuset: jobs are only bound to their CPUs, which they can change"
	noCPU     = "no cgroup controller cpu: jobs that share CPUs share them by process, not by allocation"
	noMemory  = "no cgroup controller memory: jobs are not kept to their memory"
	noPIDs    = "no cgroup controller pids: the number of processes is not limited"
	noDevices = "no cgroup controller devices: jobs can open devices that are not theirs"
)

// dir is the directory in which a controller's files are; empty if there is none.
func (g *Group) dir(controller string) string {
	if g.h.version == V2 {
		return g.dirs[Unified]
	}
	return g.dirs[controller]
}

// set writes one file, or returns the sentence if the group does not have it.
func (g *Group) set(controller, file, value, without string) (string, error) {
	dir := g.dir(controller)
	if dir == "" || !exists(dir, file) {
		return without, nil
	}
	return "", write(dir, file, value)
}

func (g *Group) setCPUs(mask []uint64) (string, error) {
	dir := g.dir(CPUSet)
	if dir == "" || !exists(dir, "cpuset.cpus") {
		return noCPUSet, nil
	}
	file := "cpuset.cpus.effective"
	if g.h.version == V1 {
		file = "cpuset.cpus"
	}
	has, err := parseCPUs(read(filepath.Dir(dir), file))
	if err != nil {
		return "", fmt.Errorf("reading which CPUs there are for %s: %w", dir, err)
	}
	if !within(mask, has) { // Declared resources may exceed the real ones.
		return "jobs are not confined to their CPUs: the machine does not have all that were declared", nil
	}
	return "", write(dir, "cpuset.cpus", notation.Mask(mask).String())
}

// parseCPUs reads a list like "0-3,8".
func parseCPUs(list string) (notation.Mask, error) {
	var cpus []int
	for part := range strings.SplitSeq(list, ",") {
		from, to, ranged := strings.Cut(part, "-")
		if !ranged {
			to = from
		}
		first, err := strconv.ParseUint(from, 10, 16)
		last, lastErr := strconv.ParseUint(to, 10, 16)
		if err = errors.Join(err, lastErr); err != nil {
			return nil, fmt.Errorf("%q is not a list of CPUs: %w", list, err)
		}
		for cpu := first; cpu <= last; cpu++ {
			cpus = append(cpus, int(cpu))
		}
	}
	return notation.MaskOf(cpus...), nil
}

// within reports whether every bit of a mask is in another.
func within(mask, in []uint64) bool {
	for i, word := range mask {
		var has uint64
		if i < len(in) {
			has = in[i]
		}
		if bits.OnesCount64(word&^has) > 0 {
			return false
		}
	}
	return true
}

func (g *Group) setShares(shares uint64) (string, error) {
	if g.h.version == V2 {
		// The kernel's own ranges: 2 to 262,144 become 1 to 10,000.
		return g.set(CPU, "cpu.weight", strconv.FormatUint(1+(shares-2)*9999/262142, 10), noCPU)
	}
	return g.set(CPU, "cpu.shares", strconv.FormatUint(shares, 10), noCPU)
}

// setMemory limits memory and swap. Swap is only limited where the kernel accounts for it.
func (g *Group) setMemory(mb, swap uint64) (string, error) {
	dir := g.dir(Memory)
	memory, both := strconv.FormatUint(mb<<20, 10), strconv.FormatUint((mb+swap)<<20, 10)
	if g.h.version == V2 {
		if dir == "" || !exists(dir, "memory.max") {
			return noMemory, nil
		}
		err := write(dir, "memory.max", memory)
		if exists(dir, "memory.swap.max") {
			err = errors.Join(err, write(dir, "memory.swap.max", strconv.FormatUint(swap<<20, 10)))
		}
		return "", err
	}
	if dir == "" {
		return noMemory, nil
	}
	if !exists(dir, "memory.memsw.limit_in_bytes") {
		return "", write(dir, "memory.limit_in_bytes", memory)
	}
	// Memory may never exceed memory with swap: which goes first depends on whether the limits rise or fall.
	err := write(dir, "memory.limit_in_bytes", memory)
	if errors.Is(err, unix.EINVAL) {
		if err = write(dir, "memory.memsw.limit_in_bytes", both); err == nil {
			err = write(dir, "memory.limit_in_bytes", memory)
		}
		return "", err
	}
	return "", errors.Join(err, write(dir, "memory.memsw.limit_in_bytes", both))
}

// limit is what the group's memory is limited to in bytes; 0 if it is not.
func (g *Group) limit() uint64 {
	if g.h.version == V2 {
		return number(g.dir(Memory), "memory.max")
	}
	// Version 1 says "no limit" with a number near 2^63.
	if n := number(g.dir(Memory), "memory.limit_in_bytes"); n < 1<<62 {
		return n
	}
	return 0
}

// Missing are sentences about limits that groups of this hierarchy will not have.
func (h *Hierarchy) Missing() []string {
	var missing []string
	controllers := strings.Fields(read(h.roots[Unified], "cgroup.controllers"))
	for _, c := range []struct{ controller, sentence string }{
		{CPUSet, noCPUSet}, {CPU, noCPU}, {Memory, noMemory}, {PIDs, noPIDs}, {Devices, noDevices},
	} {
		switch {
		case h.version == V1 && h.roots[c.controller] != "":
		case h.version == V2 && slices.Contains(controllers, c.controller):
		case h.version == V2 && c.controller == Devices:
			if err := deviceProgramWorks(); err != nil {
				missing = append(missing, "devices cannot be kept from jobs in cgroup2: "+err.Error())
			}
		default:
			missing = append(missing, c.sentence)
		}
	}
	return missing
}
