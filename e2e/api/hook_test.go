package api

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/muster-hpc/muster/e2e/cluster"
)

// hookScript is a site's submission program: what it does is decided by the job's name.
const hookScript = `#!/bin/sh
spec=$(cat)
name=$(printf %s "$spec" | sed -n 's/.*"name": *"\([a-z]*\)".*/\1/p')
case $name in
change) printf %s "$spec" | sed 's/"name": *"change"/"name":"changed", "comment":"for '"$MUSTER_USER"' '"$MUSTER_UID"'"/' ;;
refuse) echo "jobs of this site need an account: use --account" >&2; exit 3 ;;
quiet)  exit 4 ;;
hang)   exec sleep 1000 ;;
garbage) echo "all right" ;;
flood)  head -c 2000000 /dev/zero ;;
die)    kill -9 $$ ;;
esac
`

func TestTheSitesSubmissionProgramHasItsSay(t *testing.T) {
	hook := filepath.Join(t.TempDir(), "hook")
	if err := os.WriteFile(hook, []byte(hookScript), 0o755); err != nil {
		t.Fatal(err)
	}
	configuration := filepath.Join(t.TempDir(), "configuration.json")
	if err := os.WriteFile(configuration, []byte(`{"clusterName":"dev","partitions":[{"name":"main","nodes":"ALL","isDefault":true}],"settings":{"submitHook":"`+
		hook+`"}}`), 0o644); err != nil {
		t.Fatal(err)
	}
	c := cluster.Up(t, "--controllers", "1", "--nodes", "1", "--config", configuration)
	submit := func(name string) cluster.Outcome {
		t.Helper()
		return c.Run(c.Dir, "sbatch", "--parsable", "-H", "-J", name, "-o", "/dev/null", "--wrap", "true")
	}
	for name, sentence := range map[string]string{
		"refuse":  "jobs of this site need an account: use --account",
		"quiet":   "the site's submission program " + hook + " refused the job without saying why (exit status 4)",
		"hang":    "the site's submission program " + hook + " gave no answer within 5s; tell an operator",
		"garbage": "the site's submission program " + hook + " printed something that is no job specification",
		"flood":   "the site's submission program " + hook + " printed more than 1048576 bytes; tell an operator",
		"die":     "the site's submission program " + hook + " was ended by a signal (killed); tell an operator",
	} {
		out := submit(name)
		if out.Code != 1 || out.Stdout != "" || !strings.Contains(out.Stderr, sentence) {
			t.Errorf("%s: exit %d, %q, %q; expected %q", name, out.Code, out.Stdout, out.Stderr, sentence)
		}
		if out.Took > cluster.Slack(8*time.Second) {
			t.Errorf("%s took %v", name, out.Took)
		}
	}
	for _, name := range []string{"change", "plain"} {
		if out := submit(name); out.Code != 0 {
			t.Errorf("%s: exit %d, %q", name, out.Code, out.Stderr)
		}
	}
	// What was refused does not exist; what was changed is what exists.
	listed := strings.Fields(c.Must(c.Dir, "squeue", "-h", "-o", "%j"))
	if len(listed) != 2 || !strings.Contains(strings.Join(listed, " "), "changed") || !strings.Contains(strings.Join(listed, " "), "plain") {
		t.Errorf("the jobs are %v", listed)
	}
	if comment := c.Must(c.Dir, "squeue", "-h", "-n", "changed", "-o", "%k"); !strings.HasPrefix(comment, "for ") || len(strings.Fields(comment)) != 3 {
		t.Errorf("the program was told of %q", comment)
	}
	if err := os.Remove(hook); err != nil {
		t.Fatal(err)
	}
	if out := submit("plain"); out.Code != 1 || !strings.Contains(out.Stderr, "the site's submission program cannot be run (") {
		t.Errorf("without the program: exit %d, %q, %q", out.Code, out.Stdout, out.Stderr)
	}
}
