package fsm

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

var (
	member = &apiv1.Principal{Kind: memberKind, Name: "c1"}
	root   = &apiv1.Principal{Kind: userKind, Name: "root"}
	alice  = &apiv1.Principal{Kind: userKind, Uid: 1000, Gid: 100, Name: "alice"}
	bob    = &apiv1.Principal{Kind: userKind, Uid: 1001, Gid: 100, Name: "bob"}
)

func agentOf(name string) *apiv1.Principal { return &apiv1.Principal{Kind: nodeKind, Name: name} }

// rig drives a machine in virtual time. log keeps every entry, to be replayed.
type rig struct {
	t     testing.TB
	m     *Machine
	index uint64
	term  uint64
	ms    int64 // leader's clock
	log   [][]byte
}

const beginMs = int64(1_800_000_000_000)

func newRig(t testing.TB, options ...Option) *rig {
	return &rig{t: t, m: New(options...), term: 1, ms: beginMs}
}

func (r *rig) stamp() *timestamppb.Timestamp {
	return &timestamppb.Timestamp{Seconds: r.ms / 1000, Nanos: int32(r.ms%1000) * 1e6}
}

// command wraps an operation: op is any of the messages in Command's oneof.
func command(op proto.Message) *logv1.Command {
	cmd := &logv1.Command{}
	m := cmd.ProtoReflect()
	fields := m.Descriptor().Oneofs().ByName("op").Fields()
	for i := range fields.Len() {
		if f := fields.Get(i); f.Message().FullName() == op.ProtoReflect().Descriptor().FullName() {
			m.Set(f, protoreflect.ValueOfMessage(op.ProtoReflect()))
			return cmd
		}
	}
	panic("no such operation")
}

// complete fills in what a server and a leader would.
func (r *rig) complete(cmd *logv1.Command) {
	if cmd.Level == 0 {
		cmd.Level = max(1, LevelOf(cmd))
	}
	if cmd.ProposedAt == nil {
		cmd.ProposedAt = r.stamp()
	}
	if cmd.Principal == nil {
		cmd.Principal = member
	}
	if cmd.RequestId != "" && cmd.PayloadSha256 == nil {
		bare := proto.Clone(cmd).(*logv1.Command)
		bare.ProposedAt, bare.Principal, bare.Level = nil, nil, 0
		encoded, err := proto.MarshalOptions{Deterministic: true}.Marshal(bare)
		if err != nil {
			r.t.Fatal(err)
		}
		sum := sha256.Sum256(encoded)
		cmd.PayloadSha256 = sum[:]
	}
}

// entry applies commands as one entry.
func (r *rig) entry(commands ...*logv1.Command) []*logv1.Result {
	r.t.Helper()
	results, err := r.try(commands...)
	if err != nil {
		r.t.Fatalf("apply: %v", err)
	}
	return results
}

func (r *rig) try(commands ...*logv1.Command) ([]*logv1.Result, error) {
	for _, cmd := range commands {
		r.complete(cmd)
	}
	encoded, err := proto.Marshal(&logv1.Batch{Commands: commands})
	if err != nil {
		r.t.Fatal(err)
	}
	r.index++
	r.log = append(r.log, encoded)
	return r.m.Apply(r.index, r.term, encoded)
}

// do applies one operation as a principal.
func (r *rig) do(who *apiv1.Principal, op proto.Message) *logv1.Result {
	r.t.Helper()
	cmd := command(op)
	cmd.Principal = who
	return r.entry(cmd)[0]
}

// must applies one operation that may not be refused.
func (r *rig) must(who *apiv1.Principal, op proto.Message) *logv1.Result {
	r.t.Helper()
	result := r.do(who, op)
	if result.Refusal != nil {
		r.t.Fatalf("%s refused: %v", op.ProtoReflect().Descriptor().Name(), result.Refusal)
	}
	if len(result.Refusals) > 0 {
		r.t.Fatalf("%s refused in part: %v", op.ProtoReflect().Descriptor().Name(), result.Refusals)
	}
	return result
}

// check publishes and checks the invariants.
func (r *rig) check() *View {
	r.t.Helper()
	v := r.m.Publish()
	if err := CheckInvariants(v); err != nil {
		r.t.Fatalf("at %v: %v", v.Revision(), err)
	}
	return v
}

