package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"syscall"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"google.golang.org/protobuf/proto"

	"github.com/muster-hpc/muster/node/environ"
	"github.com/muster-hpc/muster/node/run"
)

// step is a step as it is here. Fields are guarded by Agent.mu, except those set once.
type step struct {
	// id, key, dir and kick are set once. kick wakes the goroutine that follows the step.
	id   uint32
	key  attemptKey
	dir  string
	kick chan struct{}

	record *nodev1.StepRecord
	phase  Phase
	// final is how it ended; nil before.
	final *supervisorv1.StepState
	// failed is why it was given up while its supervisor prepared; it goes before what the supervisor says.
	failed *prepareError
	// adopted: it was prepared by an earlier life of the agent.
	adopted bool
	// handle is the connection to its supervisor; nil while there is none.
	handle *run.Handle
	// force fires when the step should be over and is not.
	force *time.Timer
	// stop ends its preparation; nil when none is under way.
	stop context.CancelFunc
	// port is the listener that keeps the rendezvous port until the start.
	port net.Listener

	// What is to be told the supervisor.
	startEnv []string
	manager  string // of the process managers of the step's nodes
	end      *ending
	signals  []*apiv1.SignalOrder
	deadline time.Duration
	extended time.Duration
	newLimit bool

	// taskEnds are the ends of its tasks that are known before it is over. It is replaced, never changed.
	taskEnds []*apiv1.TaskExit

	// startNS is when its tasks were executed, on the boot-time clock; 0 before.
	startNS   int64
	signalled uint32
	// pmiPort is where its supervisor serves those of the step's other nodes; 0 if it does not.
	pmiPort uint32
	limitS  uint32
	// toldLimit is the time limit that its supervisor was told. needs is the version that its plan needs, and needsFor is why.
	toldLimit time.Duration
	needs     uint32
	needsFor  string

	// said is the last sentence of its supervisor, told when it was in the log, by the boot-time clock; stopped: the log
	// says that the deadline ended it.
	said    string
	told    time.Duration
	stopped bool

	// reported: the end is in the journal, or was; report is the line's number, 0 if another process wrote it.
	reported bool
	report   uint64
	settled  time.Duration

	// heard is when something was heard of its supervisor, by the boot-time clock; 0 if nothing was yet. silent is the sentence about one
	// that was killed for its silence.
	heard  time.Duration
	silent string

	stages stages
}

// ending is an order to end a step.
type ending struct {
	grace    time.Duration
	sentence string
	told     bool
}

func newStep(key attemptKey, record *nodev1.StepRecord, dir string) *step {
	order := record.GetOrder()
	return &step{
		id: order.GetSteps()[0].GetStep().GetId(), key: key, dir: dir, kick: make(chan struct{}, 1),
		record: record, phase: PhasePreparing, signalled: record.GetSignalsBefore(), limitS: order.GetTimeLimitS(),
	}
}

func (s *step) cancelPrepare() {
	if s.stop != nil {
		s.stop()
	}
}

func (s *step) closePort() {
	if s.port != nil {
		_ = s.port.Close() // it never accepted anything
		s.port = nil
	}
}

// lateVariables are those of an ActionStart.
func lateVariables(action Action) []string { return environ.Late(action.Order, action.StepOrder) }

// follow speaks with a step's supervisor until the step is over and reported. handle is nil if the step is adopted.
func (a *Agent) follow(ctx context.Context, s *step, handle *run.Handle) {
	for {
		if handle == nil {
			var err error
			if handle, err = run.Attach(ctx, s.dir); errors.Is(err, run.ErrGone) {
				a.conclude(ctx, s)
				return
			} else if err != nil {
				if ctx.Err() == nil {
					a.log.Warn("a supervisor does not answer", "step", label(s.key, s.id), "err", err)
				}
				if !sleep(ctx, attachRetry) {
					return
				}
				continue
			}
		}
		over := a.listen(ctx, s, handle)
		a.setHandle(s, nil)
		if ctx.Err() != nil || over {
			_ = handle.Close() // nothing depends on how a connection ends
			return
		}
		a.log.Warn("the connection to a supervisor ended", "step", label(s.key, s.id), "err", handle.Err())
		_ = handle.Close()
		handle = nil
	}
}

