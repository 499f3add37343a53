package bench

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc/client"
)

// submission is a small job; held jobs measure the submission alone.
func submission(name string, hold bool) *apiv1.JobSubmission {
	return &apiv1.JobSubmission{
		Script: []byte("#!/bin/sh\nexec true\n"),
		Spec: &apiv1.JobSpec{
			Name: name, Kind: apiv1.JobKind_JOB_KIND_BATCH, WorkDir: "/tmp", Hold: hold, StdoutPath: "/dev/null",
			Resources: &apiv1.ResourceRequest{NodesMin: 1, Ntasks: 1, CpusPerTask: 1}, TimeLimitS: 3600,
		},
	}
}

// submitMany submits n jobs in one call and checks that each was accepted.
func submitMany(ctx context.Context, api *client.Client, n int, name string, hold bool) error {
	request := &apiv1.SubmitJobsRequest{RequestId: client.NewRequestID()}
	for range n {
		request.Jobs = append(request.Jobs, submission(name, hold))
	}
	answer, err := api.Jobs().SubmitJobs(ctx, request)
	if err != nil {
		return fmt.Errorf("submit: %w", err)
	}
	for _, result := range answer.Results {
		if result.Refusal != nil {
			return fmt.Errorf("submit: %s", result.Refusal.Sentence)
		}
	}
	return nil
}

// connections is how many TLS connections the callers of one benchmark share: as many as a busy login host has programs.
const connections = 16

// submit measures durable submissions: one job a call from 256 callers, and 100 jobs a call from 16.
func submit(ctx context.Context, r *run) error {
	apis, err := r.clients(ctx, connections)
	if err != nil {
		return err
	}
	defer closeAll(apis)
	for _, shape := range []struct {
		name          string
		callers, jobs int
		target        float64
	}{
		{"single_job_calls", r.Clients, 1, 3000},
		{"jobs_100_per_call", 16, 100, 15000},
	} {
		var rates []float64
		for i := range r.Repeat {
			r.say("%s, run %d of %d", shape.name, i+1, r.Repeat)
			begin := time.Now()
			end := begin.Add(time.Duration(r.Seconds) * time.Second)
			calls, err := parallel(ctx, shape.callers, func(ctx context.Context, caller int) (int, error) {
				n := 0
				for time.Now().Before(end) {
					if err := submitMany(ctx, apis[caller%len(apis)], shape.jobs, "bench", true); err != nil {
						return n, err
					}
					n++
				}
				return n, nil
			})
			if err != nil {
				return err
			}
			rates = append(rates, float64(calls*shape.jobs)/time.Since(begin).Seconds())
		}
		r.add(shape.name, "1/s", shape.target, true, rates)
	}
	return nil
}

func (r *run) clients(ctx context.Context, n int) ([]*client.Client, error) {
	var apis []*client.Client
	for range n {
		api, err := r.client(ctx)
		if err != nil {
			closeAll(apis)
			return nil, err
		}
		apis = append(apis, api)
	}
	return apis, nil
}

func closeAll(apis []*client.Client) {
	for _, api := range apis {
		api.Close()
	}
}

// steady loads the cluster for minutes with all callers and counts elections: a loaded cluster must not lose its leader.
func steady(ctx context.Context, r *run) error {
	before, err := r.cluster.Status(ctx)
	if err != nil {
		return err
	}
	apis, err := r.clients(ctx, connections)
	if err != nil {
		return err
	}
	defer closeAll(apis)
	var done atomic.Int64
	begin := time.Now()
	end := begin.Add(time.Duration(r.Minutes) * time.Minute)
	ticker := time.NewTicker(time.Minute)
	defer ticker.Stop()
	calls, err := parallel(ctx, r.Clients, func(ctx context.Context, caller int) (int, error) {
		n := 0
		for time.Now().Before(end) {
			// Held jobs pile up; what piles up is cancelled, so that memory stays bounded over ten minutes.
			id, err := submitOne(ctx, apis[caller%len(apis)])
			if err != nil {
				return n, err
			}
			if _, err := apis[caller%len(apis)].Jobs().CancelJobs(ctx, &apiv1.CancelJobsRequest{
				RequestId: client.NewRequestID(), Filter: &apiv1.JobFilter{JobIds: []uint32{id}},
			}); err != nil {
				return n, fmt.Errorf("cancel: %w", err)
			}
			n += 2
			if caller == 0 {
				select {
				case <-ticker.C:
					r.say("%v done, about %d calls", time.Since(begin).Round(time.Second), int64(r.Clients)*done.Load())
				default:
				}
				done.Add(2)
			}
		}
		return n, nil
	})
	if err != nil {
		return err
	}
	after, err := r.cluster.Status(ctx)
	if err != nil {
		return err
	}
	r.add("calls", "1/s", 1, true, []float64{float64(calls) / time.Since(begin).Seconds()})
	r.add("elections", "", 0, false, []float64{float64(after.Term - before.Term)})
	return nil
}

func submitOne(ctx context.Context, api *client.Client) (uint32, error) {
	answer, err := api.Jobs().SubmitJobs(ctx, &apiv1.SubmitJobsRequest{
		RequestId: client.NewRequestID(), Jobs: []*apiv1.JobSubmission{submission("bench", true)},
	})
	switch {
	case err != nil:
		return 0, fmt.Errorf("submit: %w", err)
	case answer.Results[0].Refusal != nil:
		return 0, fmt.Errorf("submit: %s", answer.Results[0].Refusal.Sentence)
	}
	return answer.Results[0].JobId, nil
}