func testConfiguration() *apiv1.Configuration {
	return &apiv1.Configuration{ClusterName: "test", Partitions: []*apiv1.Partition{
		{Name: "main", Nodes: "ALL", IsDefault: true, MaxTimeS: 86400, DefaultTimeS: 3600},
		{Name: "alone", Nodes: "n[1-2]", Exclusive: true},
	}, Settings: &apiv1.Settings{OperatorUids: []uint32{7}}}
}

func (r *rig) boot() {
	r.t.Helper()
	r.must(member, &logv1.Bootstrap{Configuration: testConfiguration(), Incarnation: 1, ClusterId: "cluster-1"})
}

// bootAt begins a cluster at a level, as a program of that level did.
func (r *rig) bootAt(level uint32) {
	r.t.Helper()
	cmd := command(&logv1.Bootstrap{Configuration: testConfiguration(), Incarnation: 1, ClusterId: "cluster-1"})
	cmd.Level = level
	if refusal := r.entry(cmd)[0].Refusal; refusal != nil {
		r.t.Fatal(refusal)
	}
}

func nodeSpec(name string, cpus, gpus int) *apiv1.NodeSpec {
	s := &apiv1.NodeSpec{Name: name, AgentAddress: name + ":1", TaskAddress: name, Cpus: uint32(cpus), MemoryMb: 1000}
	for i := range gpus {
		s.Gpus = append(s.Gpus, &apiv1.Gpu{Index: uint32(i), Type: "h100"})
	}
	return s
}

func instance(boot, nonce string) *apiv1.Instance { return &apiv1.Instance{BootId: boot, Nonce: nonce} }

func (r *rig) join(name string, cpus, gpus int) *logv1.Result {
	r.t.Helper()
	return r.must(agentOf(name), &logv1.JoinNode{Spec: nodeSpec(name, cpus, gpus), Instance: instance("boot-"+name, "1")})
}

func blobOf(text string) *logv1.BlobContent {
	return &logv1.BlobContent{Sha256: hashOf([]byte(text)), Data: []byte(text)}
}

const script = "#!/bin/sh\ntrue\n"

func batchSpec() *apiv1.JobSpec {
	return &apiv1.JobSpec{Name: "job", Kind: apiv1.JobKind_JOB_KIND_BATCH, WorkDir: "/home", ScriptBlob: hashOf([]byte(script))}
}

func runSpec() *apiv1.JobSpec {
	return &apiv1.JobSpec{Name: "run", Kind: apiv1.JobKind_JOB_KIND_RUN, WorkDir: "/home", Args: []string{"/bin/true"}}
}

// submit submits one job and returns its id.
func (r *rig) submit(who *apiv1.Principal, spec *apiv1.JobSpec) uint32 {
	r.t.Helper()
	result := r.must(who, &logv1.SubmitJobs{Specs: []*apiv1.JobSpec{spec}, Blobs: []*logv1.BlobContent{blobOf(script)}})
	if refusal := result.Submitted[0].Refusal; refusal != nil {
		r.t.Fatalf("submission refused: %v", refusal)
	}
	return result.Submitted[0].JobId
}

// placement takes the same devices on each node, with the epochs in force.
func (r *rig) placement(cpus, gpus uint64, nodes ...uint32) *apiv1.Placement {
	p := &apiv1.Placement{Groups: []*apiv1.NodeGroup{{Nodes: nodes, CpuMask: []uint64{cpus}, GpuMask: []uint64{gpus}, MemoryMb: 100, Tasks: 1}}}
	for _, n := range nodes {
		p.Epochs = append(p.Epochs, r.m.s.Node(n).GetEpoch())
	}
	return p
}

func prepared(p *apiv1.Placement) []*apiv1.PreparedNode {
	var all []*apiv1.PreparedNode
	for _, n := range nodesOf(p) {
		all = append(all, &apiv1.PreparedNode{Node: n, Address: "10.0.0.1", Port: 1000})
	}
	return all
}

