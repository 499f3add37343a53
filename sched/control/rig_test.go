package control

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/fsm"
	"github.com/muster-hpc/muster/fsm/replica"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
)

// commitTime is how long a commit takes in the fake log.
const commitTime = time.Millisecond

// fakeLog is one member's log without Raft: the real state machine behind it, one command an entry.
type fakeLog struct {
	mu      sync.Mutex
	machine *fsm.Machine
	index   uint64
	term    uint64
	view    *fsm.View
	next    chan struct{}
	digests map[uint64]uint64
	servers []replica.Server
	// paused: nothing commits until it is closed.
	paused chan struct{}
	// before is called before a command is applied; a refusal from it is the result.
	before      func(*logv1.Command) *apiv1.ErrorDetail
	proposed    map[string]int
	quarantined string
	promoted    []string
	removed     []string
	transferred []string
}

func newFakeLog() *fakeLog {
	l := &fakeLog{machine: fsm.New(), term: 1, next: make(chan struct{}), digests: map[uint64]uint64{}, proposed: map[string]int{},
		servers: []replica.Server{{ID: "c1", Voter: true}}}
	l.view = l.machine.Publish()
	return l
}

func (l *fakeLog) ID() string { return "c1" }

func (l *fakeLog) Propose(ctx context.Context, cmd *logv1.Command) (*logv1.Result, error) {
	l.mu.Lock()
	l.proposed[fmt.Sprintf("%T", cmd.Op)]++
	paused := l.paused
	term := l.term
	l.mu.Unlock()
	if paused != nil {
		select {
		case <-paused:
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", replica.ErrOutcomeUnknown, ctx.Err())
		}
	}
	if !pause(ctx, commitTime) {
		return nil, replica.ErrOutcomeUnknown
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.term != term {
		return nil, replica.ErrNotLeader
	}
	if l.before != nil {
		if refusal := l.before(cmd); refusal != nil {
			return &logv1.Result{Refusal: refusal, Revision: l.view.Revision()}, nil
		}
	}
	cmd.Level, cmd.ProposedAt = max(1, fsm.LevelOf(cmd)), timestamppb.Now()
	entry, err := proto.Marshal(&logv1.Batch{Commands: []*logv1.Command{cmd}})
	if err != nil {
		return nil, err
	}
	l.index++
	results, err := l.machine.Apply(l.index, l.term, entry)
	if err != nil {
		return nil, err
	}
	l.view = l.machine.Publish()
	if cmd.GetTick().GetMarkDigest() {
		l.digests[l.index] = l.view.Digest()
	}
	close(l.next)
	l.next = make(chan struct{})
	return results[0], nil
}

func (l *fakeLog) View() *fsm.View {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.view
}

func (l *fakeLog) Changed() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.next
}

func (l *fakeLog) WaitIndex(_ context.Context, index uint64) (*fsm.View, error) {
	if v := l.View(); v.Revision().GetIndex() >= index {
		return v, nil
	}
	return nil, errors.New("not applied")
}

func (l *fakeLog) DigestAt(index uint64) (uint64, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	d, ok := l.digests[index]
	return d, ok
}

func (l *fakeLog) Quarantine(reason string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.quarantined = reason
}

func (l *fakeLog) reason() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.quarantined
}

func (l *fakeLog) Servers() []replica.Server {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.servers)
}

func (l *fakeLog) Promote(_ context.Context, id string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.servers {
		if l.servers[i].ID == id {
			l.servers[i].Voter = true
		}
	}
	l.promoted = append(l.promoted, id)
	return nil
}

func (l *fakeLog) Remove(_ context.Context, id string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.servers = slices.DeleteFunc(l.servers, func(s replica.Server) bool { return s.ID == id })
	l.removed = append(l.removed, id)
	return nil
}

func (l *fakeLog) Transfer(_ context.Context, id string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.transferred = append(l.transferred, id)
	return nil
}

func (l *fakeLog) handovers() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.transferred)
}

func (l *fakeLog) count(cmd any) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.proposed[fmt.Sprintf("%T", cmd)]
}

// rig is a leader over a fake log, with agents that the test plays.
type rig struct {
	t       *testing.T
	log     *fakeLog
	control *Control
	ctx     context.Context
	cancel  context.CancelFunc
	led     sync.WaitGroup
	agents  map[string]*agent
}

// agent plays a node.
type agent struct {
	r        *rig
	name     string
	number   uint32
	epoch    uint32
	instance *apiv1.Instance
	sequence uint64
	grant    uint64
	// deaf: grants do not reach it.
	deaf atomic.Bool
	stop context.CancelFunc
	ctx  context.Context
	// lazy: it never gets ready.
	lazy atomic.Bool
	// broken: it can't prepare anything, and says so.
	broken atomic.Bool
	// tidy: it reports as reaped what has ended or left it.
	tidy atomic.Bool
}

const script = "#!/bin/sh\ntrue\n"

