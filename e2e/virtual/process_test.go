package virtual

import (
	"slices"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"

	"github.com/muster-hpc/muster/fsm"
)

// supervisor is a step's supervisor with its tasks: it outlives the agent, and dies with the node.
type supervisor struct {
	m        *machine
	job      uint32
	fence    *apiv1.Fence
	step     *step
	started  bool
	lost     bool // it is gone without a result
	ended    bool
	ending   bool
	startAt  time.Duration
	deadline time.Duration
	watching bool
	limitS   uint32
	limiting bool
}

func (p *supervisor) running() bool { return p.started && !p.ended && !p.lost }

// start executes the tasks, once; false if it must not.
func (p *supervisor) start() bool {
	s := p.m.s
	if p.started || p.ended {
		return p.started
	}
	if p.step.order.StopsItself && (p.deadline == 0 || s.now >= p.deadline) {
		return false
	}
	p.started, p.startAt = true, s.now
	s.executed(p)
	plan := s.planOf(p)
	if plan.execFails && s.chance(5000) {
		s.execFailed[attemptKey{p.job, p.fence.Attempt}] = true
		exit := &apiv1.TaskExit{Code: 2, LaunchError: "execve(): /no/such: No such file or directory"}
		s.truth[p.key()] = exit
		p.finish(result{exit: exit})
		return true
	}
	took := plan.duration - plan.duration/20 + s.between(0, plan.duration/10)
	s.after(took, func() {
		if p.running() && !p.ending {
			exit := &apiv1.TaskExit{Code: plan.code, Signal: plan.signal}
			s.truth[p.key()] = exit
			p.finish(result{exit: exit})
		}
	})
	p.limits()
	if p.step.id == fsm.BatchStep {
		s.script(p, took)
	}
	return true
}

func (p *supervisor) key() processKey {
	return processKey{p.job, p.fence.Attempt, p.fence.Placement, p.step.id, p.m.idx}
}

// finish puts the result on disk and tells the agent if it is there.
func (p *supervisor) finish(r result) {
	p.ended = true
	p.step.result = &r
	p.leave()
	m, life := p.m, p.m.life
	p.m.s.after(time.Millisecond, func() {
		if m.up && m.life == life {
			m.over(p)
		}
	})
}

func (p *supervisor) leave() {
	p.m.supervisors = slices.DeleteFunc(p.m.supervisors, func(o *supervisor) bool { return o == p })
	p.m.s.processGone(p)
}

// gone is called when the node loses power.
func (p *supervisor) gone() {
	p.lost = true
	p.m.s.processGone(p)
}

// terminate ends the tree: TERM, grace, KILL.
func (p *supervisor) terminate(grace time.Duration) {
	if p.ended || p.lost {
		return
	}
	if !p.started {
		p.finish(result{})
		return
	}
	if p.ending {
		return
	}
	p.ending = true
	p.m.s.after(p.m.s.between(0, grace), func() {
		if p.running() {
			p.finish(result{exit: &apiv1.TaskExit{Signal: 15, EndedBySupervisor: true}})
		}
	})
}

func (p *supervisor) extend(deadline time.Duration) {
	p.deadline = max(p.deadline, deadline)
	p.watch()
}

// watch ends the tree at the lease deadline, at once.
func (p *supervisor) watch() {
	if !p.step.order.StopsItself || p.deadline == 0 || p.watching {
		return
	}
	p.watching = true
	p.m.s.after(p.deadline-p.m.s.now, func() {
		p.watching = false
		switch {
		case p.ended || p.lost:
		case p.m.s.now < p.deadline:
			p.watch()
		case !p.started:
			p.finish(result{deadline: true})
		default:
			p.m.s.trace("deadline", uint64(p.job), uint64(p.fence.Attempt), uint64(p.m.idx))
			p.finish(result{deadline: true, exit: &apiv1.TaskExit{Signal: 9, EndedBySupervisor: true}})
		}
	})
}

func (p *supervisor) setLimit(limitS uint32) {
	p.limitS = limitS
	p.limits()
}

// limits ends the tree at its time limit.
func (p *supervisor) limits() {
	if p.limitS == 0 || p.limitS == fsm.Unlimited || !p.started || p.limiting {
		return
	}
	p.limiting = true
	end := p.startAt + time.Duration(p.limitS)*time.Second
	p.m.s.after(max(0, end-p.m.s.now), func() {
		p.limiting = false
		switch {
		case !p.running() || p.ending:
		case p.m.s.now < p.startAt+time.Duration(p.limitS)*time.Second:
			p.limits()
		default:
			p.ending = true
			p.m.s.timedOut[attemptKey{p.job, p.fence.Attempt}] = true
			p.m.s.after(p.m.s.between(0, 30*time.Second), func() {
				if p.running() {
					p.finish(result{timeLimit: true, exit: &apiv1.TaskExit{Signal: 15, EndedBySupervisor: true}})
				}
			})
		}
	})
}
