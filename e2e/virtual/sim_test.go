package virtual

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	"github.com/muster-hpc/muster/sched/control"
)

const (
	day      = 24 * time.Hour
	patience = 12 * time.Hour // in which everything must come to an end when the faults have stopped
	machines = 50
	leaseMs  = 1_200_000
	windowMs = 240_000
	lostMs   = 2_400_000
	cpus     = 64
	gpus     = 8
)

// bugs are planted on purpose.
type bugs struct {
	fsm     fsm.Faults
	control control.Faults
	// grantUncommitted acknowledges liveness before an entry has committed.
	grantUncommitted bool
	// answerBelowSeen answers a Sync from a state below what the agent has seen.
	answerBelowSeen bool
	// unknownAt is the index from which on one entry holds a command that only the program of controller 0 knows; 0 for none.
	unknownAt uint64
	// hasty: the leader places what waits to be accounted for. That is no bug as long as the state machine refuses.
	hasty bool
}

// sim is one virtual day.
type sim struct {
	clock
	facts
	seed        uint64
	bugs        bugs
	dusk        time.Duration // when the day is over
	controllers []*controller
	machines    []*machine
	users       []*user
	operator    *user
	leaderOf    map[uint64]int // by term; 1 more than the controller
	failure     error
	poisoned    bool
	// faulty: faults happen.
	faulty bool
	// isolated is a controller that the others do not reach, -1 if there is none; agents that sided with it reach only it.
	isolated int
	sided    [machines]bool
}

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func (s *sim) wall() time.Time { return epoch.Add(s.now) }

func (s *sim) lease() time.Duration { return leaseMs * time.Millisecond }

func newSim(seed uint64, b bugs) *sim {
	s := &sim{clock: newClock(seed), facts: newFacts(), seed: seed, bugs: b, leaderOf: map[uint64]int{}, isolated: -1, faulty: true, dusk: day}
	for i := range members {
		s.controllers = append(s.controllers, &controller{s: s, id: i, offset: s.between(-time.Second, time.Second)})
	}
	for i := range machines {
		spec := &apiv1.NodeSpec{Name: fmt.Sprintf("n%d", i+1), AgentAddress: fmt.Sprintf("n%d:1", i+1), TaskAddress: fmt.Sprintf("n%d", i+1),
			Cpus: cpus, MemoryMb: 1 << 19}
		for g := range uint32(gpus) {
			spec.Gpus = append(spec.Gpus, &apiv1.Gpu{Index: g, Type: "h100"})
		}
		s.machines = append(s.machines, &machine{s: s, idx: i, name: spec.Name, spec: spec})
	}
	for i := range userCount {
		s.users = append(s.users, &user{s: s, idx: i, offset: s.between(-time.Second, time.Second), principal: &apiv1.Principal{
			Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_USER, Uid: uint32(1000 + i), Gid: 100, Name: fmt.Sprintf("user%d", i)}})
	}
	s.operator = &user{s: s, idx: userCount, principal: &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_USER, Name: "root"}}
	return s
}

// place is where a message comes from or goes to.
type place interface{ alive() bool }

func (c *controller) alive() bool { return c.up }
func (m *machine) alive() bool    { return m.up }
func (u *user) alive() bool       { return true }

// reach tells whether the network takes a message from one place to another.
func (s *sim) reach(from, to place) bool {
	a, b := from, to
	if _, ok := a.(*controller); !ok {
		a, b = b, a
	}
	c, ok := a.(*controller)
	if !ok {
		return true
	}
	isolated := c.id == s.isolated
	switch o := b.(type) {
	case *controller:
		return o == c || s.isolated < 0 || !isolated && o.id != s.isolated
	case *machine:
		return !o.cut && (s.isolated < 0 || s.sided[o.idx] == isolated)
	}
	return true
}

// delays says how late a message may be.
type delays int

const (
	shortDelays delays = iota // calls that have a deadline of seconds
	longDelays                // messages that carry a term, a fence or a sequence
	agedDelays                // requests with an id
)

func (s *sim) delay(d delays) time.Duration {
	usual := s.between(500*time.Microsecond, 20*time.Millisecond)
	if !s.faulty {
		return usual
	}
	switch n := s.rng.IntN(10000); {
	case n < 3 && d == agedDelays:
		return s.between(0, 40*time.Minute)
	case n < 10 && d >= longDelays:
		return s.between(0, 20*time.Minute)
	case n < 50 && d >= longDelays:
		return s.between(0, time.Minute)
	case n < 300:
		return s.between(0, 2*time.Second)
	}
	return usual
}

