package state

import (
	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// Defaults returns the settings with every 0 replaced by its default; see docs/limits.md. nil means all defaults.
func Defaults(set *apiv1.Settings) *apiv1.Settings {
	full := &apiv1.Settings{}
	if set != nil {
		full = proto.Clone(set).(*apiv1.Settings)
	}
	for _, f := range []struct {
		field *uint32
		value uint32
	}{
		{&full.LeaseMs, 10_000},
		{&full.FenceWindowMs, 5_000},
		{&full.LostAfterMs, 60_000},
		{&full.KillGraceS, 30},
		{&full.PrepareTimeoutMs, 60_000},
		{&full.LaunchTries, 3},
		{&full.LostLimitPercent, 20},
		{&full.FinishedJobRetentionS, 604_800},
		{&full.MaxActiveJobs, 1_000_000},
		{&full.PrologTimeoutS, 300},
		{&full.HealthDrainPercent, 5},
	} {
		if *f.field == 0 {
			*f.field = f.value
		}
	}
	return full
}
