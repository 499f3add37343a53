package server

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"iter"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
)

// ListJobs returns one page of jobs by id.
func (s jobService) ListJobs(ctx context.Context, request *apiv1.ListJobsRequest) (*apiv1.ListJobsResponse, error) {
	from, err := decodeToken(request.Page.GetToken())
	if err != nil {
		return nil, err
	}
	size := int(request.Page.GetSize())
	if size == 0 || size > rpc.MaxPageSize {
		size = rpc.MaxPageSize
	}
	view, err := s.view(ctx, request.Read)
	if err != nil {
		return nil, err
	}
	match, err := newMatcher(view, request.Filter)
	if err != nil {
		return nil, err
	}
	response := &apiv1.ListJobsResponse{Info: s.info(view)}
	stepBytes := 0
	for job := range match.candidates(from) {
		if !match.job(job) {
			continue
		}
		if len(response.Jobs) == size || stepBytes > stepPageBytes {
			response.NextToken = encodeToken(job.Id)
			break
		}
		if request.AllSteps {
			for step := range view.AttemptSteps(job.Id, job.Status.GetAttempt()) {
				response.Steps = append(response.Steps, step)
				stepBytes += proto.Size(step)
			}
		} else if request.Steps {
			response.Steps = append(response.Steps, runningSteps(view, job)...)
		}
		if request.Brief {
			job = brief(job)
		}
		response.Jobs = append(response.Jobs, job)
	}
	return response, nil
}

func runningSteps(view *fsm.View, job *apiv1.Job) []*apiv1.Step {
	if job.Status.GetAttempt() == 0 || fsm.Ended(job.Status.State) {
		return nil
	}
	var steps []*apiv1.Step
	for step := range view.AttemptSteps(job.Id, job.Status.Attempt) {
		if !fsm.StepEnded(step.State) {
			steps = append(steps, step)
		}
	}
	return steps
}

// brief leaves out what only a detailed listing shows. What remains is shared with the state.
func brief(job *apiv1.Job) *apiv1.Job {
	spec := job.Spec
	return &apiv1.Job{Id: job.Id, Revision: job.Revision, Owner: job.Owner, Status: job.Status, Spec: &apiv1.JobSpec{
		Name:              spec.GetName(),
		Kind:              spec.GetKind(),
		Account:           spec.GetAccount(),
		Partitions:        spec.GetPartitions(),
		Comment:           spec.GetComment(),
		Nice:              spec.GetNice(),
		Priority:          spec.GetPriority(),
		Hold:              spec.GetHold(),
		Resources:         spec.GetResources(),
		TimeLimitS:        spec.GetTimeLimitS(),
		Requeue:           spec.GetRequeue(),
		AutomaticRecovery: spec.GetAutomaticRecovery(),
		BeginTime:         spec.GetBeginTime(),
		Qos:               spec.GetQos(),
		Wckey:             spec.GetWckey(),
	}}
}

func encodeToken(from uint32) string {
	return base64.RawURLEncoding.EncodeToString(binary.BigEndian.AppendUint32(nil, from))
}

func decodeToken(token string) (uint32, error) {
	if token == "" {
		return 0, nil
	}
	data, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || len(data) != 4 {
		return 0, malformed("page.token", "the page token %q is none that this cluster gave out", token)
	}
	return binary.BigEndian.Uint32(data), nil
}

// matcher is a filter made ready for many jobs: lists are sets, node names are numbers.
type matcher struct {
	view       *fsm.View
	filter     *apiv1.JobFilter
	ids        []uint32 // sorted
	uids       map[uint32]bool
	states     map[apiv1.JobState]bool
	partitions map[string]bool
	names      map[string]bool
	accounts   map[string]bool
	nodes      map[uint32]bool
	loose      *matcher // for watches
}