// send takes a message somewhere: it may be lost, late, or there twice, and overtake others.
func (s *sim) send(from, to place, d delays, do func()) {
	if !s.reach(from, to) || s.faulty && from != to && s.chance(150) {
		return
	}
	times := 1
	if s.faulty && s.chance(100) {
		times = 2
	}
	for range times {
		s.after(s.delay(d), func() {
			if s.reach(from, to) && to.alive() {
				do()
			}
		})
	}
}

// run lives the day, and then lets everything come to an end. It returns the first violation.
func (s *sim) run() error {
	for _, c := range s.controllers {
		c.boot()
	}
	first := s.controllers[0]
	first.elect()
	first.propose(&logv1.Command{Principal: first.principal(), Op: &logv1.Command_Bootstrap{Bootstrap: &logv1.Bootstrap{
		Incarnation: 1, ClusterId: "virtual", Configuration: &apiv1.Configuration{ClusterName: "virtual",
			Partitions: []*apiv1.Partition{{Name: "main", Nodes: "ALL", IsDefault: true}},
			Settings:   &apiv1.Settings{LeaseMs: leaseMs, FenceWindowMs: windowMs, LostAfterMs: lostMs, PrepareTimeoutMs: 300_000, FinishedJobRetentionS: 3600},
		}}}}, func(r *logv1.Result, err error) {
		if err != nil || r.Refusal != nil {
			s.fail("the cluster was not bootstrapped: %v %v", r, err)
		}
	})
	for _, m := range s.machines {
		s.after(s.between(time.Second, time.Minute), m.boot)
	}
	for _, u := range s.users {
		s.after(2*time.Minute, u.live)
	}
	s.oracle()
	s.operate()
	s.nemesis()
	for s.failure == nil && s.step(s.dusk) {
	}
	if s.failure != nil {
		return s.failure
	}
	s.calm()
	quiet := s.dusk
	for s.failure == nil && s.step(s.dusk+patience) {
		if s.now-quiet >= 10*time.Minute {
			quiet = s.now
			if s.unsettled() == nil {
				break
			}
		}
	}
	if s.failure == nil {
		if s.failure = s.unsettled(); s.failure == nil {
			s.final()
		}
	}
	return s.failure
}

// oracle lets somebody stand for election while nobody leads a majority.
func (s *sim) oracle() {
	s.after(s.between(5*time.Second, 15*time.Second), func() {
		led := false
		for _, c := range s.controllers {
			if c.up && c.leads && c.id != s.isolated {
				up := 0
				for _, o := range s.controllers {
					if o.up && s.reach(c, o) && o.disk.term <= c.disk.term {
						up++
					}
				}
				led = led || up > members/2
			}
		}
		if c := s.controllers[s.rng.IntN(members)]; !led && c.up && c.id != s.isolated {
			c.elect()
		}
		s.oracle()
	})
}

// operate is what operators do: they resume drained nodes and release jobs that were held after failed launches.
func (s *sim) operate() {
	s.after(30*time.Minute, func() {
		s.tidy()
		s.operate()
	})
}

func (s *sim) tidy() {
	if s.canon == nil || !s.canon.Bootstrapped() {
		return
	}
	for n := range s.canon.Nodes() {
		if n.Drain {
			s.operator.ask(&request{done: func(*logv1.Result) {}, cmd: &logv1.Command{Op: &logv1.Command_UpdateNodes{UpdateNodes: &logv1.UpdateNodes{
				Request: &apiv1.UpdateNodesRequest{Names: []string{n.Spec.Name}, Change: &apiv1.UpdateNodesRequest_Resume{Resume: true}}}}}})
		}
	}
	for j := range s.canon.PendingJobs() {
		if j.Status.Held == 2 || j.Status.Held == 1 && s.now > s.dusk {
			s.operator.ask(&request{job: j.Id, done: func(*logv1.Result) {}, cmd: &logv1.Command{Op: &logv1.Command_UpdateJobs{UpdateJobs: &logv1.UpdateJobs{
				Request: &apiv1.UpdateJobRequest{JobIds: []uint32{j.Id}, Change: &apiv1.UpdateJobRequest_Hold{Hold: false}}}}}})
		}
	}
}

