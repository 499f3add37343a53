package health

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

const failed = apiv1.ConditionSeverity_CONDITION_SEVERITY_FAILED

// place is a directory with programs, and the checks of a node there.
type place struct {
	t       *testing.T
	dir     string
	changed chan struct{}
}

func newPlace(t *testing.T) *place {
	return &place{t: t, dir: t.TempDir(), changed: make(chan struct{}, 100)}
}

func (p *place) open() *Checks {
	return New(Config{
		Dir: filepath.Join(p.dir, "health"), Node: "n1", BootID: "b1", Log: slog.New(slog.DiscardHandler),
		Changed: func() {
			select {
			case p.changed <- struct{}{}:
			default:
			}
		},
	})
}

// program writes a script and returns its path.
func (p *place) program(name, text string) string {
	p.t.Helper()
	path := filepath.Join(p.dir, name)
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
		p.t.Fatal(err)
	}
	return path
}

func (p *place) read(name string) string {
	data, err := os.ReadFile(filepath.Join(p.dir, name))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		p.t.Fatal(err)
	}
	return string(data)
}

// await waits until something holds.
func (p *place) await(what string, holds func() bool) {
	p.t.Helper()
	deadline := time.After(20 * time.Second)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline:
			p.t.Fatalf("it does not become so that %s", what)
		}
	}
}

func order(job uint32) *nodev1.DesiredAttempt {
	return &nodev1.DesiredAttempt{
		Job:   &apiv1.Job{Id: job, Owner: &apiv1.JobOwner{Uid: 1001, Gid: 1001, User: "alice"}, Spec: &apiv1.JobSpec{Name: "a job", Comment: "two words"}},
		Fence: &apiv1.Fence{Incarnation: 1, Attempt: 1, Placement: 1}, GpuMask: []uint64{0b1010}, NodeList: "n[1-2]",
	}
}

func reasons(c *Checks) string {
	var all []string
	for _, f := range c.Conditions() {
		all = append(all, fmt.Sprintf("%s %s %v %s", f.Owner, f.Code, f.Severity-1, f.Reason))
	}
	return strings.Join(all, "\n")
}

func TestProgramsAreUnderstood(t *testing.T) {
	d := Defaults{Owner: "x", Code: "CHECK_FAILED", Severity: failed, Clears: "luck",
		GPU: func(uuid string) (uint32, bool) { return 5, uuid == "GPU-5" }}
	for _, test := range []struct {
		name   string
		code   int
		output string
		want   string // code severity gpus ends reason; one a line
	}{
		{"success", 0, "all is well\n", ""},
		{"silence", 3, "", "CHECK_FAILED 3 [] false it ended with exit code 3 and printed nothing"},
		{"last line", 1, "one\ntwo\n\n", "CHECK_FAILED 3 [] false two"},
		{"NHC", 1, "start\nERROR:  nhc:  Health check failed:  check_fs_mount:  /x not mounted\nbye\n",
			"CHECK_FAILED 3 [] false Health check failed: check_fs_mount: /x not mounted"},
		{"JSON", 0, `{"severity":"degraded","code":"low-bandwidth","reason":"slow","gpus":[0,"2-3"]}`, "LOW_BANDWIDTH 2 [13] false slow"},
		{"JSON by id", 0, `{"severity":"failed","gpus":"GPU-5","ends_work":true,"reason":"bad"}`, "CHECK_FAILED 3 [32] true bad"},
		{"ends work only if failed", 0, `{"severity":"info","ends_work":true,"reason":"a"}`, "CHECK_FAILED 1 [] false a"},
		{"JSON and failure", 1, "{\"severity\":\"info\",\"code\":\"A\",\"reason\":\"a\"}\nbroken\n", "A 1 [] false a\nCHECK_FAILED 3 [] false broken"},
		{"JSON is the failure", 1, `{"severity":"failed","code":"A","reason":"a","gpus":1}`, "A 3 [2] false a"},
		{"two of one code", 0, "{\"severity\":\"info\",\"code\":\"A\",\"reason\":\"a\",\"gpus\":0}\n{\"severity\":\"failed\",\"code\":\"A\",\"reason\":\"b\",\"gpus\":1}",
			"A 3 [3] false a; b"},
		{"unknown device is not the node", 0, `{"severity":"failed","gpus":"GPU-9"}`, ""},
		{"too high", 1, `{"severity":"failed","gpus":99999}`, `CHECK_FAILED 3 [] false {"severity":"failed","gpus":99999}`},
		{"no JSON of ours", 0, `{"what":1}`, ""},
		{"control characters", 1, "a\x1b[31mb\x00c\tд\xff", "CHECK_FAILED 3 [] false a[31mbc д"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got []string
			for _, c := range Parse(test.code, []byte(test.output), time.Unix(1, 0), d) {
				got = append(got, fmt.Sprintf("%s %d %v %v %s", c.Code, c.Severity, c.GpuMask, c.EndsWork, c.Reason))
			}
			if text := strings.Join(got, "\n"); text != test.want {
				t.Errorf("got\n%s\nwant\n%s", text, test.want)
			}
		})
	}
}

