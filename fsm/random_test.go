package fsm

import (
	"bytes"
	"fmt"
	"math/rand"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"

	"github.com/muster-hpc/muster/fsm/state"
)

// walk drives a machine with random commands: sensible ones most of the time, and stale, repeated and senseless ones. The same seed
// gives the same commands.
type walk struct {
	*rig
	rng  *rand.Rand
	sent []sent
	boot int
}

type sent struct {
	cmd    *logv1.Command
	minted int64
}

func newWalk(t testing.TB, seed int64, options ...Option) *walk {
	w := &walk{rig: newRig(t, options...), rng: rand.New(rand.NewSource(seed))}
	w.rig.boot()
	return w
}

func (w *walk) chance(percent int) bool { return w.rng.Intn(100) < percent }

func pick[T any](w *walk, from []T) T { return from[w.rng.Intn(len(from))] }

func (w *walk) someJob() uint32 { return uint32(1 + w.rng.Intn(int(w.m.s.NextJobID()))) }

// someAttempt prefers live ones.
func (w *walk) someAttempt() *apiv1.Attempt {
	if live := slices.Collect(w.m.s.LiveAttempts()); len(live) > 0 && w.chance(90) {
		return pick(w, live)
	}
	job := w.m.s.Job(w.someJob())
	if job == nil || job.Status.Attempt == 0 {
		return nil
	}
	return w.m.s.Attempt(job.Id, 1+uint32(w.rng.Intn(int(job.Status.Attempt))))
}

// fence returns the attempt's fence, sometimes an older or a wrong one.
func (w *walk) fence(a *apiv1.Attempt) *apiv1.Fence {
	f := proto.Clone(a.Fence).(*apiv1.Fence)
	if w.chance(15) {
		switch w.rng.Intn(3) {
		case 0:
			f.Placement = max(1, f.Placement-1)
		case 1:
			f.Attempt = max(1, f.Attempt-1)
		default:
			f.Incarnation++
		}
	}
	return f
}

// next makes a command and says when its request id was minted.
func (w *walk) next() (*logv1.Command, int64) {
	switch {
	case w.chance(3):
		w.ms += int64(w.rng.Intn(10 * 60 * 1000))
	case w.chance(60):
		w.ms += int64(w.rng.Intn(1000))
	}
	if len(w.sent) > 0 && w.chance(8) {
		old := w.sent[max(0, len(w.sent)-1-w.rng.Intn(20))]
		again := proto.Clone(old.cmd).(*logv1.Command)
		again.ProposedAt = nil
		if again.GetUpdateNodes() == nil && w.chance(20) {
			again.Principal, again.PayloadSha256 = alice, nil
		}
		return again, old.minted
	}
	who, op := w.op()
	cmd, minted := command(op), int64(0)
	cmd.Principal = who
	if who.Kind == userKind && w.chance(70) {
		minted = w.ms - int64(w.rng.Intn(5000))
		if w.chance(3) {
			minted -= 16 * 60 * 1000
		}
		cmd.RequestId = mint(minted, fmt.Sprint(w.index))
	}
	return cmd, minted
}

