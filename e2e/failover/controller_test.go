package failover

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/muster-hpc/muster/e2e/cluster"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
)

// settle waits until all controllers vote, answer and have the same state to within a little.
func settle(c *cluster.Cluster) {
	c.Eventually(60*time.Second, "all controllers vote and answer", func() bool {
		s := c.Status()
		for _, p := range s.Processes {
			if p.Role == "controller" && (!p.Alive || !p.Voter || !p.Answers) {
				return false
			}
		}
		return s.Leader != ""
	})
}

func report(t *testing.T, what string, gaps []time.Duration, median, worst time.Duration) {
	t.Helper()
	slices.Sort(gaps)
	t.Logf("%s, to the next acknowledgement: median %v, worst %v of %d (all: %v)", what, gaps[len(gaps)/2], gaps[len(gaps)-1], len(gaps), gaps)
	if m := gaps[len(gaps)/2]; m > cluster.Slack(median) {
		t.Errorf("%s: median %v is above %v", what, m, cluster.Slack(median))
	}
	if w := gaps[len(gaps)-1]; w > cluster.Slack(worst) {
		t.Errorf("%s: worst %v is above %v", what, w, cluster.Slack(worst))
	}
}

// outage waits until another controller leads and has acknowledged a request, and returns the longest time without any acknowledgement since
// before: the fault itself is somewhere between then and the return of the command that made it, and the last answers of the old
// leader may be read after that.
func (l *load) outage(c *cluster.Cluster, old string, before time.Time) time.Duration {
	c.Eventually(60*time.Second, "another controller leads than "+old, func() bool {
		leader := c.Status().Leader
		return leader != "" && leader != old
	})
	since, next := time.Now(), time.Duration(0)
	c.Eventually(60*time.Second, "a request is acknowledged by the leader after "+old, func() (ok bool) {
		next, ok = l.gapAfter(since)
		return ok
	})
	return l.longestGap(before, since.Add(next))
}

func TestKillingTheLeaderLosesNothingAndNoTaskNotices(t *testing.T) {
	c := cluster.Up(t)
	job := watch(c, 4)
	rounds := 10
	if cluster.Campaign() {
		rounds = 50
	}
	load := submitters(c, 32)
	var gaps []time.Duration
	for range rounds {
		settle(c)
		leader := c.Leader()
		before := time.Now()
		c.Dev("kill", leader)
		gaps = append(gaps, load.outage(c, leader, before))
		c.Dev("start", leader)
	}
	job.goesOn(t, 8)
	load.finish(t)
	job.finish(t)
	report(t, "SIGKILL of the leader", gaps, time.Second, 2500*time.Millisecond)
}

func TestAPausedLeaderIsReplacedAndAcknowledgesNothingStale(t *testing.T) {
	c := cluster.Up(t)
	job := watch(c, 4)
	rounds := 3
	if cluster.Campaign() {
		rounds = 20
	}
	load := submitters(c, 32)
	var gaps []time.Duration
	for range rounds {
		settle(c)
		leader := c.Leader()
		before := time.Now()
		c.Dev("pause", leader)
		gaps = append(gaps, load.outage(c, leader, before))
		load.readsAreFresh(t, c, leader)
	}
	job.goesOn(t, 8)
	load.finish(t)
	job.finish(t)
	report(t, "SIGSTOP of the leader", gaps, 3*time.Second, 3*time.Second)
}

// readsAreFresh resumes the deposed leader and at once asks that very controller, linearizably, for a job acknowledged meanwhile.
func (l *load) readsAreFresh(t *testing.T, c *cluster.Cluster, leader string) {
	t.Helper()
	l.submit("fresh-" + leader + time.Now().Format("150405.000"))
	l.mu.Lock()
	newest := uint32(0)
	for _, id := range l.acks {
		newest = max(newest, id)
	}
	l.mu.Unlock()
	deposed := c.Direct(c.Process(leader).Address)
	c.Dev("resume", leader)
	for range 20 {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		answer, err := deposed.Jobs().GetJob(ctx, &apiv1.GetJobRequest{JobId: newest})
		cancel()
		if err != nil {
			// Not answering is allowed; denying what was acknowledged is not.
			if d := rpc.Detail(err); d != nil && d.Reason == "JOB_UNKNOWN" {
				t.Errorf("the resumed leader denies job %d, which its successor acknowledged: %v", newest, err)
			}
			continue
		}
		if answer.Job.Id != newest {
			t.Errorf("asked for job %d, got %d", newest, answer.Job.Id)
		}
	}
}

func TestAGracefulTransferFailsNoCall(t *testing.T) {
	c := cluster.Up(t)
	load := submitters(c, 32)
	c.Eventually(30*time.Second, "requests are acknowledged", func() bool { _, ok := load.gapAfter(time.Time{}); return ok })
	var gaps []time.Duration
	for range 5 {
		settle(c)
		before := time.Now()
		c.Must(c.Dir, "muster", "cluster", "transfer")
		gaps = append(gaps, load.longestGap(before, time.Now()))
	}
	load.finish(t)
	report(t, "graceful transfer, longest gap", gaps, 150*time.Millisecond, 400*time.Millisecond)
}
