package supervise

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/muster-hpc/muster/node/run"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"golang.org/x/sys/unix"
)

// handle carries out a request. Refusals begin with a code; see run.Refused.
func (s *supervisor) handle(r request) {
	preparing := s.phase == supervisorv1.Phase_PHASE_UNSPECIFIED
	refusal := ""
	switch verb := r.Verb.(type) {
	case *supervisorv1.Request_Watch:
		r.from.watch()
	case *supervisorv1.Request_Start:
		if preparing {
			s.deferred = append(s.deferred, r)
			return
		}
		s.mpi.meet(verb.Start.GetPmiRoot())
		refusal = s.start(verb.Start.GetEnv())
	case *supervisorv1.Request_Extend:
		s.deadline = max(s.deadline, bootTime(verb.Extend.GetDeadlineBootNs()))
	case *supervisorv1.Request_Signal:
		refusal = s.signal(verb.Signal)
	case *supervisorv1.Request_Terminate:
		s.end(time.Duration(verb.Terminate.GetGraceMs())*time.Millisecond, s.notified(verb.Terminate.GetSentence()))
	case *supervisorv1.Request_Limit:
		s.limit = milliseconds(verb.Limit.GetTimeLimitMs())
		s.warn(verb.Limit.GetWarnings())
	case *supervisorv1.Request_Resize:
		if preparing {
			s.deferred = append(s.deferred, r)
			return
		}
		refusal = s.resize(verb.Resize.GetSize())
	case *supervisorv1.Request_Input:
		if preparing {
			s.deferred = append(s.deferred, r)
			return
		}
		answered := false
		if answered, refusal = s.input.accept(r); !answered && refusal == "" {
			return // It comes back when the pipes took it.
		}
	case *supervisorv1.Request_Dismiss:
		if preparing {
			s.deferred = append(s.deferred, r)
			return
		}
		if s.dismissed = s.final(); !s.dismissed {
			refusal = "STATE: the step has not ended, or its result is not on disk yet"
		}
	case nil:
		refusal = fmt.Sprintf("UNSUPPORTED: this supervisor speaks version %d and does not know the request", run.Version)
	default:
		refusal = fmt.Sprintf("UNSUPPORTED: this supervisor speaks version %d and does not know %T", run.Version, verb)
	}
	s.answer(r.from, r.Id, refusal)
}

// answer answers a request, or keeps the answer while there is no phase to tell.
func (s *supervisor) answer(to *conn, id uint64, refusal string) {
	if s.phase == supervisorv1.Phase_PHASE_UNSPECIFIED {
		s.held = append(s.held, heldAnswer{to, id, refusal})
		return
	}
	to.answer(&supervisorv1.Event{Id: id, State: s.state(), Error: refusal})
}

// start executes the tasks, once.
func (s *supervisor) start(env []string) (refusal string) {
	switch {
	case s.executed():
		return ""
	case s.over():
		return "STATE: the step ended without a start"
	case s.plan.GetStopsItself() && (s.deadline == 0 || s.deadline.reached(now())):
		return "LEASE: the step stops itself and has no lease deadline ahead; extend it first"
	}
	if _, err := run.MarkStarted("."); errors.Is(err, run.ErrStarted) {
		return "STATE: " + err.Error()
	} else if err != nil {
		s.log.Error("the start cannot be recorded", "error", err)
		return "DISK: " + err.Error()
	}
	// Writing may have taken long.
	if s.tick(now()); s.over() {
		return "LEASE: the lease deadline passed while the start was recorded"
	}
	s.fault("marked")
	s.started, s.startedAt, s.phase, s.changed = now(), time.Now(), supervisorv1.Phase_PHASE_RUNNING, true
	s.execute(env)
	return ""
}

// execute starts all tasks, from this thread.
func (s *supervisor) execute(env []string) {
	unprotect(s.log)
	s.mpi.begin()
	var stages []*staged
	for i, t := range s.tasks {
		t.env = environment(t.plan.GetEnv(), s.mpi.environment(t, env), s.plan.GetCookie())
		t.prologs, t.epilogs = t.plan.GetPrologs(), t.plan.GetEpilogs()
		if t := s.ready.tasks[i].terminal; t != nil {
			t.begin()
		}
		if stage := s.begin(i); stage != nil {
			stages = append(stages, stage)
		}
	}
	s.settleStages(stages)
	protect(s.log)
	s.fault("executed")
	s.executedAll()
}