func (w *walk) op() (*apiv1.Principal, proto.Message) {
	user := pick(w, []*apiv1.Principal{alice, alice, bob, root})
	for {
		switch w.rng.Intn(25) {
		case 0, 1, 2:
			return pick(w, []*apiv1.Principal{alice, bob}), w.submission()
		case 3, 4, 5, 6:
			if op := w.placing(); op != nil {
				return member, op
			}
		case 7, 8:
			if a := w.someAttempt(); a != nil {
				ready := prepared(a.Placement)
				if w.chance(10) {
					ready = ready[1:]
				}
				return member, &logv1.StartAttempt{JobId: a.JobId, Fence: w.fence(a), Prepared: ready}
			}
		case 9:
			if a := w.someAttempt(); a != nil {
				return member, &logv1.EndAttempt{JobId: a.JobId, Fence: w.fence(a), Failure: apiv1.FailureClass(1 + w.rng.Intn(9)),
					Sentence: "because", FaultNode: a.Placement.Groups[0].Nodes[0]}
			}
		case 10, 11, 12, 13, 14:
			if op := w.reporting(); op != nil {
				return member, op
			}
		case 15:
			return user, &logv1.CancelJobs{JobIds: []uint32{w.someJob()}}
		case 16:
			return user, &logv1.UpdateJobs{Request: w.updating()}
		case 17:
			return member, w.joining()
		case 18:
			return w.losing()
		case 20, 21, 22, 23:
			if op := w.stepping(); op != nil {
				return op.Principal, opOf(op)
			}
		case 24:
			if op := w.checking(); op != nil {
				return member, op
			}
		default:
			return member, &logv1.Tick{}
		}
	}
}

func (w *walk) submission() *logv1.SubmitJobs {
	spec := batchSpec()
	if w.chance(50) {
		spec = runSpec()
	}
	spec.Requeue, spec.AutomaticRecovery, spec.Hold = w.chance(60), w.chance(50), w.chance(10)
	spec.Resources = &apiv1.ResourceRequest{Exclusive: w.chance(15)}
	spec.NoKill = !spec.AutomaticRecovery && w.chance(50)
	return &logv1.SubmitJobs{Specs: []*apiv1.JobSpec{spec}, Blobs: []*logv1.BlobContent{blobOf(script)}}
}

func (w *walk) placing() *logv1.Place {
	total := w.m.s.NodeCount()
	if total == 0 {
		return nil
	}
	op := &logv1.Place{JobId: w.someJob(), Attempt: 1, PlacementNumber: 1, Partition: "main"}
	if pending := slices.Collect(w.m.s.PendingJobs()); len(pending) > 0 && w.chance(90) {
		op.JobId = pick(w, pending).Id
	}
	if job := w.m.s.Job(op.JobId); job != nil {
		op.Attempt = job.Status.Attempt + 1
	}
	if a := w.someAttempt(); a != nil && w.chance(30) {
		op.JobId, op.Attempt, op.PlacementNumber = a.JobId, a.Number, a.Fence.Placement+1
	}
	if w.chance(5) {
		op.Attempt++
	}
	if w.chance(10) {
		op.Partition = "alone"
	}
	var nodes []uint32
	for _, i := range w.rng.Perm(total)[:1+w.rng.Intn(min(3, total))] {
		nodes = append(nodes, uint32(i)+1)
	}
	cpus := uint64(1+w.rng.Intn(15)) << w.rng.Intn(4) & 0xff
	op.Placement = w.placement(max(cpus, 1), uint64(w.rng.Intn(16)), nodes...)
	if w.chance(50) {
		op.Placement.Groups[0].Gres = []*apiv1.GresShare{{Name: "ib", Mask: []uint64{uint64(1 + w.rng.Intn(3))}}}
	}
	if w.chance(5) {
		op.Placement.Epochs[0]++
	}
	// Nodes that leave may have failed; sometimes one that is not there is said to, or one that stays.
	if a := w.m.s.Attempt(op.JobId, op.Attempt); a != nil && w.chance(50) {
		for _, n := range nodesOf(a.Placement) {
			if !slices.Contains(nodes, n) || w.chance(5) {
				op.Unprepared, op.Sentence = append(op.Unprepared, n), "not ready in time"
			}
		}
	}
	return op
}