func FuzzParse(f *testing.F) {
	f.Add(1, []byte(`{"severity":"failed","code":"A","reason":"a","gpus":[1,"2-3"],"expires_s":5}`))
	f.Add(0, []byte("ERROR: nhc: Health check failed: x"))
	f.Fuzz(func(t *testing.T, code int, output []byte) {
		for _, c := range Parse(code, output, time.Unix(1, 0), Defaults{Owner: "x", Code: "X", Severity: failed}) {
			if len(c.Reason) > maxReason || strings.ContainsAny(c.Reason+c.Clears, "\n\x1b\x00") || c.Code == "" || len(c.Code) > 64 || len(c.GpuMask) > 16 {
				t.Fatalf("%v", c)
			}
		}
	})
}

func TestWhatTakesTooLongIsKilledWithItsGroupAndMeansUnknown(t *testing.T) {
	p := newPlace(t)
	slow := p.program("slow", "sleep 1000 & echo $! > "+p.dir+"/child; sleep 1000")
	r := (&runner{}).run(t.Context(), "slow", []string{slow}, nil, 300*time.Millisecond)
	if !errors.Is(r.why, ErrUnknown) || r.cut || r.took > 10*time.Second {
		t.Fatalf("%+v", r)
	}
	child, err := strconv.Atoi(strings.TrimSpace(p.read("child")))
	if err != nil {
		t.Fatal(err)
	}
	p.await("the child is gone", func() bool {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", child))
		return err != nil || strings.Contains(string(data), ") Z ")
	})
}

func TestChildrenThatHoldTheOutputOpenDelayNobody(t *testing.T) {
	p := newPlace(t)
	held := p.program("held", "setsid sleep 30 & echo $! > "+p.dir+"/child; echo well")
	r := (&runner{}).run(t.Context(), "held", []string{held}, os.Environ(), time.Minute)
	if r.why != nil || r.code != 0 || !strings.Contains(string(r.output), "well") || r.took > 15*time.Second {
		t.Errorf("%+v", r)
	}
	if child, err := strconv.Atoi(strings.TrimSpace(p.read("child"))); err == nil {
		_ = syscall.Kill(child, syscall.SIGKILL)
	}
}

func TestOutputIsBoundedAndItsEndKept(t *testing.T) {
	p := newPlace(t)
	r := (&runner{}).run(t.Context(), "loud", []string{p.program("loud", "head -c 3000000 /dev/zero | tr '\\0' x; echo; echo the end; exit 1")}, os.Environ(), time.Minute)
	if len(r.output) > maxOutput || !strings.HasSuffix(string(r.output), "the end\n") || r.code != 1 {
		t.Errorf("%d bytes, code %d, %v", len(r.output), r.code, r.why)
	}
}

