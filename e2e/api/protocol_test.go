package api

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/muster-hpc/muster/e2e/cluster"
	"github.com/muster-hpc/muster/ops/pki"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/muster/api/v1/apiv1connect"
	"github.com/muster-hpc/muster/rpc"
)

func TestProgramsReachTheClusterByEveryProtocol(t *testing.T) {
	s := site{cluster.Up(t, "--nodes", "1"), t}
	for _, test := range []struct {
		property string
		holds    func(*testing.T, site)
	}{
		{"the same request by every protocol is one job", oneJob},
		{"errors carry typed details by every protocol", details},
		{"plain JSON over HTTP/1.1 is enough", plainJSON},
		{"bodies that can't be read are refused with a sentence", unreadable},
		{"health is told to anybody", health},
		{"a watch goes on at another controller without a gap", resumed},
	} {
		t.Run(test.property, func(t *testing.T) { test.holds(t, site{s.Cluster, t}) })
	}
}

// protocols are what the one listener speaks, each as its own client speaks it.
func (s site) protocols(address string) map[string]*connect.Client {
	config, token := s.userTLS(pki.RoleController), s.Vouch().Token
	return map[string]*connect.Client{
		"Connect":                   s.dial(address, s.transport(config), token),
		"Connect over HTTP/1.1":     s.dial(address, s.http1(config), token),
		"Connect with JSON":         s.dial(address, s.transport(config), token, connecthttp.WithProtoJSON()),
		"Connect, reading with GET": s.dial(address, s.transport(config), token, connecthttp.WithHTTPGet()),
		"Connect with gzip":         s.dial(address, s.transport(config), token, connecthttp.WithSendGzip()),
		"gRPC":                      s.dial(address, s.transport(config), token, connecthttp.WithGRPC()),
		"gRPC-Web":                  s.dial(address, s.transport(config), token, connecthttp.WithGRPCWeb()),
		"gRPC-Web over HTTP/1.1":    s.dial(address, s.http1(config), token, connecthttp.WithGRPCWeb()),
	}
}

func oneJob(t *testing.T, s site) {
	request, first := held("one"), uint32(0)
	for _, address := range s.controllers() { // followers, too
		for name, c := range s.protocols(address) {
			answer, err := apiv1connect.NewJobServiceClient(c).SubmitJobs(within(t), request)
			id := submitted(t, answer, err)
			if first == 0 {
				first = id
			}
			if id != first {
				t.Errorf("%s at %s made job %d of a request that made job %d before", name, address, id, first)
			}
			got, err := apiv1connect.NewJobServiceClient(c).GetJob(within(t), &apiv1.GetJobRequest{JobId: id})
			if err != nil || got.Job.Spec.Name != "one" {
				t.Errorf("%s at %s reads %v, %v", name, address, got, err)
			}
		}
	}
	other := proto.CloneOf(request)
	other.Jobs[0].Spec.Name = "other"
	for name, c := range s.protocols(s.Process(s.Leader()).Address) {
		if _, err := apiv1connect.NewJobServiceClient(c).SubmitJobs(within(t), other); !says(err, "REQUEST_ID_REUSED") || connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%s: the same id for another job: %v", name, err)
		}
	}
}

func details(t *testing.T, s site) {
	for name, c := range s.protocols(s.Process(s.Leader()).Address) {
		jobs := apiv1connect.NewJobServiceClient(c)
		if _, err := jobs.GetJob(within(t), &apiv1.GetJobRequest{JobId: 999_999}); !says(err, "JOB_UNKNOWN", "999999") || connect.CodeOf(err) != connect.CodeNotFound {
			t.Errorf("%s: a job that is not: %v", name, err)
		}
		mine := held("mine")
		mine.RequestId = "mine"
		if _, err := jobs.SubmitJobs(within(t), mine); !says(err, "REQUEST_ID_INVALID", `"mine"`) || connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%s: a request id that is none: %v", name, err)
		}
		many := held("many")
		for range rpc.MaxJobsPerSubmit {
			many.Jobs = append(many.Jobs, many.Jobs[0])
		}
		if _, err := jobs.SubmitJobs(within(t), many); !says(err, rpc.ReasonTooMany, "1001", "1000") || connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%s: too many jobs: %v", name, err)
		}
	}
}

