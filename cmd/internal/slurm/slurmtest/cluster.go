// Package slurmtest is a cluster for tests of the Slurm-named commands: handlers over fixtures, called in process
// through Connect, with the jobs and nodes of the recorded Slurm listings.
//
// Invariants: filters and pages behave as the API's comments say; what a command sent is kept for the test to look at.
//
// It is called by tests only.
package slurmtest

import (
	"bytes"
	"context"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connectinprocess"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/muster/api/v1/apiv1connect"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
	"github.com/muster-hpc/muster/proto/notation"
	"github.com/muster-hpc/muster/rpc"
)

// Cluster is a fake cluster. Set its fields before the first call.
type Cluster struct {
	apiv1connect.UnimplementedJobServiceHandler
	apiv1connect.UnimplementedClusterServiceHandler

	// Records.
	JobList    []*apiv1.Job
	StepList   []*apiv1.Step
	NodeList   []*apiv1.Node
	Partitions []*apiv1.Partition
	Attempts   map[uint32][]*apiv1.Attempt
	Shares     map[uint32][]*apiv1.NodeShare
	Members    []*apiv1.Member
	Blobs      map[string][]byte
	// Now is the state time.
	Now time.Time
	// PageSize cuts pages smaller than asked; 0 does not.
	PageSize int
	// Refuse decides what becomes of a submission; nil accepts.
	Refuse func(*apiv1.JobSubmission) *apiv1.ErrorDetail
	// RefuseJob decides what becomes of a change of a job; nil accepts.
	RefuseJob func(id uint32) *apiv1.ErrorDetail
	// RefuseStep decides what becomes of a new step; nil accepts.
	RefuseStep func(*apiv1.CreateStepRequest) *apiv1.ErrorDetail
	// Nodes answers for agents, by address.
	Nodes map[string]nodev1connect.NodeServiceHandler
	// OnSubmit is called with each new job, which it may change.
	OnSubmit func(*apiv1.Job)
	// Fail makes every call fail.
	Fail error
	// NoQuorum is what reads end with that are not stale; nil: they are answered. Stale ones are a minute old.
	NoQuorum error
	// Silent are nodes that are up but do not answer.
	Silent []*apiv1.SilentNode

	mu        sync.Mutex
	Submitted []*apiv1.JobSubmission
	Cancelled []*apiv1.CancelJobsRequest
	Updated   []*apiv1.UpdateJobRequest
	NodeCalls []*apiv1.UpdateNodesRequest
	Created   []*apiv1.CreateStepRequest
	Listed    []*apiv1.ListJobsRequest
	Asked     []uint32 // ids of GetJob
	changed   chan struct{}

	once   sync.Once
	client *connect.Client
}

func (c *Cluster) connect() *connect.Client {
	c.once.Do(func() {
		server := connect.NewServer()
		apiv1connect.RegisterJobServiceHandler(server, c)
		apiv1connect.RegisterClusterServiceHandler(server, c)
		c.client = connect.NewClient(connectinprocess.New(server))
	})
	return c.client
}

// Jobs implements session.Cluster.
func (c *Cluster) Jobs() apiv1connect.JobServiceClient {
	return apiv1connect.NewJobServiceClient(c.connect())
}

// Cluster implements session.Cluster.
func (c *Cluster) Cluster() apiv1connect.ClusterServiceClient {
	return apiv1connect.NewClusterServiceClient(c.connect())
}

// Node implements session.Cluster.
func (c *Cluster) Node(address string) nodev1connect.NodeServiceClient {
	server := connect.NewServer()
	if handler, ok := c.Nodes[address]; ok {
		nodev1connect.RegisterNodeServiceHandler(server, handler)
	}
	return nodev1connect.NewNodeServiceClient(connect.NewClient(connectinprocess.New(server)))
}

// ClusterName implements session.Cluster.
func (c *Cluster) ClusterName() string { return "base" }

