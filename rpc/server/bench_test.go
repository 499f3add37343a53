package server

import (
	"fmt"
	"sync/atomic"
	"testing"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc/client"
)

// BenchmarkListJobs lists 100,000 pending jobs briefly, page by page, as squeue does, over the wire.
func BenchmarkListJobs(b *testing.B) {
	c := newCluster(b, 1)
	root := c.user(0, "root")
	for range 100 {
		request := &apiv1.SubmitJobsRequest{RequestId: client.NewRequestID()}
		for i := range 1000 {
			request.Jobs = append(request.Jobs, batch(fmt.Sprintf("job%d", i)))
			request.Jobs[i].Script = []byte("#!/bin/sh\n")
		}
		if _, err := root.Jobs().SubmitJobs(b.Context(), request); err != nil {
			b.Fatal(err)
		}
	}
	b.Run("all", func(b *testing.B) {
		for b.Loop() {
			token, n := "", 0
			for {
				answer, err := root.Jobs().ListJobs(b.Context(), &apiv1.ListJobsRequest{Brief: true, Page: &apiv1.Page{Token: token},
					Filter: &apiv1.JobFilter{Active: true}})
				if err != nil {
					b.Fatal(err)
				}
				n += len(answer.Jobs)
				if token = answer.NextToken; token == "" {
					break
				}
			}
			if n != 100_000 {
				b.Fatalf("%d jobs", n)
			}
		}
	})
	b.Run("one", func(b *testing.B) {
		for b.Loop() {
			if _, err := root.Jobs().GetJob(b.Context(), &apiv1.GetJobRequest{JobId: 77_777}); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkSubmit submits single jobs from 256 goroutines through one client to a log in memory: what the call itself costs.
func BenchmarkSubmit(b *testing.B) {
	c := newCluster(b, 1)
	alice := c.user(1000, "alice")
	var n atomic.Int64
	b.SetParallelism(128)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			submitOne(b, alice, fmt.Sprintf("j%d", n.Add(1)))
		}
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "calls/s")
}
