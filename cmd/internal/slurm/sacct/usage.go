package sacct

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// together is the CPU time of an attempt's steps; nil if none was counted.
func together(steps []*apiv1.Step, attempt uint32) *apiv1.StepUsage {
	var sum *apiv1.StepUsage
	for _, step := range steps {
		u := step.GetUsage()
		if u == nil || step.GetAttempt() != attempt {
			continue
		}
		if sum == nil {
			sum = &apiv1.StepUsage{}
		}
		sum.UserMs += u.GetUserMs()
		sum.SystemMs += u.GetSystemMs()
	}
	return sum
}

// cpuTime writes CPU time as Slurm does: "MM:SS.mmm" below an hour, "[D-]HH:MM:SS" above.
func cpuTime(of func(*apiv1.StepUsage) uint64) func(*line) string {
	return func(l *line) string {
		if l.used == nil {
			return ""
		}
		ms := of(l.used)
		if ms < 3_600_000 {
			return fmt.Sprintf("%02d:%02d.%03d", ms/60_000, ms/1000%60, ms%1000)
		}
		return value.Padded(int64(ms / 1000))
	}
}

// tasks is of how many tasks the use is known; 0 for allocations, which have no tasks of their own.
func (l *line) tasks() uint64 {
	if l.Step == nil {
		return 0
	}
	return uint64(l.used.GetTasks())
}

func (l *line) averageCPU() string {
	if l.tasks() == 0 {
		return ""
	}
	return value.Padded(int64((l.used.GetUserMs() + l.used.GetSystemMs()) / l.tasks() / 1000))
}

func (l *line) averageRSS() string {
	if l.tasks() == 0 {
		return ""
	}
	return l.kilobytes(l.used.GetTotalRssKb() / l.tasks())
}

func (l *line) maxRSS() string {
	if l.tasks() == 0 {
		return ""
	}
	return l.kilobytes(l.used.GetMaxRssKb())
}

func (l *line) maxRSSTask() string {
	if l.tasks() == 0 {
		return ""
	}
	return number(l.used.GetMaxRssRank())
}

// maxRSSNode is the name of the node with the largest task; empty if the record does not tell which of the step's nodes it is.
func (l *line) maxRSSNode() string {
	if l.tasks() == 0 {
		return ""
	}
	var nodes []uint32
	for _, group := range l.Step.GetPlacement().GetGroups() {
		for _, n := range group.GetNodes() {
			if !slices.Contains(nodes, n) { // a node may be in groups of several parts
				nodes = append(nodes, n)
			}
		}
	}
	hosts, err := notation.Expand(l.Step.GetNodeList())
	i := slices.Index(nodes, l.used.GetMaxRssNode())
	if err != nil || i < 0 || len(hosts) != len(nodes) {
		return ""
	}
	return hosts[i]
}

// kilobytes writes KiB: in larger units only where they are whole numbers, or in the unit that was asked for.
func (l *line) kilobytes(kb uint64) string {
	switch {
	case l.noconvert:
		return strconv.FormatUint(kb, 10) + "K"
	case l.units != 0 && l.units != 'K':
		amount := float64(kb) / 1024
		for _, step := range []struct {
			unit   byte
			factor float64
		}{{'M', 1}, {'G', 1 << 10}, {'T', 1 << 20}, {'P', 1 << 30}} {
			if step.unit == l.units {
				return strconv.FormatFloat(amount/step.factor, 'f', 2, 64) + string(l.units)
			}
		}
	}
	units := "KMGTP"
	for l.units == 0 && kb >= 1024 && kb%1024 == 0 && len(units) > 1 {
		kb, units = kb/1024, units[1:]
	}
	return strconv.FormatUint(kb, 10) + units[:1]
}
