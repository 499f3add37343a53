package server

import (
	"context"
	"time"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/muster/api/v1/apiv1connect"
)

// newTimer returns a timer for a number of milliseconds.
func newTimer(ms uint32) *time.Timer { return time.NewTimer(time.Duration(ms) * time.Millisecond) }

// WatchJobs streams changes in order. The first message comes at once. Messages carry a revision from which the watch
// can be resumed on any controller, except those in the middle of the present state or of a large batch. A watcher that
// is slower than the state forgets gets relist; there is never a silent gap.
func (s jobService) WatchJobs(ctx context.Context, request *apiv1.WatchJobsRequest, stream apiv1connect.JobServiceWatchJobsServerStream) error {
	w := &watch{server: s.Server, filter: request.Filter, send: stream.Send}
	if request.After == nil {
		view, err := s.view(ctx, nil)
		if err != nil {
			return err
		}
		if err := w.present(view); err != nil {
			return err
		}
	} else {
		waiting, cancel := context.WithTimeout(ctx, behindWait)
		view, err := s.viewAt(waiting, request.After)
		cancel()
		if err != nil {
			return err
		}
		w.after = request.After
		if relist, err := w.changes(view, true); err != nil || relist {
			return err
		}
	}
	return w.follow(ctx)
}

// watch is one stream.
type watch struct {
	server *Server
	filter *apiv1.JobFilter
	send   func(*apiv1.WatchJobsResponse) error
	after  *apiv1.Revision
}

// follow sends changes until the caller leaves, this controller leaves or must not serve any more, or relist.
func (w *watch) follow(ctx context.Context) error {
	beat := time.NewTicker(watchBeat)
	defer beat.Stop()
	for {
		changed := w.server.replica.Changed() // before View, so that no publication is missed
		quiet := false
		select {
		case <-changed:
		case <-beat.C:
			quiet = true
		case <-w.server.draining:
			return w.server.leaving()
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := w.server.refuse(apiv1connect.JobServiceWatchJobsProcedure); err != nil {
			return err
		}
		if relist, err := w.changes(w.server.replica.View(), quiet); err != nil || relist {
			return err
		}
		if quiet {
			continue
		}
		if err := pause(ctx, watchPause, w.server.draining); err != nil {
			return err
		}
	}
}

// present sends the state at a view; only the last message has the revision.
func (w *watch) present(view *fsm.View) error {
	match, err := newMatcher(view, w.filter)
	if err != nil {
		return err
	}
	message := &apiv1.WatchJobsResponse{}
	for job := range match.candidates(0) {
		if !match.job(job) {
			continue
		}
		message.Jobs = append(message.Jobs, job)
		message.Steps = append(message.Steps, runningSteps(view, job)...)
		if len(message.Jobs)+len(message.Steps) >= watchBatch {
			if err := w.send(message); err != nil {
				return err
			}
			message = &apiv1.WatchJobsResponse{}
		}
	}
	message.Revision = view.Revision()
	w.after = view.Revision()
	return w.send(message)
}

// changes sends what changed up to a view, and nothing if that is nothing of the filter's, unless always.
func (w *watch) changes(view *fsm.View, always bool) (relist bool, err error) {
	if fsm.CompareRevisions(view.Revision(), w.after) == 0 && !always {
		return false, nil
	}
	changes, complete := view.ChangedSince(w.after)
	if !complete {
		return true, w.send(&apiv1.WatchJobsResponse{Relist: true})
	}
	match, err := newMatcher(view, w.filter)
	if err != nil {
		return false, err
	}
	message := &apiv1.WatchJobsResponse{}
	sent := false
	for change := range changes {
		w.add(message, view, match, change)
		if len(message.Jobs)+len(message.Steps)+len(message.Removed) >= watchBatch {
			if err := w.send(message); err != nil {
				return false, err
			}
			message, sent = &apiv1.WatchJobsResponse{}, true
		}
	}
	w.after = view.Revision()
	if len(message.Jobs)+len(message.Steps)+len(message.Removed) == 0 && !always && !sent {
		return false, nil
	}
	message.Revision = view.Revision()
	return false, w.send(message)
}

func (w *watch) add(message *apiv1.WatchJobsResponse, view *fsm.View, match *matcher, change fsm.Change) {
	switch change.Kind {
	case fsm.ChangeJob:
		if change.Removed {
			if ids := w.filter.GetJobIds(); len(ids) == 0 || set(ids)[change.Job] {
				message.Removed = append(message.Removed, change.Job)
			}
		} else if job := view.Job(change.Job); job != nil && match.watched(job) {
			message.Jobs = append(message.Jobs, job)
		}
	case fsm.ChangeStep:
		if step := view.Step(change.Job, change.Attempt, change.Step); step != nil {
			if job := view.Job(change.Job); job != nil && match.watched(job) {
				message.Steps = append(message.Steps, step)
			}
		}
	case fsm.ChangeAttempt, fsm.ChangeNode, fsm.ChangeCluster:
		// Attempts show in their jobs, which change with them; nodes and the cluster are not watched here.
	}
}

// watched is like job, but ignores states and ends: a watcher of active jobs must see them end.
func (m *matcher) watched(job *apiv1.Job) bool {
	if m.loose == nil {
		filter := &apiv1.JobFilter{JobIds: m.filter.GetJobIds(), Uids: m.filter.GetUids(), Partitions: m.filter.GetPartitions(),
			Names: m.filter.GetNames(), Accounts: m.filter.GetAccounts(), Nodes: m.filter.GetNodes(),
			SubmittedBefore: m.filter.GetSubmittedBefore()}
		loose := *m
		loose.filter, loose.states = filter, nil
		m.loose = &loose
	}
	return m.loose.job(job)
}
