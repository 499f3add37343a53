package fsm

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

func twoNodes(t *testing.T) *rig {
	r := newRig(t)
	r.boot()
	r.join("n1", 8, 4)
	r.join("n2", 8, 4)
	r.join("n3", 8, 4)
	return r
}

func (r *rig) status(job uint32) *apiv1.JobStatus { return r.check().Job(job).Status }

func TestExitsDecideHowAJobEnds(t *testing.T) {
	launch := exits(0, 1, 0, 0)
	launch[0].LaunchError = "execve(): /no/such: No such file or directory"
	memory := exits(0, 1, 0, 9)
	memory[0].OutOfMemory = true
	for name, c := range map[string]struct {
		event  *logv1.StepEnded
		state  apiv1.JobState
		reason apiv1.WaitReason
		exit   exit
	}{
		"0":        {&logv1.StepEnded{Exits: exits(0, 1, 0, 0)}, apiv1.JobState_JOB_STATE_COMPLETED, 0, exit{}},
		"code":     {&logv1.StepEnded{Exits: exits(0, 1, 3, 0)}, apiv1.JobState_JOB_STATE_FAILED, apiv1.WaitReason_WAIT_REASON_NON_ZERO_EXIT_CODE, exit{3, 0}},
		"signal":   {&logv1.StepEnded{Exits: exits(0, 1, 0, 9)}, apiv1.JobState_JOB_STATE_FAILED, apiv1.WaitReason_WAIT_REASON_RAISED_SIGNAL, exit{0, 9}},
		"time":     {&logv1.StepEnded{Exits: exits(0, 1, 0, 15), TimeLimit: true}, apiv1.JobState_JOB_STATE_TIMEOUT, apiv1.WaitReason_WAIT_REASON_TIME_LIMIT, exit{0, 15}},
		"memory":   {&logv1.StepEnded{Exits: memory}, apiv1.JobState_JOB_STATE_OUT_OF_MEMORY, apiv1.WaitReason_WAIT_REASON_OUT_OF_MEMORY, exit{0, 9}},
		"launch":   {&logv1.StepEnded{Exits: launch}, apiv1.JobState_JOB_STATE_FAILED, apiv1.WaitReason_WAIT_REASON_NON_ZERO_EXIT_CODE, exit{1, 0}},
		"no lease": {&logv1.StepEnded{Exits: exits(0, 1, 0, 9), Deadline: true}, apiv1.JobState_JOB_STATE_NODE_FAIL, apiv1.WaitReason_WAIT_REASON_NODE_DOWN, exit{0, 9}},
	} {
		t.Run(name, func(t *testing.T) {
			r := twoNodes(t)
			job := r.submit(alice, batchSpec())
			fence := r.start(job, r.placement(1, 0, 1, 2))
			r.ms += 1000
			c.event.StepId = BatchStep
			r.report(1, job, fence, c.event)
			if s := r.status(job); s.State != jobRunning || !s.Completing {
				t.Fatalf("before anything is reaped: %s", text(s))
			}
			r.ms += 1000
			r.report(1, job, fence, &logv1.AttemptReaped{})
			r.report(2, job, fence, &logv1.AttemptReaped{})
			s := r.status(job)
			if s.State != c.state || s.Reason != c.reason || s.ExitCode != c.exit.code || s.ExitSignal != c.exit.signal || s.Completing {
				t.Errorf("status is %s", text(s))
			}
			if s.EndTime.AsTime().UnixMilli() != beginMs+1000 {
				t.Errorf("it ended at %v: the attempt's end counts, not the last reaping", s.EndTime.AsTime())
			}
		})
	}
}

