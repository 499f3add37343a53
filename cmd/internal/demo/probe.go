package demo

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc/client"
)

const (
	probePause   = 20 * time.Millisecond // between two submissions
	probeTimeout = 30 * time.Second      // for one; longer than any election
	probeName    = "probe"
)

// probe submits a small held job again and again, as a user who happens to be there.
type probe struct {
	client *client.Client
	mu     sync.Mutex
	acks   []ack
	failed []error
}

// ack is one acknowledged submission.
type ack struct {
	job         uint32
	sent, acked time.Time
}

// run submits until ctx ends.
func (p *probe) run(ctx context.Context) {
	for ctx.Err() == nil {
		p.once(ctx)
		select {
		case <-ctx.Done():
		case <-time.After(probePause):
		}
	}
}

func (p *probe) once(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	sent := time.Now()
	answer, err := p.client.Jobs().SubmitJobs(ctx, &apiv1.SubmitJobsRequest{
		RequestId: client.NewRequestID(),
		Jobs: []*apiv1.JobSubmission{{
			Spec: &apiv1.JobSpec{
				Name: probeName, Kind: apiv1.JobKind_JOB_KIND_BATCH, Hold: true, WorkDir: "/", CommandLine: "(null)",
				Resources: &apiv1.ResourceRequest{NodesMin: 1, Ntasks: 1}, StdoutPath: "/dev/null",
			},
			Script: []byte("#!/bin/sh\ntrue\n"),
		}},
	})
	acked := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case errors.Is(ctx.Err(), context.Canceled): // the demo is over: not known, not counted
	case err != nil:
		p.failed = append(p.failed, err)
	case answer.Results[0].Refusal != nil:
		p.failed = append(p.failed, errors.New(answer.Results[0].Refusal.Sentence))
	default:
		p.acks = append(p.acks, ack{job: answer.Results[0].JobId, sent: sent, acked: acked})
	}
}

// firstAfter returns how long after t the first submission that was sent after t was acknowledged.
func (p *probe) firstAfter(ctx context.Context, t time.Time) (time.Duration, error) {
	for {
		p.mu.Lock()
		for _, a := range p.acks {
			if a.sent.After(t) {
				p.mu.Unlock()
				return a.acked.Sub(t), nil
			}
		}
		p.mu.Unlock()
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("no request was acknowledged since %s: %w", t.Format(time.TimeOnly), context.Cause(ctx))
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// settle checks that every acknowledged job exists exactly once and is what it was, and cancels them. It returns how
// many there are.
func (p *probe) settle(ctx context.Context) (count int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.failed) > 0 {
		return len(p.acks), fmt.Errorf("%d of %d submissions failed, the first with: %w", len(p.failed), len(p.failed)+len(p.acks), p.failed[0])
	}
	exists := map[uint32]bool{}
	request := &apiv1.ListJobsRequest{Filter: &apiv1.JobFilter{Names: []string{probeName}}}
	for {
		page, err := p.client.Jobs().ListJobs(ctx, request)
		if err != nil {
			return len(p.acks), fmt.Errorf("list the probe's jobs: %w", err)
		}
		for _, j := range page.Jobs {
			if j.Status.State != apiv1.JobState_JOB_STATE_PENDING {
				return len(p.acks), fmt.Errorf("held job %d became %v", j.Id, j.Status.State)
			}
			exists[j.Id] = true
		}
		if page.NextToken == "" {
			break
		}
		request.Page = &apiv1.Page{Token: page.NextToken}
	}
	seen := map[uint32]bool{}
	for _, a := range p.acks {
		if seen[a.job] {
			return len(p.acks), fmt.Errorf("job id %d was given out twice", a.job)
		}
		if !exists[a.job] {
			return len(p.acks), fmt.Errorf("job %d was acknowledged and is lost", a.job)
		}
		seen[a.job] = true
	}
	// The last submission may have been interrupted when the demo ended: it is stored or not, and nobody was told.
	if extra := len(exists) - len(seen); extra > 1 {
		return len(p.acks), fmt.Errorf("%d jobs exist that nobody was told of", extra)
	}
	_, err = p.client.Jobs().CancelJobs(ctx, &apiv1.CancelJobsRequest{
		RequestId: client.NewRequestID(), Filter: &apiv1.JobFilter{Names: []string{probeName}, Active: true},
	})
	if err != nil {
		return len(p.acks), fmt.Errorf("cancel the probe's jobs: %w", err)
	}
	return len(p.acks), nil
}
