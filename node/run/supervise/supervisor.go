package supervise

import (
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	"github.com/muster-hpc/muster/node/run"
	"github.com/muster-hpc/muster/node/run/cgroup"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"golang.org/x/sys/unix"
)

// Times are the supervisor's bounds. Each is a row of docs/limits.md.
type Times struct {
	// Leftover is how long other processes may outlive the last task before they are killed.
	Leftover time.Duration
	// Linger is how long a supervisor waits to be dismissed after the result is on disk.
	Linger time.Duration
	// Orphan is how long a step that was not started waits while no agent is connected.
	Orphan time.Duration
	// KillAgain is the first pause between rounds of KILL, doubled up to KillAgainMax.
	KillAgain, KillAgainMax time.Duration
	// Stuck is how long after the first KILL the state says which process does not end; Abandon is how long until a
	// step ends without processes that nothing can end.
	Stuck, Abandon time.Duration
	// WriteAgain is the pause between tries to write the result.
	WriteAgain time.Duration
}

// DefaultTimes are the bounds in production.
var DefaultTimes = Times{
	Leftover: 500 * time.Millisecond, Linger: time.Minute, Orphan: 30 * time.Minute,
	KillAgain: 5 * time.Millisecond, KillAgainMax: 500 * time.Millisecond,
	Stuck: 10 * time.Second, Abandon: time.Minute, WriteAgain: time.Second,
}

// supervisor is the state of the loop; nothing else touches it.
type supervisor struct {
	log    *slog.Logger
	times  Times
	write  func(dir string, state *supervisorv1.StepState) error
	plan   *supervisorv1.StepPlan
	server *server
	alarm  *alarm
	tree   tree
	input  *input
	notice *notices
	tasks  []*task
	mpi    *manager // nil unless the tasks have a process manager

	phase    supervisorv1.Phase // 0 while preparing
	ready    *prepared
	sentence string
	users    bool
	started  bootTime // at exec
	// startedAt is the same by the node's clock, finished is when the last process ended.
	startedAt time.Time
	finished  bootTime
	warnings  []*warning
	cpus      *binding // nil before the first execution
	unbound   bool     // tasks could not be bound
	complete  bool     // executedAll was done
	asides    chan func()
	// fault is called at named points, for tests that stop the supervisor there.
	fault func(point string)

	// held are answers, and deferred are requests, that wait until the preparation is over.
	held     []heldAnswer
	deferred []request

	deadline    bootTime // of the lease
	deadlineHit bool
	limit       time.Duration // time limit; 0 means none
	limitHit    bool
	signals     uint32   // last ordinal
	ending      bool     // the supervisor ends the tasks
	noticed     bool     // the reason for the end was written
	killAt      bootTime // KILL is due
	killed      bootTime // of the first KILL; 0 before
	killAgain   bootTime
	killPause   time.Duration
	leftoverAt  bootTime           // leftovers of the tasks are killed
	writeAgain  bootTime           // the result is written again
	empty       bool               // no process is left
	abandoned   []cgroup.Process   // processes that outlive the step
	last        supervisorv1.Phase // the final phase once it is certain; it may wait for the disk
	trouble     string             // why the result is not on disk
	leaveAt     bootTime           // after the end
	orphanAt    bootTime
	dismissed   bool
	changed     bool
}

type heldAnswer struct {
	to    *conn
	id    uint64
	error string
}

// loop runs until the supervisor may leave.
func (s *supervisor) loop() error {
	children := make(chan os.Signal, 1)
	signal.Notify(children, unix.SIGCHLD)
	ignored := make(chan os.Signal, 1)
	signal.Notify(ignored, unix.SIGTERM, unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2)
	preparation := make(chan func(), 1)
	if s.phase == supervisorv1.Phase_PHASE_UNSPECIFIED {
		go func() {
			p, f := prepare(s.plan, s.log)
			preparation <- func() { s.prepared(p, f) }
		}()
	}
	for {
		s.reap()
		s.tick(now())
		s.publish()
		if s.dismissed || s.leaveAt.reached(now()) {
			s.mpi.wait()
			return nil
		}
		if err := s.alarm.at(s.next()); err != nil {
			return err
		}
		var act func()
		select {
		case <-children:
		case <-s.alarm.c:
			s.alarm.fired()
		case sig := <-ignored:
			s.log.Info("a signal is not an order to end the step", "signal", sig.String())
		case act = <-preparation:
		case act = <-s.asides:
		case act = <-s.mpi.done():
		case <-s.input.done:
			act = func() {
				for _, r := range s.input.finished() {
					s.handle(r)
				}
				s.changed = true
			}
		case r := <-s.server.requests:
			act = func() { s.handle(r) }
		}
		if act != nil {
			s.tick(now()) // What is due comes before what is asked.
			act()
		}
	}
}

