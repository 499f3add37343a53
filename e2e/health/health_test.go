package health

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/muster-hpc/muster/e2e/cluster"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// site is a cluster whose nodes pretend to have accelerators, with programs that do as files say.
type site struct {
	*cluster.Cluster
	t   *testing.T
	dir string
}

// check fails on a node while there is a file fail-NODE, with its words; prolog, epilog and the check for idle nodes likewise.
const programs = `#!/bin/sh
name=$(basename "$0")
echo "$SLURMD_NODENAME $SLURM_JOB_ID $SLURM_JOB_GPUS $SLURM_JOB_USER" >> "DIR/$name.log"
if [ -e "DIR/$name-fail-$SLURMD_NODENAME" ]; then cat "DIR/$name-fail-$SLURMD_NODENAME"; exit 1; fi
if [ -e "DIR/$name-hang-$SLURMD_NODENAME" ]; then echo $$ > "DIR/$name.pid"; sleep 300; fi
exit 0
`

func newSite(t *testing.T, nodes int, settings *apiv1.Settings) *site {
	t.Helper()
	s := &site{t: t, dir: t.TempDir()}
	bin := cluster.Bin(t)
	probe := filepath.Join(bin, "muster-gpu")
	out, err := exec.Command(probe, "inventory", "--mock", "dgxh100:x").Output()
	if err != nil || strings.Contains(string(out), "unknown") {
		t.Skipf("bin/muster-gpu can't pretend: it was built without a C compiler, or not at all (%v)", err)
	}
	for _, name := range []string{"check", "prolog", "epilog", "idle"} {
		s.write(name, strings.ReplaceAll(programs, "DIR", s.dir), 0o755)
	}
	t.Setenv("MUSTER_GPU_PROBE", fmt.Sprintf("%s --mock dgxh100:%%n --mock-faults %s/%%n.json --interval 200ms", probe, s.dir))
	for n := range nodes {
		s.faults(fmt.Sprintf("n%d", n+1), `{}`)
	}
	s.Cluster = cluster.Up(t, "--nodes", fmt.Sprint(nodes), "--agents-per-process", fmt.Sprint(nodes), "--controllers", "1", "--gpus", "0")
	s.configure(settings)
	return s
}