func (a *Agent) setHandle(s *step, handle *run.Handle) {
	a.mu.Lock()
	s.handle = handle
	if s.end != nil {
		s.end.told = false // a new connection is told again
	}
	s.extended = 0
	a.mu.Unlock()
}

// listen takes in the supervisor's states and tells it what is ordered; true when the step is over and reported.
func (a *Agent) listen(ctx context.Context, s *step, handle *run.Handle) (over bool) {
	a.setHandle(s, handle)
	a.poke(s.kick)
	beat := time.NewTimer(max(0, a.pulse.every-a.silence(s)))
	defer beat.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-beat.C:
			a.feelPulse(ctx, s, handle)
			beat.Reset(max(a.pulse.every/8, a.pulse.every-a.silence(s)))
		case state, ok := <-handle.Events():
			if !ok {
				return false
			}
			a.heardNow(s)
			if !a.observe(s, state) {
				continue
			}
			a.fault("ended")
			if ctx.Err() != nil || !a.finish(ctx, s, state) {
				return false
			}
			a.fault("dismiss")
			dismissCtx, cancel := context.WithTimeout(ctx, commandTimeout)
			if err := handle.Dismiss(dismissCtx); err != nil && ctx.Err() == nil && !errors.Is(err, run.ErrClosed) {
				a.log.Warn("a supervisor was not dismissed; it leaves by itself", "step", label(s.key, s.id), "err", err)
			}
			cancel()
			return true
		case <-s.kick:
			a.command(ctx, s, handle)
		}
	}
}

// observe takes in a state; true if it is final.
func (a *Agent) observe(s *step, state *supervisorv1.StepState) (final bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	was := s.phase
	a.tell(s, state)
	s.startNS, s.pmiPort = state.GetStartBootNs(), state.GetPmiPort()
	s.signalled = max(s.signalled, state.GetSignalsDelivered())
	switch state.GetPhase() {
	case supervisorv1.Phase_PHASE_PREPARED:
		switch {
		case s.phase != PhasePreparing:
		case state.GetVersion() < s.needs:
			a.tooOld(s, state.GetVersion())
		default:
			s.phase = PhasePrepared
			s.stages.mark(stagePrepared)
		}
	case supervisorv1.Phase_PHASE_RUNNING:
		s.phase = PhaseRunning
		s.stages.mark(stageStarted)
		if limit, _ := a.timing(s); s.phase != was && (limit-s.toldLimit).Abs() >= limitSlack {
			s.newLimit = true // it was reckoned when nobody knew when the step would start
			a.poke(s.kick)
		}
	case supervisorv1.Phase_PHASE_ENDED, supervisorv1.Phase_PHASE_FAILED:
		s.stages.mark(stageEnded)
		return true
	case supervisorv1.Phase_PHASE_ENDING, supervisorv1.Phase_PHASE_UNSPECIFIED:
	}
	ends := endsOf(state)
	more := len(ends) > len(s.taskEnds)
	s.taskEnds = ends
	switch {
	case s.phase != was && s.phase == PhasePrepared:
		a.announce()
	case s.phase != was:
		a.touch()
	case more:
		a.show() // the controllers learn of the step's end only
	}
	return false
}

// tooOld gives up a step that its supervisor would not run as it was asked. a.mu is held.
func (a *Agent) tooOld(s *step, version uint32) {
	s.failed = &prepareError{sentence: fmt.Sprintf("the program %s is of version %d, which does not know %s (version %d does): install that of this agent",
		a.cfg.Supervisor, version, s.needsFor, s.needs)}
	s.end = &ending{sentence: s.failed.sentence}
	a.armForce(s, a.forceAfter)
	a.poke(s.kick)
}

// endsOf returns the ends of the tasks that have ended.
func endsOf(state *supervisorv1.StepState) []*apiv1.TaskExit {
	var ends []*apiv1.TaskExit
	for _, task := range state.GetTasks() {
		if task.GetExit() != nil {
			ends = append(ends, task.GetExit())
		}
	}
	return ends
}

