package node

import (
	"log/slog"
	"time"
)

// The stages of a step on a node, in the order in which a launch goes through them.
const (
	stageOrdered  = "ordered"  // the order to prepare was taken in
	stageRecorded = "recorded" // its directory and record are made
	stageFetched  = "fetched"  // script and environment are here
	stageLaunched = "launched" // its supervisor has the plan
	stagePrepared = "prepared" // the supervisor is ready
	stageStart    = "start"    // the order to start was given to the supervisor
	stageStarted  = "started"  // the supervisor said that the tasks were executed
	stageEnded    = "ended"    // the supervisor said how they ended
	stageReported = "reported" // the end is in the journal
)

// stage is when a step reached a stage.
type stage struct {
	name string
	at   time.Time
}

// stages is how a step got where it is. At most one entry for each name, so that it stays small.
type stages []stage

// mark notes the first time at which a stage is reached.
func (l *stages) mark(name string) {
	for _, s := range *l {
		if s.name == name {
			return
		}
	}
	*l = append(*l, stage{name, time.Now()})
}

// LogValue shows the first stage as a time of day and the others as milliseconds after it.
func (l stages) LogValue() slog.Value {
	var attrs []slog.Attr
	for i, s := range l {
		if i == 0 {
			attrs = append(attrs, slog.String(s.name, s.at.UTC().Format("15:04:05.000000")))
			continue
		}
		attrs = append(attrs, slog.Float64(s.name, float64(s.at.Sub(l[0].at).Microseconds())/1000))
	}
	return slog.GroupValue(attrs...)
}

// reach notes that a step has reached a stage.
func (a *Agent) reach(s *step, name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	s.stages.mark(name)
}