// exchange sends a request as curl would, and returns status and body.
func (s site) exchange(t *testing.T, method, url, token, content string, body io.Reader) (int, http.Header, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(within(t), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	if content != "" {
		request.Header.Set("Content-Type", content)
	}
	response, err := (&http.Client{Transport: bearer{token, s.http1(s.userTLS(pki.RoleController))}}).Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil || response.ProtoMajor != 1 {
		t.Fatalf("%s %s by %s: %v", method, url, response.Proto, err)
	}
	return response.StatusCode, response.Header, string(text)
}

const submitProcedure = "/muster.api.v1.JobService/SubmitJobs"

// refusal is an error as JSON clients see it.
type refusal struct {
	Code    string
	Message string
	Details []struct{ Type, Value string }
}

// detail decodes the typed detail of an error body.
func (r refusal) detail(t *testing.T) *apiv1.ErrorDetail {
	t.Helper()
	for _, d := range r.Details {
		data, err := base64.RawStdEncoding.DecodeString(d.Value)
		detail := &apiv1.ErrorDetail{}
		if d.Type == "muster.api.v1.ErrorDetail" && err == nil && proto.Unmarshal(data, detail) == nil {
			return detail
		}
	}
	t.Errorf("no typed detail in %+v", r)
	return nil
}

func plainJSON(t *testing.T, s site) {
	token, base := s.Vouch().Token, "https://"+s.Process(s.Leader()).Address
	id := held("").RequestId
	body := fmt.Sprintf(`{"requestId":%q,"jobs":[{"script":%q,"spec":{"name":"curl","kind":"JOB_KIND_BATCH","workDir":"/tmp","hold":true,"resources":{"nodesMin":1}}}]}`,
		id, base64.StdEncoding.EncodeToString([]byte("#!/bin/sh\ntrue\n")))
	var ids [2]uint32
	for i := range ids {
		status, header, text := s.exchange(t, http.MethodPost, base+submitProcedure, token, "application/json", strings.NewReader(body))
		answer := &apiv1.SubmitJobsResponse{}
		if err := protojson.Unmarshal([]byte(text), answer); err != nil || status != http.StatusOK || header.Get("Content-Type") != "application/json" {
			t.Fatalf("%d %v %s: %v", status, header, text, err)
		}
		ids[i] = submitted(t, answer, nil)
	}
	if ids[0] != ids[1] {
		t.Errorf("the same request made jobs %v", ids)
	}
	query := url.Values{"connect": {"v1"}, "encoding": {"json"}, "message": {fmt.Sprintf(`{"jobId":%d}`, ids[0])}}
	status, _, text := s.exchange(t, http.MethodGet, base+"/muster.api.v1.JobService/GetJob?"+query.Encode(), token, "", nil)
	got := &apiv1.GetJobResponse{}
	if err := protojson.Unmarshal([]byte(text), got); err != nil || status != http.StatusOK || got.Job.GetSpec().GetName() != "curl" {
		t.Errorf("a read with GET: %d %s: %v", status, text, err)
	}
	status, _, text = s.exchange(t, http.MethodPost, base+"/muster.api.v1.JobService/GetJob", token, "application/json", strings.NewReader(`{"jobId":999999}`))
	var refused refusal
	if err := json.Unmarshal([]byte(text), &refused); err != nil || status != http.StatusNotFound || refused.Code != "not_found" {
		t.Fatalf("a job that is not: %d %s: %v", status, text, err)
	}
	if detail := refused.detail(t); detail.GetReason() != "JOB_UNKNOWN" || detail.GetSentence() != refused.Message {
		t.Errorf("the detail %v of %s", detail, text)
	}
	status, _, text = s.exchange(t, http.MethodPost, base+"/muster.api.v1.JobService/GetJob", "", "application/json", strings.NewReader(`{"jobId":1}`))
	if err := json.Unmarshal([]byte(text), &refused); err != nil || status != http.StatusUnauthorized || refused.Code != "unauthenticated" {
		t.Errorf("without a token: %d %s: %v", status, text, err)
	}
}

func unreadable(t *testing.T, s site) {
	token, base := s.Vouch().Token, "https://"+s.Process(s.Leader()).Address
	for _, test := range []struct {
		content, body, reason, part string
	}{
		{"application/json", `{"jobs":`, rpc.ReasonRequestMalformed, "Content-Type"},
		{"application/json", `{"jobs":"all"}`, rpc.ReasonRequestMalformed, "Content-Type"},
		{"application/proto", "\xff\xff\xff", rpc.ReasonRequestMalformed, "Content-Type"},
		{"application/json", `{"requestId":"` + strings.Repeat("x", rpc.MaxRequestBytes) + `"}`, rpc.ReasonRequestTooLarge, "16777216 bytes"},
		{"application/proto", string(bytes.Repeat([]byte{0}, rpc.MaxRequestBytes+1)), rpc.ReasonRequestTooLarge, "16777216 bytes"},
		{"application/json", `{"requestId":"` + held("").RequestId + `","jobs":[{"spec":{"name":"a\u001bb"}}]}`, "", rpc.ReasonMalformed}, // the job's own refusal
	} {
		status, _, text := s.exchange(t, http.MethodPost, base+submitProcedure, token, test.content, strings.NewReader(test.body))
		what := fmt.Sprintf("%s %.40q: %d %.300s", test.content, test.body, status, text)
		if test.reason == "" {
			if status != http.StatusOK || !strings.Contains(text, `"reason":"`+test.part+`"`) {
				t.Error(what)
			}
			continue
		}
		var refused refusal
		if err := json.Unmarshal([]byte(text), &refused); err != nil || status != http.StatusBadRequest || refused.Code != "invalid_argument" {
			t.Errorf("%s: %v", what, err)
			continue
		}
		if detail := refused.detail(t); detail.GetReason() != test.reason || !strings.Contains(detail.GetSentence(), test.part) {
			t.Errorf("%s: %v", what, detail)
		}
	}
}

func health(t *testing.T, s site) {
	for name, address := range s.controllers() {
		for path, want := range map[string]string{"/healthz": "ok\n", "/readyz": "ready\n"} {
			if status, _, text := s.exchange(t, http.MethodGet, "https://"+address+path, "", "", nil); status != http.StatusOK || text != want {
				t.Errorf("%s of %s: %d %q", path, name, status, text)
			}
		}
		status, _, text := s.exchange(t, http.MethodPost, "https://"+address+rpc.HealthCheckProcedure, "", "application/json", strings.NewReader("{}"))
		if status != http.StatusOK || strings.ReplaceAll(text, " ", "") != `{"status":"SERVING"}` {
			t.Errorf("the health service of %s: %d %s", name, status, text)
		}
		serving(t, s, name, address)
	}
}

// serving asks the health service as a gRPC probe does: a frame with an empty message, answered by a frame with status SERVING and a
// trailer.
func serving(t *testing.T, s site, name, address string) {
	t.Helper()
	request, err := http.NewRequestWithContext(within(t), http.MethodPost, "https://"+address+rpc.HealthCheckProcedure, bytes.NewReader(make([]byte, 5)))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/grpc")
	request.Header.Set("TE", "trailers")
	response, err := (&http.Client{Transport: s.transport(s.userTLS(pki.RoleController))}).Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	frame, err := io.ReadAll(response.Body)
	if err != nil || len(frame) != 7 || binary.BigEndian.Uint32(frame[1:5]) != 2 || !bytes.Equal(frame[5:], []byte{8, 1}) || response.Trailer.Get("Grpc-Status") != "0" {
		t.Errorf("gRPC health of %s: %s %x, trailer %v, %v", name, response.Proto, frame, response.Trailer, err)
	}
}

// resumed watches at one controller, which is killed, and goes on at another from the last revision.
func resumed(t *testing.T, s site) {
	first := s.Leader()
	writer := s.Client()
	var ids []uint32
	submit := func() {
		t.Helper()
		answer, err := writer.Jobs().SubmitJobs(within(t), held("watched"))
		ids = append(ids, submitted(t, answer, err))
	}
	filter := &apiv1.JobFilter{Names: []string{"watched"}}
	var after *apiv1.Revision
	var seen []uint32
	// follow reads until all jobs up to now were seen.
	follow := func(name string) (end func()) {
		t.Helper()
		ctx, cancel := context.WithCancel(within(t))
		stream, err := s.Direct(s.Process(name).Address).Jobs().WatchJobs(ctx, &apiv1.WatchJobsRequest{Filter: filter, After: after})
		if err != nil {
			t.Fatal(err)
		}
		for len(seen) < len(ids) {
			batch, err := stream.Receive()
			if err != nil || batch.Relist {
				t.Fatalf("the watch at %s ended with %v, %v after %v of %v", name, batch, err, seen, ids)
			}
			for _, j := range batch.Jobs {
				seen = append(seen, j.Id)
			}
			after = batch.Revision
		}
		return func() {
			cancel()
			if err := stream.Close(); err != nil && ctx.Err() == nil {
				t.Error(err)
			}
		}
	}
	for range 3 {
		submit()
	}
	end := follow(first)
	s.Dev("kill", first)
	for range 3 {
		submit()
	}
	end()
	end = follow(s.Leader())
	submit()
	defer end()
	if fmt.Sprint(seen) != fmt.Sprint(ids[:len(seen)]) || len(seen) != 6 {
		t.Errorf("seen %v of %v: something was missed, repeated, or out of order", seen, ids)
	}
	s.Dev("start", first)
}