func hashOf(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

func newRig(t *testing.T, settings *apiv1.Settings, faults Faults) *rig {
	r := &rig{t: t, log: newFakeLog(), agents: map[string]*agent{}}
	r.ctx, r.cancel = context.WithCancel(t.Context())
	r.control = New(Config{Replica: r.log, Log: slog.New(slog.DiscardHandler), Faults: faults})
	r.must(&logv1.Command{Op: &logv1.Command_Bootstrap{Bootstrap: &logv1.Bootstrap{
		Configuration: &apiv1.Configuration{ClusterName: "test", Settings: settings,
			Partitions: []*apiv1.Partition{{Name: "main", Nodes: "ALL", IsDefault: true, MaxTimeS: 86400, DefaultTimeS: 3600}}},
		Incarnation: 1, ClusterId: "x",
	}}})
	r.lead()
	return r
}

// lead begins a reign in the log's term.
func (r *rig) lead() {
	term := r.log.term
	r.led.Go(func() {
		if err := r.control.Lead(r.ctx, term); err != nil {
			r.t.Errorf("lead: %v", err)
		}
	})
	synctest.Wait()
}

// depose ends the reign and begins the next term.
func (r *rig) depose() {
	r.cancel()
	r.led.Wait()
	r.log.mu.Lock()
	r.log.term++
	r.log.mu.Unlock()
	r.ctx, r.cancel = context.WithCancel(r.t.Context())
}

// end stops everything; the test's bubble demands it.
func (r *rig) end() {
	for _, a := range r.agents {
		a.stop()
	}
	r.cancel()
	r.led.Wait()
}

func (r *rig) must(cmd *logv1.Command) *logv1.Result {
	r.t.Helper()
	if cmd.Principal == nil {
		cmd.Principal = &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_MEMBER, Name: "c1"}
	}
	result, err := r.log.Propose(r.t.Context(), cmd)
	if err != nil {
		r.t.Fatal(err)
	}
	if result.Refusal != nil {
		r.t.Fatalf("%T refused: %v", cmd.Op, result.Refusal)
	}
	return result
}

func spec(nodes uint32) *apiv1.JobSpec {
	return &apiv1.JobSpec{Name: "job", Kind: apiv1.JobKind_JOB_KIND_BATCH, WorkDir: "/home", ScriptBlob: hashOf(script), Requeue: true,
		Resources: &apiv1.ResourceRequest{NodesMin: nodes, GpusPerNode: 8}}
}

func (r *rig) submit(s *apiv1.JobSpec) uint32 {
	r.t.Helper()
	result := r.must(&logv1.Command{
		Principal: &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_USER, Uid: 1000, Gid: 100, Name: "alice"},
		Op: &logv1.Command_SubmitJobs{SubmitJobs: &logv1.SubmitJobs{Specs: []*apiv1.JobSpec{s},
			Blobs: []*logv1.BlobContent{{Sha256: hashOf(script), Data: []byte(script)}}}},
	})
	if refusal := result.Submitted[0].Refusal; refusal != nil {
		r.t.Fatal(refusal)
	}
	return result.Submitted[0].JobId
}

func (r *rig) job(id uint32) *apiv1.Job { return r.log.View().Job(id) }

func nodeSpec(name string) *apiv1.NodeSpec {
	s := &apiv1.NodeSpec{Name: name, AgentAddress: name + ":1", TaskAddress: name, Cpus: 64, MemoryMb: 1 << 19}
	for i := range uint32(8) {
		s.Gpus = append(s.Gpus, &apiv1.Gpu{Index: i, Type: "h100"})
	}
	s.Gres = []*apiv1.Gres{{Name: "ib", Type: "cx7", Count: 3}}
	return s
}

// join begins an agent's life and its Syncs, one every 3 s (a third of the default lease is 3.3 s).
func (r *rig) join(name, boot, nonce string) (*agent, error) {
	instance := &apiv1.Instance{BootId: boot, Nonce: nonce}
	response, err := r.control.JoinNode(r.t.Context(), &peerv1.JoinNodeRequest{
		Join: &nodev1.JoinRequest{Spec: nodeSpec(name), Instance: instance}, CertificateName: name})
	if err != nil {
		return nil, err
	}
	a := &agent{r: r, name: name, number: response.Number, epoch: response.Epoch, instance: instance}
	a.ctx, a.stop = context.WithCancel(r.t.Context())
	r.agents[name+nonce] = a
	go func() {
		for a.ctx.Err() == nil {
			touched := r.log.View().NodeTouched(a.number)
			a.sync()
			renew := time.NewTimer(3 * time.Second)
			for held := true; held; {
				changed := r.log.Changed()
				if fsm.CompareRevisions(r.log.View().NodeTouched(a.number), touched) != 0 {
					break // A Sync that is held ends when something is new for the node.
				}
				select {
				case <-renew.C:
					held = false
				case <-changed:
				case <-a.ctx.Done():
					held = false
				}
			}
			renew.Stop()
		}
	}()
	return a, nil
}

