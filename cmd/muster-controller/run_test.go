package main

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/fsm/replica"
	"github.com/muster-hpc/muster/ops/pki"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/rpc"
	"github.com/muster-hpc/muster/rpc/client"
)

// The test's own program is the controller too, so that it can be killed as a process.
const asController = "MUSTER_TEST_AS_CONTROLLER"

func TestMain(m *testing.M) {
	replica.CheckFilesMain()
	if os.Getenv(asController) == "1" {
		main()
		return
	}
	os.Exit(m.Run())
}

type process struct {
	name, dir, listen, raft string
	cmd                     *exec.Cmd
	ready                   chan string
	done                    chan struct{}
	err                     error
}

type site struct {
	t         *testing.T
	dir       string
	ca        *pki.CA
	processes []*process
}

func free(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// newSite starts three controllers and waits until all of them vote.
func newSite(t *testing.T) *site {
	t.Helper()
	ca, err := pki.NewCA("test")
	if err != nil {
		t.Fatal(err)
	}
	s := &site{t: t, dir: t.TempDir(), ca: ca}
	config := filepath.Join(s.dir, "configuration.json")
	if err := os.WriteFile(config, []byte(`{"clusterName":"test","partitions":[{"name":"gpu","nodes":"ALL","isDefault":true}]}`), 0o644); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		name := fmt.Sprintf("c%d", i+1)
		p := &process{name: name, dir: filepath.Join(s.dir, name), listen: free(t), raft: free(t)}
		identity, err := ca.Issue(name, pki.RoleController, "127.0.0.1")
		if err != nil {
			t.Fatal(err)
		}
		if err := identity.Save(filepath.Join(p.dir, "tls")); err != nil {
			t.Fatal(err)
		}
		s.processes = append(s.processes, p)
		if i == 0 {
			s.start(p, "--bootstrap", config)
		} else {
			s.start(p, "--join", s.processes[0].listen)
		}
	}
	s.voters(3)
	return s
}

// start starts a controller and waits for its ready line.
func (s *site) start(p *process, args ...string) {
	s.t.Helper()
	verb := []string{}
	if len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		verb, args = args[:1], args[1:]
	}
	all := append(verb, append([]string{"--dir", p.dir, "--name", p.name, "--listen", p.listen, "--raft", p.raft, "--timing", "development"}, args...)...)
	p.cmd = exec.Command(os.Args[0], all...)
	p.cmd.Env = append(os.Environ(), asController+"=1")
	log, err := os.OpenFile(filepath.Join(s.dir, p.name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		s.t.Fatal(err)
	}
	p.cmd.Stderr = log
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	log.Close()
	p.ready, p.done = make(chan string, 1), make(chan struct{})
	go func() {
		defer close(p.done)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			if strings.HasPrefix(lines.Text(), "ready ") {
				p.ready <- lines.Text()
			}
		}
		p.err = p.cmd.Wait()
	}()
	s.t.Cleanup(func() { s.kill(p) })
	select {
	case <-p.ready:
	case <-p.done:
		s.t.Fatalf("%s ended before it was ready: %v\n%s", p.name, p.err, s.log(p))
	case <-time.After(30 * time.Second):
		s.t.Fatalf("%s is not ready\n%s", p.name, s.log(p))
	}
}

func (s *site) log(p *process) string {
	text, err := os.ReadFile(filepath.Join(s.dir, p.name+".log"))
	if err != nil {
		return err.Error()
	}
	return string(text)
}

func (s *site) kill(p *process) {
	_ = p.cmd.Process.Kill() // it may have ended
	<-p.done
}

func (s *site) client(uid uint32, name string) *client.Client {
	s.t.Helper()
	n1, err := s.ca.Issue("n1", pki.RoleNode)
	if err != nil {
		s.t.Fatal(err)
	}
	now := time.Now()
	token, err := rpc.SignToken(&nodev1.UserToken{Uid: uid, Gid: 1, User: name, Node: "n1", Audience: nodev1.TokenAudience_TOKEN_AUDIENCE_CONTROLLERS, Issued: timestamppb.New(now),
		Expires: timestamppb.New(now.Add(time.Hour))}, n1.Certificate)
	if err != nil {
		s.t.Fatal(err)
	}
	direct := client.Direct{TLS: rpc.CheckingTLS(n1.Roots, rpc.RoleController, ""), Token: token}
	for _, p := range s.processes {
		direct.Controllers = append(direct.Controllers, p.listen)
	}
	c := client.OpenDirect(direct)
	s.t.Cleanup(c.Close)
	return c
}

// voters waits until n members vote and have announced themselves.
func (s *site) voters(n int) {
	s.t.Helper()
	c := s.client(0, "root")
	var last []*apiv1.Member
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		answer, err := c.Cluster().GetCluster(s.t.Context(), &apiv1.GetClusterRequest{})
		if err != nil {
			s.t.Fatal(rpc.Sentence(err))
		}
		last = answer.Members
		voting := 0
		for _, m := range answer.Members {
			if m.Voter && m.ApiAddress != "" {
				voting++
			}
		}
		if voting == n && len(answer.Members) == n {
			return
		}
	}
	s.t.Fatalf("there should be %d voters: %v\n%s", n, last, s.log(s.processes[0]))
}

func (s *site) leader() *process {
	s.t.Helper()
	answer, err := s.client(0, "root").Cluster().GetCluster(s.t.Context(), &apiv1.GetClusterRequest{})
	if err != nil {
		s.t.Fatal(rpc.Sentence(err))
	}
	for _, m := range answer.Members {
		for _, p := range s.processes {
			if m.Leader && m.Name == p.name {
				return p
			}
		}
	}
	s.t.Fatalf("no leader among %v", answer.Members)
	return nil
}