func (w *walk) reporting() *logv1.ReportTasks {
	a := w.someAttempt()
	if a == nil {
		return nil
	}
	nodes := slices.Concat(a.Unaccounted, nodesOf(a.Placement))
	n := w.m.s.Node(pick(w, nodes))
	line := &logv1.TaskReport{JobId: a.JobId, Fence: w.fence(a)}
	for _, l := range a.Leftovers {
		if l.Node == n.Number && w.chance(80) {
			line.Fence.Placement = l.Placement
		}
	}
	first, _ := firstStepID(w.m.s.Job(a.JobId).Spec.Kind)
	switch x := w.rng.Intn(10); {
	case x < 5:
		line.Event = &logv1.TaskReport_AttemptReaped{AttemptReaped: &logv1.AttemptReaped{}}
		if a.State != attemptEnding && w.chance(80) {
			return nil
		}
	case x < 6:
		line.Event = &logv1.TaskReport_PrepareFailed{PrepareFailed: &logv1.PrepareFailed{Sentence: "no disk", UsersFault: w.chance(30)}}
	default:
		_, index := holding(a, n.Number)
		exit := exits(uint32(max(0, index)), 1, uint32(w.rng.Intn(2)*w.rng.Intn(3)), 0)
		exit[0].OutOfMemory = w.chance(5)
		if w.chance(5) {
			exit[0].LaunchError = "no such file"
		}
		line.Event = &logv1.TaskReport_StepEnded{StepEnded: &logv1.StepEnded{StepId: first, Exits: exit, TimeLimit: w.chance(5), Deadline: w.chance(3)}}
	}
	r := &logv1.ReportTasks{Node: n.Number, Epoch: n.Epoch, Instance: n.Instance, Reports: []*logv1.TaskReport{line}}
	if w.chance(5) {
		r.Epoch--
	}
	return r
}

func (w *walk) updating() *apiv1.UpdateJobRequest {
	r := &apiv1.UpdateJobRequest{JobIds: []uint32{w.someJob()}, RequeueHold: w.chance(20)}
	switch w.rng.Intn(3) {
	case 0:
		r.Change = &apiv1.UpdateJobRequest_Hold{Hold: true}
	case 1:
		r.Change = &apiv1.UpdateJobRequest_Hold{}
	default:
		r.Change = &apiv1.UpdateJobRequest_Requeue{Requeue: true}
	}
	return r
}

func (w *walk) joining() *logv1.JoinNode {
	name := fmt.Sprintf("n%d", 1+w.rng.Intn(5))
	j := &logv1.JoinNode{Spec: nodeSpec(name, 8, 4), Instance: instance("boot", name), TakesOver: w.chance(60)}
	j.Spec.Gres = []*apiv1.Gres{{Name: "ib", Count: 2}}
	n := w.m.s.NodeByName(name)
	if n == nil {
		return j
	}
	j.Instance = proto.Clone(n.Instance).(*apiv1.Instance)
	if w.chance(25) {
		w.boot++
		j.Instance.Nonce = fmt.Sprint(w.boot)
		if w.chance(60) {
			j.Instance.BootId = fmt.Sprint("boot", w.boot)
		}
	}
	return j
}

func (w *walk) losing() (*apiv1.Principal, proto.Message) {
	number := uint32(1 + w.rng.Intn(6))
	n := w.m.s.Node(number)
	switch x := w.rng.Intn(10); {
	case x < 3:
		return member, &logv1.LoseNode{Node: number, Epoch: n.GetEpoch(), Sentence: "silent"}
	case x < 6:
		if a := w.someAttempt(); a != nil && w.chance(60) {
			one := &logv1.FenceNode{Node: number, Epoch: n.GetEpoch() - uint32(w.rng.Intn(2)), JobId: a.JobId, Attempt: a.Number, PoweredOff: w.chance(5)}
			if len(a.Unaccounted) > 0 && w.chance(80) {
				one.Node = pick(w, a.Unaccounted)
			}
			return member, one
		}
		return member, &logv1.FenceNode{Node: number, Epoch: n.GetEpoch() - uint32(w.rng.Intn(2)), PoweredOff: w.chance(30)}
	}
	r := &apiv1.UpdateNodesRequest{Names: []string{fmt.Sprintf("n%d", number)}, Reason: "why not"}
	switch x := w.rng.Intn(10); {
	case x < 1:
		r.Change = &apiv1.UpdateNodesRequest_Drain{Drain: true}
	case x < 2:
		r.Change = &apiv1.UpdateNodesRequest_Down{Down: true}
	case x < 3:
		r.Change = &apiv1.UpdateNodesRequest_Fenced{Fenced: true}
	default:
		r.Change = &apiv1.UpdateNodesRequest_Resume{Resume: true}
	}
	return root, &logv1.UpdateNodes{Request: r}
}

