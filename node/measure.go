package node

import (
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"

	"github.com/muster-hpc/muster/node/run"
)

// elapsedMS is how long a step ran here, in milliseconds, rounded up so that a step that ran is never said not to have; 0 if that was not
// measured.
func elapsedMS(final *supervisorv1.StepState) uint64 {
	start, end := final.GetStartBootNs(), final.GetEndBootNs()
	if start == 0 || end <= start {
		return 0
	}
	return (uint64(end-start) + uint64(time.Millisecond) - 1) / uint64(time.Millisecond)
}

// execTime is when a step's tasks were executed, by the node's clock; nil if they were not. Supervisors of version 1 tell only when that
// was noted on disk, just before. a.mu is held.
func (s *step) execTime() *timestamppb.Timestamp {
	if ns := s.final.GetStartUnixNs(); ns != 0 {
		return timestamppb.New(time.Unix(0, ns))
	}
	if s.final.GetStartBootNs() == 0 || s.dir == "" {
		return nil
	}
	started, err := run.ReadStarted(s.dir)
	if err != nil || started.BootID == "" { // torn by a crash of the machine
		return nil
	}
	return timestamppb.New(started.Time)
}

// usageOf sums up what the tasks of a step used here; nil if nobody counted.
func usageOf(final *supervisorv1.StepState) *apiv1.StepUsage {
	var sum *apiv1.StepUsage
	for _, task := range final.GetTasks() {
		u := task.GetUsage()
		if u == nil {
			continue
		}
		if sum == nil {
			sum = new(apiv1.StepUsage)
		}
		resident := (u.GetMaxRssBytes() + 1023) / 1024
		if resident == 0 {
			resident = (u.GetPeakBytes() + 1023) / 1024
		}
		if sum.Tasks == 0 || resident > sum.MaxRssKb {
			sum.MaxRssKb, sum.MaxRssRank = resident, task.GetRank()
		}
		sum.Tasks++
		sum.UserMs += u.GetUserNs() / uint64(time.Millisecond)
		sum.SystemMs += u.GetSystemNs() / uint64(time.Millisecond)
		sum.TotalRssKb += resident
	}
	return sum
}
