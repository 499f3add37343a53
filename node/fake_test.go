package node

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"

	"github.com/muster-hpc/muster/node/environ"
)

// supervisorPath is the real supervisor, built once for the package's tests.
var supervisorPath string

func TestMain(m *testing.M) {
	if word, ok := strings.CutPrefix(filepath.Base(os.Args[0]), faultySupervisor); ok {
		superviseWithFault(word)
	}
	dir, err := os.MkdirTemp("", "muster-node")
	if err != nil {
		panic(err)
	}
	supervisorPath = filepath.Join(dir, "muster-supervisor")
	if out, err := exec.Command("go", "build", "-o", supervisorPath, "../cmd/muster-supervisor").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build the supervisor: %v\n%s", err, out)
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// refusal is an error of the fake controllers with a detail.
type refusal struct{ detail *apiv1.ErrorDetail }

func (r refusal) Error() string { return r.detail.GetReason() }

func refusalOf(err error) *apiv1.ErrorDetail {
	var r refusal
	if errors.As(err, &r) {
		return r.detail
	}
	return nil
}

// fake is a control plane of several controllers that share one state: what is desired, and what was reported.
type fake struct {
	t *testing.T

	mu       sync.Mutex
	changed  chan struct{}
	revision uint64
	desired  []*nodev1.DesiredAttempt
	blobs    map[string][]byte
	// deaf controllers never answer; down ones fail at once.
	deaf, down map[string]bool
	// noGrants: no lease is granted. noAcks: nothing is acknowledged.
	noGrants, noAcks bool
	joinError        error
	epoch            uint32
	rejoin           bool
	leaseMS          uint32
	prepareMS        uint32
	// around are the cluster's programs before and after each task.
	around [2]string

	reports  []*logv1.TaskReport
	seen     map[string]bool
	actual   []*nodev1.ActualAttempt
	syncs    []string
	joins    []*nodev1.JoinRequest
	lastSync *nodev1.SyncRequest
}

func newFake(t *testing.T) *fake {
	return &fake{t: t, changed: make(chan struct{}), revision: 1, blobs: map[string][]byte{}, deaf: map[string]bool{},
		down: map[string]bool{}, epoch: 1, leaseMS: 10_000, prepareMS: 20_000, seen: map[string]bool{}}
}

// update changes the fake's state and lets held Syncs go.
func (f *fake) update(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
	f.revision++
	f.wake()
}

func (f *fake) wake() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// eventually waits until a condition on the fake's state holds.
func (f *fake) eventually(what string, condition func() bool) {
	f.t.Helper()
	deadline := time.After(10 * time.Second)
	for {
		f.mu.Lock()
		ok, changed := condition(), f.changed
		f.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			f.mu.Lock()
			defer f.mu.Unlock()
			f.t.Fatalf("never: %s\nactual: %v\nreports: %v", what, f.actual, f.reports)
		}
	}
}

func (f *fake) Join(ctx context.Context, address string, req *nodev1.JoinRequest) (*nodev1.JoinResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.joins = append(f.joins, req)
	f.wake()
	if f.down[address] {
		return nil, errors.New("connection refused")
	}
	if f.joinError != nil {
		return nil, f.joinError
	}
	f.rejoin = false
	return &nodev1.JoinResponse{Number: 7, Epoch: f.epoch, Settings: f.settings(), Revision: f.rev(), ClusterName: "test"}, nil
}

func (f *fake) settings() *apiv1.Settings {
	return &apiv1.Settings{LeaseMs: f.leaseMS, FenceWindowMs: 2000, PrepareTimeoutMs: f.prepareMS, TaskProlog: f.around[0], TaskEpilog: f.around[1]}
}

func (f *fake) rev() *apiv1.Revision { return &apiv1.Revision{Incarnation: 1, Index: f.revision} }