// fault is something that goes wrong, on average every so often.
type fault struct {
	every time.Duration
	do    func()
}

// nemesis makes things go wrong until the day is over.
func (s *sim) nemesis() {
	anyOf := func() *machine { return s.machines[s.rng.IntN(machines)] }
	for _, f := range []fault{
		{40 * time.Minute, func() { s.restart(s.controllers[s.rng.IntN(members)], 20*time.Minute) }},
		{40 * time.Minute, func() {
			for _, c := range s.controllers {
				if c.leads {
					s.restart(c, 5*time.Minute)
				}
			}
		}},
		{12 * time.Hour, func() {
			for _, c := range s.controllers {
				s.restart(c, 30*time.Minute)
			}
		}},
		{30 * time.Minute, func() {
			if c := s.controllers[s.rng.IntN(members)]; c.up {
				c.elect()
			}
		}},
		{90 * time.Minute, s.isolate},
		{6 * time.Minute, func() {
			m := anyOf()
			m.killAgent()
			s.after(s.sometime(time.Second, 5*time.Minute, time.Hour), m.startAgent)
		}},
		{40 * time.Minute, func() {
			if m := anyOf(); m.powered {
				m.powerLoss()
				s.after(s.sometime(time.Minute, 40*time.Minute, 3*time.Hour), func() {
					if !m.powered {
						m.boot()
					}
				})
			}
		}},
		{20 * time.Minute, func() { s.cut(anyOf()) }},
		{20 * time.Hour, func() {
			for range machines / 3 {
				s.cut(anyOf())
			}
		}},
	} {
		s.again(f)
	}
}

// again lets a fault happen now and then.
func (s *sim) again(f fault) {
	s.after(min(time.Duration(s.rng.ExpFloat64()*float64(f.every)), 5*f.every)+time.Second, func() {
		if s.faulty {
			s.faults++
			f.do()
			s.again(f)
		}
	})
}

// sometime draws a time, mostly short and sometimes long.
func (s *sim) sometime(low, high, long time.Duration) time.Duration {
	if s.chance(1000) {
		return s.between(low, long)
	}
	return s.between(low, high)
}

func (s *sim) restart(c *controller, within time.Duration) {
	if !c.up {
		return
	}
	c.crash()
	s.after(s.between(time.Second, within), func() {
		if !c.up {
			c.boot()
		}
	})
}

// isolate cuts one controller, mostly the leader, off from the others; a third of the agents reach only it.
func (s *sim) isolate() {
	if s.isolated >= 0 {
		return
	}
	s.isolated = s.rng.IntN(members)
	for _, c := range s.controllers {
		if c.leads && s.chance(6000) {
			s.isolated = c.id
		}
	}
	side := rand.New(rand.NewPCG(s.rng.Uint64(), 0))
	for i := range s.sided {
		s.sided[i] = side.IntN(12) == 0
	}
	s.trace("isolate", uint64(s.isolated))
	s.after(s.sometime(10*time.Second, 20*time.Minute, 2*time.Hour), func() {
		s.isolated = -1
		s.trace("heal")
	})
}

func (s *sim) cut(m *machine) {
	m.cut = true
	s.trace("cut", uint64(m.idx))
	s.after(s.sometime(5*time.Second, 30*time.Minute, 3*time.Hour), func() { m.cut = false })
}

// calm ends all faults.
func (s *sim) calm() {
	s.trace("calm")
	s.faulty, s.isolated = false, -1
	for _, c := range s.controllers {
		if !c.up {
			c.boot()
		}
	}
	for _, m := range s.machines {
		m.cut = false
		if !m.powered {
			m.boot()
		}
		m.startAgent()
	}
	s.tidy()
}