func (s *site) write(name, text string, mode os.FileMode) {
	s.t.Helper()
	path := filepath.Join(s.dir, name)
	if err := os.WriteFile(path+".new", []byte(text), mode); err != nil {
		s.t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) remove(name string) {
	s.t.Helper()
	if err := os.Remove(filepath.Join(s.dir, name)); err != nil {
		s.t.Fatal(err)
	}
}

// faults says what is wrong with a node's pretended GPUs.
func (s *site) faults(node, faults string) { s.t.Helper(); s.write(node+".json", faults, 0o644) }

func (s *site) configure(settings *apiv1.Settings) {
	s.t.Helper()
	text := s.Must(s.dir, "muster", "cluster", "configuration")
	configuration := &apiv1.Configuration{}
	if err := protojson.Unmarshal([]byte(text), configuration); err != nil {
		s.t.Fatal(err)
	}
	settings.OperatorUids = configuration.Settings.GetOperatorUids()
	configuration.Settings = settings
	encoded, err := protojson.Marshal(configuration)
	if err != nil {
		s.t.Fatal(err)
	}
	s.write("configuration.json", string(encoded), 0o644)
	s.Must(s.dir, "muster", "cluster", "configure", filepath.Join(s.dir, "configuration.json"))
}

// nodes are all nodes.
func (s *site) nodes() map[string]*apiv1.Node {
	s.t.Helper()
	answer := &apiv1.ListNodesResponse{}
	if err := protojson.Unmarshal([]byte(s.Must(s.dir, "muster", "nodes", "--json")), answer); err != nil {
		s.t.Fatal(err)
	}
	nodes := map[string]*apiv1.Node{}
	for _, n := range answer.Nodes {
		nodes[n.Spec.Name] = n
	}
	return nodes
}

func (s *site) drained() (names []string) {
	for name, n := range s.nodes() {
		if n.Drain {
			names = append(names, name)
		}
	}
	return names
}

// submit returns the id of a job.
func (s *site) submit(words ...string) string {
	s.t.Helper()
	return strings.TrimSpace(s.Must(s.dir, "sbatch", append([]string{"--parsable", "-o", s.dir + "/%j.out"}, words...)...))
}

func (s *site) job(id string) string {
	return s.Must(s.dir, "scontrol", "show", "job", id)
}

func bound(d time.Duration) time.Duration { return cluster.Slack(d) }

func TestWhatBreaksOnANodeMovesWorkAndWhatOnlyLooksBrokenDoesNot(t *testing.T) {
	check := &apiv1.HealthCheck{Name: "nhc", IntervalS: 5, TimeoutS: 20, Times: []apiv1.CheckTime{apiv1.CheckTime_CHECK_TIME_PERIODIC}}
	settings := func() *apiv1.Settings {
		return &apiv1.Settings{HealthChecks: []*apiv1.HealthCheck{check}}
	}
	s := newSite(t, 6, &apiv1.Settings{})
	check.Command = []string{filepath.Join(s.dir, "check")}
	run := func(name string, f func(*testing.T)) {
		if !t.Run(name, f) {
			t.FailNow() // the next would only repeat it
		}
	}
	run("inventory", s.inventory)
	s.configure(settings())
	run("limit", s.limit)
	generous := settings()
	generous.HealthDrainPercent = 100
	s.configure(generous)
	run("check", s.check)
	run("vanish", s.vanish)
	run("left", s.left)
	run("prolog", s.prolog)
	run("idle", s.idle)
	run("hang", s.hang)
}

// inventory: what the probe reads is what Slurm's commands and ours show.
func (s *site) inventory(t *testing.T) {
	out := s.Must(s.dir, "scontrol", "show", "node", "n1")
	if !strings.Contains(out, "Gres=gpu:h100:8") {
		t.Errorf("scontrol shows\n%s", out)
	}
	out = s.Must(s.dir, "muster", "nodes", "show", "n1")
	for _, want := range []string{"GPU-", "18 to", "NVLINKS", "0000"} {
		if !strings.Contains(out, want) {
			t.Errorf("muster nodes show has no %q:\n%s", want, out)
		}
	}
}

// limit: a check that fails on five nodes at once drains one, says so, and the node is resumed when it succeeds again.
func (s *site) limit(t *testing.T) {
	for n := range 5 {
		s.write(fmt.Sprintf("check-fail-n%d", n+1), "ERROR:  nhc:  Health check failed:  check_fs_mount:  /scratch not mounted\n", 0o644)
	}
	s.Eventually(bound(10*time.Second), "one node is drained, and four are not", func() bool {
		withheld := 0
		for _, n := range s.nodes() {
			if n.HealthDrainWithheld {
				withheld++
			}
		}
		return withheld == 4 && len(s.drained()) == 1
	})
	s.Eventually(bound(5*time.Second), "the alarm", func() bool {
		out := s.Must(s.dir, "muster", "cluster")
		return strings.Contains(out, "Alarm") && strings.Contains(out, "would drain 4 more nodes")
	})
	name := s.drained()[0]
	out := s.Must(s.dir, "scontrol", "show", "node", name)
	if !strings.Contains(out, "Reason=nhc: Health check failed: check_fs_mount: /scratch not mounted") {
		t.Errorf("the drained node shows\n%s", out)
	}
	for n := range 5 {
		s.remove(fmt.Sprintf("check-fail-n%d", n+1))
	}
	s.Eventually(bound(10*time.Second), "all nodes are put back to work", func() bool {
		for _, n := range s.nodes() {
			if n.Drain || n.HealthDrainWithheld || len(n.Conditions) > 0 {
				return false
			}
		}
		return true
	})
}

// check: a line of JSON takes single devices out of use, and nothing else.
func (s *site) check(t *testing.T) {
	s.write("check-fail-n2", `{"severity": "failed", "code": "bandwidth", "reason": "GPU 3 is slow", "gpus": "3", "clears": "a faster GPU"}`+"\n", 0o644)
	s.Eventually(bound(10*time.Second), "GPU 3 of n2 is unusable", func() bool {
		n := s.nodes()["n2"]
		return !n.Drain && len(n.GpusUnusableMask) == 1 && n.GpusUnusableMask[0] == 8
	})
	if out := s.Must(s.dir, "muster", "nodes", "show", "n2"); !strings.Contains(out, "FAILED nhc/BANDWIDTH, GPU 3") || !strings.Contains(out, "a faster GPU") {
		t.Errorf("muster nodes show says\n%s", out)
	}
	id := s.submit("-w", "n2", "--gpus-per-node=7", "--wrap", "sleep 0.1; echo $CUDA_VISIBLE_DEVICES")
	s.WaitState(bound(10*time.Second), id, "COMPLETED")
	if out, _ := os.ReadFile(filepath.Join(s.dir, id+".out")); strings.Contains(string(out), "3") {
		t.Errorf("the job had the GPUs %s", out)
	}
	s.remove("check-fail-n2")
	s.Eventually(bound(10*time.Second), "GPU 3 of n2 is usable", func() bool { return len(s.nodes()["n2"].GpusUnusableMask) == 0 })
}

// vanish: a GPU that is lost under a job ends its attempt as a failure of hardware, and the job runs elsewhere.
func (s *site) vanish(t *testing.T) {
	id := s.submit("--requeue", "--gpus-per-node=8", "--wrap", "sleep 60")
	s.WaitState(bound(10*time.Second), id, "RUNNING")
	first := nodeOf(s.job(id))
	s.faults(first, `{"gpus": {"3": {"state": "lost", "xids": [79]}}}`)
	s.Eventually(bound(15*time.Second), "the job runs elsewhere", func() bool {
		out := s.job(id)
		return strings.Contains(out, "JobState=RUNNING") && strings.Contains(out, "Restarts=1") && nodeOf(out) != first
	})
	shown := &struct {
		Attempts []struct{ Failure, EndSentence string }
	}{}
	if err := json.Unmarshal([]byte(s.Must(s.dir, "muster", "show", "job", id, "--json")), shown); err != nil {
		t.Fatal(err)
	}
	if a := shown.Attempts[0]; a.Failure != "FAILURE_CLASS_HARDWARE" || !strings.Contains(a.EndSentence, "node "+first) {
		t.Errorf("the first attempt ended with %+v", a)
	}
	s.Must(s.dir, "scancel", id)
	s.faults(first, `{}`)
}

func nodeOf(job string) string {
	for _, word := range strings.Fields(job) {
		if name, ok := strings.CutPrefix(word, "NodeList="); ok {
			return name
		}
	}
	return ""
}

// left: a process of no job on a GPU takes that GPU out of use until it is gone.
func (s *site) left(t *testing.T) {
	s.faults("n6", fmt.Sprintf(`{"gpus": {"5": {"processes": [{"pid": %d}]}}}`, os.Getpid()))
	id := s.submit("-w", "n6", "--wrap", "true") // the end of a job is when it is looked
	s.WaitState(bound(10*time.Second), id, "COMPLETED")
	s.Eventually(bound(10*time.Second), "GPU 5 of n6 is unusable", func() bool {
		n := s.nodes()["n6"]
		return len(n.GpusUnusableMask) == 1 && n.GpusUnusableMask[0] == 32 && n.Conditions[0].Owner == "gpu" &&
			strings.Contains(n.Conditions[0].Reason, fmt.Sprint(os.Getpid()))
	})
	s.faults("n6", `{}`)
	id = s.submit("-w", "n6", "--wrap", "true")
	s.WaitState(bound(10*time.Second), id, "COMPLETED")
	s.Eventually(bound(20*time.Second), "GPU 5 of n6 is usable", func() bool { return len(s.nodes()["n6"].GpusUnusableMask) == 0 })
}

// prolog: a node whose prolog fails is replaced before anything ran, and said so; the epilog runs after.
func (s *site) prolog(t *testing.T) {
	s.configure(&apiv1.Settings{Prolog: filepath.Join(s.dir, "prolog"), Epilog: filepath.Join(s.dir, "epilog")})
	s.write("prolog-fail-n2", "cannot mount /home\n", 0o644)
	began := time.Now()
	id := s.submit("-N2", "--gpus-per-node=8", "--comment", "two words", "--wrap", "srun hostname")
	s.WaitState(bound(20*time.Second), id, "COMPLETED")
	if out := s.job(id); strings.Contains(nodeOf(out), "n2") || !strings.Contains(out, "Restarts=0") {
		t.Errorf("after %v the job is\n%s", time.Since(began), out)
	}
	log, err := os.ReadFile(filepath.Join(s.dir, "prolog.log"))
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(log), "n2 "+id+" "); n > 1 {
		t.Errorf("the prolog ran %d times on n2", n)
	}
	if !strings.Contains(string(log), " "+id+" 0,1,2,3,4,5,6,7 ") {
		t.Errorf("the prolog was told\n%s", log)
	}
	epilogs := ""
	defer func() {
		if t.Failed() {
			t.Logf("prologs\n%sepilogs\n%s", log, epilogs)
		}
	}()
	s.Eventually(bound(5*time.Second), "the epilog runs once on each node that ran the prolog", func() bool {
		data, _ := os.ReadFile(filepath.Join(s.dir, "epilog.log"))
		epilogs = string(data)
		return strings.Count(epilogs, " "+id+" ") == 3
	})
	if n := s.nodes()["n2"]; n.LaunchFailures == 0 {
		t.Error("the failure was not charged to n2")
	}
	s.remove("prolog-fail-n2")
	s.configure(&apiv1.Settings{})
}

