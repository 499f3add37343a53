package node

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"

	"github.com/muster-hpc/muster/node/environ"
	"github.com/muster-hpc/muster/node/journal"
	"github.com/muster-hpc/muster/node/run"
)

// scriptFile is the batch script's name in its step's directory; scripts that look at $0 know it.
const scriptFile = "slurm_script"

// prepareError is why a step could not be prepared, for the user.
type prepareError struct {
	sentence   string
	usersFault bool
}

func (e *prepareError) Error() string { return e.sentence }

func (e *prepareError) state() *supervisorv1.StepState {
	return &supervisorv1.StepState{Version: run.Version, Phase: supervisorv1.Phase_PHASE_FAILED, Sentence: e.sentence, UsersFault: e.usersFault}
}

// prepareFailure makes any error one for the user. A full disk is named.
func prepareFailure(dir string, err error) *prepareError {
	var p *prepareError
	switch {
	case errors.As(err, &p):
		return p
	case errors.Is(err, journal.ErrNoSpace), errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return &prepareError{sentence: fmt.Sprintf("no space is left on the disk of the agent's directory %s; free some space there", dir)}
	case errors.Is(err, context.DeadlineExceeded):
		return &prepareError{sentence: "the step was not prepared in time: " + err.Error()}
	}
	return &prepareError{sentence: "the step could not be prepared: " + err.Error()}
}

// beginPrepare makes the step known and prepares it in its own goroutine. a.mu is held.
func (a *Agent) beginPrepare(ctx context.Context, at *attempt, action Action) {
	order := proto.Clone(action.Order).(*nodev1.DesiredAttempt)
	order.Steps = []*nodev1.DesiredStep{proto.Clone(action.StepOrder).(*nodev1.DesiredStep)}
	record := &nodev1.StepRecord{Order: order, BootId: a.instance.GetBootId(), Cookie: a.cookie(order)}
	for _, signal := range order.GetSignals() {
		record.SignalsBefore = max(record.SignalsBefore, signal.GetOrdinal())
	}
	s := newStep(keyOf(action.Job, action.Fence), record, a.stepDir(order))
	s.stages.mark(stageOrdered)
	at.steps[s.id] = s
	timeout := defaultPrepareTimeout
	if ms := a.control.settings.GetPrepareTimeoutMs(); ms > 0 {
		timeout = time.Duration(ms) * time.Millisecond
	}
	prepareCtx, cancel := context.WithTimeout(ctx, timeout)
	s.stop = cancel
	a.wg.Go(func() {
		defer cancel()
		a.prepareAndFollow(ctx, prepareCtx, s)
	})
	a.touch()
}

// prepareAndFollow prepares a step and then follows it to its end.
func (a *Agent) prepareAndFollow(ctx, prepareCtx context.Context, s *step) {
	handle, err := a.prepare(prepareCtx, s)
	if ctx.Err() != nil {
		if handle != nil {
			_ = handle.Close()
		}
		return
	}
	if err != nil {
		a.mu.Lock()
		ended := s.end != nil
		a.mu.Unlock()
		state := prepareFailure(a.cfg.Dir, err).state()
		if ended {
			state = &supervisorv1.StepState{Version: run.Version, Phase: supervisorv1.Phase_PHASE_ENDED}
		} else {
			a.log.Warn("a step could not be prepared", "step", label(s.key, s.id), "users_fault", state.GetUsersFault(), "err", err)
		}
		if err := run.WriteResult(s.dir, state); err != nil { // a later life of the agent would prepare it again
			a.log.Debug("the failure was not written to the step's directory", "err", err)
		}
		a.finish(ctx, s, state)
		return
	}
	deadline, _ := prepareCtx.Deadline()
	watchdog := time.AfterFunc(time.Until(deadline), func() { a.giveUp(s) })
	defer watchdog.Stop()
	a.follow(ctx, s, handle)
}

// giveUp ends a step whose supervisor did not become ready in time.
func (a *Agent) giveUp(s *step) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s.phase != PhasePreparing || s.end != nil {
		return
	}
	s.failed = &prepareError{sentence: "the step's supervisor did not become ready in time; its log in " + s.dir + " says more"}
	s.end = &ending{sentence: s.failed.sentence}
	a.armForce(s, a.forceAfter)
	a.poke(s.kick)
}

