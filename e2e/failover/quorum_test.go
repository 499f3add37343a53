package failover

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/muster-hpc/muster/e2e/cluster"
)

// TestWithoutAQuorumPicturesAreOldAndSaySoAndWritesWait kills one of three controllers and stops another, then ends all of them, and starts
// them again.
func TestWithoutAQuorumPicturesAreOldAndSaySoAndWritesWait(t *testing.T) {
	c := cluster.Up(t, "--nodes", "1")
	id := c.Must(c.Dir, "sbatch", "--parsable", "-H", "-J", "before", "--wrap", "true")
	names := map[string]bool{"c1": true, "c2": true, "c3": true}
	gone := c.Leader()
	delete(names, gone)
	var rest []string
	for name := range names {
		rest = append(rest, name)
	}
	survivor, stopped := rest[0], rest[1]
	c.Dev("kill", gone)
	c.Dev("pause", stopped)

	t.Run("one of three shows what it has", func(t *testing.T) {
		for _, look := range []struct{ line, shows string }{
			{"squeue -h -o %i|%j", id + "|before"}, {"sinfo -h -o %N|%D", "n1|1"}, {"muster cluster", "does not answer"},
		} {
			words := strings.Fields(look.line)
			out := c.Run(c.Dir, words[0], words[1:]...)
			if out.Code != 0 || !strings.Contains(out.Stdout, look.shows) {
				t.Errorf("%s: exit %d, %q, %q", look.line, out.Code, out.Stdout, out.Stderr)
			}
			for _, part := range []string{"as of ", " ago: no quorum: 1 of 3 controllers answers (", gone, stopped, " are silent)", "running work goes on"} {
				if !strings.Contains(out.Stderr, part) {
					t.Errorf("%s does not say %q: %q", look.line, part, out.Stderr)
				}
			}
			if out.Took > cluster.Slack(10*time.Second) {
				t.Errorf("%s took %v", look.line, out.Took)
			}
		}
		out := c.Run(c.Dir, "muster", "cluster")
		if strings.Count(out.Stdout, "does not answer") != 2 {
			t.Errorf("muster cluster shows the troubles of others than %s and %s:\n%s", gone, stopped, out.Stdout)
		}
		// The one that was stopped has the request before it, and may take it up when it goes on.
		out = c.RunWith(cluster.Command{Dir: c.Dir, Name: "sbatch", Args: []string{"-H", "--wrap", "true"}, Env: []string{"MUSTER_TIMEOUT=2"}})
		if out.Code != 1 || out.Stdout != "" || !strings.Contains(out.Stderr, "1 of 3 controllers answers") || !strings.Contains(out.Stderr, "is not known") {
			t.Errorf("sbatch: exit %d, %q, %q", out.Code, out.Stdout, out.Stderr)
		}
	})
	c.Dev("kill", stopped)
	c.Dev("kill", survivor)
	waiting := make(chan cluster.Outcome, 1)
	go func() { waiting <- c.Run(c.Dir, "sbatch", "--parsable", "-H", "-J", "during", "--wrap", "true") }()

	t.Run("none of three is said soon", func(t *testing.T) {
		begun := time.Now()
		for line, code := range map[string]int{"squeue": 1, "sinfo": 1, "muster cluster": 3, "sacct -j " + id: 1} {
			words := strings.Fields(line)
			out := c.Run(c.Dir, words[0], words[1:]...)
			if out.Code != code || out.Stdout != "" || !strings.Contains(out.Stderr, "no controller of cluster dev answers: nothing listens at ") {
				t.Errorf("%s: exit %d, %q, %q", line, out.Code, out.Stdout, out.Stderr)
			}
			if out.Took > cluster.Slack(3500*time.Millisecond) {
				t.Errorf("%s took %v", line, out.Took)
			}
		}
		t.Logf("four commands took %v", time.Since(begun))
	})
	select {
	case out := <-waiting:
		t.Errorf("sbatch did not wait: exit %d, %q, %q", out.Code, out.Stdout, out.Stderr)
		waiting <- out
	default:
	}
	for _, name := range []string{gone, stopped, survivor} {
		c.Dev("start", name)
	}
	out := <-waiting
	if out.Code != 0 {
		t.Fatalf("sbatch over a restart of all controllers: exit %d, %q", out.Code, out.Stderr)
	}
	listed := c.Must(c.Dir, "squeue", "-h", "-o", "%i|%j")
	if want := id + "|before"; strings.Count(listed, "before") != 1 || !strings.Contains(listed, want) {
		t.Errorf("the job of before is not there once: %q", listed)
	}
	if want := strings.TrimSpace(out.Stdout) + "|during"; strings.Count(listed, "during") != 1 || !strings.Contains(listed, want) {
		t.Errorf("the job that waited is not there once as %q: %q", want, listed)
	}
}

// TestSbatchDuringAnElectionSubmitsExactlyOnce: many processes of sbatch are started while the leader is killed.
func TestSbatchDuringAnElectionSubmitsExactlyOnce(t *testing.T) {
	c := cluster.Up(t, "--nodes", "1")
	const rounds, submitters, each = 3, 16, 3
	type result struct {
		name string
		out  cluster.Outcome
	}
	acknowledged := map[string]string{}
	for round := range rounds {
		settle(c)
		leader := c.Leader()
		results := make(chan result)
		for i := range submitters {
			go func() {
				for k := range each {
					name := "e" + string(rune('a'+round)) + string(rune('a'+i)) + string(rune('a'+k))
					cmd := exec.Command(filepath.Join(cluster.Bin(t), "slurm", "sbatch"), "--parsable", "-H", "-J", name, "-o", "/dev/null", "--wrap", "true")
					cmd.Env, cmd.Dir = c.Env, c.Dir
					var stderr strings.Builder
					cmd.Stderr = &stderr
					stdout, err := cmd.Output()
					out := cluster.Outcome{Stdout: strings.TrimSpace(string(stdout)), Stderr: stderr.String()}
					if err != nil {
						out.Code, out.Stderr = 1, out.Stderr+err.Error()
					}
					results <- result{name, out}
				}
			}()
		}
		for n := range submitters * each {
			if n == submitters/2 { // all have begun, and half of them wait for the answer
				c.Dev("kill", leader)
			}
			r := <-results
			if r.out.Code != 0 || r.out.Stdout == "" {
				t.Errorf("sbatch of %s: exit %d, %q, %q", r.name, r.out.Code, r.out.Stdout, r.out.Stderr)
				continue
			}
			acknowledged[r.name] = r.out.Stdout
		}
		c.Dev("start", leader)
	}
	existing := map[string][]string{}
	for line := range strings.Lines(c.Must(c.Dir, "squeue", "-h", "-o", "%j %i") + "\n") {
		if name, id, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			existing[name] = append(existing[name], id)
		}
	}
	for name, id := range acknowledged {
		if got := existing[name]; len(got) != 1 || got[0] != id {
			t.Errorf("%s was acknowledged as job %s and exists as %v", name, id, got)
		}
	}
	for name, ids := range existing {
		if _, ok := acknowledged[name]; !ok {
			t.Errorf("jobs %v are named %s, which nobody was told of", ids, name)
		}
	}
	t.Logf("%d of %d submissions acknowledged", len(acknowledged), rounds*submitters*each)
}
