package api

import (
	"context"
	"crypto/tls"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/e2e/cluster"
	"github.com/muster-hpc/muster/ops/pki"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/rpc"
	"github.com/muster-hpc/muster/rpc/client"
)

// site is a running cluster and the keys of its parts.
type site struct {
	*cluster.Cluster
	t *testing.T
}

// identity is the certificate of a part of the cluster, as it lies in its directory.
func (s site) identity(name string) *pki.Identity {
	s.t.Helper()
	identity, err := pki.Load(filepath.Join(s.Dir, name, "tls"))
	if err != nil {
		s.t.Fatal(err)
	}
	return identity
}

// token is what the agent of n1 gives to a user whom the kernel has named to it.
func (s site) token(audience nodev1.TokenAudience, uid uint32, name string) string {
	s.t.Helper()
	now := time.Now()
	token, err := rpc.SignToken(&nodev1.UserToken{Uid: uid, Gid: uid, User: name, Node: "n1", Audience: audience, Issued: timestamppb.New(now),
		Expires: timestamppb.New(now.Add(time.Hour))}, s.identity("n1").Certificate)
	if err != nil {
		s.t.Fatal(err)
	}
	return token
}

// userTLS checks controllers or agents as a user's client does.
func (s site) userTLS(role pki.Role) *tls.Config {
	s.t.Helper()
	roots, err := rpc.Roots(s.Vouch().CaPem)
	if err != nil {
		s.t.Fatal(err)
	}
	return rpc.CheckingTLS(roots, role, "")
}

// transport is a plain HTTP transport that ends with the test.
func (s site) transport(config *tls.Config) *http.Transport {
	t := &http.Transport{TLSClientConfig: config.Clone(), ForceAttemptHTTP2: true}
	s.t.Cleanup(t.CloseIdleConnections)
	return t
}

// http1 is a transport that speaks nothing but HTTP/1.1, like curl's default over plain sockets.
func (s site) http1(config *tls.Config) *http.Transport {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	t := &http.Transport{TLSClientConfig: config.Clone(), Protocols: protocols}
	s.t.Cleanup(t.CloseIdleConnections)
	return t
}

// bearer adds a token to every request.
type bearer struct {
	token string
	next  http.RoundTripper
}

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	if b.token != "" {
		r = r.Clone(r.Context())
		r.Header.Set("Authorization", "Bearer "+b.token)
	}
	return b.next.RoundTrip(r)
}

// dial is a bare Connect client of one address: no retries, no hedging.
func (s site) dial(address string, next http.RoundTripper, token string, options ...connecthttp.Option) *connect.Client {
	return connect.NewClient(connecthttp.NewTransport(&http.Client{Transport: bearer{token, next}}, "https://"+address, options...))
}

// controllers are the API addresses by name.
func (s site) controllers() map[string]string {
	s.t.Helper()
	addresses := map[string]string{}
	for _, p := range s.Status().Processes {
		if p.Role == "controller" {
			addresses[p.Name] = p.Address
		}
	}
	return addresses
}

// within bounds one call.
func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), cluster.Slack(20*time.Second))
	t.Cleanup(cancel)
	return ctx
}

// held is a submission of one held job.
func held(name string) *apiv1.SubmitJobsRequest {
	return &apiv1.SubmitJobsRequest{RequestId: client.NewRequestID(), Jobs: []*apiv1.JobSubmission{{Script: []byte("#!/bin/sh\ntrue\n"), Spec: &apiv1.JobSpec{
		Name: name, Kind: apiv1.JobKind_JOB_KIND_BATCH, WorkDir: "/tmp", Hold: true, Resources: &apiv1.ResourceRequest{NodesMin: 1}}}}}
}

// submitted is the id in the answer to held.
func submitted(t *testing.T, answer *apiv1.SubmitJobsResponse, err error) uint32 {
	t.Helper()
	if err != nil {
		t.Fatalf("submit: %v", err)
	}
	if len(answer.Results) != 1 || answer.Results[0].JobId == 0 {
		t.Fatalf("submit: %v", answer)
	}
	return answer.Results[0].JobId
}

// says reports whether an error carries a typed detail with this reason, and a sentence with all the parts.
func says(err error, reason string, parts ...string) bool {
	detail := rpc.Detail(err)
	for _, part := range parts {
		if !strings.Contains(detail.GetSentence(), part) {
			return false
		}
	}
	return detail.GetReason() == reason
}