// One program of the gang that cannot be executed ends the attempt everywhere (G5).
func TestAFailedExecEndsTheGang(t *testing.T) {
	r := twoNodes(t)
	spec := runSpec()
	spec.Resources = &apiv1.ResourceRequest{NodesMin: 2}
	job := r.submit(alice, spec)
	fence := r.start(job, r.placement(1, 0, 1, 2))
	failed := exits(0, 1, 2, 0)
	failed[0].LaunchError = "no such file"
	r.report(1, job, fence, &logv1.StepEnded{Exits: failed})
	if step := r.check().Step(job, 1, 0); !step.Ending {
		t.Fatalf("the other node goes on: %s", text(step))
	}
	killed := exits(1, 1, 0, 9)
	killed[0].EndedBySupervisor = true
	r.report(2, job, fence, &logv1.StepEnded{Exits: killed})
	if s := r.status(job); s.ExitCode != 2 || s.ExitSignal != 0 || !s.Completing || s.Sentence != "no such file" {
		t.Errorf("status is %s", text(s))
	}
}

func TestLaunchFailuresBackOffThenHold(t *testing.T) {
	r := twoNodes(t)
	job := r.submit(alice, batchSpec())
	for n, wait := range []int64{1, 2} {
		node := uint32(n + 1)
		r.must(member, &logv1.Place{JobId: job, Attempt: uint32(n + 1), PlacementNumber: 1, Partition: "main", Placement: r.placement(1, 0, node)})
		fence := r.m.s.Attempt(job, uint32(n+1)).Fence
		r.report(node, job, fence, &logv1.PrepareFailed{Sentence: "the disk is full"})
		r.must(member, &logv1.EndAttempt{JobId: job, Fence: fence, Failure: classLaunch, Sentence: "node: the disk is full", FaultNode: node})
		if n := r.m.s.Node(node); n.LaunchFailures != 1 {
			t.Fatalf("the failure was charged %d times", n.LaunchFailures)
		}
		r.report(node, job, fence, &logv1.AttemptReaped{})
		s := r.status(job)
		if s.State != jobPending || s.NotBefore.Seconds != r.ms/1000+wait || s.Reason != apiv1.WaitReason_WAIT_REASON_LAUNCH_BACKOFF || s.Restarts != 0 {
			t.Fatalf("after failure %d: %s", n+1, text(s))
		}
	}
	r.must(member, &logv1.Place{JobId: job, Attempt: 3, PlacementNumber: 1, Partition: "main", Placement: r.placement(1, 0, 1)})
	r.must(member, &logv1.EndAttempt{JobId: job, Fence: r.m.s.Attempt(job, 3).Fence, Failure: classLaunch, Sentence: "node n1 did not prepare in time", FaultNode: 1})
	r.report(1, job, r.m.s.Attempt(job, 3).Fence, &logv1.AttemptReaped{})
	s := r.status(job)
	if s.Held != heldByOperator || s.Reason != apiv1.WaitReason_WAIT_REASON_JOB_HELD_ADMIN || !strings.Contains(s.Sentence, "3 failed launches") {
		t.Fatalf("after the last try: %s", text(s))
	}
	if got := r.do(member, &logv1.Place{JobId: job, Attempt: 4, PlacementNumber: 1, Partition: "main", Placement: r.placement(1, 0, 1)}).Refusal.GetReason(); got != "JOB_HELD" {
		t.Errorf("a held job was placed: %q", got)
	}
	if result := r.do(alice, &logv1.UpdateJobs{Request: &apiv1.UpdateJobRequest{JobIds: []uint32{job}, Change: &apiv1.UpdateJobRequest_Hold{}}}); len(result.Refusals) != 1 {
		t.Errorf("alice released what Muster held: %v", result)
	}
	r.must(root, &logv1.UpdateJobs{Request: &apiv1.UpdateJobRequest{JobIds: []uint32{job}, Change: &apiv1.UpdateJobRequest_Hold{}}})
	r.start(job, r.placement(1, 0, 1))
	if s := r.status(job); s.LaunchFailures != 0 || s.State != jobRunning {
		t.Errorf("started at last: %s", text(s))
	}
}

