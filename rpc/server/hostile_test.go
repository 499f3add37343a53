package server

import (
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/rpc"
	"github.com/muster-hpc/muster/rpc/client"
)

// What users write is shown to others: it must not control their terminals nor forge lines.
func TestTextThatControlsTerminalsIsRefused(t *testing.T) {
	c := newCluster(t, 1)
	leader := c.members[0]
	alice := c.user(1000, "alice")
	id := submitOne(t, alice, "x")
	before := leader.proposals.Load()
	for name, change := range map[string]func(*apiv1.JobSpec){
		"an escape in the name":         func(s *apiv1.JobSpec) { s.Name = "a\x1b[2Jb" },
		"a line break in the comment":   func(s *apiv1.JobSpec) { s.Comment = "a\nJobId=1" },
		"a C1 escape in the account":    func(s *apiv1.JobSpec) { s.Account = "a\u009b2J" },
		"a line break in a path":        func(s *apiv1.JobSpec) { s.StdoutPath = "/tmp/a\nb" },
		"an escape in a list of nodes":  func(s *apiv1.JobSpec) { s.Resources.Exclude = []string{"n1", "\x1b"} },
		"an escape in the working path": func(s *apiv1.JobSpec) { s.WorkDir = "/tmp/\x1b" },
	} {
		job := batch("x")
		change(job.Spec)
		answer, err := alice.Jobs().SubmitJobs(t.Context(), &apiv1.SubmitJobsRequest{RequestId: client.NewRequestID(), Jobs: []*apiv1.JobSubmission{job}})
		if err != nil || answer.Results[0].GetRefusal().GetReason() != rpc.ReasonMalformed {
			t.Errorf("%s: %v, %v", name, answer, err)
		}
	}
	_, err := alice.Jobs().UpdateJob(t.Context(), &apiv1.UpdateJobRequest{RequestId: client.NewRequestID(), JobIds: []uint32{id},
		Change: &apiv1.UpdateJobRequest_Name{Name: "\x1b]0;"}})
	if rpc.Reason(err) != rpc.ReasonMalformed {
		t.Errorf("another name: %v", err)
	}
	spec := nodeSpec("n9")
	spec.AgentAddress = "127.0.0.1:1\n"
	_, err = c.agentOf("n9").Agents(leader.address).Join(t.Context(), &nodev1.JoinRequest{Spec: spec, Instance: instance("n9")})
	if rpc.Reason(err) != rpc.ReasonMalformed {
		t.Errorf("a node that joins: %v", err)
	}
	if now := leader.proposals.Load(); now != before {
		t.Errorf("%d commands were proposed", now-before)
	}
	job := batch("x") // what programs take as it is may contain anything
	job.Spec.Args, job.Spec.CommandLine = []string{"-c", "a\nb"}, "bash -c a\nb"
	answer, err := alice.Jobs().SubmitJobs(t.Context(), &apiv1.SubmitJobsRequest{RequestId: client.NewRequestID(), Jobs: []*apiv1.JobSubmission{job}})
	if err != nil || answer.Results[0].JobId == 0 {
		t.Errorf("lines in arguments: %v, %v", answer, err)
	}
}

// post sends a body to SubmitJobs as JSON.
func post(t *testing.T, c *cluster, token, encoding string, body io.Reader) (int, string) {
	t.Helper()
	roots, err := rpc.Roots(c.ca.PEM())
	if err != nil {
		t.Fatal(err)
	}
	config := rpc.CheckingTLS(roots, rpc.RoleController, "")
	transport := &http.Transport{TLSClientConfig: config}
	defer transport.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+c.members[0].address+"/muster.api.v1.JobService/SubmitJobs", body)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	if encoding != "" {
		request.Header.Set("Content-Encoding", encoding)
	}
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(text)
}

// counter counts what is read from it.
type counter struct {
	r io.Reader
	n int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

// endless is JSON that never ends.
type endless struct{}

func (endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

func TestHugeBodiesAndBombsEndAtTheLimit(t *testing.T) {
	c := newCluster(t, 1)
	alice := c.token(1000, "alice")
	var bomb bytes.Buffer
	pack := gzip.NewWriter(&bomb)
	if _, err := io.CopyN(pack, endless{}, 256<<20); err != nil {
		t.Fatal(err)
	}
	if err := pack.Close(); err != nil {
		t.Fatal(err)
	}
	if bomb.Len() > rpc.MaxRequestBytes/16 {
		t.Fatalf("the bomb has %d bytes: it is none", bomb.Len())
	}
	if code, text := post(t, c, alice, "gzip", &bomb); code != http.StatusTooManyRequests && code != http.StatusBadRequest || !strings.Contains(text, "code") {
		t.Errorf("the bomb: %d %s", code, text)
	}
	huge := &counter{r: io.LimitReader(endless{}, 8*rpc.MaxRequestBytes)}
	if code, text := post(t, c, alice, "", huge); code != http.StatusTooManyRequests && code != http.StatusBadRequest {
		t.Errorf("a huge body: %d %s", code, text)
	}
	if huge.n > 3*rpc.MaxRequestBytes {
		t.Errorf("%d bytes of it were taken", huge.n)
	}
	strangers := &counter{r: io.LimitReader(endless{}, 8*rpc.MaxRequestBytes)}
	if code, text := post(t, c, "", "", strangers); code != http.StatusUnauthorized {
		t.Errorf("a stranger's body: %d %s", code, text)
	}
	if strangers.n > rpc.MaxRequestBytes {
		t.Errorf("%d bytes of a stranger's body were taken", strangers.n)
	}
}
