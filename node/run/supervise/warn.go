package supervise

import (
	"time"

	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"golang.org/x/sys/unix"
)

// warning is a signal before the time limit.
type warning struct {
	*supervisorv1.Warning
	sent bool
}

// after is when it is due, from the start.
func (w *warning) after() time.Duration { return milliseconds(w.GetAfterMs()) }

// warn takes warnings over: those that are known move. One that was sent is sent again only at a time that is still to come.
func (s *supervisor) warn(all []*supervisorv1.Warning) {
	for _, w := range all {
		known := (*warning)(nil)
		for _, old := range s.warnings {
			if old.GetNumber() == w.GetNumber() {
				known = old
			}
		}
		if known == nil {
			s.warnings = append(s.warnings, &warning{Warning: w})
			continue
		}
		known.Warning = w
		if known.sent && s.executed() && !s.started.add(known.after()).reached(now()) {
			known.sent, s.changed = false, true
		}
	}
}

// warnAt is when the next warning is due; 0 if none is.
func (s *supervisor) warnAt() bootTime {
	var next bootTime
	if !s.executed() || s.ending || s.over() {
		return 0
	}
	for _, w := range s.warnings {
		if !w.sent {
			next = sooner(next, s.started.add(max(w.after(), 1)))
		}
	}
	return next
}

// tickWarnings sends what is due.
func (s *supervisor) tickWarnings(now bootTime) {
	if !s.warnAt().reached(now) {
		return
	}
	for _, w := range s.warnings {
		if w.sent || !s.started.add(w.after()).reached(now) {
			continue
		}
		w.sent, s.changed = true, true
		s.log.Info("the signal before the time limit", "signal", w.GetSignal(), "limit", s.limit)
		if w.GetSignal() > 0 && w.GetSignal() <= 64 {
			s.deliver(unix.Signal(w.GetSignal()), w.GetTree())
		}
	}
}

// warned are the numbers of the warnings that were sent.
func (s *supervisor) warned() []uint32 {
	var numbers []uint32
	for _, w := range s.warnings {
		if w.sent {
			numbers = append(numbers, w.GetNumber())
		}
	}
	return numbers
}

// deliver signals the tasks: all their processes, or the first of each.
func (s *supervisor) deliver(sig unix.Signal, tree bool) {
	if tree {
		s.tree.signal(s.groups(), sig)
		return
	}
	for _, pid := range s.groups() {
		if err := unix.Kill(pid, sig); err != nil {
			s.log.Warn("delivering a signal", "pid", pid, "signal", int(sig), "error", err)
		}
	}
}