// NodeName implements session.Cluster.
func (c *Cluster) NodeName() string { return "n1" }

// Controllers implements session.Cluster.
func (c *Cluster) Controllers() []string { return []string{"127.0.0.11:6817"} }

// Outcome is what a command did.
type Outcome struct {
	Code           int
	Stdout, Stderr string
}

// Session is a session over the cluster with buffers; words are the command line with the program in front.
func (c *Cluster) Session(t testing.TB, words ...string) (*session.Session, *Buffer, *Buffer) {
	t.Helper()
	stdout, stderr := &Buffer{}, &Buffer{}
	return &session.Session{
		Program: words[0], Args: words[1:], Stdin: strings.NewReader(""), Stdout: stdout, Stderr: stderr,
		Environ: []string{"PATH=/usr/bin:/bin", "HOME=/root"}, Dir: "/home/user/work", Host: "vm", Umask: 0o22,
		Now: func() time.Time { return c.Now }, RequestID: func() string { return "01890000-0000-7000-8000-000000000000" },
		Dial: func(context.Context) (session.Cluster, error) { return c, nil },
	}, stdout, stderr
}

// Buffer is a bytes.Buffer that several goroutines may write to.
type Buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write appends.
func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

// String returns what was written.
func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// Run runs a command to its end.
func (c *Cluster) Run(t testing.TB, run func(context.Context, *session.Session) int, words ...string) Outcome {
	t.Helper()
	s, stdout, stderr := c.Session(t, words...)
	code := run(t.Context(), s)
	return Outcome{code, stdout.String(), stderr.String()}
}

func (c *Cluster) info() *apiv1.ReadInfo {
	return &apiv1.ReadInfo{Revision: &apiv1.Revision{Incarnation: 1, Index: 100}, StateTime: timestamppb.New(c.Now)}
}

// read is how fresh an answer is, or why there is none.
func (c *Cluster) read(options *apiv1.ReadOptions) (*apiv1.ReadInfo, error) {
	info := c.info()
	switch {
	case c.Fail != nil:
		return nil, c.Fail
	case options.GetConsistency() == apiv1.ReadConsistency_READ_CONSISTENCY_STALE:
		info.AgeMs = 60_000
	case c.NoQuorum != nil:
		return nil, c.NoQuorum
	}
	return info, nil
}

// match applies a filter as the API's comments say.
func match(f *apiv1.JobFilter, j *apiv1.Job) bool {
	in := func(n int, ok bool) bool { return n == 0 || ok }
	status := j.GetStatus()
	partition := slices.Contains(f.GetPartitions(), status.GetPartition())
	for _, name := range j.GetSpec().GetPartitions() {
		partition = partition || slices.Contains(f.GetPartitions(), name)
	}
	hosts, _ := notation.Expand(status.GetNodeList())
	on := slices.ContainsFunc(hosts, func(h string) bool { return slices.Contains(f.GetNodes(), h) })
	ended := value.Ended(status.GetState())
	return in(len(f.GetJobIds()), slices.Contains(f.GetJobIds(), j.GetId())) &&
		in(len(f.GetUids()), slices.Contains(f.GetUids(), j.GetOwner().GetUid())) &&
		in(len(f.GetStates()), slices.Contains(f.GetStates(), status.GetState())) &&
		in(len(f.GetPartitions()), partition) && in(len(f.GetNodes()), on) &&
		in(len(f.GetNames()), slices.Contains(f.GetNames(), j.GetSpec().GetName())) &&
		in(len(f.GetAccounts()), slices.Contains(f.GetAccounts(), j.GetSpec().GetAccount())) &&
		(!f.GetActive() || !ended) &&
		(f.GetEndedSince() == nil || !ended || !status.GetEndTime().AsTime().Before(f.GetEndedSince().AsTime())) &&
		(f.GetSubmittedBefore() == nil || status.GetSubmitTime().AsTime().Before(f.GetSubmittedBefore().AsTime()))
}