// answerOf writes a result as the twin does.
func answerOf(cmd *logv1.Command, r *logv1.Result) (reason, answer string) {
	if r.Refusal != nil {
		return r.Refusal.Reason, ""
	}
	for _, s := range r.Submitted {
		answer += fmt.Sprint(s.JobId, ",")
	}
	switch cmd.Op.(type) {
	case *logv1.Command_CancelJobs, *logv1.Command_UpdateJobs, *logv1.Command_UpdateNodes:
		if len(r.Refusals) > 0 {
			answer += r.Refusals[0].Reason
		}
		answer += ","
	}
	return "", answer
}

// compareWithTwin runs a walk beside the twin and returns the first difference or broken invariant.
func compareWithTwin(t testing.TB, seed int64, steps int, options ...Option) (*walk, error) {
	w, twin := newWalk(t, seed, options...), newTwin()
	for range steps {
		cmd, minted := w.next()
		if cmd.RequestId != "" {
			w.sent = append(w.sent, sent{cmd, minted})
		}
		results, err := w.try(cmd)
		if err != nil {
			return w, err
		}
		reason, answer := answerOf(cmd, results[0])
		wantReason, wantAnswer := twin.apply(cmd, w.ms, minted)
		if reason != wantReason || answer != wantAnswer {
			return w, fmt.Errorf("%s answered %q %q, the twin %q %q", text(cmd), reason, answer, wantReason, wantAnswer)
		}
		v := w.m.Publish()
		if got, want := pictureOf(v), twin.picture(); got != want {
			return w, fmt.Errorf("after %s:\n%s", text(cmd), differences(want, got))
		}
		if err := CheckInvariants(v); err != nil {
			return w, fmt.Errorf("after %s: %w", text(cmd), err)
		}
	}
	return w, nil
}

func differences(want, got string) string {
	var b strings.Builder
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range max(len(w), len(g)) {
		a, c := "", ""
		if i < len(w) {
			a = w[i]
		}
		if i < len(g) {
			c = g[i]
		}
		if a != c {
			fmt.Fprintf(&b, "twin: %s\nfsm:  %s\n", a, c)
		}
	}
	return b.String()
}

const (
	walks = 25
	steps = 400
)

func TestMachineDoesWhatItsTwinDoes(t *testing.T) {
	for seed := range int64(walks) {
		if w, err := compareWithTwin(t, seed, steps); err != nil {
			t.Fatalf("seed %d, command %d: %v", seed, w.index, err)
		}
	}
}

// The walks must reach what they are meant to compare.
func TestWalksReachEveryState(t *testing.T) {
	jobs, attempts := make(map[apiv1.JobState]int), make(map[apiv1.AttemptState]int)
	leftovers, restarts, repeated := 0, 0, 0
	seen := make(launchCounts)
	for seed := range int64(20) {
		w := newWalk(t, seed)
		for range steps {
			cmd, minted := w.next()
			if cmd.RequestId != "" {
				w.sent = append(w.sent, sent{cmd, minted})
			}
			result := w.entry(cmd)[0]
			if result.RepeatedRequest {
				repeated++
			}
			seen.note(w, cmd, result)
			for a := range w.m.s.LiveAttempts() {
				leftovers += len(a.Leftovers)
				attempts[a.State]++
			}
		}
		for j := range w.m.s.Jobs(0) {
			jobs[j.Status.State]++
			restarts += int(j.Status.Restarts)
		}
	}
	for s := range apiv1.JobState_name {
		switch apiv1.JobState(s) {
		case apiv1.JobState_JOB_STATE_UNSPECIFIED, apiv1.JobState_JOB_STATE_DEADLINE, apiv1.JobState_JOB_STATE_BOOT_FAIL:
			continue // nothing leads there yet
		}
		if jobs[apiv1.JobState(s)] == 0 {
			t.Errorf("no job is %s", apiv1.JobState(s))
		}
	}
	seen.check(t)
	if len(attempts) != 3 || leftovers == 0 || restarts == 0 || repeated == 0 {
		t.Errorf("attempts %v, leftovers %d, restarts %d, repeated requests %d", attempts, leftovers, restarts, repeated)
	}
}