func now() bootTime { return bootTime(run.BootNow()) }

// prepared takes what the preparation found.
func (s *supervisor) prepared(p *prepared, f *fault) {
	switch {
	case s.over(): // It was ended meanwhile.
		p.close()
		if p != nil {
			p.groups.remove(s.log)
		}
		return
	case f != nil:
		s.fail(f)
	default:
		if f := s.manage(p); f != nil {
			p.close()
			p.groups.remove(s.log)
			s.fail(f)
			return
		}
		s.ready, s.sentence, s.phase = p, p.sentence, supervisorv1.Phase_PHASE_PREPARED
		s.input.pipes = p.pipes
		s.fault("prepared")
		s.settle()
	}
}

// settle answers what waited for the phase.
func (s *supervisor) settle() {
	s.changed = true
	if s.phase == supervisorv1.Phase_PHASE_UNSPECIFIED {
		return
	}
	held, deferred := s.held, s.deferred
	s.held, s.deferred = nil, nil
	for _, h := range held {
		s.answer(h.to, h.id, h.error)
	}
	for _, r := range deferred {
		s.handle(r)
	}
}

// over reports whether the end is certain, and final whether it is on disk too.
func (s *supervisor) over() bool  { return s.last != supervisorv1.Phase_PHASE_UNSPECIFIED }
func (s *supervisor) final() bool { return s.over() && s.phase == s.last }

// executed reports whether tasks were executed.
func (s *supervisor) executed() bool { return s.started != 0 }

// next is when the loop must wake without being asked.
func (s *supervisor) next() bootTime {
	t := sooner(s.leaveAt, s.writeAgain)
	if s.over() {
		return t
	}
	if s.plan.GetStopsItself() && !s.deadlineHit {
		t = sooner(t, s.deadline)
	}
	t = sooner(sooner(t, s.limitAt()), sooner(s.warnAt(), s.asideAt()))
	if s.killed == 0 { // These lead to the first KILL only.
		t = sooner(t, sooner(s.killAt, s.leftoverAt))
	}
	return sooner(sooner(t, s.killAgain), s.orphanAt)
}

// limitAt is when the time limit is reached; 0 if it does not matter.
func (s *supervisor) limitAt() bootTime {
	if !s.executed() || s.limit == 0 || s.limitHit || s.ending {
		return 0
	}
	return s.started.add(s.limit)
}

// tick does what is due.
func (s *supervisor) tick(now bootTime) {
	if s.writeAgain.reached(now) {
		s.record()
	}
	if s.over() {
		return
	}
	if s.plan.GetStopsItself() && !s.deadlineHit && s.deadline.reached(now) {
		s.deadlineHit = true
		s.log.Warn("the lease deadline passed")
		s.say("The lease deadline of this node passed; the step was ended so that it can run elsewhere.")
		s.end(0, s.words("DUE TO NODE FAILURE"))
	}
	s.tickWarnings(now)
	s.tickAsides(now)
	if s.limitAt().reached(now) {
		s.limitHit = true
		s.end(s.grace(), s.words("DUE TO TIME LIMIT"))
	}
	if s.killed == 0 && (s.killAt.reached(now) || s.leftoverAt.reached(now)) {
		s.kill(now)
	} else if s.killAgain.reached(now) {
		s.kill(now)
	}
	s.tickOrphan(now)
}

// tickOrphan ends a step that was not started when nobody came back for it.
func (s *supervisor) tickOrphan(now bootTime) {
	if s.executed() || s.over() {
		s.orphanAt = 0
		return
	}
	switch {
	case s.server.connected():
		// Connections that close do not wake the loop: look again.
		s.orphanAt = now.add(s.times.Orphan)
	case s.orphanAt == 0:
		s.orphanAt = now.add(s.times.Orphan)
	case s.orphanAt.reached(now):
		s.fail(&fault{sentence: fmt.Sprintf("No agent came to start the step within %v.", s.times.Orphan)})
	}
}

// grace is the plan's time between TERM and KILL.
func (s *supervisor) grace() time.Duration {
	return time.Duration(s.plan.GetKillGraceMs()) * time.Millisecond
}