// start places and starts a job.
func (r *rig) start(job uint32, p *apiv1.Placement) *apiv1.Fence {
	r.t.Helper()
	n := r.m.s.Job(job).Status.Attempt + 1
	r.must(member, &logv1.Place{JobId: job, Attempt: n, PlacementNumber: 1, Placement: p, Partition: "main"})
	fence := r.m.s.Attempt(job, n).Fence
	r.must(member, &logv1.StartAttempt{JobId: job, Fence: fence, Prepared: prepared(p)})
	return fence
}

// report reports one line from a node in its present life.
func (r *rig) report(node, job uint32, fence *apiv1.Fence, event any) *logv1.Result {
	r.t.Helper()
	n := r.m.s.Node(node)
	line := &logv1.TaskReport{JournalId: 1, JobId: job, Fence: fence}
	switch e := event.(type) {
	case *logv1.StepEnded:
		line.Event = &logv1.TaskReport_StepEnded{StepEnded: e}
	case *logv1.AttemptReaped:
		line.Event = &logv1.TaskReport_AttemptReaped{AttemptReaped: e}
	case *logv1.PrepareFailed:
		line.Event = &logv1.TaskReport_PrepareFailed{PrepareFailed: e}
	default:
		r.t.Fatalf("no such event: %T", event)
	}
	return r.must(agentOf(n.Spec.Name), &logv1.ReportTasks{Node: node, Epoch: n.Epoch, Instance: n.Instance, Reports: []*logv1.TaskReport{line}})
}

func exits(first, count, code, signal uint32) []*apiv1.TaskExit {
	return []*apiv1.TaskExit{{FirstRank: first, Count: count, Code: code, Signal: signal}}
}

// mint makes a request id of a time, different for each seed.
func mint(ms int64, seed string) string {
	sum := sha256.Sum256([]byte(seed))
	var id uuid.UUID
	copy(id[:], sum[:])
	for i := range 6 {
		id[i] = byte(ms >> (40 - 8*i))
	}
	id[6] = id[6]&0x0f | 0x70
	id[8] = id[8]&0x3f | 0x80
	return id.String()
}

// snapshotOf returns a view's snapshot.
func snapshotOf(t testing.TB, v *View) []byte {
	var b bytes.Buffer
	if err := v.WriteSnapshot(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// text writes a message on one line, always in the same way.
func text(m proto.Message) string {
	var b strings.Builder
	writeMessage(&b, m.ProtoReflect())
	return b.String()
}

func writeMessage(b *strings.Builder, m protoreflect.Message) {
	switch typed := m.Interface().(type) {
	case *timestamppb.Timestamp:
		fmt.Fprintf(b, "+%dms", typed.AsTime().UnixMilli()-beginMs)
		return
	case *apiv1.Revision:
		fmt.Fprintf(b, "%d.%d.%d", typed.Incarnation, typed.Index, typed.Ordinal)
		return
	}
	fields := m.Descriptor().Fields()
	sep := ""
	for i := range fields.Len() {
		f := fields.Get(i)
		if !m.Has(f) {
			continue
		}
		b.WriteString(sep)
		sep = " "
		b.WriteString(string(f.Name()))
		value := m.Get(f)
		if f.IsList() {
			for i := range value.List().Len() {
				writeValue(b, f, value.List().Get(i))
			}
			continue
		}
		writeValue(b, f, value)
	}
}

func writeValue(b *strings.Builder, f protoreflect.FieldDescriptor, v protoreflect.Value) {
	switch {
	case f.Message() != nil:
		b.WriteString("{")
		writeMessage(b, v.Message())
		b.WriteString("}")
	case f.Enum() != nil:
		b.WriteString("=" + shortEnum(string(f.Enum().Values().ByNumber(v.Enum()).Name())))
	case f.Kind() == protoreflect.StringKind:
		fmt.Fprintf(b, "=%q", v.String())
	default:
		fmt.Fprintf(b, "=%v", v.Interface())
	}
}

var enumPrefixes = []string{"JOB_STATE_", "WAIT_REASON_", "FAILURE_CLASS_", "ATTEMPT_STATE_", "STEP_STATE_", "NODE_STATE_", "JOB_KIND_"}

func shortEnum(name string) string {
	for _, p := range enumPrefixes {
		name = strings.TrimPrefix(name, p)
	}
	return name
}