func TestUnknownIsNotFailedAndClearsNothing(t *testing.T) {
	p := newPlace(t)
	c := p.open()
	h := &apiv1.HealthCheck{Name: "disk", Command: []string{p.program("disk", "echo bad; exit 1")}}
	c.Configure(&apiv1.Settings{HealthChecks: []*apiv1.HealthCheck{h}}, "x")
	c.check(t.Context(), h, "periodic", nil)
	if got := reasons(c); got != "disk CHECK_FAILED 2 bad" && !strings.Contains(got, "bad") {
		t.Fatalf("%s", got)
	}
	since := c.Conditions()[0].Since
	for _, text := range []string{"kill -9 $$", "sleep 100"} {
		p.program("disk", text)
		h.TimeoutS = 1
		c.check(t.Context(), h, "periodic", nil)
		list := c.Conditions()
		if len(list) != 2 || list[0].Severity != failed || list[1].Code != codeUnknown || list[1].Severity >= failed {
			t.Fatalf("%s: %s", text, reasons(c))
		}
	}
	// The agent is started again: what was found is known, and since when.
	again := p.open()
	if list := again.Conditions(); len(list) != 2 || !list[0].Since.AsTime().Equal(since.AsTime()) {
		t.Errorf("after a restart: %v", list)
	}
	p.program("disk", "exit 0")
	c.check(t.Context(), h, "periodic", nil)
	if got := reasons(c); got != "" {
		t.Errorf("after success: %s", got)
	}
	c.check(t.Context(), &apiv1.HealthCheck{Name: "disk", Command: []string{"/no/such"}}, "periodic", nil)
	if list := c.Conditions(); len(list) != 1 || list[0].Code != codeUnknown {
		t.Errorf("a program that is not there: %s", reasons(c))
	}
	c.Configure(&apiv1.Settings{}, "x")
	if len(c.Conditions()) != 0 {
		t.Error("findings of a check that there is no more stay")
	}
}

func TestFindingsExpire(t *testing.T) {
	p := newPlace(t)
	c := p.open()
	h := &apiv1.HealthCheck{Name: "disk", Command: []string{p.program("disk", `echo '{"severity":"failed","reason":"x","expires_s":1}'`)}}
	c.Configure(&apiv1.Settings{HealthChecks: []*apiv1.HealthCheck{h}}, "x")
	c.check(t.Context(), h, "periodic", nil)
	if len(c.Conditions()) != 1 {
		t.Fatal("nothing was found")
	}
	p.await("it is forgotten", func() bool { return len(c.Conditions()) == 0 })
}

func TestTheCheckForIdleNodesRunsOnlyBesideNoWorkAndIsKilledAtOnce(t *testing.T) {
	p := newPlace(t)
	c := p.open()
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan struct{})
	go func() { c.Run(ctx); close(over) }()
	defer func() { cancel(); <-over }()
	path := p.program("active", "echo $$ > "+p.dir+"/pid; sleep 1000")
	h := &apiv1.HealthCheck{Name: "active", Command: []string{path}, IntervalS: 1, TimeoutS: 1000, Times: []apiv1.CheckTime{apiv1.CheckTime_CHECK_TIME_IDLE}}
	c.Busy(true)
	c.Configure(&apiv1.Settings{HealthChecks: []*apiv1.HealthCheck{h}}, "x")
	c.next(time.Now()) // it is due within a second now
	if due, _, _ := c.next(time.Now().Add(time.Hour)); due != nil {
		t.Fatal("it would be started beside work")
	}
	c.Busy(false)
	p.await("it runs", func() bool { return p.read("pid") != "" })
	began := time.Now()
	c.Busy(true)
	if err := c.BeforeJob(ctx, order(7)); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("the job waited %v for it", took)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(p.read("pid")))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, 0); err == nil {
		t.Error("it runs beside the job")
	}
	if got := reasons(c); got != "" {
		t.Errorf("that it was killed says something: %s", got)
	}
}

func TestNodesBeginAtDifferentTimesAndEachAtTheSame(t *testing.T) {
	const nodes, parts = 10_000, 20
	var count [parts]int
	for i := range nodes {
		name := fmt.Sprintf("n%d", i)
		j := Jitter(name, time.Hour)
		if j != Jitter(name, time.Hour) || j < 0 || j >= time.Hour {
			t.Fatalf("%s: %v", name, j)
		}
		count[j*parts/time.Hour]++
	}
	for i, n := range count {
		if n < nodes/parts/2 || n > nodes/parts*2 {
			t.Errorf("part %d of the interval has %d of %d nodes", i, n, nodes)
		}
	}
}

