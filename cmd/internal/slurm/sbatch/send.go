package sbatch

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect/v2"

	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// waitRetry is the pause before a broken watch of --wait is opened again; a row of docs/limits.md.
const waitRetry = 500 * time.Millisecond

// send submits the job and prints its id.
func send(ctx context.Context, s *session.Session, b *batch) int {
	cluster, err := s.Cluster(ctx)
	if err != nil {
		s.Errorf("Batch job submission failed: Unable to contact the cluster\n%s", s.Sentence(err))
		return submit.CodeRefused
	}
	if !here(s, b, cluster) {
		return submit.CodeRefused
	}
	answer, err := cluster.Jobs().SubmitJobs(ctx, &apiv1.SubmitJobsRequest{
		RequestId: s.RequestID(),
		Jobs:      []*apiv1.JobSubmission{{Spec: b.spec, Script: b.script, Environment: b.env}},
	})
	if err != nil {
		submit.Explain(s, "Batch job submission failed", err)
		return submit.CodeRefused
	}
	result := answer.GetResults()[0]
	if refusal := result.GetRefusal(); refusal != nil {
		submit.ExplainDetail(s, "Batch job submission failed", refusal, b.spec)
		return submit.CodeRefused
	}
	for _, warning := range result.GetWarnings() {
		s.Line("warning: %s", warning)
	}
	switch {
	case b.options.Has("parsable") && b.options.Has("clusters"):
		fmt.Fprintf(s.Stdout, "%d;%s\n", result.GetJobId(), cluster.ClusterName())
	case b.options.Has("parsable"):
		fmt.Fprintf(s.Stdout, "%d\n", result.GetJobId())
	case b.options.Has("quiet"):
	case b.options.Has("clusters"):
		fmt.Fprintf(s.Stdout, "Submitted batch job %d on cluster %s\n", result.GetJobId(), cluster.ClusterName())
	default:
		fmt.Fprintf(s.Stdout, "Submitted batch job %d\n", result.GetJobId())
	}
	if b.options.Has("verbose") {
		s.Line("job %d is stored by a majority of the controllers at index %d", result.GetJobId(), answer.GetRevision().GetIndex())
	}
	if b.options.Has("wait") {
		return wait(ctx, s, cluster, result.GetJobId())
	}
	return 0
}

// wait follows the job to its end; its exit code is sbatch's, and a signal counts as 1.
func wait(ctx context.Context, s *session.Session, cluster session.Cluster, id uint32) int {
	var after *apiv1.Revision
	for {
		code, ended, err := follow(ctx, cluster, id, &after)
		switch {
		case ended:
			return code
		case ctx.Err() != nil:
			return submit.CodeRefused
		case err != nil && connect.CodeOf(err) != connect.CodeUnavailable && connect.CodeOf(err) != connect.CodeDeadlineExceeded:
			s.Errorf("waiting for job %d: %s", id, s.Sentence(err))
			return submit.CodeRefused
		}
		timer := time.NewTimer(waitRetry)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
}

// follow reads one watch until the job has ended or the watch breaks.
func follow(ctx context.Context, cluster session.Cluster, id uint32, after **apiv1.Revision) (code int, ended bool, err error) {
	watch, err := cluster.Jobs().WatchJobs(ctx, &apiv1.WatchJobsRequest{Filter: &apiv1.JobFilter{JobIds: []uint32{id}}, After: *after})
	if err != nil {
		return 0, false, err
	}
	defer watch.Close()
	for {
		batch, err := watch.Receive()
		if err != nil {
			return 0, false, err
		}
		if batch.GetRelist() {
			*after = nil
			return 0, false, nil
		}
		for _, job := range batch.GetJobs() {
			if status := job.GetStatus(); job.GetId() == id && value.Ended(status.GetState()) {
				switch {
				case status.GetExitSignal() != 0:
					return 1, true, nil
				case status.GetExitCode() == 0 && status.GetState() != apiv1.JobState_JOB_STATE_COMPLETED:
					return 1, true, nil
				}
				return int(status.GetExitCode()), true, nil
			}
		}
		*after = batch.GetRevision()
	}
}

// test asks whether the cluster would take the job, and submits nothing.
func test(ctx context.Context, s *session.Session, b *batch) int {
	cluster, err := s.Cluster(ctx)
	if err != nil {
		s.Errorf("allocation failure: Unable to contact the cluster\n%s", s.Sentence(err))
		return submit.CodeRefused
	}
	if !here(s, b, cluster) {
		return submit.CodeRefused
	}
	answer, err := cluster.Jobs().SubmitJobs(ctx, &apiv1.SubmitJobsRequest{
		Jobs: []*apiv1.JobSubmission{{Spec: b.spec, Script: b.script, Environment: b.env}}, ValidateOnly: true,
	})
	if err != nil {
		submit.Explain(s, "allocation failure", err)
		return submit.CodeRefused
	}
	result := answer.GetResults()[0]
	if refusal := result.GetRefusal(); refusal != nil {
		submit.ExplainDetail(s, "allocation failure", refusal, b.spec)
		return submit.CodeRefused
	}
	for _, warning := range result.GetWarnings() {
		s.Line("warning: %s", warning)
	}
	s.Line("the request is valid; no start time is estimated yet")
	return 0
}

// here tells whether --clusters names this cluster, and says so if it does not.
func here(s *session.Session, b *batch, cluster session.Cluster) bool {
	name := b.options.Text("clusters")
	if name == "" || session.NamesCluster(name, cluster.ClusterName()) {
		return true
	}
	s.Errorf("'%s' can't be reached now, or it is an invalid entry for --cluster.\nThis is cluster %s; there is no other here.", name, cluster.ClusterName())
	return false
}
