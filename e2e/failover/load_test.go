package failover

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/muster-hpc/muster/e2e/cluster"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc/client"
)

// load is many submitters that submit held jobs of unique names, one request after the other.
type load struct {
	api  *client.Client
	stop context.CancelFunc
	wait sync.WaitGroup

	mu       sync.Mutex
	acks     map[string]uint32 // name → job id as acknowledged
	asked    map[string]bool
	times    []time.Time // of acknowledgements
	failures []string
}

// submitters starts n of them.
func submitters(c *cluster.Cluster, n int) *load {
	ctx, stop := context.WithCancel(context.Background())
	l := &load{api: c.Client(), stop: stop, acks: map[string]uint32{}, asked: map[string]bool{}}
	for i := range n {
		l.wait.Go(func() {
			for k := 0; ctx.Err() == nil; k++ {
				l.submit(fmt.Sprintf("load-%d-%d", i, k))
			}
		})
	}
	return l
}

func (l *load) submit(name string) {
	l.mu.Lock()
	l.asked[name] = true
	l.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	answer, err := l.api.Jobs().SubmitJobs(ctx, &apiv1.SubmitJobsRequest{
		RequestId: client.NewRequestID(),
		Jobs: []*apiv1.JobSubmission{{
			Script: []byte("#!/bin/sh\ntrue\n"),
			Spec: &apiv1.JobSpec{
				Name: name, Kind: apiv1.JobKind_JOB_KIND_BATCH, WorkDir: "/tmp", Hold: true,
				Resources: &apiv1.ResourceRequest{NodesMin: 1},
			},
		}},
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case err != nil:
		l.failures = append(l.failures, fmt.Sprintf("%s: %v", name, err))
	case answer.Results[0].Refusal != nil:
		l.failures = append(l.failures, fmt.Sprintf("%s: %s", name, answer.Results[0].Refusal.Sentence))
	default:
		l.acks[name] = answer.Results[0].JobId
		l.times = append(l.times, time.Now())
	}
}

// gapAfter returns the time from when to the first acknowledgement of a request after it.
func (l *load) gapAfter(when time.Time) (time.Duration, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i, found := slices.BinarySearchFunc(l.times, when, time.Time.Compare)
	for found && i < len(l.times) && !l.times[i].After(when) {
		i++
	}
	if i >= len(l.times) {
		return 0, false
	}
	return l.times[i].Sub(when), true
}

// longestGap returns the longest time without any acknowledgement in a window.
func (l *load) longestGap(from, to time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	longest, last := time.Duration(0), from
	for _, t := range append(slices.Clone(l.times), to) {
		if t.Before(from) || t.After(to) {
			continue
		}
		longest, last = max(longest, t.Sub(last)), t
	}
	return longest
}

// finish stops the submitters and checks G1: every acknowledged job exists once, with the id it was acknowledged with; no
// name exists twice; nothing exists that nobody asked for.
func (l *load) finish(t *testing.T) {
	t.Helper()
	l.stop()
	l.wait.Wait()
	for _, f := range l.failures {
		t.Errorf("a request failed although the client may retry for 30 s: %s", f)
	}
	ids := map[string][]uint32{}
	token := ""
	for {
		page, err := l.api.Jobs().ListJobs(context.Background(), &apiv1.ListJobsRequest{Brief: true, Page: &apiv1.Page{Token: token}})
		if err != nil {
			t.Fatal(err)
		}
		for _, j := range page.Jobs {
			if l.asked[j.Spec.Name] {
				ids[j.Spec.Name] = append(ids[j.Spec.Name], j.Id)
			} else if j.Spec.Name != "watched" {
				t.Errorf("job %d is named %q, which nobody submitted", j.Id, j.Spec.Name)
			}
		}
		if token = page.NextToken; token == "" {
			break
		}
	}
	for name, id := range l.acks {
		if got := ids[name]; len(got) != 1 || got[0] != id {
			t.Errorf("%s was acknowledged as job %d and exists as %v", name, id, got)
		}
	}
	for name, got := range ids {
		if len(got) > 1 {
			t.Errorf("%s exists %d times: %v", name, len(got), got)
		}
	}
	t.Logf("%d requests acknowledged, %d asked, %d exist", len(l.acks), len(l.asked), len(ids))
}

// watched is a job over all nodes whose tasks write a line each 100 ms.
type watched struct {
	c  *cluster.Cluster
	id string
}

// watch starts it and waits until it runs everywhere.
func watch(c *cluster.Cluster, nodes int) watched {
	script := c.Script("watched.sh", `#!/bin/bash
#SBATCH --job-name=watched
srun bash -c 'echo $$ > pid.$SLURM_PROCID.$MUSTER_ATTEMPT; i=0; while [ ! -e stop ]; do i=$((i+1)); echo $i > count.$SLURM_PROCID; sleep 0.1; done; exit 0'
echo "srun returned $?"
`)
	w := watched{c: c, id: c.Must(c.Dir, "sbatch", "--parsable", fmt.Sprintf("-N%d", nodes), "--ntasks-per-node=2", script)}
	c.Eventually(cluster.Slack(20*time.Second), "every rank of the watched job counts", func() bool {
		for rank := range 2 * nodes {
			if w.count(rank) == 0 {
				return false
			}
		}
		return true
	})
	return w
}