// end ends the step: TERM now, KILL after the grace, or sooner if that was due already.
func (s *supervisor) end(grace time.Duration, line string) {
	if s.over() {
		return
	}
	s.changed = true
	if line != "" && !s.noticed {
		s.noticed = true
		s.print(0, line)
	}
	first := !s.ending
	s.ending = true
	if !s.executed() {
		s.seal(supervisorv1.Phase_PHASE_ENDED)
		return
	}
	s.phase = supervisorv1.Phase_PHASE_ENDING
	t := now()
	s.killAt = sooner(s.killAt, t.add(grace))
	if s.killed == 0 && s.killAt.reached(t) {
		s.kill(t)
	} else if first {
		s.tree.signal(s.groups(), unix.SIGTERM)
		s.tree.signal(s.groups(), unix.SIGCONT)
	}
}

// kill sends KILL to everything; it is repeated until nothing is left, because processes may be born meanwhile.
func (s *supervisor) kill(t bootTime) {
	if s.killed == 0 {
		s.killed, s.killPause = t, s.times.KillAgain
		s.phase, s.changed = supervisorv1.Phase_PHASE_ENDING, true
	}
	for _, t := range s.tasks {
		t.epilogs = nil // they would be killed, too
	}
	s.tree.signal(s.groups(), unix.SIGKILL)
	s.ready.groups.kill(s.log)
	s.killAgain = t.add(s.killPause)
	s.killPause = min(2*s.killPause, s.times.KillAgainMax)
	if s.killed.add(s.times.Stuck).reached(t) {
		s.complain(t)
	}
}

// complain says which processes do not end. Those that nothing can end are given up after a while, so that the step does
// not take for ever: they sleep in the kernel, which will end them before they execute another instruction.
func (s *supervisor) complain(t bootTime) {
	stuck := s.tree.stuck()
	if len(stuck) == 0 {
		return
	}
	if what := "A process does not end though it was sent KILL: " + cgroup.Describe(stuck) + "."; what != s.sentence {
		s.log.Error("processes do not end", "what", cgroup.Describe(stuck))
		s.sentence, s.changed = what, true // TERM and limits have been said in the output.
	}
	sleeping := !slices.ContainsFunc(stuck, func(p cgroup.Process) bool { return p.State != uninterruptible })
	if sleeping && s.killed.add(s.times.Abandon).reached(t) {
		s.log.Error("the step ends without them", "what", cgroup.Describe(stuck))
		s.abandoned = stuck
		s.seal(supervisorv1.Phase_PHASE_ENDED)
	}
}

// uninterruptible is the letter of processes that sleep in the kernel whatever happens.
const uninterruptible = "D"

// groups are the process groups of tasks whose leaders are not reaped, so that their numbers are certain.
func (s *supervisor) groups() []int {
	var groups []int
	for _, t := range s.tasks {
		if t.pid != 0 && !t.reaped {
			groups = append(groups, t.pid)
		}
	}
	return groups
}

// reap collects what ended and sees whether the step did.
func (s *supervisor) reap() {
	if !s.executed() || s.over() {
		return
	}
	for {
		pid, status, used, empty, err := reap()
		if err != nil {
			s.log.Error("waiting for processes", "error", err)
			return
		}
		s.empty = empty
		if pid == 0 {
			break
		}
		// A task that waits for its prolog has no process yet, and is none of them.
		i := slices.IndexFunc(s.tasks, func(t *task) bool { return t.pid == pid && !t.reaped })
		if i < 0 {
			s.asideEnded(pid, status)
			continue
		}
		s.tasks[i].reaped = true
		s.ended(i, exitOf(status), used)
	}
	s.judge()
}

// ended takes the end of a task's first process. A stage that could not execute its task has told why before.
func (s *supervisor) ended(i int, exit *apiv1.TaskExit, used *unix.Rusage) {
	t := s.tasks[i]
	s.changed = true
	s.fault("exited")
	defer s.follow(i)
	if t.exit == nil {
		exit.EndedBySupervisor = s.ending
		s.mpi.ended(t, exit)
		t.end(exit)
	}
	if t.usage = measured(s.ready.groups.usage(i), used); t.usage.GetMemoryKills() == 0 {
		return
	}
	t.exit.OutOfMemory = true
	verdict := s.ready.groups.verdict(t.plan.GetRank(), s.plan.GetNode())
	s.log.Warn("a task was killed for memory", "rank", t.plan.GetRank(), "verdict", verdict)
	s.say(strings.ToUpper(verdict[:1]) + verdict[1:] + ".")
	s.print(i, s.voice()+verdict)
}

