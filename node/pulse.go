package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/muster-hpc/muster/node/run"
)

// pulse are the bounds of a supervisor's silence. Tests have less patience.
type pulse struct {
	// every is the silence after which it is asked, answer how long it may take to answer, and patience how long once it was continued.
	every, answer, patience time.Duration
}

// heardNow notes that a step's supervisor lives: it said something.
func (a *Agent) heardNow(s *step) {
	a.mu.Lock()
	s.heard = a.boot()
	a.mu.Unlock()
}

// silence is how long nothing was heard of a step's supervisor.
func (a *Agent) silence(s *step) time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s.heard == 0 {
		s.heard = a.boot()
	}
	return a.boot() - s.heard
}

// feelPulse asks a silent supervisor whether it answers. One that does not may have been stopped: it is continued, once. If that does not
// help it is killed, and the step concluded as that of any supervisor that is lost: a step that nobody holds to its limits and deadline
// must not go on.
func (a *Agent) feelPulse(ctx context.Context, s *step, handle *run.Handle) {
	if a.silence(s) < a.pulse.every || a.ping(ctx, s, handle, a.pulse.answer) || ctx.Err() != nil {
		return
	}
	continued, err := signalSupervisor(s.dir, unix.SIGCONT)
	a.mu.Lock()
	preparing := s.phase == PhasePreparing
	a.mu.Unlock()
	if preparing { // it answers when it is ready; the time for that is bounded elsewhere (giveUp)
		a.heardNow(s)
		return
	}
	a.log.Warn("a supervisor does not answer; it is continued, in case that somebody stopped it", "step", label(s.key, s.id),
		"processes", continued, "silent_for", a.silence(s).Round(time.Millisecond), "err", err)
	if a.ping(ctx, s, handle, a.pulse.patience) || ctx.Err() != nil {
		return
	}
	silent := a.silence(s).Round(time.Second)
	killed, err := killSupervisor(s.dir)
	a.log.Error("a supervisor still does not answer; it is killed, and its processes follow", "step", label(s.key, s.id), "killed", killed,
		"silent_for", silent, "err", err)
	a.mu.Lock()
	s.silent = fmt.Sprintf("The supervisor of this step did not answer for %v, also after it was continued; it and the step's processes were killed.", silent)
	a.mu.Unlock()
	_ = handle.Close() // what was said last is in the result, if there is one
}

// ping reports whether a supervisor answers in time, or has said something. A connection that ended is not silence.
func (a *Agent) ping(ctx context.Context, s *step, handle *run.Handle, within time.Duration) bool {
	pingCtx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	err := handle.Ping(pingCtx)
	if err != nil && !errors.Is(err, run.ErrClosed) {
		return false
	}
	if err == nil {
		a.heardNow(s)
	}
	return true
}