func TestANodeIsDrainedAfterThreeFailuresOfItsOwn(t *testing.T) {
	r := twoNodes(t)
	for i := range 4 {
		job := r.submit(alice, batchSpec())
		if i == 1 { // a success in between begins the count anew
			fence := r.start(job, r.placement(1, 0, 1))
			r.report(1, job, fence, &logv1.StepEnded{StepId: BatchStep, Exits: exits(0, 1, 0, 0)})
			r.report(1, job, fence, &logv1.AttemptReaped{})
			continue
		}
		r.must(member, &logv1.Place{JobId: job, Attempt: 1, PlacementNumber: 1, Partition: "main", Placement: r.placement(1, 0, 1)})
		r.report(1, job, r.m.s.Attempt(job, 1).Fence, &logv1.PrepareFailed{Sentence: "no disk"})
		r.report(1, job, r.m.s.Attempt(job, 1).Fence, &logv1.AttemptReaped{})
	}
	if n := r.check().Node(1); n.LaunchFailures != 2 || n.Drain {
		t.Fatalf("node is %s", text(n))
	}
	job := r.submit(alice, batchSpec())
	r.must(member, &logv1.Place{JobId: job, Attempt: 1, PlacementNumber: 1, Partition: "main", Placement: r.placement(1, 0, 1)})
	r.report(1, job, r.m.s.Attempt(job, 1).Fence, &logv1.PrepareFailed{Sentence: "no disk"})
	if n := r.check().Node(1); !n.Drain || n.ReasonBy != "muster" || !strings.Contains(n.Reason, "no disk") {
		t.Fatalf("node is %s", text(n))
	}
	users := r.submit(alice, batchSpec())
	r.must(member, &logv1.Place{JobId: users, Attempt: 1, PlacementNumber: 1, Partition: "main", Placement: r.placement(1, 0, 2)})
	r.report(2, users, r.m.s.Attempt(users, 1).Fence, &logv1.PrepareFailed{Sentence: "/nowhere does not exist", UsersFault: true})
	r.report(2, users, r.m.s.Attempt(users, 1).Fence, &logv1.AttemptReaped{})
	if s, n := r.status(users), r.m.s.Node(2); s.State != apiv1.JobState_JOB_STATE_FAILED ||
		s.Reason != apiv1.WaitReason_WAIT_REASON_JOB_LAUNCH_FAILURE || n.LaunchFailures != 0 {
		t.Errorf("the user's fault: %s, node %s", text(s), text(n))
	}
}