func (f *fake) Sync(ctx context.Context, address string, req *nodev1.SyncRequest) (*nodev1.SyncResponse, error) {
	f.mu.Lock()
	f.syncs = append(f.syncs, address)
	f.lastSync = req
	deaf, down := f.deaf[address], f.down[address]
	var last uint64
	if !deaf && !down {
		f.actual = req.GetActual()
		for _, r := range req.GetReports() {
			last = r.GetJournalId()
			key := reportKey(r)
			if !f.seen[key] && req.GetEpoch() == f.epoch {
				f.seen[key] = true
				f.reports = append(f.reports, r)
			}
		}
	}
	f.wake()
	f.mu.Unlock()
	if down {
		return nil, errors.New("connection refused")
	}
	if deaf {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	hold := time.NewTimer(time.Duration(req.GetHoldMs()) * time.Millisecond)
	defer hold.Stop()
	for {
		f.mu.Lock()
		res := &nodev1.SyncResponse{Revision: f.rev(), Settings: f.settings(), Rejoin: f.rejoin}
		if !f.noAcks {
			res.Acknowledged = last
		}
		if !f.noGrants {
			res.Grant = &nodev1.Grant{Sequence: req.GetSequence(), LeaseMs: f.leaseMS, FenceWindowMs: 2000}
		}
		newer := req.GetHolds() == nil || compareRevisions(f.rev(), req.GetHolds()) > 0
		if newer {
			for _, d := range f.desired {
				res.Desired = append(res.Desired, proto.Clone(d).(*nodev1.DesiredAttempt))
			}
		}
		res.Unchanged = !newer
		changed, now := f.changed, newer || last > 0 || f.rejoin || f.deaf[address]
		f.mu.Unlock()
		if now {
			return res, nil
		}
		select {
		case <-changed:
		case <-hold.C:
			return res, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func reportKey(r *logv1.TaskReport) string {
	c := proto.Clone(r).(*logv1.TaskReport)
	c.JournalId = 0
	b, _ := proto.MarshalOptions{Deterministic: true}.Marshal(c)
	return string(b)
}

func (f *fake) GetBlob(ctx context.Context, req *apiv1.GetBlobRequest) (*apiv1.GetBlobResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if data, ok := f.blobs[req.GetSha256()]; ok {
		return &apiv1.GetBlobResponse{Data: data}, nil
	}
	return nil, refusal{&apiv1.ErrorDetail{Reason: "BLOB_UNKNOWN", Sentence: "there is no such blob"}}
}

func (f *fake) blob(data string) string {
	sum := sha256.Sum256([]byte(data))
	sha := hex.EncodeToString(sum[:])
	f.mu.Lock()
	f.blobs[sha] = []byte(data)
	f.mu.Unlock()
	return sha
}

// ended returns the report about the end of a step, if it came.
func (f *fake) ended(job, step uint32) *logv1.StepEnded {
	for _, r := range f.reports {
		if r.GetJobId() == job && r.GetStepEnded() != nil && r.GetStepEnded().GetStepId() == step {
			return r.GetStepEnded()
		}
	}
	return nil
}

func (f *fake) failed(job uint32) *logv1.PrepareFailed {
	for _, r := range f.reports {
		if r.GetJobId() == job && r.GetPrepareFailed() != nil {
			return r.GetPrepareFailed()
		}
	}
	return nil
}

func (f *fake) reaped(job uint32) bool {
	return slices.ContainsFunc(f.reports, func(r *logv1.TaskReport) bool { return r.GetJobId() == job && r.GetAttemptReaped() != nil })
}

// state is how far a step is by the last Sync; UNSPECIFIED if it was not mentioned.
func (f *fake) state(job, step uint32) nodev1.WorkState {
	for _, a := range f.actual {
		for _, s := range a.GetSteps() {
			if a.GetJobId() == job && s.GetStepId() == step {
				return s.GetState()
			}
		}
	}
	return nodev1.WorkState_WORK_STATE_UNSPECIFIED
}

// want changes what is wanted of a job and of all its steps.
func (f *fake) want(job uint32, w nodev1.WorkState) {
	f.update(func() {
		for _, d := range f.desired {
			if d.GetJob().GetId() == job {
				d.Want = w
				for _, s := range d.GetSteps() {
					s.Want = w
				}
			}
		}
	})
}

const (
	prepared = nodev1.WorkState_WORK_STATE_PREPARED
	running  = nodev1.WorkState_WORK_STATE_RUNNING
	ended    = nodev1.WorkState_WORK_STATE_ENDED
)

// batch adds a batch job that wants to be prepared.
func (f *fake) batch(id uint32, workDir, script string, change func(*nodev1.DesiredAttempt)) {
	sha := f.blob(script)
	env := f.blob("PATH=" + os.Getenv("PATH") + "\x00PWD=" + workDir + "\x00")
	d := &nodev1.DesiredAttempt{
		Job: &apiv1.Job{
			Id: id, Spec: &apiv1.JobSpec{Name: "job", Kind: apiv1.JobKind_JOB_KIND_BATCH, ScriptBlob: sha, EnvironmentBlob: env, WorkDir: workDir, Umask: 0o22},
			Owner: &apiv1.JobOwner{Uid: uint32(os.Getuid()), Gid: uint32(os.Getgid()), User: "me"}, Status: &apiv1.JobStatus{Partition: "main"},
		},
		Fence: &apiv1.Fence{Incarnation: 1, Attempt: 1, Placement: 1}, Want: prepared,
		Steps: []*nodev1.DesiredStep{{
			Step: &apiv1.Step{JobId: id, Id: environ.BatchStep, Attempt: 1, NodeList: "n1", NumTasks: 1, Unreported: []uint32{7}},
			Want: prepared, Ranks: []uint32{0}, TasksPerNode: []uint32{1},
		}},
		NodeList: "n1", CpuMask: []uint64{1}, CpusPerNode: "1", TasksPerNode: "1", NumTasks: 1,
		TimeLimitS: environ.Unlimited, KillGraceS: 1,
	}
	if change != nil {
		change(d)
	}
	f.update(func() { f.desired = append(f.desired, d) })
}

// life is one life of an agent, from start to kill.
type life struct {
	a      *Agent
	cancel context.CancelFunc
	done   chan error
}

// begin starts an agent in dir.
func (f *fake) begin(dir string, change func(*Config)) *life {
	f.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cfg := Config{
		Dir: dir, Spec: &apiv1.NodeSpec{Name: "n1", AgentAddress: "127.0.0.1:1", TaskAddress: "127.0.0.1", Cpus: 4, MemoryMb: 1000},
		Addresses: []string{"c1", "c2"}, Controllers: f, Refusal: refusalOf, Supervisor: supervisorPath,
		Log: slog.New(slog.NewTextHandler(testWriter{f.t}, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	if change != nil {
		change(&cfg)
	}
	l := &life{cancel: cancel, done: make(chan error, 1)}
	if fault := cfg.Fault; fault != nil {
		cfg.Fault = func(point string) { fault(point) }
	}
	a, err := Open(cfg)
	if err != nil {
		cancel()
		f.t.Fatal(err)
	}
	l.a = a
	go func() { l.done <- a.Run(ctx) }()
	f.t.Cleanup(func() { l.end() })
	return l
}

// end kills the agent: nothing is said to anybody, as with SIGKILL.
func (l *life) end() error {
	if l.a == nil {
		return nil
	}
	l.cancel()
	err := <-l.done
	err = errors.Join(err, l.a.Close())
	l.a = nil
	return err
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimRight(string(p), "\n"))
	return len(p), nil
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
