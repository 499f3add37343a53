package control

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	"github.com/muster-hpc/muster/sched"
)

// What changes bring about equals a translation from scratch.
func TestTranslationByChangesEqualsOneFromScratch(t *testing.T) {
	for seed := range 30 {
		synctest.Test(t, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(uint64(seed), 1))
			r := newRig(t, nil, Faults{})
			r.depose() // The test itself decides.
			m := &mirror{}
			skipped := 0
			for step := range 150 {
				random(r, rnd)
				v := r.log.View()
				if rnd.IntN(3) == 0 {
					continue
				}
				if m.follow(v) && step > 10 {
					skipped++
				}
				fresh := &mirror{}
				fresh.rebuild(v)
				if a, b := m.view.Dump(), fresh.view.Dump(); a != b {
					t.Fatalf("seed %d step %d: by changes\n%s\nfrom scratch\n%s", seed, step, a, b)
				}
			}
			if skipped > 1 {
				t.Errorf("rebuilt %d times", skipped)
			}
			r.end()
		})
	}
}

// random does something to the state; refusals are as good as anything.
func random(r *rig, rnd *rand.Rand) {
	v := r.log.View()
	do := func(who *apiv1.Principal, cmd *logv1.Command) {
		cmd.Principal = who
		if cmd.GetPlace() != nil || cmd.GetStartAttempt() != nil || cmd.GetEndAttempt() != nil || cmd.GetLoseNode() != nil || cmd.GetFenceNode() != nil {
			cmd.DecidedInTerm = r.log.term
		}
		if _, err := r.log.Propose(r.t.Context(), cmd); err != nil {
			r.t.Fatal(err)
		}
	}
	root := &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_USER, Name: "root"}
	self := &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_MEMBER, Name: "c1"}
	name := fmt.Sprintf("n%d", 1+rnd.IntN(4))
	node := v.NodeByName(name)
	id := 1 + rnd.Uint32N(12)
	a := v.Attempt(id, v.Job(id).GetStatus().GetAttempt())
	switch rnd.IntN(12) {
	case 0, 1:
		do(&apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_NODE, Name: name}, &logv1.Command{Op: &logv1.Command_JoinNode{JoinNode: &logv1.JoinNode{
			Spec: nodeSpec(name), Instance: &apiv1.Instance{BootId: fmt.Sprint(rnd.IntN(2)), Nonce: "1"}, TakesOver: true}}})
	case 2, 3:
		s := spec(1 + rnd.Uint32N(2))
		s.Resources.GpusPerNode = 4
		if rnd.IntN(2) == 0 {
			s.Resources.GpusPerNode = 0
			s.Resources.Gres = []*apiv1.GresRequest{{Name: "gpu", Type: "h100", Count: 2}, {Name: "ib", Count: 1}}
		}
		s.Hold = rnd.IntN(4) == 0
		s.AutomaticRecovery = rnd.IntN(2) == 0
		do(root, &logv1.Command{Op: &logv1.Command_SubmitJobs{SubmitJobs: &logv1.SubmitJobs{Specs: []*apiv1.JobSpec{s},
			Blobs: []*logv1.BlobContent{{Sha256: hashOf(script), Data: []byte(script)}}}}})
	case 4, 5:
		m := &mirror{}
		m.rebuild(v)
		for _, cmd := range placements(m, v) {
			do(self, cmd)
			place := cmd.GetPlace()
			if got := r.log.View().Attempt(place.JobId, place.Attempt); got == nil {
				r.t.Fatalf("what the planner decided was refused: %v", place)
			}
		}
	case 6:
		if a != nil {
			var prepared []*apiv1.PreparedNode
			for _, g := range a.Placement.Groups {
				for _, n := range g.Nodes {
					prepared = append(prepared, &apiv1.PreparedNode{Node: n, Address: "x"})
				}
			}
			do(self, &logv1.Command{Op: &logv1.Command_StartAttempt{StartAttempt: &logv1.StartAttempt{JobId: id, Fence: a.Fence, Prepared: prepared}}})
		}
	case 7:
		do(root, &logv1.Command{Op: &logv1.Command_CancelJobs{CancelJobs: &logv1.CancelJobs{JobIds: []uint32{id}}}})
	case 8:
		if a != nil && node != nil {
			do(&apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_NODE, Name: name}, &logv1.Command{Op: &logv1.Command_ReportTasks{ReportTasks: &logv1.ReportTasks{
				Node: node.Number, Epoch: node.Epoch, Instance: node.Instance,
				Reports: []*logv1.TaskReport{{JournalId: 1, JobId: id, Fence: a.Fence, Event: &logv1.TaskReport_AttemptReaped{AttemptReaped: &logv1.AttemptReaped{}}}}}}})
		}
	case 9:
		if node != nil {
			do(self, &logv1.Command{Op: &logv1.Command_LoseNode{LoseNode: &logv1.LoseNode{Node: node.Number, Epoch: node.Epoch, Sentence: "x"}}})
			do(self, &logv1.Command{Op: &logv1.Command_FenceNode{FenceNode: &logv1.FenceNode{Node: node.Number, Epoch: node.Epoch}}})
		}
	case 10:
		req := &apiv1.UpdateNodesRequest{Names: []string{name}, Change: &apiv1.UpdateNodesRequest_Drain{Drain: true}, Reason: "x"}
		if rnd.IntN(2) == 0 {
			req = &apiv1.UpdateNodesRequest{Names: []string{name}, Change: &apiv1.UpdateNodesRequest_Resume{Resume: true}}
		}
		do(root, &logv1.Command{Op: &logv1.Command_UpdateNodes{UpdateNodes: &logv1.UpdateNodes{Request: req}}})
	case 11:
		if node == nil {
			break
		}
		report := &logv1.ReportHealth{Node: node.Number, Epoch: node.Epoch, Instance: node.Instance}
		for i := range rnd.IntN(3) {
			report.Conditions = append(report.Conditions, &apiv1.Condition{
				Owner: "test", Code: fmt.Sprintf("C%d", i), Severity: apiv1.ConditionSeverity(1 + rnd.IntN(3)), Reason: "x",
				GpuMask: []uint64{rnd.Uint64() & 0xff & rnd.Uint64()}, EndsWork: rnd.IntN(4) == 0,
			})
		}
		do(&apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_NODE, Name: name}, &logv1.Command{Op: &logv1.Command_ReportHealth{ReportHealth: report}})
	}
	if err := fsm.CheckInvariants(r.log.View()); err != nil {
		r.t.Fatal(err)
	}
}

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
