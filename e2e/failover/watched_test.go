package failover

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/muster-hpc/muster/e2e/cluster"
)

func (w watched) count(rank int) int {
	text, err := os.ReadFile(filepath.Join(w.c.Dir, "count."+strconv.Itoa(rank)))
	if err != nil {
		return 0
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0 // caught between truncating and writing
	}
	return n
}

// pids returns the process ids of the ranks of attempt 1, and whether there was another attempt.
func (w watched) pids(t *testing.T) (pids []int, others []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(w.c.Dir, "pid.*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if !strings.HasSuffix(f, ".1") {
			others = append(others, f)
			continue
		}
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	return pids, others
}

// goesOn checks that the same processes run as before and go on counting.
func (w watched) goesOn(t *testing.T, ranks int) {
	t.Helper()
	pids, others := w.pids(t)
	if len(others) > 0 || len(pids) != ranks {
		t.Errorf("the watched job has %d ranks of attempt 1, not %d, and others: %v", len(pids), ranks, others)
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, 0); err != nil {
			t.Errorf("rank with pid %d: %v", pid, err)
		}
	}
	before := make([]int, ranks)
	for r := range ranks {
		before[r] = w.count(r)
	}
	w.c.Eventually(cluster.Slack(10*time.Second), "every rank goes on counting", func() bool {
		for r := range ranks {
			if w.count(r) <= before[r] {
				return false
			}
		}
		return true
	})
}

// finish lets it end and checks that its exit code is the true one.
func (w watched) finish(t *testing.T) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(w.c.Dir, "stop"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	w.c.WaitState(cluster.Slack(30*time.Second), w.id, "COMPLETED")
	if state, exit := w.c.JobState(w.id); state != "COMPLETED" || exit != "0:0" {
		t.Errorf("the watched job ended as %s %s, not COMPLETED 0:0", state, exit)
	}
	output, err := os.ReadFile(filepath.Join(w.c.Dir, "slurm-"+w.id+".out"))
	if err != nil || !strings.Contains(string(output), "srun returned 0") {
		t.Errorf("the script did not see its srun return 0: %q, %v", output, err)
	}
}
