package rpc_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"connectrpc.com/connect/v2"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
)

func TestDetailSurvivesWrapping(t *testing.T) {
	err := fmt.Errorf("submit: %w", rpc.Refuse(connect.CodeNotFound, "JOB_UNKNOWN", "job 7", "there is no job 7"))
	detail := rpc.Detail(err)
	if detail.GetReason() != "JOB_UNKNOWN" || detail.GetSubject() != "job 7" || rpc.Sentence(err) != "there is no job 7" {
		t.Fatalf("detail %v, sentence %q", detail, rpc.Sentence(err))
	}
	if rpc.Detail(errors.New("plain")) != nil || rpc.Reason(errors.New("plain")) != "" {
		t.Error("a plain error has a detail")
	}
}

func TestCodesFollowReasons(t *testing.T) {
	for reason, code := range map[string]connect.Code{
		"NOT_LEADER": connect.CodeFailedPrecondition, "JOB_UNKNOWN": connect.CodeNotFound, "SPEC_INVALID": connect.CodeInvalidArgument,
		"NODE_NAME_TAKEN": connect.CodeAlreadyExists, "ATTEMPT_ENDED": connect.CodeFailedPrecondition, "BEHIND": connect.CodeUnavailable,
	} {
		if got := connect.CodeOf(rpc.FromDetail(&apiv1.ErrorDetail{Reason: reason})); got != code {
			t.Errorf("%s: code %s, should be %s", reason, got, code)
		}
	}
	if rpc.FromDetail(nil) != nil {
		t.Error("no refusal is an error")
	}
}

func TestErrorsOfPeersBecomeOwn(t *testing.T) {
	remote := connect.NewError(connect.CodeNotFound, "gone").WithRemote()
	local := rpc.Local(remote)
	var e *connect.Error
	if !errors.As(local, &e) || e.IsRemote() || e.Code() != connect.CodeNotFound || e.Message() != "gone" {
		t.Fatalf("got %v", local)
	}
	if connect.CodeOf(rpc.Local(context.DeadlineExceeded)) != connect.CodeDeadlineExceeded {
		t.Error("a deadline lost its code")
	}
	if connect.CodeOf(rpc.Local(errors.New("x"))) != connect.CodeInternal {
		t.Error("another error is not internal")
	}
}