// ListJobs lists by id, a page at a time.
func (c *Cluster) ListJobs(_ context.Context, r *apiv1.ListJobsRequest) (*apiv1.ListJobsResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	info, err := c.read(r.GetRead())
	if err != nil {
		return nil, err
	}
	c.Listed = append(c.Listed, proto.Clone(r).(*apiv1.ListJobsRequest))
	from, _ := strconv.Atoi(r.GetPage().GetToken())
	size := int(r.GetPage().GetSize())
	if c.PageSize > 0 {
		size = min(size, c.PageSize)
	}
	answer := &apiv1.ListJobsResponse{Info: info}
	for i := from; i < len(c.JobList); i++ {
		if len(answer.Jobs) == size {
			answer.NextToken = strconv.Itoa(i)
			break
		}
		job := c.JobList[i]
		if !match(r.GetFilter(), job) {
			continue
		}
		answer.Jobs = append(answer.Jobs, job)
		for _, step := range c.StepList {
			running := r.GetSteps() && step.GetState() <= apiv1.StepState_STEP_STATE_RUNNING
			last := r.GetAllSteps() && max(1, step.GetAttempt()) == max(1, job.GetStatus().GetAttempt())
			if step.GetJobId() == job.GetId() && (running || last) {
				answer.Steps = append(answer.Steps, step)
			}
		}
	}
	return answer, nil
}

// GetJob returns a job.
func (c *Cluster) GetJob(_ context.Context, r *apiv1.GetJobRequest) (*apiv1.GetJobResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.Asked = append(c.Asked, r.GetJobId())
	for _, job := range c.JobList {
		if job.GetId() == r.GetJobId() {
			answer := &apiv1.GetJobResponse{Job: job, Info: c.info(), Attempts: c.Attempts[job.GetId()], Shares: c.Shares[job.GetId()]}
			for _, step := range c.StepList {
				if step.GetJobId() == job.GetId() {
					answer.Steps = append(answer.Steps, step)
				}
			}
			return answer, nil
		}
	}
	return nil, rpc.Refuse(connect.CodeNotFound, "JOB_UNKNOWN", "job "+strconv.Itoa(int(r.GetJobId())), "There is no such job.")
}

// SubmitJobs stores jobs.
func (c *Cluster) SubmitJobs(_ context.Context, r *apiv1.SubmitJobsRequest) (*apiv1.SubmitJobsResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.Fail != nil {
		return nil, c.Fail
	}
	answer := &apiv1.SubmitJobsResponse{Revision: &apiv1.Revision{Incarnation: 1, Index: 101}}
	for _, submission := range r.GetJobs() {
		if r.GetValidateOnly() {
			result := &apiv1.SubmitResult{}
			if c.Refuse != nil {
				result.Refusal = c.Refuse(submission)
			}
			answer.Results = append(answer.Results, result)
			continue
		}
		c.Submitted = append(c.Submitted, proto.Clone(submission).(*apiv1.JobSubmission))
		if c.Refuse != nil {
			if refusal := c.Refuse(submission); refusal != nil {
				answer.Results = append(answer.Results, &apiv1.SubmitResult{Refusal: refusal})
				continue
			}
		}
		id := uint32(1)
		if n := len(c.JobList); n > 0 {
			id = c.JobList[n-1].GetId() + 1
		}
		job := &apiv1.Job{Id: id, Spec: submission.GetSpec(), Owner: &apiv1.JobOwner{User: "root"}, Status: &apiv1.JobStatus{
			State: apiv1.JobState_JOB_STATE_PENDING, SubmitTime: timestamppb.New(c.Now), Partition: "main",
		}}
		if c.OnSubmit != nil {
			c.OnSubmit(job)
		}
		c.JobList = append(c.JobList, job)
		answer.Results = append(answer.Results, &apiv1.SubmitResult{JobId: id})
	}
	return answer, nil
}