func TestThePrologRunsOnceForAnAttemptAndTheEpilogAfterIt(t *testing.T) {
	p := newPlace(t)
	settings := &apiv1.Settings{
		Prolog: p.program("prolog", "echo prolog $SLURM_JOB_ID $SLURM_JOB_UID $SLURM_JOB_USER $SLURM_JOB_GPUS $SLURMD_NODENAME \"$SLURM_JOB_COMMENT\" >> "+p.dir+"/log"),
		Epilog: p.program("epilog", "echo epilog $SLURM_JOB_ID >> "+p.dir+"/log"),
	}
	c := p.open()
	c.Configure(settings, "x")
	errs := make(chan error, 3)
	for range 3 {
		go func() { errs <- c.BeforeJob(t.Context(), order(7)) }()
	}
	for range 3 {
		if err := <-errs; err != nil {
			t.Fatal(err)
		}
	}
	c = p.open() // the agent is started again in the middle of the job
	c.Configure(settings, "x")
	if err := c.BeforeJob(t.Context(), order(7)); err != nil {
		t.Fatal(err)
	}
	for _, job := range []uint32{7, 7, 8} { // the second order for 7 is a repetition; nothing ran before 8
		if !c.AfterJob(t.Context(), order(job), false) {
			t.Fatalf("AfterJob of job %d was not over", job)
		}
	}
	if got, want := p.read("log"), "prolog 7 1001 alice 1,3 n1 two words\nepilog 7\n"; got != want {
		t.Errorf("ran\n%s\nwant\n%s", got, want)
	}
}

func TestAFailedPrologRefusesTheJobAndAFailedEpilogIsACondition(t *testing.T) {
	p := newPlace(t)
	c := p.open()
	c.Configure(&apiv1.Settings{
		Prolog: p.program("prolog", `echo '{"severity":"degraded","code":"SLOW_DISK","reason":"slow"}'; echo cannot mount /home; exit 1`),
		Epilog: p.program("epilog", "echo cannot clean up; exit 2"),
	}, "x")
	err := c.BeforeJob(t.Context(), order(7))
	if !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "cannot mount /home") {
		t.Fatalf("%v", err)
	}
	if list := c.Conditions(); len(list) != 1 || list[0].Code != "SLOW_DISK" {
		t.Errorf("%s", reasons(c))
	}
	if !c.AfterJob(t.Context(), order(7), true) {
		t.Fatal("not over")
	}
	if list := c.Conditions(); len(list) != 2 || list[0].Code != "EPILOG_FAILED" || list[0].Severity != failed || list[0].Reason != "cannot clean up" {
		t.Errorf("%s", reasons(c))
	}
	p.program("prolog", "sleep 100")
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := c.BeforeJob(ctx, order(8)); errors.Is(err, ErrRefused) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a prolog that is cut off: %v", err)
	}
}

func TestACheckBeforeAJobRefusesOnlyJobsWithTheDevicesThatItNames(t *testing.T) {
	p := newPlace(t)
	c := p.open()
	h := &apiv1.HealthCheck{Name: "gpus", Times: []apiv1.CheckTime{apiv1.CheckTime_CHECK_TIME_BEFORE_JOB},
		Command: []string{p.program("gpus", `echo '{"severity":"failed","code":"A","reason":"GPU 1 is slow","gpus":1}'`)}}
	c.Configure(&apiv1.Settings{HealthChecks: []*apiv1.HealthCheck{h}}, "x")
	if err := c.BeforeJob(t.Context(), order(7)); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "GPU 1 is slow") {
		t.Errorf("a job with GPU 1: %v", err)
	}
	other := order(8)
	other.GpuMask = []uint64{0b100}
	if err := c.BeforeJob(t.Context(), other); err != nil {
		t.Errorf("a job with GPU 2: %v", err)
	}
}