// tell logs what the administrator of the node should know of a step: that the deadline ended it, and why its end does
// not come to an end, again every minute while that lasts. a.mu is held.
func (a *Agent) tell(s *step, state *supervisorv1.StepState) {
	if state.GetDeadline() && !s.stopped {
		s.stopped, s.said = true, state.GetSentence()
		a.log.Warn("a step was stopped because the lease was not renewed until its deadline", "step", label(s.key, s.id))
	}
	sentence := state.GetSentence()
	fresh := sentence != s.said
	s.said = sentence
	if state.GetPhase() != supervisorv1.Phase_PHASE_ENDING || sentence == "" {
		s.told = 0 // what it says before its end is for the user
		return
	}
	if fresh || s.told != 0 && a.boot()-s.told >= tellAgain {
		s.told = a.boot()
		a.log.Warn("a step is ending but not over", "step", label(s.key, s.id), "why", sentence, "dir", s.dir)
	}
}

// command tells the supervisor everything that is ordered and was not told.
func (a *Agent) command(ctx context.Context, s *step, handle *run.Handle) {
	a.mu.Lock()
	var deadline time.Duration
	if s.deadline > s.extended {
		deadline = s.deadline
	}
	var end ending
	ending := s.end != nil
	tellEnd := ending && !s.end.told
	if tellEnd {
		end, s.end.told = *s.end, true
	}
	start := s.phase == PhaseStarting && !ending
	if start && !a.leased() {
		start, s.phase = false, PhasePrepared // the lease ended meanwhile; the next grant tries again
	}
	if start || ending {
		s.closePort()
	}
	env, manager := s.startEnv, s.manager
	signals := s.signals
	s.signals = nil
	limit, warnings := a.timing(s)
	newLimit := s.newLimit && s.startNS != 0
	if newLimit {
		s.newLimit, s.toldLimit = false, limit
	}
	a.mu.Unlock()

	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	if deadline != 0 {
		if _, err := handle.Extend(ctx, int64(deadline)); a.told(s, "move the deadline", err) {
			a.mu.Lock()
			s.extended = deadline
			a.mu.Unlock()
		}
	}
	if ending {
		if !tellEnd {
			return
		}
		if _, err := handle.Terminate(ctx, end.grace, end.sentence); !a.told(s, "end", err) {
			_ = handle.Close() // a new connection is told again
		}
		return
	}
	if start {
		a.fault("start")
		a.reach(s, stageStart)
		_, err := handle.StartMPI(ctx, env, manager)
		if !a.told(s, "start", err) {
			a.notStarted(s)
		}
	}
	for i, signal := range signals {
		_, err := handle.Signal(ctx, signal.GetOrdinal(), signal.GetSignal(), !signal.GetBatchOnly())
		if !a.told(s, "signal", err) && !refused(err) {
			a.mu.Lock()
			s.signals = append(signals[i:], s.signals...) // the supervisor knows which ones it has delivered
			a.mu.Unlock()
			_ = handle.Close()
			return
		}
	}
	if newLimit {
		_, err := handle.SetTiming(ctx, limit, warnings)
		a.told(s, "change the time limit", err)
	}
}

// told logs why a supervisor did not do what it was told; true if it did. A connection that ended is made again, and the
// supervisor then told again what still holds.
func (a *Agent) told(s *step, what string, err error) bool {
	if err != nil && !errors.Is(err, context.Canceled) {
		a.log.Warn("a supervisor did not do what it was told", "step", label(s.key, s.id), "what", what, "err", err)
	}
	return err == nil
}

func refused(err error) bool {
	var r *run.Refused
	return errors.As(err, &r)
}

// notStarted lets the start be ordered again at the next change, which a grant or the next Sync brings.
func (a *Agent) notStarted(s *step) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s.phase == PhaseStarting {
		s.phase = PhasePrepared
	}
}

// conclude finds out how a step ended that has no supervisor.
func (a *Agent) conclude(ctx context.Context, s *step) {
	if s.adopted && neverLaunched(s.dir) {
		a.discard(s)
		return
	}
	for began := a.boot(); ; {
		end := run.Conclude
		if a.boot()-began >= a.stuckAfter {
			end = run.Abandon
		}
		concludeCtx, cancel := context.WithTimeout(ctx, leftoverTimeout)
		state, err := end(concludeCtx, s.dir)
		cancel()
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			a.finish(ctx, s, state)
			return
		}
		a.log.Error("the end of a step without supervisor could not be settled; tried again", "step", label(s.key, s.id), "err", err)
		if !sleep(ctx, attachRetry) {
			return
		}
	}
}