// ChangeStep replaces a step and wakes watches.
func (c *Cluster) ChangeStep(job, id uint32, change func(*apiv1.Step)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, step := range c.StepList {
		if step.GetJobId() == job && step.GetId() == id {
			c.StepList[i] = proto.Clone(step).(*apiv1.Step)
			change(c.StepList[i])
		}
	}
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}

// Change replaces a job and wakes watches.
func (c *Cluster) Change(id uint32, change func(*apiv1.Job)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, job := range c.JobList {
		if job.GetId() == id {
			c.JobList[i] = proto.Clone(job).(*apiv1.Job)
			change(c.JobList[i])
		}
	}
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}

// WatchJobs sends the jobs and every change.
func (c *Cluster) WatchJobs(ctx context.Context, r *apiv1.WatchJobsRequest, stream apiv1connect.JobServiceWatchJobsServerStream) error {
	sent, sentSteps := map[uint32]*apiv1.Job{}, map[[2]uint32]*apiv1.Step{}
	for {
		c.mu.Lock()
		if c.changed == nil {
			c.changed = make(chan struct{})
		}
		changed := c.changed
		batch := &apiv1.WatchJobsResponse{Revision: &apiv1.Revision{Incarnation: 1, Index: 102}}
		for _, job := range c.JobList {
			if match(r.GetFilter(), job) && sent[job.GetId()] != job {
				sent[job.GetId()] = job
				batch.Jobs = append(batch.Jobs, job)
			}
		}
		for _, step := range c.StepList {
			key := [2]uint32{step.GetJobId(), step.GetId()}
			if sent[step.GetJobId()] != nil && sentSteps[key] != step {
				sentSteps[key] = step
				batch.Steps = append(batch.Steps, step)
			}
		}
		c.mu.Unlock()
		if len(batch.GetJobs())+len(batch.GetSteps()) > 0 {
			if err := stream.Send(batch); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// CancelJobs keeps the request.
func (c *Cluster) CancelJobs(_ context.Context, r *apiv1.CancelJobsRequest) (*apiv1.CancelJobsResponse, error) {
	c.mu.Lock()
	c.Cancelled = append(c.Cancelled, proto.Clone(r).(*apiv1.CancelJobsRequest))
	answer := &apiv1.CancelJobsResponse{}
	for _, job := range c.JobList {
		if !match(r.GetFilter(), job) {
			continue
		}
		if c.RefuseJob != nil {
			if refusal := c.RefuseJob(job.GetId()); refusal != nil {
				answer.Refusals = append(answer.Refusals, refusal)
				continue
			}
		}
		answer.JobIds = append(answer.JobIds, job.GetId())
	}
	for _, id := range r.GetFilter().GetJobIds() {
		if !slices.ContainsFunc(c.JobList, func(j *apiv1.Job) bool { return j.GetId() == id }) {
			answer.Refusals = append(answer.Refusals, &apiv1.ErrorDetail{Reason: "JOB_UNKNOWN", Subject: "job " + strconv.Itoa(int(id)), Sentence: "There is no such job."})
		}
	}
	c.mu.Unlock()
	if r.GetSignal() == 0 && r.Step == nil {
		for _, id := range answer.GetJobIds() {
			c.Change(id, func(j *apiv1.Job) {
				if !value.Ended(j.GetStatus().GetState()) {
					j.Status.State = apiv1.JobState_JOB_STATE_CANCELLED
				}
			})
		}
	}
	return answer, nil
}

// UpdateJob keeps the request.
func (c *Cluster) UpdateJob(_ context.Context, r *apiv1.UpdateJobRequest) (*apiv1.UpdateJobResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.Updated = append(c.Updated, proto.Clone(r).(*apiv1.UpdateJobRequest))
	answer := &apiv1.UpdateJobResponse{}
	for _, id := range r.GetJobIds() {
		if c.RefuseJob != nil {
			if refusal := c.RefuseJob(id); refusal != nil {
				answer.Refusals = append(answer.Refusals, refusal)
			}
		}
	}
	return answer, nil
}

// CreateStep makes a step over the job's shares.
func (c *Cluster) CreateStep(_ context.Context, r *apiv1.CreateStepRequest) (*apiv1.CreateStepResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.Created = append(c.Created, proto.Clone(r).(*apiv1.CreateStepRequest))
	if c.RefuseStep != nil {
		if refusal := c.RefuseStep(r); refusal != nil {
			return nil, rpc.Refuse(connect.CodeFailedPrecondition, refusal.GetReason(), refusal.GetSubject(), refusal.GetSentence())
		}
	}
	id := uint32(0)
	for _, step := range c.StepList {
		if step.GetJobId() == r.GetJobId() && step.GetId() < 1<<30 {
			id = step.GetId() + 1
		}
	}
	step := &apiv1.Step{JobId: r.GetJobId(), Id: id, Attempt: max(1, r.GetAttempt()), Spec: r.GetSpec(), State: apiv1.StepState_STEP_STATE_RUNNING}
	shares := c.Shares[r.GetJobId()]
	for _, share := range shares {
		step.NumTasks += share.GetTasks()
	}
	c.StepList = append(c.StepList, step)
	return &apiv1.CreateStepResponse{Step: step, Shares: shares}, nil
}

// GetStep returns a step; it never holds the question.
func (c *Cluster) GetStep(_ context.Context, r *apiv1.GetStepRequest) (*apiv1.GetStepResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, step := range c.StepList {
		if step.GetJobId() == r.GetJobId() && step.GetId() == r.GetStepId() {
			return &apiv1.GetStepResponse{Step: step, Shares: c.Shares[step.GetJobId()], Info: c.info()}, nil
		}
	}
	return nil, rpc.Refuse(connect.CodeNotFound, "STEP_UNKNOWN", "step", "There is no such step.")
}

// ListNodes lists nodes and partitions.
func (c *Cluster) ListNodes(_ context.Context, r *apiv1.ListNodesRequest) (*apiv1.ListNodesResponse, error) {
	info, err := c.read(r.GetRead())
	if err != nil {
		return nil, err
	}
	answer := &apiv1.ListNodesResponse{Partitions: c.Partitions, Info: info}
	if info.GetAgeMs() == 0 {
		answer.Silent = c.Silent
	}
	for _, node := range c.NodeList {
		if len(r.GetNames()) == 0 || slices.Contains(r.GetNames(), node.GetSpec().GetName()) {
			answer.Nodes = append(answer.Nodes, node)
		}
	}
	return answer, nil
}

// UpdateNodes keeps the request.
func (c *Cluster) UpdateNodes(_ context.Context, r *apiv1.UpdateNodesRequest) (*apiv1.UpdateNodesResponse, error) {
	c.NodeCalls = append(c.NodeCalls, proto.Clone(r).(*apiv1.UpdateNodesRequest))
	return &apiv1.UpdateNodesResponse{}, nil
}

// GetCluster describes the cluster.
func (c *Cluster) GetCluster(context.Context, *apiv1.GetClusterRequest) (*apiv1.GetClusterResponse, error) {
	return &apiv1.GetClusterResponse{
		Configuration: &apiv1.Configuration{ClusterName: "base", Partitions: c.Partitions, Settings: &apiv1.Settings{}},
		Members:       c.Members, Info: c.info(),
	}, nil
}

// GetBlob returns a blob.
func (c *Cluster) GetBlob(_ context.Context, r *apiv1.GetBlobRequest) (*apiv1.GetBlobResponse, error) {
	data, ok := c.Blobs[r.GetSha256()]
	if !ok {
		return nil, rpc.Refuse(connect.CodeNotFound, "BLOB_UNKNOWN", "blob", "There is no such blob.")
	}
	return &apiv1.GetBlobResponse{Data: data}, nil
}
