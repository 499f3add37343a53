package server

import (
	"context"
	"fmt"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/proto"

	"github.com/muster-hpc/muster/fsm"
	"github.com/muster-hpc/muster/fsm/shape"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	"github.com/muster-hpc/muster/proto/notation"
	"github.com/muster-hpc/muster/rpc"
)

// jobService is apiv1connect.JobServiceHandler.
type jobService struct{ *Server }

// SubmitJobs stores jobs durably.
func (s jobService) SubmitJobs(ctx context.Context, request *apiv1.SubmitJobsRequest) (*apiv1.SubmitJobsResponse, error) {
	return s.submit(ctx, request)
}

// CancelJobs ends or signals the jobs that the filter selects.
func (s jobService) CancelJobs(ctx context.Context, request *apiv1.CancelJobsRequest) (*apiv1.CancelJobsResponse, error) {
	if err := known(request); err != nil {
		return nil, err
	}
	command, err := stamp(ctx, request.RequestId, request)
	if err != nil {
		return nil, err
	}
	ids, err := s.selected(ctx, request.Filter)
	if err != nil {
		return nil, err
	}
	response := &apiv1.CancelJobsResponse{Revision: s.replica.View().Revision()}
	for part := 0; part == 0 || len(ids) > 0; part++ {
		n := min(len(ids), maxIDsPerCommand)
		result, err := s.propose(ctx, partOf(command, part, &logv1.Command{Op: &logv1.Command_CancelJobs{CancelJobs: &logv1.CancelJobs{
			JobIds: ids[:n], Signal: request.Signal, BatchOnly: request.BatchOnly, Full: request.Full, Step: request.Step,
			Complete: request.Complete, ExitCode: request.ExitCode, ExitSignal: request.ExitSignal}}}), false)
		if err != nil {
			return nil, err
		}
		if result.Refusal != nil {
			return nil, rpc.FromDetail(result.Refusal)
		}
		response.JobIds = append(response.JobIds, result.JobIds...)
		response.Refusals = append(response.Refusals, result.Refusals...)
		response.Revision = result.Revision
		ids = ids[n:]
	}
	return response, nil
}

// selected resolves the filter of a CancelJobs. Jobs that are named are taken as they are, so that Apply says of each
// that is unknown or has ended; otherwise only active jobs count, and of a user who is no operator only the own ones.
func (s *Server) selected(ctx context.Context, filter *apiv1.JobFilter) ([]uint32, error) {
	if proto.Size(filter) == 0 {
		return nil, rpc.Refuse(connect.CodeInvalidArgument, "EMPTY_FILTER", "filter",
			"the filter is empty, which would mean all jobs: name jobs, users, partitions, names or states")
	}
	if err := tooMany("job ids", len(filter.JobIds), maxNames); err != nil {
		return nil, err
	}
	if onlyIDs := (&apiv1.JobFilter{JobIds: filter.JobIds}); proto.Equal(onlyIDs, filter) {
		return filter.JobIds, nil
	}
	view, err := s.view(ctx, nil)
	if err != nil {
		return nil, err
	}
	match, err := newMatcher(view, filter)
	if err != nil {
		return nil, err
	}
	principal := rpc.PrincipalOf(ctx)
	everybodys := len(filter.JobIds) > 0 || rpc.IsOperator(principal, view.Settings())
	var ids []uint32
	for job := range match.candidates(0) {
		if !fsm.Ended(job.Status.State) && match.job(job) && (everybodys || job.Owner.Uid == principal.Uid) {
			ids = append(ids, job.Id)
		}
	}
	return ids, nil
}

// UpdateJob holds, releases, requeues or changes jobs.
func (s jobService) UpdateJob(ctx context.Context, request *apiv1.UpdateJobRequest) (*apiv1.UpdateJobResponse, error) {
	if err := tooMany("job ids", len(request.JobIds), maxIDsPerCommand); err != nil {
		return nil, err
	}
	if request.Change == nil {
		return nil, malformed("change", "the request does not say what to change")
	}
	if err := known(request); err != nil {
		return nil, err
	}
	if err := printable(request); err != nil {
		return nil, err
	}
	command, err := stamp(ctx, request.RequestId, request)
	if err != nil {
		return nil, err
	}
	inner := proto.CloneOf(request)
	inner.RequestId = ""
	command.Op = &logv1.Command_UpdateJobs{UpdateJobs: &logv1.UpdateJobs{Request: inner}}
	result, err := s.propose(ctx, command, false)
	if err != nil {
		return nil, err
	}
	if result.Refusal != nil {
		return nil, rpc.FromDetail(result.Refusal)
	}
	return &apiv1.UpdateJobResponse{Refusals: result.Refusals, Revision: result.Revision}, nil
}