// idle: a check for idle nodes is killed when work comes, and the work does not wait for it.
func (s *site) idle(t *testing.T) {
	s.write("idle-hang-n4", "", 0o644)
	s.configure(&apiv1.Settings{HealthChecks: []*apiv1.HealthCheck{{Name: "active", Command: []string{filepath.Join(s.dir, "idle")}, IntervalS: 5, TimeoutS: 100,
		Times: []apiv1.CheckTime{apiv1.CheckTime_CHECK_TIME_IDLE}}}})
	pid := ""
	s.Eventually(bound(15*time.Second), "the check runs", func() bool {
		data, _ := os.ReadFile(filepath.Join(s.dir, "idle.pid"))
		pid = strings.TrimSpace(string(data))
		return pid != ""
	})
	began := time.Now()
	id := s.submit("-w", "n4", "--wrap", "sleep 3")
	s.WaitState(bound(5*time.Second), id, "RUNNING")
	if _, err := os.Stat("/proc/" + pid); err == nil {
		t.Errorf("the check still runs beside the job")
	}
	t.Logf("the job ran after %v", time.Since(began))
	if n := s.nodes()["n4"]; len(n.Conditions) > 0 {
		t.Errorf("that the check was killed means something: %v", n.Conditions)
	}
	s.WaitState(bound(10*time.Second), id, "COMPLETED")
	s.remove("idle-hang-n4")
	s.configure(&apiv1.Settings{})
}

// hang: a probe that hangs keeps nobody from the node.
func (s *site) hang(t *testing.T) {
	s.faults("n5", `{"hang_s": 100}`)
	id := s.submit("-w", "n5", "--gpus-per-node=8", "--wrap", "sleep 1")
	s.WaitState(bound(10*time.Second), id, "COMPLETED")
	if n := s.nodes()["n5"]; n.Drain || len(n.GpusUnusableMask) > 0 {
		t.Errorf("n5 is not usable: %v", n.Conditions)
	}
}