// executedAll is done once when no task waits for the programs before it any more.
func (s *supervisor) executedAll() {
	if s.complete || s.over() || slices.ContainsFunc(s.tasks, func(t *task) bool { return t.aside != nil && t.aside.before }) {
		return
	}
	s.complete = true
	said := map[string]bool{}
	for i, t := range s.tasks {
		if t.untold != nil {
			s.log.Warn("a task has no SLURM_TASK_PID", "rank", t.plan.GetRank(), "error", t.untold)
		}
		if e := t.exit.GetLaunchError(); e != "" {
			s.log.Warn("a task was not executed", "rank", t.plan.GetRank(), "error", e)
			if !said[e] { // the first task tells it for all of this node
				said[e] = true
				s.print(i, s.voice()+e)
			}
		}
	}
	s.ready.closeInputs()
	if s.unbound {
		s.log.Info("tasks are not bound to CPUs: the machine does not have those of the plan, or does not let us use them")
	}
	for _, sentence := range []string{s.ready.sentence, s.cutLimits()} {
		if sentence != "" {
			s.print(0, s.voice()+sentence)
		}
	}
	s.log.Info("tasks were executed", "tasks", len(s.tasks))
}

// settleStages waits for the stages, but not beyond what is due.
func (s *supervisor) settleStages(stages []*staged) {
	wait := stageTimeout
	if due := s.next(); due != 0 {
		wait = min(wait, max(time.Duration(due-now()), 0))
	}
	until := time.Now().Add(wait)
	for _, stage := range stages {
		if err := stage.settle(until); err != nil {
			s.log.Error("it is not known whether a task was executed", "rank", stage.plan.GetRank(), "error", err)
		}
	}
}

// signal delivers a signal once.
func (s *supervisor) signal(q *supervisorv1.Signal) (refusal string) {
	if q.GetSignal() == 0 || q.GetSignal() > 64 {
		return fmt.Sprintf("INVALID: there is no signal %d", q.GetSignal())
	}
	if q.GetOrdinal() <= s.signals {
		return ""
	}
	s.signals, s.changed = q.GetOrdinal(), true
	if !s.executed() || s.over() {
		return ""
	}
	s.deliver(unix.Signal(q.GetSignal()), q.GetTree())
	return ""
}

// resize changes the size of the terminals.
func (s *supervisor) resize(size *supervisorv1.Terminal) (refusal string) {
	if s.ready == nil || s.over() {
		return ""
	}
	for _, t := range s.ready.tasks {
		if t.terminal == nil {
			continue
		}
		if err := t.terminal.resize(size); err != nil {
			return "TERMINAL: " + err.Error()
		}
	}
	return ""
}

// print writes a line to the standard error of a task.
func (s *supervisor) print(i int, line string) {
	if s.ready == nil || s.over() {
		return
	}
	stderr := s.ready.tasks[i].stderr
	if t := s.ready.tasks[i].terminal; t != nil { // its slave is the task's alone
		stderr = t.out
	}
	if !s.notice.write(stderr, line) {
		s.log.Warn("a line for the user was dropped: its output does not take any", "line", line)
	}
}

// voice begins a line for the user: it names the node, where the plan does.
func (s *supervisor) voice() string {
	if node := value(s.tasks[0].plan.GetEnv(), "SLURMD_NODENAME"); node != "" {
		return "slurmstepd-" + node + ": error: "
	}
	return "slurmstepd: error: "
}

// words is the line with which users and their tools know the end of a job or step.
func (s *supervisor) words(cause string) string {
	part := strings.Split(s.plan.GetLabel(), ".") // job.attempt.step
	subject := "STEP " + s.plan.GetLabel()
	if len(part) == 3 {
		subject = "STEP " + part[0] + "." + part[2]
		if part[2] == batchStep {
			subject = "JOB " + part[0]
		}
	}
	if cause != "" {
		cause = " " + cause
	}
	if node := value(s.tasks[0].plan.GetEnv(), "SLURMD_NODENAME"); node != "" {
		subject += " ON " + node
	}
	return "slurmstepd: error: *** " + subject + " CANCELLED AT " + time.Now().Format("2006-01-02T15:04:05") + cause + " ***"
}

// notified is the line for the order to end: what is said in the order, in the words that users and their tools look for where it has some.
func (s *supervisor) notified(sentence string) string {
	switch {
	case strings.HasPrefix(sentence, "cancelled by "):
		return s.words("")
	case strings.HasPrefix(sentence, "requeued by "):
		return s.words("DUE TO JOB REQUEUE")
	case strings.HasPrefix(sentence, "node ") && strings.Contains(sentence, " was lost: "):
		return s.words("DUE TO NODE FAILURE")
	default:
		return sentence
	}
}

// batchStep is the number of the batch script's step.
const batchStep = "4294967291"

// value returns a variable of an environment; empty if it has none.
func value(env []string, name string) string {
	for _, v := range env {
		if found, ok := strings.CutPrefix(v, name+"="); ok {
			return found
		}
	}
	return ""
}

// milliseconds converts a time limit; what does not fit is as good as none.
func milliseconds(ms uint64) time.Duration {
	if ms > uint64(1<<63-1)/uint64(time.Millisecond)/2 {
		return 0
	}
	return time.Duration(ms) * time.Millisecond
}