// GetJob returns a job with its attempts and steps.
func (s jobService) GetJob(ctx context.Context, request *apiv1.GetJobRequest) (*apiv1.GetJobResponse, error) {
	view, err := s.view(ctx, request.Read)
	if err != nil {
		return nil, err
	}
	job := view.Job(request.JobId)
	if job == nil {
		return nil, jobUnknown(request.JobId)
	}
	response := &apiv1.GetJobResponse{Job: job, Info: s.info(view)}
	for attempt := range view.Attempts(job.Id) {
		response.Attempts = append(response.Attempts, attempt)
	}
	for step := range view.Steps(job.Id) {
		response.Steps = append(response.Steps, step)
	}
	if attempt := view.Attempt(job.Id, job.Status.Attempt); attempt != nil {
		response.Shares = shares(view, attempt.Placement)
	}
	return response, nil
}

func jobUnknown(id uint32) error {
	return rpc.Refuse(connect.CodeNotFound, "JOB_UNKNOWN", fmt.Sprintf("job %d", id),
		fmt.Sprintf("there is no job %d: it was never submitted, or it finished so long ago that it left the cluster's memory", id))
}

// CreateStep creates a step in a running job, and returns when this controller sees it.
func (s jobService) CreateStep(ctx context.Context, request *apiv1.CreateStepRequest) (*apiv1.CreateStepResponse, error) {
	ctx, cancel := deadline(ctx)
	defer cancel()
	if request.Spec == nil {
		return nil, malformed("spec", "the request has no step specification")
	}
	if len(request.Environment) > rpc.MaxEnvironmentBytes {
		return nil, rpc.Refuse(connect.CodeInvalidArgument, rpc.ReasonTooLarge, "environment", fmt.Sprintf(
			"the environment has %d bytes; the limit is %d bytes", len(request.Environment), rpc.MaxEnvironmentBytes))
	}
	if err := known(request); err != nil {
		return nil, err
	}
	if err := printable(request); err != nil {
		return nil, err
	}
	command, err := stamp(ctx, request.RequestId, request)
	if err != nil {
		return nil, err
	}
	op := &logv1.CreateStep{JobId: request.JobId, Spec: request.Spec, Attempt: request.Attempt}
	if len(request.Environment) > 0 {
		blob := blobOf(request.Environment)
		op.Spec = proto.CloneOf(request.Spec)
		op.Spec.EnvironmentBlob = blob.Sha256
		if len(blob.Data) > maxInlineBlobs {
			if err := s.putBlobs(ctx, command.Principal, []*logv1.BlobContent{blob}); err != nil {
				return nil, err
			}
		} else {
			op.Blobs = append(op.Blobs, blob)
		}
	}
	command.Op = &logv1.Command_CreateStep{CreateStep: op}
	result, err := s.propose(ctx, command, false)
	if err != nil {
		return nil, err
	}
	if result.Refusal != nil {
		return nil, rpc.FromDetail(result.Refusal)
	}
	view, err := s.viewAt(ctx, result.Revision)
	if err != nil {
		return nil, err
	}
	step := findStep(view, request.JobId, result.Attempt, result.StepId)
	if step == nil {
		return nil, stepUnknown(request.JobId, result.StepId)
	}
	return &apiv1.CreateStepResponse{Step: step, Shares: stepShares(view, step), Revision: result.Revision}, nil
}

// findStep returns a step; attempt 0 means the latest attempt that has it.
func findStep(view *fsm.View, job, attempt, id uint32) *apiv1.Step {
	if attempt != 0 {
		return view.Step(job, attempt, id)
	}
	j := view.Job(job)
	if j == nil {
		return nil
	}
	for n := j.Status.Attempt; n > 0; n-- {
		if step := view.Step(job, n, id); step != nil {
			return step
		}
	}
	return nil
}

func stepUnknown(job, step uint32) error {
	name := fmt.Sprintf("step %d.%d", job, step)
	if step == fsm.BatchStep {
		name = fmt.Sprintf("step %d.batch", job)
	}
	return rpc.Refuse(connect.CodeNotFound, "STEP_UNKNOWN", name, "there is no "+name)
}