func submit(ctx context.Context, c *client.Client, name string) (uint32, error) {
	answer, err := c.Jobs().SubmitJobs(ctx, &apiv1.SubmitJobsRequest{RequestId: client.NewRequestID(), Jobs: []*apiv1.JobSubmission{{
		Script: []byte("#!/bin/sh\n"), Spec: &apiv1.JobSpec{Name: name, Kind: apiv1.JobKind_JOB_KIND_BATCH, WorkDir: "/tmp", Hold: true,
			Resources: &apiv1.ResourceRequest{NodesMin: 1, Ntasks: 1, CpusPerTask: 1}}}}})
	if err != nil {
		return 0, err
	}
	return answer.Results[0].JobId, rpc.FromDetail(answer.Results[0].Refusal)
}

// load submits jobs from several clients until stop; it returns what was acknowledged.
type load struct {
	mu    sync.Mutex
	acked map[string]uint32
	mark  atomic.Int64
	after atomic.Int64 // acknowledgements of jobs begun after mark
	stop  chan struct{}
	group sync.WaitGroup
}

func (s *site) load(clients int) *load {
	l := &load{acked: map[string]uint32{}, stop: make(chan struct{})}
	for w := range clients {
		c := s.client(1000, "alice")
		l.group.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-l.stop:
					return
				default:
				}
				name, begun := fmt.Sprintf("w%d.%d", w, i), time.Now().UnixNano()
				id, err := submit(s.t.Context(), c, name)
				if err != nil {
					s.t.Errorf("%s: %s", name, rpc.Sentence(err))
					return
				}
				l.mu.Lock()
				l.acked[name] = id
				l.mu.Unlock()
				if mark := l.mark.Load(); mark > 0 && begun > mark {
					l.after.CompareAndSwap(0, time.Now().UnixNano())
				}
			}
		})
	}
	return l
}

// next waits for the acknowledgement of a request that was made after began, and returns how long it took.
func (l *load) next(t *testing.T, began time.Time) time.Duration {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if at := l.after.Load(); at != 0 {
			return time.Unix(0, at).Sub(began)
		}
	}
	t.Fatal("no acknowledgement within 20 s")
	return 0
}

func (s *site) check(l *load) {
	s.t.Helper()
	close(l.stop)
	l.group.Wait()
	c := s.client(0, "root")
	exist := map[string][]uint32{}
	token := ""
	for {
		answer, err := c.Jobs().ListJobs(s.t.Context(), &apiv1.ListJobsRequest{Page: &apiv1.Page{Token: token}, Brief: true})
		if err != nil {
			s.t.Fatal(rpc.Sentence(err))
		}
		for _, job := range answer.Jobs {
			exist[job.Spec.Name] = append(exist[job.Spec.Name], job.Id)
		}
		if token = answer.NextToken; token == "" {
			break
		}
	}
	for name, id := range l.acked {
		if got := exist[name]; len(got) != 1 || got[0] != id {
			s.t.Errorf("%s was acknowledged as job %d; it exists as %v", name, id, got)
		}
	}
	for name, ids := range exist {
		if len(ids) > 1 {
			s.t.Errorf("%s exists as %v", name, ids)
		}
	}
	s.t.Logf("%d jobs acknowledged, each exists once", len(l.acked))
}

func (l *load) after0(at time.Time) { l.after.Store(0); l.mark.Store(at.UnixNano()) }

func TestKilledPausedAndLeavingLeadersLoseNothing(t *testing.T) {
	s := newSite(t)
	l := s.load(8)
	for range 2 {
		p := s.leader()
		began := time.Now()
		s.kill(p)
		l.after0(began)
		t.Logf("%s killed: %s to the next acknowledgement", p.name, l.next(t, began).Round(time.Millisecond))
		s.start(p)
	}
	p := s.leader()
	if err := p.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	l.after0(began)
	t.Logf("%s paused: %s to the next acknowledgement", p.name, l.next(t, began).Round(time.Millisecond))
	if err := p.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	p = s.leader()
	began = time.Now()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	l.after0(began)
	t.Logf("%s told to leave: %s to the next acknowledgement", p.name, l.next(t, began).Round(time.Millisecond))
	select {
	case <-p.done:
		if p.err != nil {
			t.Errorf("it left with %v\n%s", p.err, s.log(p))
		}
	case <-time.After(15 * time.Second):
		t.Errorf("it does not leave\n%s", s.log(p))
	}
	s.start(p)
	s.check(l)
}

func TestWipedControllerRejoinsWithOneCommand(t *testing.T) {
	s := newSite(t)
	c := s.client(1000, "alice")
	if _, err := submit(t.Context(), c, "before"); err != nil {
		t.Fatal(err)
	}
	p := s.processes[2]
	s.kill(p)
	db := filepath.Join(p.dir, "raft")
	entries, err := os.ReadDir(db)
	if err != nil || len(entries) == 0 {
		t.Fatalf("%v, %v", entries, err)
	}
	for _, entry := range entries {
		if err := os.Truncate(filepath.Join(db, entry.Name()), 1000); err != nil {
			t.Fatal(err)
		}
	}
	s.start(p, "rejoin", "--join", s.processes[0].listen+","+s.processes[1].listen)
	s.voters(3)
	if _, err := submit(t.Context(), c, "after"); err != nil {
		t.Fatal(rpc.Sentence(err))
	}
}
