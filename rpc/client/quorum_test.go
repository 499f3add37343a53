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
