package gpu

import (
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

const (
	// Check is the owner of the conditions that come from here.
	Check = "gpu"
	// codeGone is the condition of numbers that no device has any more.
	codeGone = "GPU_NUMBER_UNUSED"
	// maxCPUs bounds the CPU numbers that are believed.
	maxCPUs = 65_536
	// maxReason bounds the sentence of one condition, in bytes.
	maxReason = 1000
)

// Entries returns the devices as a node's agent tells them to the controllers: the entry at position n is device n. Numbers that no
// device has (a MIG instance was destroyed) have an entry of type "none", and a condition by Conditions.
func Entries(inv *nodev1.GpuInventory) []*apiv1.Gpu {
	t := Wiring(inv)
	entries := make([]*apiv1.Gpu, len(t))
	byNumber := ByNumber(inv)
	for n := range entries {
		e := &apiv1.Gpu{Index: uint32(n), Type: "none", Numa: -1}
		entries[n] = e
		d := byNumber[uint32(n)]
		if d == nil {
			continue
		}
		e.Type, e.Uuid, e.MemoryMb, e.Pci, e.CpuMask, e.DeviceFiles = d.Type, d.Uuid, d.MemoryMb, d.PciAddress, cpuMask(d.Cpus), DeviceFiles(d)
		if d.NumaNode != nil {
			e.Numa = int32(d.GetNumaNode())
		}
		if d.Mig != nil {
			e.MigParent = &d.Index
		}
		if slices.ContainsFunc(t[n].Links, func(l int) bool { return l > 0 }) {
			for _, l := range t[n].Links {
				e.Nvlinks = append(e.Nvlinks, uint32(l))
			}
		}
	}
	return entries
}

// cpuMask reads a list of ranges as the kernel writes it; what is no such list gives no CPUs.
func cpuMask(list string) []uint64 {
	var mask []uint64
	for part := range strings.SplitSeq(list, ",") {
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		first, errF := strconv.ParseUint(from, 10, 32)
		last, errT := strconv.ParseUint(to, 10, 32)
		if errF != nil || errT != nil || last >= maxCPUs {
			return nil
		}
		for cpu := first; cpu <= last; cpu++ {
			mask = set(mask, uint32(cpu))
		}
	}
	return mask
}

func set(mask []uint64, n uint32) []uint64 {
	for len(mask) <= int(n)/64 {
		mask = append(mask, 0)
	}
	mask[n/64] |= 1 << (n % 64)
	return mask
}

// Conditions returns findings as conditions of the node, one for each code: what is found of several devices is joined.
func Conditions(inv *nodev1.GpuInventory, findings []Finding) []*apiv1.Condition {
	var all []*apiv1.Condition
	byCode := map[string]*apiv1.Condition{}
	for _, f := range findings {
		severity := [...]apiv1.ConditionSeverity{
			apiv1.ConditionSeverity_CONDITION_SEVERITY_INFO, apiv1.ConditionSeverity_CONDITION_SEVERITY_DEGRADED,
			apiv1.ConditionSeverity_CONDITION_SEVERITY_FAILED,
		}[f.Severity]
		c := byCode[f.Code]
		if c == nil {
			c = &apiv1.Condition{Owner: Check, Code: f.Code, Reason: f.Reason, Clears: f.Clears, Severity: severity, EndsWork: f.EndsWork}
			if !f.Since.IsZero() {
				c.Since = timestamppb.New(f.Since)
			}
			byCode[f.Code] = c
			all = append(all, c)
		} else {
			join(c, f, severity)
		}
		for _, d := range f.Devices {
			c.GpuMask = set(c.GpuMask, d)
		}
	}
	return append(all, unused(inv)...)
}

// join adds a finding to the condition of its code. What devices share is what the worse of them say; only a finding of no
// device may not make the others' worse, and the other way round it has no device to make worse.
func join(c *apiv1.Condition, f Finding, severity apiv1.ConditionSeverity) {
	c.Severity, c.EndsWork = max(c.Severity, severity), c.EndsWork || f.EndsWork
	if len(c.Reason)+len(f.Reason) < maxReason {
		c.Reason += "; " + f.Reason
	}
	if !f.Since.IsZero() && (c.Since == nil || f.Since.Before(c.Since.AsTime())) {
		c.Since = timestamppb.New(f.Since)
	}
}

// unused is the condition that keeps work away from numbers that no device has.
func unused(inv *nodev1.GpuInventory) []*apiv1.Condition {
	c := &apiv1.Condition{
		Owner: Check, Code: codeGone, Severity: apiv1.ConditionSeverity_CONDITION_SEVERITY_FAILED,
		Reason: "MIG instances were destroyed, and their numbers are not used", Clears: "new instances take the numbers",
	}
	byNumber := ByNumber(inv)
	for n := range Entries(inv) {
		if byNumber[uint32(n)] == nil {
			c.GpuMask = set(c.GpuMask, uint32(n))
		}
	}
	if len(c.GpuMask) == 0 {
		return nil
	}
	return []*apiv1.Condition{c}
}
