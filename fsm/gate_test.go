package fsm

import (
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"

	"github.com/muster-hpc/muster/fsm/level"
)

func encode(t testing.TB, b *logv1.Batch) []byte {
	t.Helper()
	encoded, err := proto.Marshal(b)
	if err != nil {
		t.Fatal(err)
	}
	return encoded
}

// unknownField appends a field that no message has.
func unknownField(encoded []byte) []byte {
	return protowire.AppendVarint(protowire.AppendTag(encoded, 9999, protowire.VarintType), 1)
}

// stopping entries, each made from a state in which n1 has joined.
func stoppingEntries(t *testing.T, r *rig) map[string][]byte {
	cmd := func(op proto.Message) *logv1.Command {
		c := command(op)
		r.complete(c)
		return c
	}
	withUnknown := cmd(&logv1.SubmitJobs{Specs: []*apiv1.JobSpec{batchSpec()}})
	withUnknown.GetSubmitJobs().Specs[0].Resources = &apiv1.ResourceRequest{}
	withUnknown.GetSubmitJobs().Specs[0].Resources.ProtoReflect().SetUnknown(unknownField(nil))
	noOperation := &logv1.Command{}
	r.complete(noOperation)
	future := cmd(&logv1.Tick{})
	future.Level = MaxLevel + 1
	badEnum := cmd(&logv1.SubmitJobs{Specs: []*apiv1.JobSpec{{Kind: 77}}})
	unknownOp := &logv1.Command{}
	r.complete(unknownOp)
	unknownOp.ProtoReflect().SetUnknown(unknownField(nil))
	tick := cmd(&logv1.Tick{})
	return map[string][]byte{
		"nothing":                        {},
		"garbage":                        []byte("\xff\xfe garbage"),
		"a batch that is cut off":        encode(t, &logv1.Batch{Commands: []*logv1.Command{tick}})[:5],
		"a command without operation":    encode(t, &logv1.Batch{Commands: []*logv1.Command{tick, noOperation}}),
		"an operation of the future":     encode(t, &logv1.Batch{Commands: []*logv1.Command{tick, unknownOp}}),
		"an unknown field deep inside":   encode(t, &logv1.Batch{Commands: []*logv1.Command{tick, withUnknown}}),
		"an unknown field of the batch":  unknownField(encode(t, &logv1.Batch{Commands: []*logv1.Command{tick}})),
		"an unknown enum value":          encode(t, &logv1.Batch{Commands: []*logv1.Command{tick, badEnum}}),
		"a level that nobody here knows": encode(t, &logv1.Batch{Commands: []*logv1.Command{tick, future}}),
	}
}

func TestWhatIsNotUnderstoodStopsTheReplicaAndChangesNothing(t *testing.T) {
	names := stoppingEntries(t, newRig(t))
	for name := range names {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.boot()
			r.join("n1", 8, 0)
			before := r.m.Digest()
			_, err := r.m.Apply(r.index+1, 1, stoppingEntries(t, r)[name])
			var entry *EntryError
			if !errors.As(err, &entry) || entry.Index != r.index+1 {
				t.Fatalf("error is %v", err)
			}
			if r.m.Digest() != before {
				t.Error("a part of the entry was applied")
			}
			r.index += 2
			if _, err := r.m.Apply(r.index, 1, encode(t, &logv1.Batch{Commands: []*logv1.Command{command(&logv1.Tick{})}})); !errors.Is(err, ErrStopped) {
				t.Errorf("the machine went on: %v", err)
			}
		})
	}
}

func TestPlantedNoOpIsFound(t *testing.T) {
	noticed := 0
	for name := range stoppingEntries(t, newRig(t)) {
		r := newRig(t, WithFaults(Faults{UnknownIsNoOp: true}))
		r.boot()
		if _, err := r.m.Apply(r.index+1, 1, stoppingEntries(t, r)[name]); err == nil {
			noticed++
		}
	}
	if noticed == 0 {
		t.Error("the test of unknown entries would not notice that they are applied as no-ops")
	}
}

func TestAnEntryIsNotAppliedTwice(t *testing.T) {
	r := newRig(t)
	r.boot()
	r.do(member, &logv1.Tick{})
	if _, err := r.m.Apply(r.index, 1, r.log[len(r.log)-1]); err == nil || !strings.Contains(err.Error(), "has been applied") {
		t.Errorf("error is %v", err)
	}
}

