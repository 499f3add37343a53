package rpc

import (
	"strings"

	"connectrpc.com/connect/v2"
)

// Reasons given by the API servers themselves. Those of the state machine are listed in package fsm.
const (
	// ReasonNotLeader: the answering controller does not lead and cannot pass the call on.
	ReasonNotLeader = "NOT_LEADER"
	// ReasonNoLeader: no leader was found until the deadline.
	ReasonNoLeader = "NO_LEADER"
	// ReasonNoQuorum: too few controllers answer each other for a leader. Nothing was proposed by the answering controller.
	ReasonNoQuorum = "NO_QUORUM"
	// ReasonBehind: the answering controller has not applied what the caller has seen.
	ReasonBehind = "BEHIND"
	// ReasonQuarantined: the answering controller's state is damaged or differs from the others'; it serves nothing.
	ReasonQuarantined = "QUARANTINED"
	// ReasonOutcomeUnknown: the command may or may not take effect.
	ReasonOutcomeUnknown = "OUTCOME_UNKNOWN"
	// ReasonDiskFull: the controller's disk has no room for new entries.
	ReasonDiskFull = "DISK_FULL"
	// ReasonMemberFull: the disk of the controller that should lead has no room. Unlike ReasonDiskFull another controller says the same.
	ReasonMemberFull = "MEMBER_DISK_FULL"
	// ReasonUnauthenticated: no certificate and no token, or one that does not verify.
	ReasonUnauthenticated = "UNAUTHENTICATED"
	// ReasonTokenExpired: the token was good once.
	ReasonTokenExpired = "TOKEN_EXPIRED"
	// ReasonNotAllowed: the caller is known but may not do this.
	ReasonNotAllowed = "NOT_ALLOWED"
	// ReasonNotYourNode: a node spoke for another node.
	ReasonNotYourNode = "NOT_YOUR_NODE"
	// ReasonSubmitHook: the site's submission program refused the job.
	ReasonSubmitHook = "SUBMIT_HOOK"
	// ReasonTooLarge: a message, script or environment is over its bound.
	ReasonTooLarge = "TOO_LARGE"
	// ReasonTooMany: more items than one call may have.
	ReasonTooMany = "TOO_MANY"
	// ReasonRequestTooLarge: the body of a request is over its bound, so that nothing of it was read.
	ReasonRequestTooLarge = "REQUEST_TOO_LARGE"
	// ReasonRequestMalformed: the body of a request can't be decoded.
	ReasonRequestMalformed = "REQUEST_MALFORMED"
	// ReasonMalformed: the request cannot be understood.
	ReasonMalformed = "MALFORMED"
	// ReasonBusy: a bound on concurrent calls is reached.
	ReasonBusy = "BUSY"
	// ReasonInternal: a bug; the log of the answering controller says more.
	ReasonInternal = "INTERNAL"
	// ReasonNotBootstrapped: the cluster's life has not begun.
	ReasonNotBootstrapped = "NOT_BOOTSTRAPPED"
	// ReasonShuttingDown: the answering controller is about to leave.
	ReasonShuttingDown = "SHUTTING_DOWN"
)

// codes maps reasons to codes. Reasons that are not here follow the rules of CodeOf.
var codes = map[string]connect.Code{
	ReasonNotLeader:       connect.CodeFailedPrecondition,
	ReasonNoLeader:        connect.CodeUnavailable,
	ReasonNoQuorum:        connect.CodeUnavailable,
	ReasonBehind:          connect.CodeUnavailable,
	ReasonQuarantined:     connect.CodeUnavailable,
	ReasonOutcomeUnknown:  connect.CodeUnavailable,
	ReasonShuttingDown:    connect.CodeUnavailable,
	ReasonDiskFull:        connect.CodeResourceExhausted,
	ReasonBusy:            connect.CodeResourceExhausted,
	ReasonTooLarge:        connect.CodeInvalidArgument,
	ReasonTooMany:         connect.CodeInvalidArgument,
	ReasonRequestTooLarge: connect.CodeInvalidArgument,
	ReasonMalformed:       connect.CodeInvalidArgument,
	ReasonUnauthenticated: connect.CodeUnauthenticated,
	ReasonTokenExpired:    connect.CodeUnauthenticated,
	ReasonNotAllowed:      connect.CodePermissionDenied,
	ReasonNotYourNode:     connect.CodePermissionDenied,
	ReasonSubmitHook:      connect.CodeFailedPrecondition,
	ReasonInternal:        connect.CodeInternal,
	"NODE_NAME_TAKEN":     connect.CodeAlreadyExists,
	"REQUEST_TOO_OLD":     connect.CodeFailedPrecondition,
	"REQUEST_ID_REUSED":   connect.CodeInvalidArgument,
	ReasonNotBootstrapped: connect.CodeUnavailable,
	"NOT_OWNER":           connect.CodePermissionDenied,
}

// CodeOf returns the code that goes with a reason. Reasons without a row: "…_UNKNOWN" is not found, "…_INVALID" and
// "…_MALFORMED" are invalid arguments, and all others are failed preconditions (the request is well-formed, but the
// state refuses it).
func CodeOf(reason string) connect.Code {
	if code, ok := codes[reason]; ok {
		return code
	}
	switch {
	case strings.HasSuffix(reason, "_UNKNOWN"):
		return connect.CodeNotFound
	case strings.HasSuffix(reason, "_INVALID"), strings.HasSuffix(reason, "_MALFORMED"):
		return connect.CodeInvalidArgument
	}
	return connect.CodeFailedPrecondition
}