// neverLaunched reports whether a step was left by an agent that was killed while it prepared the step.
func neverLaunched(dir string) bool {
	_, started := run.ReadStarted(dir)
	_, result := run.ReadResult(dir)
	return errors.Is(started, fs.ErrNotExist) && errors.Is(result, fs.ErrNotExist)
}

// discard forgets a step of which nothing was executed; if it is still wanted it is prepared again.
func (a *Agent) discard(s *step) {
	if err := os.RemoveAll(s.dir); err != nil {
		a.log.Error("the directory of a step that was not prepared to the end could not be removed", "dir", s.dir, "err", err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if at := a.attempts[s.key]; at != nil {
		delete(at.steps, s.id)
	}
	a.touch()
}

// finish puts a step's end into the journal; false if ctx ended before.
func (a *Agent) finish(ctx context.Context, s *step, state *supervisorv1.StepState) bool {
	a.mu.Lock()
	a.tell(s, state)
	a.noteStuck(s, state)
	s.final = state
	s.startNS = max(s.startNS, state.GetStartBootNs())
	s.closePort()
	if s.force != nil {
		s.force.Stop()
	}
	s.phase = PhaseEnded
	switch {
	case s.failed != nil:
		s.final = s.failed.state()
	case s.silent != "" && len(state.GetStuck()) == 0 && state.GetStartBootNs() == 0: // nobody but run.Conclude has told its end
		s.final = proto.CloneOf(state)
		s.final.Sentence = s.silent
	}
	if s.final.GetPhase() == supervisorv1.Phase_PHASE_FAILED {
		s.phase = PhaseFailed
	}
	reported := s.reported
	a.show() // readers may have the rest of the output, though nothing is reported yet
	a.mu.Unlock()
	return reported || a.reportEnd(ctx, s)
}

// reportEnd puts the end of a step that is over into the journal; false if ctx ended before.
func (a *Agent) reportEnd(ctx context.Context, s *step) bool {
	a.mu.Lock()
	report := s.endReport(a.wanted(s))
	a.mu.Unlock()
	id, ok := a.append(ctx, report)
	if !ok {
		return false
	}
	a.fault("journaled")
	if ctx.Err() != nil {
		return false
	}
	if s.dir != "" {
		a.markReported(s.dir)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	s.reported, s.report = true, id
	s.stages.mark(stageReported)
	a.log.Debug("the stages of a step", "step", label(s.key, s.id), "ms", s.stages)
	a.announce()
	return true
}

// wanted is what the controllers want of a step; UNSPECIFIED if they do not speak of it. a.mu is held.
func (a *Agent) wanted(s *step) nodev1.WorkState {
	for _, order := range a.control.desired {
		if keyOf(order.GetJob().GetId(), order.GetFence()) != s.key {
			continue
		}
		for _, want := range order.GetSteps() {
			if want.GetStep().GetId() == s.id {
				return want.GetWant()
			}
		}
	}
	return nodev1.WorkState_WORK_STATE_UNSPECIFIED
}

// endReport is the report of a step that is over. One that was not prepared is a failed prepare, unless it was prepared
// once and has been started since: then its tasks have ended without having been executed. a.mu is held.
func (s *step) endReport(wanted nodev1.WorkState) *logv1.TaskReport {
	report := &logv1.TaskReport{JobId: s.key.job, Fence: s.record.GetOrder().GetFence()}
	if s.phase == PhaseFailed && wanted != nodev1.WorkState_WORK_STATE_RUNNING {
		report.Event = &logv1.TaskReport_PrepareFailed{PrepareFailed: &logv1.PrepareFailed{
			StepId: proto.Uint32(s.id), Sentence: clip(s.final.GetSentence()), UsersFault: s.final.GetUsersFault(),
		}}
		return report
	}
	report.Event = &logv1.TaskReport_StepEnded{StepEnded: &logv1.StepEnded{
		StepId: s.id, Exits: s.exits(), TimeLimit: s.final.GetTimeLimit(), Deadline: s.final.GetDeadline(),
		Sentence: clip(s.final.GetSentence()), ElapsedMs: elapsedMS(s.final), ExecTime: s.execTime(), Usage: usageOf(s.final),
	}}
	return report
}

// exits folds the ends of the node's tasks into ranges. Tasks without one were never executed. a.mu is held.
func (s *step) exits() []*apiv1.TaskExit {
	byRank := make(map[uint32]*apiv1.TaskExit)
	for _, task := range s.final.GetTasks() {
		if task.GetExit() != nil {
			byRank[task.GetRank()] = task.GetExit()
		}
	}
	missing := &apiv1.TaskExit{Signal: uint32(syscall.SIGTERM), EndedBySupervisor: true}
	if s.phase == PhaseFailed {
		missing = &apiv1.TaskExit{Code: 1, EndedBySupervisor: true, LaunchError: s.final.GetSentence()}
	}
	return foldExits(s.record.GetOrder().GetSteps()[0].GetRanks(), byRank, missing)
}

// foldExits covers exactly the given ranks with ranges of tasks that ended alike.
func foldExits(ranks []uint32, byRank map[uint32]*apiv1.TaskExit, missing *apiv1.TaskExit) []*apiv1.TaskExit {
	ranks = slices.Sorted(slices.Values(ranks))
	var exits []*apiv1.TaskExit
	for _, rank := range ranks {
		exit := byRank[rank]
		if exit == nil {
			exit = missing
		}
		exit = proto.Clone(exit).(*apiv1.TaskExit)
		exit.FirstRank, exit.Count, exit.LaunchError = rank, 1, clip(exit.GetLaunchError())
		if n := len(exits); n > 0 && exits[n-1].GetFirstRank()+exits[n-1].GetCount() == rank {
			exit.FirstRank, exit.Count = exits[n-1].GetFirstRank(), exits[n-1].GetCount()
			if proto.Equal(exit, exits[n-1]) {
				exits[n-1].Count++
				continue
			}
			exit.FirstRank, exit.Count = rank, 1
		}
		exits = append(exits, exit)
	}
	return exits
}

// clip bounds a sentence.
func clip(sentence string) string {
	if len(sentence) <= maxSentence {
		return sentence
	}
	cut := maxSentence
	for cut > 0 && sentence[cut]&0xc0 == 0x80 {
		cut--
	}
	return sentence[:cut] + "…"
}

// missing reports the end of a step of which nothing is known here: it never starts. a.mu is held.
func (a *Agent) missing(ctx context.Context, at *attempt, action Action) {
	order := proto.Clone(action.Order).(*nodev1.DesiredAttempt)
	order.Steps = []*nodev1.DesiredStep{action.StepOrder}
	s := newStep(keyOf(action.Job, action.Fence), &nodev1.StepRecord{Order: order, Cookie: a.cookie(order)}, "")
	s.phase = PhaseEnded
	s.final = &supervisorv1.StepState{Phase: supervisorv1.Phase_PHASE_ENDED}
	if action.StepOrder.GetWant() == nodev1.WorkState_WORK_STATE_RUNNING {
		s.final.Sentence = "Node " + a.cfg.Spec.GetName() + " knows nothing of the step: its agent's directory was lost."
		for _, rank := range action.StepOrder.GetRanks() {
			s.final.Tasks = append(s.final.Tasks, &supervisorv1.TaskState{Rank: rank, Ended: true, Exit: &apiv1.TaskExit{
				Signal: 9, EndedBySupervisor: true, LaunchError: s.final.Sentence,
			}})
		}
	}
	at.steps[s.id] = s
	a.wg.Go(func() { a.reportEnd(ctx, s) })
}

// changeLimit remembers a changed time limit of the attempt and lets the supervisor know. a.mu is held.
func (a *Agent) changeLimit(s *step, limitS uint32) {
	s.limitS, s.newLimit = limitS, true
	s.record.Order.TimeLimitS = limitS
	if err := a.writeStep(s.dir, s.record); err != nil {
		a.log.Error("a step's record could not be written", "step", label(s.key, s.id), "err", err)
	}
	a.poke(s.kick)
}