// judge draws the consequences of tasks that ended.
func (s *supervisor) judge() {
	running, bad, unlaunched := 0, false, false
	for _, t := range s.tasks {
		if t.exit == nil {
			running++
		}
		bad = bad || t.bad()
		unlaunched = unlaunched || t.exit.GetLaunchError() != ""
	}
	switch {
	case running == 0 && s.empty && !s.busy():
		s.seal(supervisorv1.Phase_PHASE_ENDED)
	case running == 0 && s.leftoverAt == 0 && s.killed == 0 && !s.busy():
		s.input.close()
		s.leftoverAt = now().add(s.times.Leftover)
	case running > 0 && !s.ending && (unlaunched || (bad && s.plan.GetKillOnBadExit())):
		s.end(s.grace(), "")
	}
}

// fail ends a step that cannot be started.
func (s *supervisor) fail(f *fault) {
	s.log.Error("the step cannot be prepared", "sentence", f.sentence, "users_fault", f.users)
	s.say(f.sentence)
	s.users = f.users
	for _, t := range s.tasks {
		// Slurm's exit of a job whose output cannot be opened is 0:53.
		t.end(&apiv1.TaskExit{Signal: 53, LaunchError: f.sentence})
	}
	s.seal(supervisorv1.Phase_PHASE_FAILED)
}

// seal makes the end final. From here on only the disk stands between the result and those who wait for it.
func (s *supervisor) seal(last supervisorv1.Phase) {
	s.last = last
	if s.executed() {
		s.finished = now()
	}
	for _, t := range s.tasks {
		if t.exit == nil { // It was never executed, or its end is not waited for.
			sig := unix.SIGTERM
			if s.deadlineHit || t.pid != 0 {
				sig = unix.SIGKILL
			}
			t.end(&apiv1.TaskExit{Signal: uint32(sig), EndedBySupervisor: true})
		}
	}
	s.input.close()
	s.mpi.close()
	if s.ready != nil {
		s.ready.groups.remove(s.log)
	}
	written := s.ready.drain()
	if s.notice.flush() && written {
		s.ready.close()
	}
	s.fault("sealed")
	s.record()
}

// record puts the result on disk and then lets it be told. A disk that is full or broken is tried again for as long as
// it takes: the outcome exists nowhere else.
func (s *supervisor) record() {
	s.changed = true
	result := s.state()
	result.Phase = s.last
	t := now()
	if err := s.write(".", result); err != nil {
		s.log.Error("the result cannot be written", "error", err)
		s.phase = supervisorv1.Phase_PHASE_ENDING
		s.trouble = fmt.Sprintf("All processes ended, but the result cannot be written (%s); it is tried again every %v.",
			errnoText(err), s.times.WriteAgain)
		s.writeAgain = t.add(s.times.WriteAgain)
	} else {
		s.log.Info("the step ended", "phase", s.last.String())
		s.phase, s.trouble, s.writeAgain = s.last, "", 0
		s.leaveAt = t.add(s.times.Linger)
		s.fault("written")
	}
	s.settle()
}

// say adds a sentence to what the user should know.
func (s *supervisor) say(sentence string) {
	if s.sentence != "" {
		s.sentence += " "
	}
	s.sentence += sentence
	s.changed = true
}

// state is what is told.
func (s *supervisor) state() *supervisorv1.StepState {
	state := &supervisorv1.StepState{
		Version: run.Version, Phase: s.phase, TimeLimit: s.limitHit, Deadline: s.deadlineHit,
		Sentence: s.sentence, UsersFault: s.users, Pid: uint32(s.tree.self), SignalsDelivered: s.signals,
		StartBootNs: int64(s.started), InputOffset: s.input.taken, PmiPort: s.mpi.told(),
		Stuck: run.StuckProcesses(s.abandoned), EndBootNs: int64(s.finished), Warned: s.warned(),
	}
	if !s.startedAt.IsZero() {
		state.StartUnixNs = s.startedAt.UnixNano()
	}
	if s.ready != nil && s.ready.groups != nil {
		state.Limitations = s.ready.groups.missing
	}
	if s.trouble != "" {
		state.Sentence = s.trouble
	}
	for _, t := range s.tasks {
		state.Tasks = append(state.Tasks, t.state())
	}
	return state
}

// publish tells a change to everybody who watches.
func (s *supervisor) publish() {
	if s.changed && s.phase != supervisorv1.Phase_PHASE_UNSPECIFIED {
		s.changed = false
		s.server.tell(s.state())
	}
}