func TestDecisionsOfAnotherTermAreRefused(t *testing.T) {
	r := newRig(t)
	r.boot()
	r.term = 5
	for term, want := range map[uint64]string{4: "STALE_TERM", 5: "", 6: "STALE_TERM", 0: ""} {
		cmd := command(&logv1.Tick{})
		cmd.DecidedInTerm = term
		if got := r.entry(cmd)[0].GetRefusal().GetReason(); got != want {
			t.Errorf("decided in term %d: %q, want %q", term, got, want)
		}
	}
}

func TestStateTimeNeverGoesBack(t *testing.T) {
	r := newRig(t)
	r.boot()
	r.ms += 5000
	r.do(member, &logv1.Tick{})
	r.ms -= 60_000
	r.do(member, &logv1.Tick{})
	if got := r.check().StateTime().UnixMilli(); got != beginMs+5000 {
		t.Errorf("state time is %d ms after the beginning", got-beginMs)
	}
}

func TestRequestIDs(t *testing.T) {
	r := newRig(t)
	r.boot()
	send := func(id string, who *apiv1.Principal, names ...string) *logv1.Result {
		var specs []*apiv1.JobSpec
		for _, name := range names {
			spec := runSpec()
			spec.Name = name
			specs = append(specs, spec)
		}
		cmd := command(&logv1.SubmitJobs{Specs: specs})
		cmd.RequestId, cmd.Principal = id, who
		return r.entry(cmd)[0]
	}
	id := mint(r.ms, "a")
	first := send(id, alice, "x", "y")
	r.ms += 60_000
	again := send(id, alice, "x", "y")
	if !again.RepeatedRequest || len(again.Submitted) != 2 || again.Submitted[1].JobId != first.Submitted[1].JobId ||
		CompareRevisions(again.Revision, first.Revision) != 0 {
		t.Errorf("first %v, again %v", first, again)
	}
	for name, result := range map[string]*logv1.Result{
		"REQUEST_ID_REUSED":       send(id, alice, "x"),
		"REQUEST_ID_REUSED again": send(id, bob, "x", "y"),
		"REQUEST_TOO_OLD":         send(mint(r.ms-15*60_000-2000, "b"), alice, "x"),
		"REQUEST_FROM_FUTURE":     send(mint(r.ms+2*60_000+2000, "c"), alice, "x"),
		"REQUEST_ID_INVALID":      send("hello", alice, "x"),
		"REQUEST_ID_INVALID v4":   send("3f2c9a52-4e0d-4f0a-9d3c-0123456789ab", alice, "x"),
		"REQUEST_ID_INVALID case": send(strings.ToUpper(mint(r.ms, "d")), alice, "x"),
	} {
		want, _, _ := strings.Cut(name, " ")
		if got := result.GetRefusal().GetReason(); got != want {
			t.Errorf("%s: %v", name, result)
		}
	}
	if n := r.check().JobCount(); n != 2 {
		t.Errorf("%d jobs exist, 2 were asked for", n)
	}
}

// There must be no moment at which an answer is forgotten and its id still young enough to be executed.
func TestAnIDIsNeverExecutedTwiceHoweverLateItComes(t *testing.T) {
	for _, ahead := range []time.Duration{0, 2 * time.Minute, -14 * time.Minute} {
		for wait := time.Duration(0); wait < 40*time.Minute; wait += 30 * time.Second {
			r := newRig(t)
			r.boot()
			id := mint(r.ms+ahead.Milliseconds(), "late")
			ask := func() {
				cmd := command(&logv1.SubmitJobs{Specs: []*apiv1.JobSpec{runSpec()}})
				cmd.RequestId, cmd.Principal = id, alice
				r.entry(cmd)
			}
			ask()
			r.ms += wait.Milliseconds()
			for range 3 {
				r.do(member, &logv1.Tick{})
			}
			ask()
			if n := r.check().JobCount(); n != 1 {
				t.Fatalf("minted %v ahead and repeated after %v: %d jobs", ahead, wait, n)
			}
		}
	}
}

