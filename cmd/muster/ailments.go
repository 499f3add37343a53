package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/muster-hpc/muster/cmd/internal/config"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// severityWord writes what a condition means for work.
func severityWord(s apiv1.ConditionSeverity) string {
	return strings.ToLower(strings.TrimPrefix(s.String(), "CONDITION_SEVERITY_"))
}

// marks are what is to be known of a node besides its state: "degraded", "drain withheld".
func marks(n *apiv1.Node) []string {
	var list []string
	if n.HealthDrainWithheld {
		list = append(list, "drain withheld")
	}
	if slices.ContainsFunc(n.Conditions, func(c *apiv1.Condition) bool {
		return c.Severity == apiv1.ConditionSeverity_CONDITION_SEVERITY_DEGRADED
	}) {
		list = append(list, "degraded")
	}
	return list
}

// nodeReason is why a node is as it is; if nobody drained it, the worst that was found there.
func nodeReason(n *apiv1.Node) string {
	if n.Reason != "" || len(n.Conditions) == 0 {
		return n.Reason
	}
	worst := slices.MaxFunc(n.Conditions, func(a, b *apiv1.Condition) int { return int(a.Severity) - int(b.Severity) })
	if worst.Severity == apiv1.ConditionSeverity_CONDITION_SEVERITY_INFO {
		return ""
	}
	return worst.Owner + ": " + worst.Reason
}

// gpuCounts writes accelerators in use, by type, and how many are out of use: "3/8 h100, 1 unusable".
func gpuCounts(n *apiv1.Node) string {
	total := 0
	var types []string
	for _, g := range n.Spec.Gpus {
		if g.Type == "none" {
			continue
		}
		total++
		if !slices.Contains(types, g.Type) {
			types = append(types, g.Type)
		}
	}
	if total == 0 {
		return ""
	}
	text := fmt.Sprintf("%d/%d %s", notation.Mask(n.GpusAllocatedMask).Count(), total, strings.Join(types, "+"))
	if bad := notation.Mask(n.GpusUnusableMask).Count(); bad > 0 {
		text += fmt.Sprintf(", %d unusable", bad)
	}
	return text
}

// writeDevices writes a table of the accelerators that are known, and of other devices.
func (a *app) writeDevices(n *apiv1.Node) {
	if slices.ContainsFunc(n.Spec.Gpus, func(g *apiv1.Gpu) bool { return g.Uuid != "" }) {
		t := table{header: []string{"GPU", "TYPE", "MEMORY", "PCI", "NUMA", "CPUS", "NVLINKS", "USE", "UUID"}}
		for _, g := range n.Spec.Gpus {
			t.add(gpuRow(n, g)...)
		}
		fmt.Fprintln(a.out)
		t.write(a.out, a.colour)
	}
	if len(n.Spec.Gres) > 0 {
		t := table{header: []string{"DEVICE", "TYPE", "COUNT", "ALLOCATED", "FILES"}, right: map[int]bool{2: true}}
		for _, g := range n.Spec.Gres {
			used := ""
			for _, s := range n.GresAllocated {
				if s.Name == g.Name {
					used = notation.Mask(s.Mask).String()
				}
			}
			t.add(g.Name, g.Type, fmt.Sprint(g.Count), used, notation.Fold(g.DeviceFiles))
		}
		fmt.Fprintln(a.out)
		t.write(a.out, a.colour)
	}
}

func gpuRow(n *apiv1.Node, g *apiv1.Gpu) []string {
	use := "free"
	switch i := int(g.Index); {
	case notation.Mask(n.GpusUnusableMask).Has(i) && notation.Mask(n.GpusAllocatedMask).Has(i):
		use = "allocated, unusable"
	case notation.Mask(n.GpusUnusableMask).Has(i):
		use = "unusable"
	case notation.Mask(n.GpusAllocatedMask).Has(i):
		use = "allocated"
	}
	kind, numa := g.Type, ""
	if g.MigParent != nil {
		kind = fmt.Sprintf("%s of GPU %d", kind, *g.MigParent)
	}
	if g.Numa >= 0 {
		numa = fmt.Sprint(g.Numa)
	}
	return []string{
		fmt.Sprint(g.Index), kind, config.FormatMemory(g.MemoryMb), g.Pci, numa, notation.Mask(g.CpuMask).String(), links(g.Nvlinks), use, g.Uuid,
	}
}

// links writes the links to each other accelerator, run-length folded: "18 to 1-7".
func links(nvlinks []uint32) string {
	by := map[uint32][]int{}
	var counts []uint32
	for other, count := range nvlinks {
		if count == 0 {
			continue
		}
		if by[count] == nil {
			counts = append(counts, count)
		}
		by[count] = append(by[count], other)
	}
	slices.Sort(counts)
	var parts []string
	for _, count := range slices.Backward(counts) {
		parts = append(parts, fmt.Sprintf("%d to %s", count, notation.FoldIndexes(by[count])))
	}
	return strings.Join(parts, ", ")
}

// writeConditions writes what checks found: what it means, about what, why, since when, for how long and what would clear it.
func writeConditions(w io.Writer, n *apiv1.Node) {
	for _, c := range n.Conditions {
		fmt.Fprintf(w, "\n%s %s/%s", strings.ToUpper(severityWord(c.Severity)), value.Safe(c.Owner), value.Safe(c.Code))
		for _, d := range []struct {
			word string
			mask []uint64
		}{{"GPU", c.GpuMask}, {"CPU", c.CpuMask}} {
			if list := notation.Mask(d.mask).String(); list != "" {
				fmt.Fprintf(w, ", %s %s", d.word, list)
			}
		}
		if c.EndsWork {
			fmt.Fprint(w, ", ends work")
		}
		if c.Waived {
			fmt.Fprint(w, ", waived by an operator")
		}
		fmt.Fprintf(w, "\n  %s\n", value.Safe(c.Reason))
		if c.Since != nil {
			fmt.Fprintf(w, "  since   %s\n", moment(c.Since))
		}
		if c.Expires != nil {
			fmt.Fprintf(w, "  expires %s\n", moment(c.Expires))
		}
		if c.Clears != "" {
			fmt.Fprintf(w, "  clears  %s\n", value.Safe(c.Clears))
		}
	}
}