// Each planted bug must be noticed by the walks: otherwise they prove nothing about the guarantee.
func TestPlantedBugsAreFound(t *testing.T) {
	for name, faults := range map[string]Faults{
		"a request id is not checked (G1)":                    {SkipRequestIDs: true},
		"a fence is ignored (G2)":                             {IgnoreFence: true},
		"an attempt starts before the last is accounted (G2)": {StartUnaccounted: true},
		"steps share devices":                                 {StepsShareDevices: true},
		"an unusable device is placed":                        {PlaceUnusable: true},
		"checks drain without limit":                          {DrainWithoutLimit: true},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range int64(walks) {
				if _, err := compareWithTwin(t, seed, steps, WithFaults(faults)); err != nil {
					t.Logf("found with seed %d: %.200s", seed, err.Error())
					return
				}
			}
			t.Error("nobody noticed")
		})
	}
}

// The invariants alone, without the twin, must see two owners and two attempts: that is how whole-system tests find them.
func TestInvariantsSeePlantedBugs(t *testing.T) {
	for name, faults := range map[string]Faults{
		"an attempt starts before the last is accounted (G2)": {StartUnaccounted: true},
		"steps share devices": {StepsShareDevices: true},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range int64(walks) {
				w := newWalk(t, seed, WithFaults(faults))
				for range steps {
					cmd, _ := w.next()
					w.entry(cmd)
					// The walk offers attempts after the last only for pending jobs: offer them for all.
					if a := w.someAttempt(); a != nil {
						place := w.placing()
						place.JobId, place.Attempt, place.PlacementNumber = a.JobId, w.m.s.Job(a.JobId).Status.Attempt+1, 1
						w.do(member, place)
					}
					if err := CheckInvariants(w.m.Publish()); err != nil {
						t.Logf("found with seed %d: %v", seed, err)
						return
					}
				}
			}
			t.Error("nobody noticed")
		})
	}
}

// A replica restored from a snapshot at any point has the same state, and goes on in the same way.
func TestRestoredReplicaGoesOnAsTheOthers(t *testing.T) {
	for seed := range int64(10) {
		w := newWalk(t, 1000+seed)
		var other *Machine
		for i := range steps {
			cmd, minted := w.next()
			if cmd.RequestId != "" {
				w.sent = append(w.sent, sent{cmd, minted})
			}
			results := w.entry(cmd)
			if other != nil {
				again, err := other.Apply(w.index, w.term, w.log[len(w.log)-1])
				if err != nil || !proto.Equal(again[0], results[0]) {
					t.Fatalf("seed %d, command %d: %v, %v on the restored replica: %v", seed, w.index, results[0], again, err)
				}
				if a, b := w.m.Digest(), other.Digest(); a != b {
					t.Fatalf("seed %d, command %d (%s): digest %x, on the restored replica %x", seed, w.index, text(cmd), a, b)
				}
			}
			if i%50 == 49 {
				v := w.m.Publish()
				snapshot := snapshotOf(t, v)
				other = New()
				if err := other.Restore(bytes.NewReader(snapshot)); err != nil {
					t.Fatalf("seed %d, command %d: %v", seed, w.index, err)
				}
				restored := other.Publish()
				if err := CheckInvariants(restored); err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(snapshot, snapshotOf(t, restored)) {
					t.Fatalf("seed %d: the restored state gives another snapshot", seed)
				}
			}
		}
	}
}