// prepare does everything that can be done before the tasks are executed, and launches the supervisor.
func (a *Agent) prepare(ctx context.Context, s *step) (*run.Handle, error) {
	order := s.record.GetOrder()
	src := sourceOf(order, order.GetSteps()[0])
	who, err := a.accounts.find(order.GetJob().GetOwner())
	if err != nil {
		return nil, err
	}
	if err := a.journal.Reserve(reserveBytes); err != nil {
		return nil, err
	}
	a.nameFiles(s, src)
	if err := a.findPort(s); err != nil {
		return nil, err
	}
	if err := a.makeDir(ctx, s); err != nil {
		return nil, err
	}
	a.fault("recorded")
	a.reach(s, stageRecorded)
	if err := a.beforeJob(ctx, order); err != nil {
		return nil, err
	}
	environment, err := a.blob(ctx, order.GetJob().GetId(), src.environmentBlob)
	if err != nil {
		return nil, fmt.Errorf("fetch the environment: %w", err)
	}
	script := ""
	if src.scriptBlob != "" {
		text, err := a.blob(ctx, order.GetJob().GetId(), src.scriptBlob)
		if err != nil {
			return nil, fmt.Errorf("fetch the batch script: %w", err)
		}
		if script, err = writeScript(s.dir, text, who); err != nil {
			return nil, err
		}
	}
	a.reach(s, stageFetched)
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	l, err := a.layOut(order, order.GetSteps()[0], script)
	if err != nil {
		return nil, err
	}
	plan := a.plan(s, src, who, l, environ.Split(environment))
	if err := a.confine(s, src, l, plan); err != nil {
		return nil, err
	}
	if err := a.manage(plan, src, order, environ.Split(environment)); err != nil {
		return nil, err
	}
	a.mu.Lock()
	s.needs, s.needsFor = needs(plan)
	a.mu.Unlock()
	handle, err := a.supervisors.Launch(ctx, s.dir, plan)
	if err != nil {
		return nil, err
	}
	a.fault("launched")
	a.reach(s, stageLaunched)
	return handle, nil
}

// source is what a step runs, from the step's or, for a job's first program, the job's specification.
type source struct {
	scriptBlob, environmentBlob, workDir string
	stdinPath, stdoutPath, stderrPath    string
	openAppend, batch                    bool
	umask                                uint32
	options                              *apiv1.TaskOptions
}

func sourceOf(order *nodev1.DesiredAttempt, step *nodev1.DesiredStep) source {
	job, own := order.GetJob().GetSpec(), step.GetStep().GetSpec()
	batch := step.GetStep().GetId() == environ.BatchStep
	if !batch && len(own.GetArgs()) > 0 {
		return source{
			environmentBlob: own.GetEnvironmentBlob(), workDir: own.GetWorkDir(),
			stdinPath: own.GetStdinPath(), stdoutPath: own.GetStdoutPath(), stderrPath: own.GetStderrPath(),
			openAppend: own.GetOpenAppend(), umask: own.GetUmask(), options: own.GetTaskOptions(),
		}
	}
	src := source{
		environmentBlob: job.GetEnvironmentBlob(), workDir: job.GetWorkDir(), batch: batch,
		stdinPath: job.GetStdinPath(), stdoutPath: job.GetStdoutPath(), stderrPath: job.GetStderrPath(),
		openAppend: job.GetOpenAppend(), umask: job.GetUmask(), options: job.GetTaskOptions(),
	}
	if batch {
		src.scriptBlob = job.GetScriptBlob()
		if src.stdoutPath == "" {
			src.stdoutPath = "slurm-%j.out"
		}
		if src.stdinPath == "" {
			src.stdinPath = os.DevNull
		}
	}
	return src
}

// nameFiles fills in where the tasks' output goes.
func (a *Agent) nameFiles(s *step, src source) {
	order := s.record.GetOrder()
	var files []*nodev1.TaskFiles
	for _, rank := range order.GetSteps()[0].GetRanks() {
		names := a.names(order, rank)
		f := &nodev1.TaskFiles{Rank: rank, StdoutPath: names.Path(src.stdoutPath, src.dir()), StderrPath: names.Path(src.stderrPath, src.dir())}
		if f.StderrPath == "" {
			f.StderrPath = f.StdoutPath // stderr follows a redirected stdout, as in Slurm
		}
		switch {
		case hasTerminal(src, rank):
			f.StderrPath = f.StdoutPath // a terminal has one stream
		case src.options.GetPty() && !src.batch && src.stdoutPath == "": // as in Slurm: only the terminal is heard
			f.StdoutPath, f.StderrPath = os.DevNull, os.DevNull
		}
		files = append(files, f)
	}
	a.mu.Lock()
	s.record.Files = files
	a.mu.Unlock()
}

func (a *Agent) names(order *nodev1.DesiredAttempt, rank uint32) environ.Names {
	step := order.GetSteps()[0]
	return environ.Names{
		JobID: order.GetJob().GetId(), StepID: step.GetStep().GetId(), JobName: order.GetJob().GetSpec().GetName(),
		User: order.GetJob().GetOwner().GetUser(), Node: a.cfg.Spec.GetName(), NodeIndex: step.GetNodeIndex(), Rank: rank,
		Restarts: order.GetJob().GetStatus().GetRestarts(),
	}
}

