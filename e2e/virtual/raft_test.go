package virtual

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/muster-hpc/muster/fsm"
	"github.com/muster-hpc/muster/fsm/replica"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
	"github.com/muster-hpc/muster/rpc/server"
	"github.com/muster-hpc/muster/sched/control"
)

const (
	raftAgents   = 4
	raftJobs     = 12
	raftRounds   = 6
	raftPatience = 10 * time.Minute
)

var memberNames = []string{"m1", "m2", "m3"}

// group is three members with real Raft, the real state machine and the real leader's duties, in virtual time.
type group struct {
	t       *testing.T
	net     *replica.InMemoryNetwork
	disks   []*replica.InMemoryDisk
	faults  control.Faults
	profile replica.Timing

	mu      sync.Mutex
	up      []*member // nil while it is down
	digests map[uint64]uint64
	// acked has the job of each acknowledged submission, runs the attempt that runs of each job, starts counts them.
	acked  map[string]uint32
	runs   map[uint32][2]uint32 // attempt, number of processes
	starts int
	failed error
}

// member is one controller.
type member struct {
	replica *replica.Replica
	control *control.Control
	cancel  context.CancelFunc
	wg      sync.WaitGroup
}

func (g *group) fail(format string, args ...any) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.failed == nil {
		g.failed = fmt.Errorf(format, args...)
	}
}

func (g *group) failure() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.failed
}

func (g *group) members() (all []*member) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, m := range g.up {
		if m != nil {
			all = append(all, m)
		}
	}
	return all
}

// start opens a member on its disk.
func (g *group) start(i int) {
	r, err := replica.OpenInMemory(replica.Config{Name: memberNames[i], Profile: g.profile, LevelOf: fsm.LevelOf}, replica.Machine(fsm.New()), g.disks[i], g.net)
	if err != nil {
		g.t.Fatal(err)
	}
	m := &member{replica: r, control: control.New(control.Config{Replica: r, Log: slog.New(slog.DiscardHandler), Faults: g.faults})}
	var ctx context.Context
	ctx, m.cancel = context.WithCancel(context.Background())
	m.wg.Go(func() { _ = r.Lead(ctx, m.control.Lead) }) // it ends with the member
	m.wg.Go(func() { g.compare(ctx, r) })
	g.mu.Lock()
	g.up[i] = m
	g.mu.Unlock()
}

