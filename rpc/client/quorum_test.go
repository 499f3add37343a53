package client

import (
	"context"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect/v2"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
)

const quorumSentence = "1 of 3 controllers answers (c2, c3 are silent)"

func noQuorum() error {
	return rpc.Refuse(connect.CodeUnavailable, rpc.ReasonNoQuorum, "controller c1", quorumSentence)
}

// lone is a controller that says that there is no quorum; the two others are dead.
func lone(t *testing.T) (*site, *Client) {
	s := newSite(t)
	address := s.start(&fake{name: "c1",
		submit: func(context.Context, func() *apiv1.SubmitJobsResponse) (*apiv1.SubmitJobsResponse, error) {
			return nil, noQuorum()
		},
		get: func(context.Context, *apiv1.GetStepRequest) (*apiv1.GetStepResponse, error) { return nil, noQuorum() },
	})
	return s, s.client(s.dead(), address, s.dead())
}

func TestAReadEndsSoonWithoutAQuorum(t *testing.T) {
	_, c := lone(t)
	began := time.Now()
	_, err := c.Jobs().GetStep(t.Context(), &apiv1.GetStepRequest{})
	if rpc.Reason(err) != rpc.ReasonNoQuorum || rpc.Sentence(err) != quorumSentence {
		t.Errorf("the read: %v", err)
	}
	if d := time.Since(began); d > 5*time.Second {
		t.Errorf("it took %v", d)
	}
}

func TestAWriteWithoutAQuorumIsTriedToItsEndAndNothingWasDecided(t *testing.T) {
	_, c := lone(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	began := time.Now()
	_, err := c.Jobs().SubmitJobs(ctx, &apiv1.SubmitJobsRequest{RequestId: NewRequestID(), Jobs: []*apiv1.JobSubmission{{}}})
	if d := time.Since(began); d < 2900*time.Millisecond {
		t.Errorf("it was given up after %v", d)
	}
	if said := rpc.Sentence(err); rpc.Reason(err) != rpc.ReasonNoQuorum || !strings.HasPrefix(said, quorumSentence) || !strings.HasSuffix(said, "nothing was decided") {
		t.Errorf("the write: %v", err)
	}
}

// A try that was cut off may have had an effect, whatever is answered later.
func TestAWriteThatWasCutOffOnceIsNotSaidToBeUndecided(t *testing.T) {
	s := newSite(t)
	first := true
	address := s.start(&fake{name: "c1", submit: func(context.Context, func() *apiv1.SubmitJobsResponse) (*apiv1.SubmitJobsResponse, error) {
		if first {
			first = false
			return nil, rpc.Refuse(connect.CodeUnavailable, rpc.ReasonOutcomeUnknown, "", "leadership changed")
		}
		return nil, noQuorum()
	}})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_, err := s.client(address).Jobs().SubmitJobs(ctx, &apiv1.SubmitJobsRequest{RequestId: NewRequestID(), Jobs: []*apiv1.JobSubmission{{}}})
	if said := rpc.Sentence(err); !strings.Contains(said, "is not known") || strings.Contains(said, "nothing was decided") {
		t.Errorf("the write: %v", err)
	}
}

func TestAReadThatNobodyAnswersIsNotSaidToHaveHadAnEffect(t *testing.T) {
	s := newSite(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := s.client(s.dead()).Jobs().GetStep(ctx, &apiv1.GetStepRequest{})
	if said := rpc.Sentence(err); err == nil || strings.Contains(said, "took effect") {
		t.Errorf("the read: %v", err)
	}
}

// nobody is a cluster of three controllers of which none runs. The function it returns starts one of them.
func nobody(t *testing.T, direct Direct) (c *Client, restart func()) {
	s := newSite(t)
	direct.Controllers = []string{s.dead(), s.dead(), s.dead()}
	f := &fake{name: "c2", get: func(context.Context, *apiv1.GetStepRequest) (*apiv1.GetStepResponse, error) {
		return &apiv1.GetStepResponse{Step: &apiv1.Step{Id: 7}}, nil
	}}
	return s.clientWith(direct), func() { s.startAt(f, direct.Controllers[1]) }
}

func TestAReadSaysSoonThatNobodyListens(t *testing.T) {
	t.Parallel()
	c, _ := nobody(t, Direct{})
	began := time.Now()
	_, err := c.Jobs().GetStep(t.Context(), &apiv1.GetStepRequest{})
	if d := time.Since(began); d < noControllerWait || d > noControllerWait+3*time.Second {
		t.Errorf("it took %v; %v is given to controllers that are restarted", d, noControllerWait)
	}
	if connect.CodeOf(err) != connect.CodeUnavailable {
		t.Errorf("the read: %v", err)
	}
	for _, part := range append(c.Controllers(), "no controller of cluster test answers", "running work goes on") {
		if !strings.Contains(rpc.Sentence(err), part) {
			t.Errorf("%q does not say %q", rpc.Sentence(err), part)
		}
	}
}

// later runs f after a while in which reads would give up, and waits for it when the test ends.
func later(t *testing.T, f func()) {
	done := make(chan struct{})
	timer := time.AfterFunc(noControllerWait+1500*time.Millisecond, func() { defer close(done); f() })
	t.Cleanup(func() {
		if !timer.Stop() {
			<-done
		}
	})
}

func TestAWriteOutwaitsARestartOfAllControllers(t *testing.T) {
	t.Parallel()
	c, restart := nobody(t, Direct{})
	later(t, restart)
	if _, err := submit(t, c); err != nil {
		t.Errorf("the write: %v", err)
	}
}

func TestAPatientReadOutwaitsARestartOfAllControllers(t *testing.T) {
	t.Parallel()
	c, restart := nobody(t, Direct{Patient: true})
	later(t, restart)
	if answer, err := c.Jobs().GetStep(t.Context(), &apiv1.GetStepRequest{}); err != nil || answer.Step.GetId() != 7 {
		t.Errorf("the read: %v, %v", answer, err)
	}
}

func TestALongPollOutwaitsARestartOfAllControllers(t *testing.T) {
	t.Parallel()
	c, restart := nobody(t, Direct{})
	later(t, restart)
	if answer, err := c.Jobs().GetStep(t.Context(), &apiv1.GetStepRequest{WaitEndMs: 1000}); err != nil || answer.Step.GetId() != 7 {
		t.Errorf("the long poll: %v, %v", answer, err)
	}
}

// A silent host proves nothing: its controller may be slow.
func TestAReadGoesOnWhileAControllerIsOnlySilent(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	ctx, cancel := context.WithTimeout(t.Context(), noControllerWait+2*time.Second)
	defer cancel()
	_, err := s.client(s.dead(), s.paused()).Jobs().GetStep(ctx, &apiv1.GetStepRequest{})
	if ctx.Err() == nil {
		t.Errorf("it was given up with %v", err)
	}
}
