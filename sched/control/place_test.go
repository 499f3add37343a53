package control

import (
	"time"

	"github.com/muster-hpc/muster/fsm"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	"github.com/muster-hpc/muster/sched"
)

// placements are the commands that a pass over a view decides on.
func placements(m *mirror, v *fsm.View) []*logv1.Command {
	var all []*logv1.Command
	d := m.view.Plan(sched.Time(time.Now().UnixMilli()), sched.DefaultLimits())
	for i := range d.Placements {
		p := &d.Placements[i]
		all = append(all, &logv1.Command{Op: &logv1.Command_Place{Place: &logv1.Place{
			JobId: uint32(p.Job), Attempt: p.Attempt, PlacementNumber: 1, Placement: placement(p), Partition: p.Partition}}})
	}
	return all
}