func TestAnswersAreForgottenALittleAtATime(t *testing.T) {
	r := newRig(t)
	r.boot()
	for i := range 100 {
		cmd := command(&logv1.CancelJobs{})
		cmd.RequestId, cmd.Principal = mint(r.ms, string(rune('a'+i))), alice
		r.entry(cmd)
	}
	r.ms += 16 * 60_000
	for want := 100 - expirePerCommand; want > 0; want -= expirePerCommand {
		r.do(member, &logv1.Tick{})
		if got := r.check().RequestCount(); got != want {
			t.Fatalf("%d answers are remembered, want %d", got, want)
		}
	}
}

func TestOnlyThoseMayWhoMay(t *testing.T) {
	r := newRig(t)
	r.boot()
	r.join("n1", 8, 0)
	job := r.submit(alice, runSpec())
	nobody := &apiv1.Principal{}
	for _, c := range []struct {
		who  *apiv1.Principal
		op   proto.Message
		want string
	}{
		{nobody, &logv1.Tick{}, "UNAUTHENTICATED"},
		{member, &logv1.SubmitJobs{}, "SUBMITTER_NOT_USER"},
		{agentOf("n1"), &logv1.SubmitJobs{}, "SUBMITTER_NOT_USER"},
		{agentOf("n1"), &logv1.CancelJobs{JobIds: []uint32{job}}, "PERMISSION_DENIED"},
		{alice, &logv1.Place{JobId: job}, "PERMISSION_DENIED"},
		{root, &logv1.Tick{}, "PERMISSION_DENIED"},
		{alice, &logv1.UpdateNodes{}, "PERMISSION_DENIED"},
		{alice, &logv1.Configure{}, "PERMISSION_DENIED"},
		{bob, &logv1.RaiseLevel{Level: 1}, "PERMISSION_DENIED"},
		{alice, &logv1.ReportTasks{Node: 1}, "PERMISSION_DENIED"},
		{agentOf("n2"), &logv1.ReportTasks{Node: 1}, "PERMISSION_DENIED"},
		{agentOf("n2"), &logv1.JoinNode{Spec: nodeSpec("n3", 1, 0), Instance: instance("b", "n")}, "PERMISSION_DENIED"},
		{agentOf("n1"), &logv1.ReportTasks{Node: 1}, ""},
		{member, &logv1.ReportTasks{Node: 1}, ""},
		{bob, &logv1.CreateStep{JobId: job, Spec: &apiv1.StepSpec{}}, "PERMISSION_DENIED"},
	} {
		if got := r.do(c.who, c.op).GetRefusal().GetReason(); got != c.want {
			t.Errorf("%s by %s: %q, want %q", c.op.ProtoReflect().Descriptor().Name(), c.who.Name, got, c.want)
		}
	}
	for who, want := range map[*apiv1.Principal]bool{bob: false, alice: true, root: true, member: true,
		{Kind: userKind, Uid: 7, Name: "oscar"}: true} {
		job := r.submit(alice, runSpec())
		result := r.do(who, &logv1.CancelJobs{JobIds: []uint32{job}})
		if got := len(result.JobIds) == 1; got != want {
			t.Errorf("cancel by %s: %v", who.Name, result)
		}
	}
}