// dir is where relative names begin: the working directory, or /tmp if that does not exist, where the tasks then run.
func (s source) dir() string {
	if _, err := os.Stat(s.workDir); errors.Is(err, os.ErrNotExist) || s.workDir == "" {
		return "/tmp"
	}
	return s.workDir
}

// findPort finds a free port for the rendezvous and keeps it until the start, if this node is the step's first.
func (a *Agent) findPort(s *step) error {
	order := s.record.GetOrder()
	if !environ.WantsPort(order, order.GetSteps()[0]) {
		return nil
	}
	var last error
	for range portTries {
		port := portMin + rand.IntN(portMax-portMin+1)
		listener, err := net.Listen("tcp", ":"+strconv.Itoa(port))
		if err != nil {
			last = err
			continue
		}
		a.mu.Lock()
		s.port, s.record.Port = listener, uint32(port)
		a.mu.Unlock()
		return nil
	}
	return fmt.Errorf("find a free port for the rendezvous: %w", last)
}

// makeDir makes the step's directory and its record. What an earlier placement left there is removed: it is over.
func (a *Agent) makeDir(ctx context.Context, s *step) error {
	for {
		if _, err := os.Lstat(s.dir); errors.Is(err, os.ErrNotExist) {
			break
		}
		if alive, err := run.Alive(s.dir); err != nil {
			return err
		} else if !alive {
			break
		}
		// The supervisor of an earlier placement, which has ended, is about to leave.
		if !sleep(ctx, leavePoll) {
			return fmt.Errorf("an earlier placement's supervisor is still in %s: %w", s.dir, ctx.Err())
		}
	}
	if err := os.RemoveAll(s.dir); err != nil {
		return fmt.Errorf("remove what an earlier placement left: %w", err)
	}
	// The user passes through to the script, whatever umask the agent was started with; everything else is closed.
	err := os.Mkdir(s.dir, 0o711)
	if err == nil {
		err = os.Chmod(s.dir, 0o711)
	}
	if err != nil {
		return fmt.Errorf("make the step's directory: %w", err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.writeStep(s.dir, s.record)
}

func writeScript(dir string, script []byte, who account) (string, error) {
	path := filepath.Join(dir, scriptFile)
	if err := os.WriteFile(path, script, 0o700); err != nil {
		return "", fmt.Errorf("write the batch script: %w", err)
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(path, int(who.uid), int(who.gid)); err != nil {
			return "", fmt.Errorf("give the batch script to its user: %w", err)
		}
	}
	return path, nil
}

// plan says what the supervisor shall do.
func (a *Agent) plan(s *step, src source, who account, l *layout, user []string) *supervisorv1.StepPlan {
	order := s.record.GetOrder()
	_, gpus, _ := l.own(order)
	environments := environ.Tasks(environ.Request{
		Node: a.cfg.Spec.GetName(), Cluster: a.clusterName(), AgentSocket: a.SocketPath(), Home: who.home, Shell: "/bin/sh",
		Order: order, Step: order.GetSteps()[0], User: user, Commands: a.cfg.Commands,
		Bindings: l.bindings, GPUs: a.cfg.Spec.GetGpus(), Reachable: a.reachable(gpus),
	})
	a.mu.Lock()
	defer a.mu.Unlock()
	limit, warnings := a.timing(s)
	plan := &supervisorv1.StepPlan{
		Label: label(s.key, s.id), Uid: who.uid, Gid: who.gid, Groups: who.groups, Umask: src.umask, WorkDir: src.workDir,
		TimeLimitMs: uint64(limit / time.Millisecond), Warnings: warnings, KillGraceMs: order.GetKillGraceS() * 1000,
		StopsItself: order.GetStopsItself(), KillOnBadExit: src.options.GetKillOnBadExit(), Cookie: s.record.GetCookie(),
		BootId: a.kernelBoot, TaskProgramTimeoutMs: a.taskProgramTimeoutMS(),
	}
	s.toldLimit = limit
	if order.GetStopsItself() {
		plan.DeadlineBootNs = int64(a.lease.deadline)
	}
	plan.Tasks = a.tasks(s, src, l, environments)
	return plan
}

// taskProgramTimeoutMS bounds each program around a task. a.mu is held.
func (a *Agent) taskProgramTimeoutMS() uint32 {
	if s := a.control.settings.GetPrologTimeoutS(); s > 0 {
		return min(s, 86400) * 1000
	}
	return uint32(defaultPrologTimeout / time.Millisecond)
}