func (r *rig) cluster(n int) []*agent {
	r.t.Helper()
	var all []*agent
	for i := range n {
		a, err := r.join(fmt.Sprintf("n%d", i+1), "boot", fmt.Sprint(i))
		if err != nil {
			r.t.Fatal(err)
		}
		all = append(all, a)
	}
	return all
}

// sync reports what the agent would: attempts that prepare are prepared at once, unless it is lazy.
func (a *agent) sync() {
	if a.ctx.Err() != nil {
		return
	}
	a.sequence++
	b := &peerv1.Beat{Node: a.number, Epoch: a.epoch, Instance: a.instance, Sequence: a.sequence, LastGrant: a.grant}
	v := a.r.log.View()
	for at := range v.NodeAttempts(a.number) {
		a.report(at)
		if a.broken.Load() || !slices.Contains(flat(at.Placement), a.number) {
			continue
		}
		if at.State != apiv1.AttemptState_ATTEMPT_STATE_PREPARING || a.lazy.Load() {
			continue
		}
		actual := &nodev1.ActualAttempt{JobId: at.JobId, Fence: at.Fence, State: nodev1.WorkState_WORK_STATE_PREPARED, Address: a.name}
		if v.Job(at.JobId).Spec.Kind == apiv1.JobKind_JOB_KIND_RUN {
			actual.Steps = []*nodev1.ActualStep{{StepId: 0, State: nodev1.WorkState_WORK_STATE_PREPARED}}
		} else if at.Placement.Groups[0].Nodes[0] == a.number {
			actual.Steps = []*nodev1.ActualStep{{StepId: fsm.BatchStep, State: nodev1.WorkState_WORK_STATE_PREPARED, Port: 29500}}
		}
		b.Actual = append(b.Actual, actual)
	}
	ctx, cancel := context.WithTimeout(a.ctx, time.Second)
	defer cancel()
	response, err := a.r.control.ReportLiveness(ctx, []*peerv1.Beat{b})
	if err == nil && !slices.Contains(response.Refused, a.number) && !a.deaf.Load() {
		a.grant = b.Sequence
	}
}

func flat(p *apiv1.Placement) (nodes []uint32) {
	for _, g := range p.Groups {
		nodes = append(nodes, g.Nodes...)
	}
	return nodes
}

// report writes what the node has to say about an attempt.
func (a *agent) report(at *apiv1.Attempt) {
	line := &logv1.TaskReport{JobId: at.JobId, Fence: at.Fence}
	here := slices.Contains(flat(at.Placement), a.number)
	for _, l := range at.Leftovers {
		if l.Node == a.number {
			line.Fence = &apiv1.Fence{Incarnation: at.Fence.Incarnation, Attempt: at.Number, Placement: l.Placement}
		}
	}
	marked := slices.ContainsFunc(at.Unprepared, func(u *apiv1.UnpreparedNode) bool { return u.Node == a.number })
	switch {
	case a.tidy.Load() && (!here || at.State == apiv1.AttemptState_ATTEMPT_STATE_ENDING):
		line.Event = &logv1.TaskReport_AttemptReaped{AttemptReaped: &logv1.AttemptReaped{}}
	case a.broken.Load() && here && !marked && at.State == apiv1.AttemptState_ATTEMPT_STATE_PREPARING:
		line.Event = &logv1.TaskReport_PrepareFailed{PrepareFailed: &logv1.PrepareFailed{Sentence: "the disk is full"}}
	default:
		return
	}
	cmd := &logv1.Command{Principal: &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_NODE, Name: a.name},
		Op: &logv1.Command_ReportTasks{ReportTasks: &logv1.ReportTasks{Node: a.number, Epoch: a.epoch, Instance: a.instance, Reports: []*logv1.TaskReport{line}}}}
	if result, err := a.r.log.Propose(a.ctx, cmd); err == nil && result.Refusal != nil {
		a.r.t.Errorf("a report of %s was refused: %v", a.name, result.Refusal)
	}
}

// eventually waits in virtual time until a condition holds, and returns how long that took.
func (r *rig) eventually(within time.Duration, what string, holds func() bool) time.Duration {
	r.t.Helper()
	began := time.Now()
	for !holds() {
		if time.Since(began) > within {
			r.t.Fatalf("not within %v: %s", within, what)
		}
		time.Sleep(time.Millisecond)
		synctest.Wait()
	}
	return time.Since(began)
}

func (r *rig) running(id uint32) func() bool {
	return func() bool { return r.job(id).Status.State == apiv1.JobState_JOB_STATE_RUNNING }
}

func (r *rig) down(name string) func() bool {
	return func() bool { return r.log.View().NodeByName(name).State == apiv1.NodeState_NODE_STATE_DOWN }
}