// unsettled says what has not come to an end.
func (s *sim) unsettled() error {
	for j := range s.canon.ActiveJobs() {
		return fmt.Errorf("liveness: job %d is %s (%s, held %d, attempt %d, completing %t: %s)", j.Id, j.Status.State, j.Status.Reason,
			j.Status.Held, j.Status.Attempt, j.Status.Completing, j.Status.Sentence)
	}
	for a := range s.canon.LiveAttempts() {
		return fmt.Errorf("liveness: attempt %d of job %d is %s, unaccounted on %v", a.Number, a.JobId, a.State, a.Unaccounted)
	}
	for n := range s.canon.Nodes() {
		if n.State != apiv1.NodeState_NODE_STATE_UP {
			return fmt.Errorf("liveness: node %s is %s (%s)", n.Spec.Name, n.State, n.Reason)
		}
	}
	for _, m := range s.machines {
		if len(m.supervisors) > 0 {
			p := m.supervisors[0]
			return fmt.Errorf("liveness: node %d has a supervisor of job %d, attempt %d, placement %d, step %d (started %t)", m.idx, p.job,
				p.fence.Attempt, p.fence.Placement, p.step.id, p.started)
		}
		if len(m.journal) > 0 {
			return fmt.Errorf("liveness: node %d has %d unacknowledged reports, the first about job %d", m.idx, len(m.journal), m.journal[0].JobId)
		}
	}
	for _, c := range s.controllers {
		if c.applied != s.canonAt {
			return fmt.Errorf("liveness: controller %d has applied %d of %d entries", c.id, c.applied, s.canonAt)
		}
	}
	return nil
}

// final checks the day against the ledger and against what the processes did.
func (s *sim) final() {
	for _, c := range s.controllers {
		s.checkInvariants(c.view, "at the end")
	}
	for name, id := range s.acked {
		j := s.last[id]
		if j == nil || j.Spec.Name != name {
			s.fail("G1: job %d (%s) was acknowledged and never existed", id, name)
			return
		}
		for _, c := range s.controllers {
			if v := c.view.Job(id); v == nil && s.wall().Sub(j.Status.EndTime.AsTime()) < 50*time.Minute {
				s.fail("G1: job %d was acknowledged and is lost on controller %d", id, c.id)
			}
		}
	}
	for id, attempt := range s.cancelled {
		if got := s.attempts[id].GetNumber(); got != attempt {
			s.fail("G1: the cancellation of job %d was acknowledged in attempt %d, and attempt %d began", id, attempt, got)
		}
	}
	for id, j := range s.last {
		if err := s.checkEnd(j, s.attempts[id]); err != nil {
			s.fail("job %d (%s, %s): %w", id, j.Spec.Name, j.Status.State, err)
		}
	}
}

// checkEnd compares a job's end with what its processes did.
func (s *sim) checkEnd(j *apiv1.Job, a *apiv1.Attempt) error {
	if !fsm.Ended(j.Status.State) {
		return fmt.Errorf("it has not ended")
	}
	if a == nil {
		return nil
	}
	if s.execFailed[attemptKey{j.Id, a.Number}] && j.Status.State == apiv1.JobState_JOB_STATE_COMPLETED && j.Spec.Kind == apiv1.JobKind_JOB_KIND_RUN {
		return fmt.Errorf("G5: a program could not be executed, and it completed")
	}
	if a.Failure == apiv1.FailureClass_FAILURE_CLASS_TIME_LIMIT && !s.timedOut[attemptKey{j.Id, a.Number}] {
		return fmt.Errorf("it is said to have reached its time limit, and no supervisor saw that")
	}
	if a.Failure != apiv1.FailureClass_FAILURE_CLASS_UNSPECIFIED && a.Failure != apiv1.FailureClass_FAILURE_CLASS_USER_CODE {
		return nil
	}
	groups, id := a.Placement.Groups, uint32(0)
	if j.Spec.Kind == apiv1.JobKind_JOB_KIND_BATCH {
		id = fsm.BatchStep
		groups = []*apiv1.NodeGroup{{Nodes: groups[0].Nodes[:1]}}
	}
	var code, signal uint32
	known := 0
	for _, g := range groups {
		for _, n := range g.Nodes {
			exit := s.truth[processKey{j.Id, a.Number, a.Fence.Placement, id, s.machineOf(n)}]
			if exit == nil {
				if a.Failure == apiv1.FailureClass_FAILURE_CLASS_UNSPECIFIED {
					return fmt.Errorf("it completed, and its process on node %d did not", s.machineOf(n))
				}
				continue
			}
			known++
			code, signal = max(code, exit.Code), max(signal, exit.Signal)
		}
	}
	if code != 0 {
		signal = 0
	}
	switch {
	case known == 0:
		return fmt.Errorf("it has an exit code, and none of its processes ended by itself")
	case j.Status.ExitCode != code || j.Status.ExitSignal != signal:
		return fmt.Errorf("its exit is %d:%d; its processes ended with %d:%d", j.Status.ExitCode, j.Status.ExitSignal, code, signal)
	}
	return nil
}