// GetStep returns a step, and can wait for its beginning and for its end.
func (s jobService) GetStep(ctx context.Context, request *apiv1.GetStepRequest) (*apiv1.GetStepResponse, error) {
	view, err := s.view(ctx, request.Read)
	if err != nil {
		return nil, err
	}
	find := func(view *fsm.View) (*apiv1.Step, error) {
		if view.Job(request.JobId) == nil {
			return nil, jobUnknown(request.JobId)
		}
		step := findStep(view, request.JobId, request.Attempt, request.StepId)
		if step == nil {
			return nil, stepUnknown(request.JobId, request.StepId)
		}
		return step, nil
	}
	if request.WaitBeginMs > 0 {
		begun := func(view *fsm.View) bool {
			job := view.Job(request.JobId)
			return job == nil || fsm.Ended(job.Status.State) || findStep(view, request.JobId, request.Attempt, request.StepId) != nil
		}
		if view, err = s.waitStep(ctx, request.JobId, request.WaitBeginMs, view, begun); err != nil {
			return nil, err
		}
	}
	step, err := find(view)
	if err != nil {
		return nil, err
	}
	if request.WaitEndMs > 0 && !fsm.StepEnded(step.State) {
		over := func(view *fsm.View) bool {
			step := findStep(view, request.JobId, request.Attempt, request.StepId)
			return step == nil || fsm.StepEnded(step.State)
		}
		if view, err = s.waitStep(ctx, request.JobId, request.WaitEndMs, view, over); err != nil {
			return nil, err
		}
		if step, err = find(view); err != nil {
			return nil, err
		}
	}
	return &apiv1.GetStepResponse{Step: step, Shares: stepShares(view, step), Info: s.info(view)}, nil
}

// waitStep returns the newest view when it is as awaited or the time in milliseconds is over; an error when this controller
// leaves. A later view than the one that the caller's consistency demanded satisfies it as well.
func (s *Server) waitStep(ctx context.Context, job, ms uint32, view *fsm.View, awaited func(*fsm.View) bool) (*fsm.View, error) {
	timer := newTimer(ms)
	defer timer.Stop()
	waiter, done := s.hub.job(job)
	defer done()
	for {
		if now := s.replica.View(); fsm.CompareRevisions(now.Revision(), view.Revision()) > 0 {
			view = now
		}
		if awaited(view) {
			return view, nil
		}
		select {
		case <-waiter.wake:
		case <-timer.C:
			return view, nil
		case <-s.draining:
			return nil, s.leaving()
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// stepShares lists where a step is, with the ranks there.
func stepShares(view *fsm.View, step *apiv1.Step) []*apiv1.NodeShare {
	list := shares(view, step.Placement)
	d, err := shape.ParseDistribution(step.Spec.GetTaskOptions().GetDistribution())
	if len(step.PartRanks) == 0 && (err != nil || d == shape.Distribution{}) {
		return list // by block: ranks follow the order
	}
	seen := map[uint32]int{} // shares of a node so far: it has one for each part
	i := 0
	for _, group := range step.Placement.GetGroups() {
		for _, number := range group.Nodes {
			if portions := shape.Portions(step, number); seen[number] < len(portions) {
				list[i].Ranks = foldRanks(portions[seen[number]].Ranks)
			}
			seen[number]++
			i++
		}
	}
	return list
}

func foldRanks(ranks []uint32) string {
	indexes := make([]int, len(ranks))
	for i, rank := range ranks {
		indexes[i] = int(rank)
	}
	return notation.FoldIndexes(indexes)
}

// shares lists a placement by node name, in rank order.
func shares(view *fsm.View, placement *apiv1.Placement) []*apiv1.NodeShare {
	var list []*apiv1.NodeShare
	for _, group := range placement.GetGroups() {
		cpus, gpus := notation.Mask(group.CpuMask).String(), notation.Mask(group.GpuMask).String()
		for _, number := range group.Nodes {
			share := &apiv1.NodeShare{Cpus: cpus, Gpus: gpus, MemoryMb: group.MemoryMb, Tasks: group.Tasks}
			if node := view.Node(number); node != nil {
				share.Node = node.Spec.GetName()
				share.AgentAddress = node.Spec.GetAgentAddress()
				if first := notation.Mask(group.GpuMask).Devices(); len(first) > 0 && first[0] < len(node.Spec.GetGpus()) {
					share.GpuType = node.Spec.Gpus[first[0]].Type
				}
			}
			list = append(list, share)
		}
	}
	return list
}