// A node that could not prepare is marked and charged at once; the attempt waits for the leader's choice. In another placement of it the
// node has no part, the nodes that stay do though they are drained, and the job is charged nothing.
func TestANodeThatCannotPrepareIsMarkedChargedAndReplaced(t *testing.T) {
	r := twoNodes(t)
	job := r.submit(alice, batchSpec())
	place := func(number uint32, unprepared []uint32, nodes ...uint32) string {
		return r.do(member, &logv1.Place{JobId: job, Attempt: 1, PlacementNumber: number, Partition: "main", Unprepared: unprepared,
			Sentence: "node n1 did not get ready in time", Placement: r.placement(1, 0, nodes...)}).Refusal.GetReason()
	}
	if got := place(1, []uint32{3}, 1, 2); got != "PLACEMENT_INVALID" {
		t.Fatalf("a first placement without an unprepared node: %q", got)
	}
	place(1, nil, 1, 2)
	fence := r.m.s.Attempt(job, 1).Fence
	for range 2 { // A journal may send a line again.
		r.report(2, job, fence, &logv1.PrepareFailed{Sentence: "no disk"})
	}
	a := r.check().Attempt(job, 1)
	if a.State != attemptPreparing || len(a.Unprepared) != 1 || a.Unprepared[0].Sentence != "node n2: no disk" || r.m.s.Node(2).LaunchFailures != 1 {
		t.Fatalf("attempt is %s, node %s", text(a), text(r.m.s.Node(2)))
	}
	if got := r.do(member, &logv1.StartAttempt{JobId: job, Fence: fence, Prepared: []*apiv1.PreparedNode{{Node: 1}, {Node: 2}}}).Refusal.GetReason(); got != "NOT_PREPARED" {
		t.Fatalf("started with a node that could not prepare: %q", got)
	}
	r.must(root, &logv1.UpdateNodes{Request: &apiv1.UpdateNodesRequest{Names: []string{"n1"}, Change: &apiv1.UpdateNodesRequest_Drain{Drain: true}, Reason: "later"}})
	for _, c := range []struct {
		unprepared, nodes []uint32
		want              string
	}{
		{nil, []uint32{1, 2}, "NODE_UNPREPARED"},
		{[]uint32{1}, []uint32{1, 3}, "PLACEMENT_INVALID"},
		{[]uint32{3}, []uint32{1}, "PLACEMENT_INVALID"},
		{nil, []uint32{1, 3}, ""},
	} {
		if got := place(2, c.unprepared, c.nodes...); got != c.want {
			t.Fatalf("%v without %v: %q, want %q", c.nodes, c.unprepared, got, c.want)
		}
	}
	r.report(2, job, fence, &logv1.AttemptReaped{})
	if got := place(3, nil, 1, 2); got != "NODE_UNPREPARED" {
		t.Fatalf("placed again on a node that could not prepare: %q", got)
	}
	if got := place(3, []uint32{1}, 3); got != "" {
		t.Fatalf("n1 leaves too: %q", got)
	}
	v := r.check()
	s, n := v.Job(job).Status, v.Node(1)
	if s.State != jobConfiguring || s.LaunchFailures != 0 || n.LaunchFailures != 1 || len(v.Attempt(job, 1).Unprepared) != 2 {
		t.Errorf("job is %s, node %s", text(s), text(n))
	}
}

func TestANodeThatLeftKeepsItsDevicesUntilReaped(t *testing.T) {
	r := twoNodes(t)
	job := r.submit(alice, batchSpec())
	r.must(member, &logv1.Place{JobId: job, Attempt: 1, PlacementNumber: 1, Partition: "main", Placement: r.placement(0xf, 1, 1, 2)})
	old := r.m.s.Attempt(job, 1).Fence
	r.must(member, &logv1.Place{JobId: job, Attempt: 1, PlacementNumber: 2, Partition: "main", Placement: r.placement(0xf, 1, 1, 3)})
	v := r.check()
	a := v.Attempt(job, 1)
	if len(a.Leftovers) != 1 || a.Leftovers[0].Node != 2 || a.Leftovers[0].Placement != 1 || a.Fence.Placement != 2 {
		t.Fatalf("attempt is %s", text(a))
	}
	if got := r.do(member, &logv1.StartAttempt{JobId: job, Fence: old, Prepared: prepared(a.Placement)}).Refusal.GetReason(); got != "FENCE_STALE" {
		t.Errorf("started under the old fence: %q", got)
	}
	other := r.submit(alice, batchSpec())
	if got := r.do(member, &logv1.Place{JobId: other, Attempt: 1, PlacementNumber: 1, Partition: "main", Placement: r.placement(1, 0, 2)}).Refusal.GetReason(); got != "CPUS_TAKEN" {
		t.Errorf("devices of a leftover were given away: %q", got)
	}
	if got := r.do(member, &logv1.Place{JobId: job, Attempt: 1, PlacementNumber: 3, Partition: "main", Placement: r.placement(0xf, 1, 2)}).Refusal.GetReason(); got != "NODE_UNACCOUNTED" {
		t.Errorf("the attempt took its own leftover again: %q", got)
	}
	r.report(2, job, a.Fence, &logv1.AttemptReaped{}) // the new fence is not the leftover's
	if n := r.check().Node(2); len(n.Owners) != 1 {
		t.Fatalf("node is %s", text(n))
	}
	r.report(2, job, old, &logv1.AttemptReaped{})
	if n := r.check().Node(2); len(n.Owners) != 0 {
		t.Fatalf("node is %s", text(n))
	}
	r.must(member, &logv1.StartAttempt{JobId: job, Fence: a.Fence, Prepared: prepared(a.Placement)})
	r.must(member, &logv1.Place{JobId: other, Attempt: 1, PlacementNumber: 1, Partition: "main", Placement: r.placement(1, 0, 2)})
}

