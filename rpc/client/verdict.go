package client

import (
	"context"
	"errors"
	"net"
	"syscall"

	"connectrpc.com/connect/v2"

	"github.com/muster-hpc/muster/rpc"
)

// verdict is what the error of one try means for the call.
type verdict int

const (
	// final: the cluster understood and said no, or the caller gave up.
	final verdict = iota
	// again: silence, a broken connection, or "not now": try elsewhere or later.
	again
	// renew: the credentials have run out.
	renew
	// wrongPeer: something else answers at this address. It counts as final once every address is like that.
	wrongPeer
)

// transient are the reasons that mean "not now" or "not here".
var transient = map[string]bool{
	rpc.ReasonNotLeader:       true,
	rpc.ReasonNoLeader:        true,
	rpc.ReasonNoQuorum:        true,
	rpc.ReasonBehind:          true,
	rpc.ReasonQuarantined:     true,
	rpc.ReasonOutcomeUnknown:  true,
	rpc.ReasonShuttingDown:    true,
	rpc.ReasonBusy:            true,
	rpc.ReasonDiskFull:        true,
	rpc.ReasonNotBootstrapped: true,
}

// undecided are the reasons after which it is certain that the answering controller has proposed nothing.
var undecided = map[string]bool{
	rpc.ReasonNotLeader:       true,
	rpc.ReasonNoLeader:        true,
	rpc.ReasonNoQuorum:        true,
	rpc.ReasonQuarantined:     true,
	rpc.ReasonNotBootstrapped: true,
	rpc.ReasonTokenExpired:    true,
}

// nothingDone reports whether it is certain that a try which ended with this error has had no effect: the controller said so, or no
// connection came about.
func nothingDone(err error) bool {
	var dial *net.OpError
	return undecided[rpc.Reason(err)] || errors.As(err, &dial) && dial.Op == "dial" || errors.Is(err, rpc.ErrWrongPeer)
}

// refused reports whether a try ended because nobody listens at the address. A host that is silent is no such evidence: it may be slow.
func refused(err error) bool {
	var dial *net.OpError
	return errors.As(err, &dial) && dial.Op == "dial" && errors.Is(err, syscall.ECONNREFUSED)
}

// judge reads the error of one try. Answers of Muster always carry a detail; an error without one was made by a broken
// connection, a proxy, or a process that is leaving.
func judge(err error) verdict {
	if errors.Is(err, rpc.ErrWrongPeer) {
		return wrongPeer
	}
	if detail := rpc.Detail(err); detail != nil {
		switch {
		case detail.Reason == rpc.ReasonTokenExpired:
			return renew
		case transient[detail.Reason]:
			return again
		}
		// A deadline or cancellation that the other side reports while ours has not passed is its own affair.
		if code := connect.CodeOf(err); code == connect.CodeDeadlineExceeded || code == connect.CodeCanceled {
			return again
		}
		return final
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return again // the caller checks its own context first
	}
	switch connect.CodeOf(err) {
	case connect.CodeUnavailable, connect.CodeUnknown, connect.CodeInternal, connect.CodeCanceled,
		connect.CodeDeadlineExceeded, connect.CodeAborted:
		return again
	case connect.CodeInvalidArgument, connect.CodeNotFound, connect.CodeAlreadyExists, connect.CodePermissionDenied,
		connect.CodeResourceExhausted, connect.CodeFailedPrecondition, connect.CodeOutOfRange,
		connect.CodeUnimplemented, connect.CodeDataLoss, connect.CodeUnauthenticated:
		return final
	}
	return final
}
