package upgrade

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/muster-hpc/muster/e2e/cluster"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc/client"
)

type release struct{ name, commit, level string }

// releases reads the list.
func releases(t *testing.T) []release {
	t.Helper()
	text, err := os.ReadFile("releases")
	if err != nil {
		t.Fatal(err)
	}
	var all []release
	for line := range strings.Lines(string(text)) {
		if line, _, _ = strings.Cut(line, "#"); strings.TrimSpace(line) == "" {
			continue
		}
		fields := strings.Fields(line)
		if len(fields) != 3 {
			t.Fatalf("releases: %q is not NAME COMMIT LEVEL", line)
		}
		all = append(all, release{fields[0], fields[1], fields[2]})
	}
	return all
}

// build builds the programs of a release and returns their directory. A checkout without the commit (a shallow clone) is a skip,
// because nothing can be said about it; a commit that does not build is a failure.
func (r release) build(t *testing.T) string {
	t.Helper()
	cache, err := filepath.Abs(filepath.Join(".cache", r.commit))
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(cache, "bin")
	if _, err := os.Stat(filepath.Join(bin, "muster-slurm")); err == nil {
		return bin
	}
	if err := exec.Command("git", "cat-file", "-e", r.commit+"^{commit}").Run(); err != nil {
		t.Skipf("this checkout does not have commit %s of release %s: fetch the whole history to test upgrades from it", r.commit, r.name)
	}
	source := filepath.Join(cache, "source")
	if err := os.MkdirAll(source, 0o755); err != nil {
		t.Fatal(err)
	}
	archive := exec.Command("git", "archive", "--format=tar", r.commit)
	archive.Dir = "../.."
	var tar, stderr bytes.Buffer
	archive.Stdout, archive.Stderr = &tar, &stderr
	if err := archive.Run(); err != nil {
		t.Fatalf("git archive: %v: %s", err, stderr.String())
	}
	unpack := exec.Command("tar", "-x", "-C", source)
	unpack.Stdin = &tar
	if out, err := unpack.CombinedOutput(); err != nil {
		t.Fatalf("tar: %v: %s", err, out)
	}
	build := exec.Command("make", "build", "VERSION="+r.name)
	build.Dir = source
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("release %s does not build any more: %v\n%s", r.name, err, out)
	}
	if err := os.Rename(filepath.Join(source, "bin"), bin); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(source); err != nil {
		t.Fatal(err)
	}
	return bin
}

func TestEveryProcessIsUpgradedUnderLoadAndThereIsAWayBack(t *testing.T) {
	for _, r := range releases(t) {
		t.Run(r.name, func(t *testing.T) {
			old, new := r.build(t), cluster.Bin(t)
			c := cluster.Up(t, "--nodes", "2", "--bin", old)
			job := c.Must(c.Dir, "sbatch", "--parsable", "-N2", "--ntasks-per-node=1", c.Script("long.sh",
				"#!/bin/bash\nsrun bash -c 'echo $$ >> pids.$SLURM_PROCID; while [ ! -e stop ]; do sleep 0.1; done; exit 0'\necho srun returned $?\n"))
			c.Eventually(cluster.Slack(20*time.Second), "both ranks run", func() bool {
				return lines(c, "pids.0") == 1 && lines(c, "pids.1") == 1
			})
			stop := load(t, c)
			for _, bin := range []string{new, old, new} {
				for _, name := range []string{"c1", "c2", "c3"} {
					c.Dev("stop", name)
					c.Dev("start", "--bin", bin, name)
				}
			}
			for _, bin := range []string{new, old, new} {
				for _, name := range []string{"n1", "n2"} {
					c.Dev("stop", name)
					c.Dev("start", "--bin", bin, name)
				}
			}
			stop()
			if err := os.WriteFile(filepath.Join(c.Dir, "stop"), nil, 0o644); err != nil {
				t.Fatal(err)
			}
			c.WaitState(cluster.Slack(30*time.Second), job, "COMPLETED")
			if lines(c, "pids.0") != 1 || lines(c, "pids.1") != 1 {
				t.Error("a rank of the job was started again during the upgrade")
			}
			output, err := os.ReadFile(filepath.Join(c.Dir, "slurm-"+job+".out"))
			if err != nil || !strings.Contains(string(output), "srun returned 0") {
				t.Errorf("the script's srun did not return 0: %q, %v", output, err)
			}
		})
	}
}

func lines(c *cluster.Cluster, name string) int {
	text, err := os.ReadFile(filepath.Join(c.Dir, name))
	if err != nil {
		return 0
	}
	return strings.Count(string(text), "\n")
}

// load submits held jobs all the time; the returned function stops it and checks that no request failed and each exists once.
func load(t *testing.T, c *cluster.Cluster) (stop func()) {
	t.Helper()
	api := c.Client()
	ctx, cancel := context.WithCancel(context.Background())
	acknowledged := map[uint32]bool{}
	var group sync.WaitGroup
	group.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			answer, err := api.Jobs().SubmitJobs(context.Background(), &apiv1.SubmitJobsRequest{
				RequestId: client.NewRequestID(),
				Jobs: []*apiv1.JobSubmission{{Script: []byte("#!/bin/sh\n"), Spec: &apiv1.JobSpec{
					Name: fmt.Sprintf("upgrade-%d", i), Kind: apiv1.JobKind_JOB_KIND_BATCH, WorkDir: "/tmp", Hold: true,
				}}},
			})
			if err != nil {
				t.Errorf("a request failed during the upgrade: %v", err)
				return
			}
			if id := answer.Results[0].JobId; id == 0 || acknowledged[id] {
				t.Errorf("request %d was answered with %v", i, answer.Results[0])
			} else {
				acknowledged[id] = true
			}
		}
	})
	return func() {
		cancel()
		group.Wait()
		for id := range acknowledged {
			if _, err := api.Jobs().GetJob(context.Background(), &apiv1.GetJobRequest{JobId: id}); err != nil {
				t.Errorf("job %d was acknowledged: %v", id, err)
			}
		}
		t.Logf("%d requests were acknowledged while every process was replaced six times", len(acknowledged))
	}
}