func TestAFenceAccountsOnlyForWorkThatStopsItself(t *testing.T) {
	for _, automatic := range []bool{true, false} {
		r := twoNodes(t)
		spec := batchSpec()
		spec.AutomaticRecovery, spec.Requeue = automatic, true
		job := r.submit(alice, spec)
		r.start(job, r.placement(1, 0, 1))
		if got := r.do(member, &logv1.FenceNode{Node: 1, Epoch: 1}).Refusal.GetReason(); got != "NODE_NOT_LOST" {
			t.Errorf("a node that is up was fenced: %q", got)
		}
		r.must(member, &logv1.LoseNode{Node: 1, Epoch: 1, Sentence: "silent for 60 s"})
		if s := r.status(job); s.Completing != automatic || s.State != jobRunning {
			t.Fatalf("losing is not accounting: %s", text(s))
		}
		r.must(member, &logv1.FenceNode{Node: 1, Epoch: 1})
		if got := r.status(job).State == jobPending; got != automatic {
			t.Fatalf("automatic recovery %t: %s", automatic, text(r.status(job)))
		}
		if automatic {
			continue
		}
		r.must(root, &logv1.UpdateNodes{Request: &apiv1.UpdateNodesRequest{Names: []string{"n1"}, Change: &apiv1.UpdateNodesRequest_Fenced{Fenced: true}}})
		if s := r.status(job); s.State != jobPending || s.Restarts != 1 {
			t.Errorf("powered off: %s", text(s))
		}
	}
}

func TestANewBootAccountsANewAgentDoesNot(t *testing.T) {
	for _, boot := range []string{"boot-n1", "another"} {
		r := twoNodes(t)
		job := r.submit(alice, batchSpec())
		fence := r.start(job, r.placement(1, 0, 1))
		join := &logv1.JoinNode{Spec: nodeSpec("n1", 8, 4), Instance: instance(boot, "2")}
		if got := r.do(agentOf("n1"), join).Refusal.GetReason(); got != "NODE_NAME_TAKEN" {
			t.Fatalf("a second agent was let in: %q", got)
		}
		join.TakesOver = true
		if result := r.must(agentOf("n1"), join); result.NodeEpoch != 2 || result.NodeNumber != 1 {
			t.Fatalf("joined as %v", result)
		}
		s := r.status(job)
		if rebooted := boot == "another"; rebooted != (s.State == apiv1.JobState_JOB_STATE_NODE_FAIL) || !rebooted && !s.Completing {
			t.Fatalf("boot %s: %s", boot, text(s))
		}
		old := &logv1.ReportTasks{Node: 1, Epoch: 1, Instance: instance("boot-n1", "1"), Reports: []*logv1.TaskReport{
			{JobId: job, Fence: fence, Event: &logv1.TaskReport_AttemptReaped{AttemptReaped: &logv1.AttemptReaped{}}},
		}}
		r.must(agentOf("n1"), old)
		if boot == "boot-n1" && r.status(job).State != jobRunning {
			t.Error("a report of the old instance counted")
		}
		r.report(1, job, fence, &logv1.AttemptReaped{})
		if s := r.status(job); s.State != apiv1.JobState_JOB_STATE_NODE_FAIL {
			t.Errorf("boot %s, reaped: %s", boot, text(s))
		}
	}
}