// compare compares every published state with the others' at the same revision (G8), and with itself (G2).
func (g *group) compare(ctx context.Context, r *replica.Replica) {
	for ctx.Err() == nil {
		changed := r.Changed()
		v := r.View()
		index := v.Revision().GetIndex()
		g.mu.Lock()
		known, ok := g.digests[index]
		g.digests[index] = v.Digest()
		g.mu.Unlock()
		if ok && known != v.Digest() {
			g.fail("G8: at index %d member %s has digest %016x, another %016x", index, r.ID(), v.Digest(), known)
		}
		if v.Bootstrapped() {
			if err := fsm.CheckInvariants(v); err != nil {
				g.fail("the state machine's invariants at index %d: %v", index, err)
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// kill ends a member; it is cut off first, so that it can't say goodbye.
func (g *group) kill(i int) {
	g.mu.Lock()
	m := g.up[i]
	g.up[i] = nil
	g.mu.Unlock()
	if m == nil {
		return
	}
	for _, o := range memberNames {
		g.net.Cut(memberNames[i], o)
		g.net.Cut(o, memberNames[i])
	}
	m.cancel()
	if err := m.replica.Close(); err != nil {
		g.t.Error(err)
	}
	m.wg.Wait()
}

// applied is the highest index that any member has applied.
func (g *group) applied() (highest uint64) {
	for _, m := range g.members() {
		highest = max(highest, m.replica.Applied())
	}
	return highest
}

// view is the newest view of any member.
func (g *group) view() (newest *fsm.View) {
	for _, m := range g.members() {
		if v := m.replica.View(); newest == nil || compareRevisions(v.Revision(), newest.Revision()) > 0 {
			newest = v
		}
	}
	return newest
}

// propose asks whoever leads until there is an answer.
func (g *group) propose(ctx context.Context, cmd func() *logv1.Command) *logv1.Result {
	for ctx.Err() == nil {
		for _, m := range g.members() {
			call, cancel := context.WithTimeout(ctx, 2*time.Second)
			r, err := m.replica.Propose(call, cmd())
			cancel()
			if err == nil {
				return r
			}
		}
		rest(ctx, 20*time.Millisecond)
	}
	return nil
}

func rest(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

func (g *group) bootstrap() {
	first := g.members()[0].replica
	if err := first.Bootstrap(&logv1.Bootstrap{Incarnation: 1, ClusterId: "virtual", Configuration: &apiv1.Configuration{ClusterName: "virtual",
		Partitions: []*apiv1.Partition{{Name: "main", Nodes: "ALL", IsDefault: true}}}}); err != nil {
		g.t.Fatal(err)
	}
	for _, m := range g.members()[1:] {
		for _, join := range []func() error{
			func() error { return first.AddLearner(g.t.Context(), m.replica.ID(), m.replica.Address()) },
			func() error { return first.Promote(g.t.Context(), m.replica.ID()) },
		} {
			for join() != nil {
				time.Sleep(10 * time.Millisecond)
			}
		}
	}
}

// player plays an agent: it joins, beats, prepares what it is ordered to, runs it for a while, and reports.
type player struct {
	g        *group
	name     string
	rng      *rand.Rand
	instance *apiv1.Instance
	number   uint32
	epoch    uint32
	seen     *apiv1.Revision
	works    map[string]*work
	reports  []*logv1.TaskReport
	line     uint64
}

// work is an attempt on the player's node.
type work struct {
	job     uint32
	fence   *apiv1.Fence
	step    uint32
	ranks   []uint32
	readyAt time.Time
	started bool
	over    bool
	reaped  bool
	endAt   time.Time
}

func (p *player) live(ctx context.Context) {
	sequence, granted := uint64(0), uint64(0)
	for ctx.Err() == nil {
		all := p.g.members()
		if len(all) == 0 {
			rest(ctx, 50*time.Millisecond)
			continue
		}
		m := all[p.rng.IntN(len(all))]
		if p.number == 0 {
			p.join(ctx, m)
			rest(ctx, 50*time.Millisecond)
			continue
		}
		if v := m.replica.View(); compareRevisions(v.Revision(), p.seen) >= 0 {
			p.seen = v.Revision()
			p.obey(v)
		}
		p.report(ctx)
		for _, l := range all {
			sequence++
			before := p.g.applied()
			call, cancel := context.WithTimeout(ctx, time.Second)
			r, err := l.control.ReportLiveness(call, []*peerv1.Beat{{Node: p.number, Epoch: p.epoch, Instance: p.instance, Sequence: sequence,
				LastGrant: granted, Actual: p.actual()}})
			cancel()
			if err != nil {
				continue
			}
			if r.Index <= before {
				p.g.fail("a lease was granted for entry %d, and entry %d had committed before it was asked for", r.Index, before)
			}
			if slices.Contains(r.Refused, p.number) {
				p.number = 0
			} else {
				granted = sequence
			}
			break
		}
		rest(ctx, time.Duration(100+p.rng.IntN(400))*time.Millisecond)
	}
}

func (p *player) join(ctx context.Context, m *member) {
	call, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	spec := &apiv1.NodeSpec{Name: p.name, AgentAddress: p.name + ":1", TaskAddress: p.name, Cpus: 8, MemoryMb: 1 << 16}
	r, err := m.control.JoinNode(call, &peerv1.JoinNodeRequest{CertificateName: p.name, Join: &nodev1.JoinRequest{Spec: spec, Instance: p.instance}})
	if err == nil {
		p.number, p.epoch = r.Number, r.Epoch
	}
}

// obey does what the state orders.
func (p *player) obey(v *fsm.View) {
	if n := v.Node(p.number); n == nil || n.Epoch != p.epoch || n.State != apiv1.NodeState_NODE_STATE_UP {
		p.number = 0
		return
	}
	for _, order := range server.Desired(v, p.number) {
		key := fmt.Sprintf("%d.%d.%d", order.Job.Id, order.Fence.Attempt, order.Fence.Placement)
		w := p.works[key]
		if w == nil {
			w = &work{job: order.Job.Id, fence: order.Fence, readyAt: time.Now().Add(time.Duration(p.rng.IntN(1500)) * time.Millisecond)}
			if len(order.Steps) > 0 {
				w.step, w.ranks = order.Steps[0].Step.Id, order.Steps[0].Ranks
			}
			p.works[key] = w
		}
		switch {
		case order.Want == nodev1.WorkState_WORK_STATE_ENDED && !w.reaped:
			p.end(w, 15)
			w.reaped = true
			p.say(w, &logv1.TaskReport{Event: &logv1.TaskReport_AttemptReaped{AttemptReaped: &logv1.AttemptReaped{}}})
		case order.Want == nodev1.WorkState_WORK_STATE_RUNNING && !w.started && !w.over:
			p.g.exec(p, w)
			w.endAt = time.Now().Add(time.Duration(1+p.rng.IntN(20)) * time.Second)
		case w.started && !w.over && time.Now().After(w.endAt):
			p.end(w, 0)
		}
	}
}

// end ends the node's tasks of an attempt.
func (p *player) end(w *work, signal uint32) {
	if w.over {
		return
	}
	w.over = true
	if !w.started {
		return
	}
	p.g.gone(w)
	e := &logv1.StepEnded{StepId: w.step}
	for _, rank := range w.ranks {
		e.Exits = append(e.Exits, &apiv1.TaskExit{FirstRank: rank, Count: 1, Signal: signal, EndedBySupervisor: signal != 0})
	}
	p.say(w, &logv1.TaskReport{Event: &logv1.TaskReport_StepEnded{StepEnded: e}})
}

func (p *player) say(w *work, r *logv1.TaskReport) {
	p.line++
	r.JournalId, r.JobId, r.Fence = p.line, w.job, w.fence
	p.reports = append(p.reports, r)
}

// report has the journal's lines committed; what is not known to be is said again.
func (p *player) report(ctx context.Context) {
	if len(p.reports) == 0 {
		return
	}
	for _, m := range p.g.members() {
		call, cancel := context.WithTimeout(ctx, time.Second)
		_, err := m.replica.Propose(call, &logv1.Command{Principal: &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_NODE, Name: p.name},
			Op: &logv1.Command_ReportTasks{ReportTasks: &logv1.ReportTasks{Node: p.number, Epoch: p.epoch, Instance: p.instance, Reports: p.reports}}})
		cancel()
		if err == nil {
			p.reports = nil
			return
		}
	}
}

func (p *player) actual() (all []*nodev1.ActualAttempt) {
	for _, w := range p.works {
		if w.started || w.over || time.Now().Before(w.readyAt) {
			continue
		}
		a := &nodev1.ActualAttempt{JobId: w.job, Fence: w.fence, State: nodev1.WorkState_WORK_STATE_PREPARED, Address: p.name}
		if len(w.ranks) > 0 {
			a.Steps = []*nodev1.ActualStep{{StepId: w.step, State: nodev1.WorkState_WORK_STATE_PREPARED}}
		}
		p.g.ready(w, p)
		all = append(all, a)
	}
	return all
}

// ready notes that a node is ready, and exec checks what must hold when a process starts.
func (g *group) ready(w *work, p *player) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.digests[readyKey(w.job, w.fence, p.number)] = 1
}

// readyKey is a key above all indexes.
func readyKey(job uint32, f *apiv1.Fence, node uint32) uint64 {
	return 1<<63 | uint64(job)<<32 | uint64(f.Attempt)<<20 | uint64(f.Placement)<<12 | uint64(node)
}

func (g *group) exec(p *player, w *work) {
	v := g.view()
	g.mu.Lock()
	defer g.mu.Unlock()
	w.started = true
	g.starts++
	set := func(format string, args ...any) {
		if g.failed == nil {
			g.failed = fmt.Errorf(format, args...)
		}
	}
	if run := g.runs[w.job]; run[1] > 0 && run[0] != w.fence.Attempt {
		set("G2: job %d starts in attempt %d on %s while attempt %d runs", w.job, w.fence.Attempt, p.name, run[0])
	}
	g.runs[w.job] = [2]uint32{w.fence.Attempt, g.runs[w.job][1] + 1}
	for _, group := range v.Attempt(w.job, w.fence.Attempt).GetPlacement().GetGroups() {
		for _, n := range group.Nodes {
			if g.digests[readyKey(w.job, w.fence, n)] == 0 {
				set("G5: job %d starts on %s and node %d is not prepared", w.job, p.name, n)
			}
		}
	}
}

func (g *group) gone(w *work) {
	g.mu.Lock()
	defer g.mu.Unlock()
	run := g.runs[w.job]
	g.runs[w.job] = [2]uint32{run[0], run[1] - 1}
}

// submit submits a job until it is acknowledged, with one request id.
func (g *group) submit(ctx context.Context, rng *rand.Rand, name string) {
	id, err := uuid.NewV7()
	if err != nil {
		g.t.Error(err)
		return
	}
	nodes := uint32(1 + rng.IntN(3))
	r := g.propose(ctx, func() *logv1.Command {
		return &logv1.Command{RequestId: id.String(), PayloadSha256: make([]byte, 32),
			Principal: &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_USER, Uid: 1000, Gid: 100, Name: "alice"},
			Op: &logv1.Command_SubmitJobs{SubmitJobs: &logv1.SubmitJobs{Specs: []*apiv1.JobSpec{{Name: name, Kind: apiv1.JobKind_JOB_KIND_RUN,
				Args: []string{"train"}, WorkDir: "/home", Requeue: true, Resources: &apiv1.ResourceRequest{NodesMin: nodes}}}}}}
	})
	if r == nil {
		return
	}
	if r.Refusal != nil || r.Submitted[0].JobId == 0 {
		g.fail("submission %s was refused: %v", name, r)
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.acked[name] = r.Submitted[0].JobId
}

// harm makes one fault and repairs it.
func (g *group) harm(rng *rand.Rand) {
	victim := rng.IntN(len(memberNames))
	for i := range memberNames {
		g.mu.Lock()
		m := g.up[i]
		g.mu.Unlock()
		if m != nil && m.replica.Leader().IsSelf && rng.IntN(4) > 0 {
			victim = i
		}
	}
	others := []string{memberNames[(victim+1)%3], memberNames[(victim+2)%3]}
	pause := time.Duration(500+rng.IntN(4000)) * time.Millisecond
	switch rng.IntN(4) {
	case 0:
		g.kill(victim)
		time.Sleep(pause)
		g.net.Heal()
		g.start(victim)
	case 1:
		g.net.Partition([]string{memberNames[victim]}, others)
		time.Sleep(pause)
	case 2: // its messages get out, nothing comes in
		for _, o := range others {
			g.net.Cut(o, memberNames[victim])
		}
		time.Sleep(pause)
	case 3: // stopped before it reads the answers, and deposed behind its back
		g.net.Hold(memberNames[victim])
		_ = g.net.CallElection(others[rng.IntN(2)]) // it may have just failed to answer: no fault then
		time.Sleep(pause / 4)
	}
	g.net.Heal()
	time.Sleep(time.Duration(rng.IntN(4000)) * time.Millisecond)
}

// runRaft is one run. It returns the number of processes and the first violation.
func runRaft(t *testing.T, seed uint64, faults control.Faults) (starts int, err error) {
	synctest.Test(t, func(t *testing.T) {
		rng := rand.New(rand.NewPCG(seed, 2))
		g := &group{t: t, net: replica.NewInMemoryNetwork(), faults: faults, profile: replica.Development(), up: make([]*member, len(memberNames)),
			digests: map[uint64]uint64{}, acked: map[string]uint32{}, runs: map[uint32][2]uint32{}}
		g.profile.SnapshotThreshold, g.profile.TrailingLogs, g.profile.SnapshotInterval = 200, 20, 2*time.Second
		for i, name := range memberNames {
			g.disks = append(g.disks, replica.NewInMemoryDisk(name))
			g.start(i)
		}
		g.bootstrap()
		g.net.SetLatency(0, 3*time.Millisecond, seed)
		ctx, cancel := context.WithCancel(t.Context())
		var agents, users sync.WaitGroup
		for i := range raftAgents {
			p := &player{g: g, name: fmt.Sprintf("n%d", i+1), rng: rand.New(rand.NewPCG(seed, uint64(10+i))), works: map[string]*work{},
				instance: &apiv1.Instance{BootId: "boot", Nonce: fmt.Sprint(i)}}
			agents.Go(func() { p.live(ctx) })
		}
		for i := range raftJobs {
			user := rand.New(rand.NewPCG(seed, uint64(100+i)))
			users.Go(func() {
				rest(ctx, time.Duration(2+user.IntN(20))*time.Second)
				g.submit(ctx, user, fmt.Sprintf("job-%d", i))
			})
		}
		time.Sleep(2 * time.Second)
		for range raftRounds {
			g.harm(rng)
		}
		g.settle(&users)
		cancel()
		agents.Wait()
		users.Wait()
		for i := range memberNames {
			g.net.Heal()
			g.kill(i)
		}
		err, starts = g.failed, g.starts
	})
	return starts, err
}

// settle waits for the end of all jobs, and checks the ledger.
func (g *group) settle(users *sync.WaitGroup) {
	for deadline := time.Now().Add(raftPatience); g.failure() == nil; time.Sleep(time.Second) {
		v := g.view()
		active, named := 0, map[string]int{}
		for j := range v.Jobs(0) {
			named[j.Spec.Name]++
			if !fsm.Ended(j.Status.State) {
				active++
			}
		}
		g.mu.Lock()
		acked := len(g.acked)
		for name := range g.acked {
			if named[name] != 1 && g.failed == nil {
				g.failed = fmt.Errorf("G1: %s was acknowledged and is there %d times", name, named[name])
			}
		}
		g.mu.Unlock()
		if acked == raftJobs && active == 0 {
			users.Wait()
			for j := range v.Jobs(0) {
				if j.Status.State != apiv1.JobState_JOB_STATE_COMPLETED {
					g.fail("job %d is %s; no process of it failed (%s)", j.Id, j.Status.State, j.Status.Sentence)
				}
			}
			return
		}
		if time.Now().After(deadline) {
			g.fail("liveness: %d of %d jobs acknowledged, %d have not ended", acked, raftJobs, active)
		}
	}
}

func TestRaftAndTheLeadersDutiesKeepTheirPromisesInVirtualTime(t *testing.T) {
	first, n := seeds(t, 20, 200)
	for seed := first; seed < first+n; seed++ {
		starts, err := runRaft(t, seed, control.Faults{})
		if err != nil {
			t.Fatalf("seed %d: %v\nreplay: MUSTER_SEED=%d go test -run Raft ./e2e/virtual", seed, err, seed)
		}
		if starts < raftJobs {
			t.Errorf("seed %d: %d processes are too few to mean anything", seed, starts)
		}
	}
}

// TestPlantedBugsAreNoticedOverRaft plants bugs in the real duties of the leader.
func TestPlantedBugsAreNoticedOverRaft(t *testing.T) {
	for _, c := range []struct {
		name, word string
		faults     control.Faults
	}{
		{"grant a lease without a committed entry", "a lease was granted", control.Faults{GrantWithoutCommit: true}},
		{"start before every node is prepared", "G5", control.Faults{StartUnprepared: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := errors.New("nothing")
			for seed := uint64(1); seed <= plantedSeeds; seed++ {
				if _, err = runRaft(t, seed, c.faults); err != nil {
					break
				}
			}
			if err == nil || !strings.Contains(err.Error(), c.word) {
				t.Errorf("%d runs noticed %v", plantedSeeds, err)
			}
		})
	}
}