// The ladder with levels that do not exist: commands above the state's level are refused, the level rises only when all can.
func TestLevelsRiseOnlyWhenEveryMemberCan(t *testing.T) {
	ops := map[protoreflect.Name]uint32{}
	arms := (&logv1.Command{}).ProtoReflect().Descriptor().Oneofs().ByName("op").Fields()
	for i := range arms.Len() {
		ops[arms.Get(i).Name()] = 1
	}
	ops["explain_jobs"] = 3
	ladder, err := level.New(3, ops, map[protoreflect.FullName]uint32{"muster.api.v1.JobSpec.wckey": 2})
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, func(m *Machine) { m.ladder = ladder })
	r.bootAt(1)
	plain, keyed := runSpec(), runSpec()
	keyed.Wckey = "w"
	submit := func(spec *apiv1.JobSpec) string {
		cmd := command(&logv1.SubmitJobs{Specs: []*apiv1.JobSpec{spec}})
		cmd.Principal, cmd.Level = alice, ladder.Of(cmd)
		return r.entry(cmd)[0].GetRefusal().GetReason()
	}
	raise := func(to uint32) string { return r.do(member, &logv1.RaiseLevel{Level: to}).GetRefusal().GetReason() }
	announce := func(id string, supports uint32) {
		r.must(member, &logv1.AnnounceMember{Member: &apiv1.Member{Id: id, Name: id, SupportedLevel: supports}})
	}
	expect := func(what, got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	expect("plain", submit(plain), "")
	expect("field of level 2 at level 1", submit(keyed), "LEVEL_TOO_LOW")
	misstated := command(&logv1.SubmitJobs{Specs: []*apiv1.JobSpec{keyed}})
	misstated.Principal, misstated.Level = alice, 1
	expect("field of level 2 that says level 1", r.entry(misstated)[0].GetRefusal().GetReason(), "LEVEL_MISSTATED")
	expect("nobody announced", raise(2), "LEVEL_UNSUPPORTED")
	announce("a", 3)
	announce("b", 1)
	expect("b is old", raise(2), "LEVEL_UNSUPPORTED")
	announce("b", 2)
	expect("all can", raise(2), "")
	expect("field of level 2 at level 2", submit(keyed), "")
	expect("not again", raise(2), "LEVEL_NOT_HIGHER")
	expect("b knows 2 only", raise(3), "LEVEL_UNSUPPORTED")
	if got := r.do(member, &logv1.AnnounceMember{Member: &apiv1.Member{Id: "c", SupportedLevel: 1}}).GetRefusal().GetReason(); got != "MEMBER_TOO_OLD" {
		t.Errorf("an old member was let in: %q", got)
	}
	r.must(member, &logv1.AnnounceMember{Member: &apiv1.Member{Id: "b"}, Remove: true})
	announce("a", 9)
	if _, err := r.try(command(&logv1.RaiseLevel{Level: 9})); err == nil {
		t.Error("a program went on at a level that it does not know")
	}
	if r.m.Publish().Level() != 2 {
		t.Errorf("the level is %d", r.m.Publish().Level())
	}
}

func TestLaddersWithHolesAreRefused(t *testing.T) {
	if _, err := level.New(1, map[protoreflect.Name]uint32{"tick": 1}, nil); err == nil {
		t.Error("a ladder without rows for operations was accepted")
	}
	cmd := command(&logv1.Tick{})
	if LevelOf(cmd) != 1 || LevelOf(&logv1.Command{}) != 0 {
		t.Errorf("levels are %d and %d", LevelOf(cmd), LevelOf(&logv1.Command{}))
	}
}

func TestBootstrapBeginsIncarnations(t *testing.T) {
	r := newRig(t)
	if got := r.do(alice, &logv1.Bootstrap{}).GetRefusal().GetReason(); got != "PERMISSION_DENIED" {
		t.Errorf("alice bootstrapped: %q", got)
	}
	for reason, b := range map[string]*logv1.Bootstrap{
		"BOOTSTRAP_INVALID":     {Configuration: testConfiguration(), ClusterId: "c"},
		"CONFIGURATION_INVALID": {ClusterId: "c", Incarnation: 1},
	} {
		if got := r.do(member, b).GetRefusal().GetReason(); got != reason {
			t.Errorf("%v: %q", b, got)
		}
	}
	r.boot()
	job := r.submit(alice, runSpec())
	old := r.check().Revision()
	if got := r.do(member, &logv1.Bootstrap{Configuration: testConfiguration(), Incarnation: 1, ClusterId: "x"}).GetRefusal().GetReason(); got != "ALREADY_BOOTSTRAPPED" {
		t.Errorf("bootstrapped twice: %q", got)
	}
	// Recovered from a backup into a new log, which begins at a low index again.
	r.index = 2
	r.must(member, &logv1.Bootstrap{Incarnation: 2, JobIdsAbove: 500})
	v := r.check()
	if v.Incarnation() != 2 || v.Job(job) == nil || v.ClusterID() != "cluster-1" || CompareRevisions(old, v.Revision()) >= 0 {
		t.Errorf("incarnation %d, cluster %s, revision %v after %v", v.Incarnation(), v.ClusterID(), v.Revision(), old)
	}
	if _, ok := v.ChangedSince(old); ok {
		t.Error("changes were followed from another incarnation")
	}
	if next := r.submit(alice, runSpec()); next != 501 {
		t.Errorf("the next job got id %d", next)
	}
}