func TestCancelWinsOverARequeueThatIsUnderWay(t *testing.T) {
	r := twoNodes(t)
	job := r.submit(alice, batchSpec())
	fence := r.start(job, r.placement(1, 0, 1))
	r.must(alice, &logv1.UpdateJobs{Request: &apiv1.UpdateJobRequest{JobIds: []uint32{job}, Change: &apiv1.UpdateJobRequest_Requeue{Requeue: true}}})
	r.must(alice, &logv1.CancelJobs{JobIds: []uint32{job}})
	r.report(1, job, fence, &logv1.AttemptReaped{})
	if s := r.status(job); s.State != jobCancelled || s.CancelledBy != alice.Uid {
		t.Errorf("status is %s", text(s))
	}
	r.must(alice, &logv1.UpdateJobs{Request: &apiv1.UpdateJobRequest{JobIds: []uint32{job}, Change: &apiv1.UpdateJobRequest_Requeue{Requeue: true}}})
	if s := r.status(job); s.State != jobPending || s.EndTime != nil || s.CancelledBy != 0 {
		t.Errorf("taken up again: %s", text(s))
	}
}

func TestSignalsAreOrderedOnceOnEveryNode(t *testing.T) {
	r := twoNodes(t)
	job := r.submit(alice, runSpec())
	if result := r.do(alice, &logv1.CancelJobs{JobIds: []uint32{job}, Signal: 10}); result.Refusals[0].Reason != "JOB_NOT_RUNNING" {
		t.Errorf("a pending job was signalled: %v", result)
	}
	r.start(job, r.placement(1, 0, 1, 2))
	before := r.check().Revision()
	r.must(alice, &logv1.CancelJobs{JobIds: []uint32{job}, Signal: 10})
	r.must(alice, &logv1.CancelJobs{JobIds: []uint32{job}, Signal: 12, Step: new(uint32)})
	if result := r.do(alice, &logv1.CancelJobs{JobIds: []uint32{job}, Signal: 10, BatchOnly: true}); result.Refusals[0].Reason != "JOB_NOT_BATCH" {
		t.Errorf("a batch shell that is not there was signalled: %v", result)
	}
	v := r.check()
	if a := v.Attempt(job, 1); len(a.Signals) != 2 || a.Signals[1].Ordinal != 2 || a.Signals[1].Step == nil {
		t.Errorf("signals are %v", a.Signals)
	}
	if touched := slices.Sorted(v.NodesTouchedSince(before)); !slices.Equal(touched, []uint32{1, 2}) {
		t.Errorf("touched nodes %v", touched)
	}
	r.must(alice, &logv1.CancelJobs{JobIds: []uint32{job}, Signal: 9})
	if s := r.status(job); !s.Completing {
		t.Errorf("signal 9 did not end the job: %s", text(s))
	}
}

func TestPendingJobsAreInOrderOfPriorityThenSubmission(t *testing.T) {
	r := newRig(t)
	r.boot()
	nice := runSpec()
	nice.Nice = 100
	eager := runSpec()
	eager.Nice = -5 // alice may not: ignored with a warning
	first, second, third := r.submit(alice, nice), r.submit(alice, runSpec()), r.submit(alice, eager)
	urgent := runSpec()
	urgent.Priority = ^uint32(0)
	fourth := r.submit(root, urgent)
	var got []uint32
	for j := range r.check().PendingJobs() {
		got = append(got, j.Id)
	}
	if want := []uint32{fourth, second, third, first}; !slices.Equal(got, want) {
		t.Errorf("order is %v, want %v", got, want)
	}
}