// A view stays as it was whatever is applied afterwards.
func TestPublishedViewsNeverChange(t *testing.T) {
	w := newWalk(t, 7)
	type kept struct {
		view     *View
		snapshot []byte
	}
	var all []kept
	for i := range steps {
		cmd, _ := w.next()
		w.entry(cmd)
		if i%20 == 0 {
			v := w.m.Publish()
			all = append(all, kept{v, snapshotOf(t, v)})
		}
	}
	for i, k := range all {
		if !bytes.Equal(k.snapshot, snapshotOf(t, k.view)) {
			t.Errorf("view %d changed", i)
		}
		if err := CheckInvariants(k.view); err != nil {
			t.Errorf("view %d: %v", i, err)
		}
	}
}

// Whoever follows changes from any revision knows the present state.
func TestChangesLeadFromAnyRevisionToThePresent(t *testing.T) {
	w := newWalk(t, 8)
	var views []*View
	for range steps {
		cmd, _ := w.next()
		w.entry(cmd)
		views = append(views, w.m.Publish())
	}
	last := views[len(views)-1]
	for _, v := range views {
		changed := make(map[uint32]bool)
		sequence, ok := last.ChangedSince(v.Revision())
		if !ok {
			t.Fatalf("the changes after %v are not known", v.Revision())
		}
		before := v.Revision()
		for c := range sequence {
			if CompareRevisions(before, c.Revision) > 0 {
				t.Fatalf("a change at %v follows one at %v", c.Revision, before)
			}
			before = c.Revision
			if c.Kind == ChangeJob {
				changed[c.Job] = true
			}
		}
		for j := range last.Jobs(0) {
			if old := v.Job(j.Id); (old != j) != changed[j.Id] {
				t.Fatalf("job %d: changed %t, told %t", j.Id, old != j, changed[j.Id])
			}
		}
		touched := make(map[uint32]bool)
		for n := range last.NodesTouchedSince(v.Revision()) {
			touched[n] = true
		}
		for n := range last.Nodes() {
			if desired(v, n.Number) != desired(last, n.Number) && !touched[n.Number] {
				t.Fatalf("what node %d shall do changed after %v and it was not touched", n.Number, v.Revision())
			}
		}
	}
}

// desired writes all that a node's desired set is made of.
func desired(v *View, node uint32) string {
	var b strings.Builder
	n := v.Node(node)
	fmt.Fprint(&b, n.GetEpoch(), text(n.GetInstance()))
	for a := range v.NodeAttempts(node) {
		h, index := holding(a, node)
		fmt.Fprint(&b, a.JobId, a.Fence, a.State, index, h.cpus, h.gpus, len(a.Signals), a.TimeLimitS)
		for s := range v.AttemptSteps(a.JobId, a.Number) {
			if slices.Contains(nodesOf(s.Placement), node) {
				fmt.Fprint(&b, s.Id, s.State, s.Ending)
			}
		}
	}
	return b.String()
}

// CompareRevisions and the packed keys must agree with their definitions at the edges.
func TestStepOrderPutsTheBatchStepFirst(t *testing.T) {
	r := newRig(t)
	r.boot()
	r.join("n1", 8, 0)
	job := r.submit(alice, batchSpec())
	r.start(job, r.placement(3, 0, 1))
	for range 3 {
		r.must(alice, &logv1.CreateStep{JobId: job, Spec: &apiv1.StepSpec{Args: []string{"x"}, WorkDir: "/",
			Resources: &apiv1.ResourceRequest{Overlap: true}}})
	}
	var ids []uint32
	for s := range r.check().Steps(job) {
		ids = append(ids, s.Id)
	}
	if !slices.Equal(ids, []uint32{state.BatchStep, 0, 1, 2}) {
		t.Errorf("steps are %v", ids)
	}
}