func newMatcher(view *fsm.View, filter *apiv1.JobFilter) (*matcher, error) {
	for _, list := range []struct {
		name string
		n    int
	}{
		{"job ids", len(filter.GetJobIds())}, {"user ids", len(filter.GetUids())}, {"states", len(filter.GetStates())},
		{"partitions", len(filter.GetPartitions())}, {"names", len(filter.GetNames())},
		{"accounts", len(filter.GetAccounts())}, {"nodes", len(filter.GetNodes())},
	} {
		if err := tooMany(list.name, list.n, maxNames); err != nil {
			return nil, err
		}
	}
	m := &matcher{
		view:       view,
		filter:     filter,
		ids:        slices.Compact(slices.Sorted(slices.Values(filter.GetJobIds()))),
		uids:       set(filter.GetUids()),
		states:     set(filter.GetStates()),
		partitions: set(filter.GetPartitions()),
		names:      set(filter.GetNames()),
		accounts:   set(filter.GetAccounts()),
	}
	if names := filter.GetNodes(); len(names) > 0 {
		m.nodes = map[uint32]bool{}
		for _, name := range names {
			if node := view.NodeByName(name); node != nil {
				m.nodes[node.Number] = true
			}
		}
	}
	return m, nil
}

// set returns nil, which means "any", for an empty list.
func set[T comparable](list []T) map[T]bool {
	if len(list) == 0 {
		return nil
	}
	m := make(map[T]bool, len(list))
	for _, item := range list {
		m[item] = true
	}
	return m
}

// candidates yields jobs by id, from an id on, among which all matches are: the named ones, the active ones if no other
// state can match, or all.
func (m *matcher) candidates(from uint32) iter.Seq[*apiv1.Job] {
	switch {
	case len(m.ids) > 0:
		return func(yield func(*apiv1.Job) bool) {
			first, _ := slices.BinarySearch(m.ids, from)
			for _, id := range m.ids[first:] {
				if job := m.view.Job(id); job != nil && !yield(job) {
					return
				}
			}
		}
	case m.onlyActive():
		return func(yield func(*apiv1.Job) bool) {
			for job := range m.view.ActiveJobs() {
				if job.Id >= from && !yield(job) {
					return
				}
			}
		}
	}
	return m.view.Jobs(from)
}

func (m *matcher) onlyActive() bool {
	if m.filter.GetActive() {
		return true
	}
	if m.states == nil {
		return false
	}
	for state := range m.states {
		if fsm.Ended(state) {
			return false
		}
	}
	return true
}

// job reports whether a job matches. It costs no allocation.
func (m *matcher) job(job *apiv1.Job) bool {
	status := job.Status
	if m.filter.GetActive() && fsm.Ended(status.State) && !status.Completing {
		return false
	}
	if m.uids != nil && !m.uids[job.Owner.GetUid()] ||
		m.states != nil && !m.states[status.State] ||
		m.names != nil && !m.names[job.Spec.GetName()] ||
		m.accounts != nil && !m.accounts[job.Spec.GetAccount()] {
		return false
	}
	if len(m.ids) > 0 {
		if _, ok := slices.BinarySearch(m.ids, job.Id); !ok {
			return false
		}
	}
	if m.partitions != nil && !m.partitions[status.Partition] &&
		!slices.ContainsFunc(job.Spec.GetPartitions(), func(p string) bool { return m.partitions[p] }) {
		return false
	}
	if since := m.filter.GetEndedSince(); since != nil && status.EndTime != nil && fsm.Ended(status.State) &&
		status.EndTime.AsTime().Before(since.AsTime()) {
		return false
	}
	if before := m.filter.GetSubmittedBefore(); before != nil && !status.SubmitTime.AsTime().Before(before.AsTime()) {
		return false
	}
	return m.nodes == nil || m.onNodes(job)
}

func (m *matcher) onNodes(job *apiv1.Job) bool {
	for attempt := range m.view.Attempts(job.Id) {
		for _, group := range attempt.Placement.GetGroups() {
			for _, number := range group.Nodes {
				if m.nodes[number] {
					return true
				}
			}
		}
	}
	return false
}