func TestUpdatesChangeWhatTheyMay(t *testing.T) {
	r := twoNodes(t)
	job := r.submit(alice, runSpec())
	change := func(who *apiv1.Principal, request *apiv1.UpdateJobRequest) string {
		request.JobIds = []uint32{job}
		result := r.do(who, &logv1.UpdateJobs{Request: request})
		if len(result.Refusals) > 0 {
			return result.Refusals[0].Reason
		}
		return result.Refusal.GetReason()
	}
	for i, c := range []struct {
		who     *apiv1.Principal
		request *apiv1.UpdateJobRequest
		want    string
	}{
		{alice, &apiv1.UpdateJobRequest{}, "CHANGE_MISSING"},
		{bob, &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Name{Name: "x"}}, "PERMISSION_DENIED"},
		{alice, &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Name{Name: strings.Repeat("x", 1025)}}, "TOO_LONG"},
		{alice, &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Name{Name: "x"}}, ""},
		{alice, &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_TimeLimitS{TimeLimitS: 7200}}, "PERMISSION_DENIED"},
		{alice, &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_TimeLimitS{TimeLimitS: 60}}, ""},
		{root, &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_TimeLimitS{TimeLimitS: 7200}}, ""},
		{alice, &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Priority{Priority: 1}}, "PERMISSION_DENIED"},
		{root, &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Priority{Priority: 1}}, ""},
		{alice, &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Partition{Partition: "nosuch"}}, "PARTITION_UNKNOWN"},
		{alice, &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Partition{Partition: "alone"}}, ""},
		{alice, &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Nice{Nice: -1}}, "PERMISSION_DENIED"},
		{alice, &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Requeue{Requeue: true}}, "JOB_PENDING"},
	} {
		if got := change(c.who, c.request); got != c.want {
			t.Errorf("change %d: %q, want %q", i, got, c.want)
		}
	}
	j := r.check().Job(job)
	if j.Spec.Name != "x" || j.Status.TimeLimitS != 7200 || j.Status.Priority != 1 || j.Status.Partition != "alone" {
		t.Errorf("job is %s", text(j))
	}
	r.must(root, &logv1.UpdateJobs{Request: &apiv1.UpdateJobRequest{JobIds: []uint32{job}, Change: &apiv1.UpdateJobRequest_Partition{Partition: "main"}}})
	r.start(job, r.placement(1, 0, 1))
	if got := change(root, &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_TimeLimitS{TimeLimitS: 100}}); got != "" {
		t.Fatal(got)
	}
	if a := r.check().Attempt(job, 1); a.TimeLimitS != 100 {
		t.Errorf("the running attempt keeps %d s", a.TimeLimitS)
	}
}

func TestReasonsAreKeptForWaitingJobsOnly(t *testing.T) {
	r := twoNodes(t)
	waits, runs := r.submit(alice, runSpec()), r.submit(alice, runSpec())
	r.start(runs, r.placement(1, 0, 1))
	reason := func(job uint32) *logv1.JobReason {
		return &logv1.JobReason{JobId: job, Reason: apiv1.WaitReason_WAIT_REASON_RESOURCES, Sentence: "waits for 2 nodes"}
	}
	r.must(member, &logv1.ExplainJobs{Reasons: []*logv1.JobReason{reason(waits), reason(runs), reason(99)}})
	if s := r.status(waits); s.Sentence != "waits for 2 nodes" {
		t.Errorf("status is %s", text(s))
	}
	if s := r.status(runs); s.Sentence != "" {
		t.Errorf("status is %s", text(s))
	}
	before := r.m.s.Job(waits)
	r.must(member, &logv1.ExplainJobs{Reasons: []*logv1.JobReason{reason(waits)}})
	if r.m.s.Job(waits) != before {
		t.Error("the same reason made a new record")
	}
}

func TestBeginTimeIsShownUntilItComes(t *testing.T) {
	r := newRig(t)
	r.boot()
	spec := runSpec()
	spec.BeginTime = &timestamppb.Timestamp{Seconds: beginMs/1000 + 3600}
	if s := r.status(r.submit(alice, spec)); s.Reason != apiv1.WaitReason_WAIT_REASON_BEGIN_TIME || s.EligibleTime.Seconds != spec.BeginTime.Seconds {
		t.Errorf("status is %s", text(s))
	}
}
