package server

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
	"github.com/muster-hpc/muster/rpc/client"
)

// TestASurvivorSaysThatThereIsNoQuorumAndWhoIsSilent: with one of three alive, reads end soon with a sentence, stale ones are answered with
// their age, and no try of a write has an effect.
func TestASurvivorSaysThatThereIsNoQuorumAndWhoIsSilent(t *testing.T) {
	c := newRaftCluster(t)
	user := c.user(c.nodes...)
	submitOne(t, user, "before")
	for _, n := range c.nodes[1:] {
		n.stop()
	}
	lost := time.Now()
	_, err := user.Cluster().GetCluster(t.Context(), &apiv1.GetClusterRequest{})
	if d := time.Since(lost); d > 8*time.Second {
		t.Errorf("the read took %v", d)
	}
	want := "1 of 3 controllers answers (c2, c3 are silent); no decisions are made until 2 do; running work goes on"
	if rpc.Reason(err) != rpc.ReasonNoQuorum || rpc.Sentence(err) != want {
		t.Errorf("the read: %q: %v", rpc.Reason(err), err)
	}
	answer, err := user.Cluster().GetCluster(t.Context(), &apiv1.GetClusterRequest{
		Read: &apiv1.ReadOptions{Consistency: apiv1.ReadConsistency_READ_CONSISTENCY_STALE}})
	if err != nil {
		t.Fatal(err)
	}
	if answer.Info.AgeMs < 1000 {
		t.Errorf("the age of a stale answer is %d ms", answer.Info.AgeMs)
	}
	silent := 0
	for _, m := range answer.Members {
		if slices.Contains(m.Troubles, "does not answer") {
			silent++
		}
	}
	if silent != 2 {
		t.Errorf("members: %v", answer.Members)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_, err = user.Jobs().SubmitJobs(ctx, &apiv1.SubmitJobsRequest{RequestId: client.NewRequestID(), Jobs: []*apiv1.JobSubmission{batch("x")}})
	if said := rpc.Sentence(err); !strings.HasPrefix(said, want) || !strings.HasSuffix(said, "nothing was decided") {
		t.Errorf("the write: %v", err)
	}
}
