package sched

import "cmp"

// position is a place in the order of jobs. The zero value is the front, before every job.
type position struct {
	rank uint64 // tier and priority, highest first
	id   JobID
}

func (a position) compare(b position) int {
	if a.rank != b.rank {
		return cmp.Compare(a.rank, b.rank)
	}
	return cmp.Compare(a.id, b.id)
}

// position is that of the job at the cursor.
func (c *class) position() position {
	return position{^(uint64(c.tier)<<32 | uint64(c.headPriority)), c.headID}
}

// begin counts what is to be done until every job has had its turn since the last change.
func (v *View) begin() {
	switch {
	case v.dirty:
		v.laps, v.reuse = 1, false
		if v.resume != (position{}) {
			v.laps = 2 // To the end, and again to where this pass goes on.
		}
	case v.laps == 0:
		v.laps = 1
	}
}

// sweep is how a pass divides its limits. Where the passes before it did not come to the end, half is for the front of the order, so that
// the first jobs never wait, and the rest for the jobs from where the last pass stopped, so that every job has its turn. The jobs between
// were considered in passes before, and did not fit then.
type sweep struct {
	stage stage
	// tests and work are the numbers at which the stage ends.
	tests, work int
	// from is where the last stage begins, skipped is raised when a job was left out.
	from    position
	skipped bool
	moved   bool // a job of the last stage had its turn
	gap     int  // jobs considered between front and rest
	gapWork int
}

type stage uint8

const (
	stageFront stage = iota
	stageGap
	stageRest
)

// turn is what happens with a class when it is its turn.
type turn uint8

const (
	turnConsiders turn = iota
	turnSkips
	turnEnds
)

func (p *pass) beginSweep() {
	s := &p.sweep
	s.from = p.v.resume
	s.stage, s.tests, s.work = stageFront, p.limits.Tests/2, p.limits.Work/2
	if s.from == (position{}) {
		s.stage, s.tests, s.work = stageRest, p.limits.Tests, p.limits.Work
	}
}

// turn decides whether the next class is considered.
func (p *pass) turn(c *class) turn {
	s := &p.sweep
	if len(p.dec.Placements) >= p.limits.Placements {
		return turnEnds // What was placed is progress: the next pass begins at the front.
	}
	if s.stage == stageFront && (p.dec.Considered >= s.tests || p.work >= s.work) {
		s.stage, s.gap, s.gapWork = stageGap, p.dec.Considered, p.work
	}
	if s.stage != stageRest && c.position().compare(s.from) >= 0 {
		if s.stage == stageGap {
			s.gap, s.gapWork = p.dec.Considered-s.gap, p.work-s.gapWork
		}
		s.stage, s.tests, s.work = stageRest, p.limits.Tests+s.gap, p.limits.Work+s.gapWork
	}
	switch s.stage {
	case stageFront:
	case stageGap:
		if !p.leads(c) {
			s.skipped = true
			return turnSkips
		}
		// A partition has one first; beyond these are only jobs that can never run, and they are known the next time.
		if p.dec.Considered-s.gap >= p.limits.Tests+len(p.v.partitions)+len(p.dec.Placements) {
			return turnEnds
		}
	case stageRest:
		if s.moved && (p.dec.Considered >= s.tests || p.work >= s.work) {
			p.v.resume = c.position()
			return turnEnds
		}
		s.moved = true
	}
	return turnConsiders
}

// leads tells whether a class may have the first job that does not fit in one of its partitions: nothing behind it may be considered
// before, because it might get a reservation.
func (p *pass) leads(c *class) bool {
	known := c.shapeOf == p.x.generation
	for i, name := range c.partitions {
		part := p.v.partitions[name]
		if part == nil || part.head != 0 || part.closed || known && c.shapes[i].never.Code != None {
			continue
		}
		return true
	}
	return false
}

// endSweep notes that the end of the order was reached.
func (p *pass) endSweep() {
	p.v.resume = position{}
	if p.v.laps--; !p.sweep.skipped {
		p.v.laps = 0
	}
	p.dec.Complete = p.v.laps == 0
}
