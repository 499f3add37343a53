package server

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/proto"

	"github.com/muster-hpc/muster/fsm/replica"
	"github.com/muster-hpc/muster/fsm/state"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
	"github.com/muster-hpc/muster/proto/muster/peer/v1/peerv1connect"
	"github.com/muster-hpc/muster/rpc"
)

// leaderClient is the leader's service for other controllers.
type leaderClient = peerv1connect.PeerServiceClient

// onLeader runs an action on the leader: here if this controller leads, through the leader's service otherwise. Each try
// is abandoned when leader or term change. While no leader is known it waits. again decides whether an error allows
// another try; without a deadline of the caller the default holds.
func (s *Server) onLeader(ctx context.Context, what string, again func(error) bool,
	here func(context.Context) error, there func(context.Context, leaderClient) error) error {
	ctx, cancel := deadline(ctx)
	defer cancel()
	var last error
	var sent error // the first error after which something may have been written
	for {
		changed := s.replica.LeaderChanged() // before Leader, so that no change is missed
		leader, service := s.peers.leader(ctx)
		var err error
		switch {
		case leader.IsSelf:
			err = here(ctx)
		case service != nil:
			err = s.abandonable(ctx, changed, func(ctx context.Context) error { return there(ctx, service) })
		default:
			err = errNoLeader
		}
		if err == nil {
			return nil
		}
		if sent == nil && what != aRead && !s.unsent(err) {
			sent = err
		}
		if ctx.Err() != nil {
			return s.noLeader(what, sent, last, err)
		}
		if !again(err) {
			return s.translate(err)
		}
		last = err
		if sent == nil { // a later "no leader" does not make it certain that nothing was written
			if refusal := s.withoutQuorum(); refusal != nil {
				return refusal
			}
		}
		wait := retryPause
		if leader.ID == "" {
			wait = quorumCheck // it ends when there is a leader; by then it may be known that there can't be one
		}
		if pause(ctx, wait, changed) != nil {
			return s.noLeader(what, sent, last, err)
		}
	}
}

// abandonable runs f with a context that also ends when leader or term change: a deposed or paused leader does not
// answer.
func (s *Server) abandonable(ctx context.Context, changed <-chan struct{}, f func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan struct{})
	watcher := make(chan struct{})
	go func() { // waited for below
		defer close(watcher)
		select {
		case <-changed:
			cancel(errAbandoned)
		case <-done:
		}
	}()
	err := f(ctx)
	close(done)
	<-watcher
	if err != nil && errors.Is(context.Cause(ctx), errAbandoned) {
		return errAbandoned
	}
	return err
}

var (
	errNoLeader  = errors.New("no leader is known")
	errAbandoned = errors.New("the leader changed before it answered")
)

// unsent are the errors after which nothing was written: another try is always safe.
func (s *Server) unsent(err error) bool {
	if errors.Is(err, errNoLeader) || errors.Is(err, replica.ErrNotLeader) ||
		s.errNotLeading != nil && errors.Is(err, s.errNotLeading) {
		return true
	}
	switch rpc.Reason(err) {
	case rpc.ReasonNotLeader, rpc.ReasonNoLeader, rpc.ReasonNoQuorum, rpc.ReasonShuttingDown:
		return true
	}
	return false
}

// unclear are the errors after which something may have been written: another try needs a request id, or a command that
// may be applied twice.
func unclear(err error) bool {
	if errors.Is(err, errAbandoned) || errors.Is(err, replica.ErrOutcomeUnknown) {
		return true
	}
	detail := rpc.Detail(err)
	if detail != nil {
		return detail.Reason == rpc.ReasonOutcomeUnknown
	}
	// An error of a peer without a detail is a broken connection or a process that died.
	var e *connect.Error
	return errors.As(err, &e)
}

// propose has a command applied and returns its result. Repeatable says that applying it twice does no harm; commands
// with a request id are always repeatable. A refusal by Apply is in the result, not in the error.
func (s *Server) propose(ctx context.Context, command *logv1.Command, repeatable bool) (*logv1.Result, error) {
	repeatable = repeatable || command.RequestId != ""
	var result *logv1.Result
	err := s.onLeader(ctx, "the request",
		func(err error) bool { return s.unsent(err) || repeatable && unclear(err) },
		func(ctx context.Context) (err error) {
			result, err = s.apply(ctx, command)
			return err
		},
		func(ctx context.Context, leader leaderClient) error {
			answer, err := leader.Propose(ctx, &peerv1.ProposeRequest{Commands: []*logv1.Command{command}})
			if err != nil {
				return err
			}
			if len(answer.Results) != 1 {
				return fmt.Errorf("the leader gave %d results for one command", len(answer.Results))
			}
			result = answer.Results[0]
			return nil
		})
	return result, err
}

// translate turns errors of the replica and of control into refusals.
func (s *Server) translate(err error) error {
	name := s.self.GetName()
	var refusal interface{ ErrorDetail() *apiv1.ErrorDetail } // of control
	switch {
	case err == nil:
		return nil
	case errors.As(err, &refusal):
		return rpc.FromDetail(refusal.ErrorDetail())
	case errors.Is(err, replica.ErrNotLeader), s.errNotLeading != nil && errors.Is(err, s.errNotLeading):
		return s.notLeader()
	case errors.Is(err, replica.ErrOutcomeUnknown), errors.Is(err, errAbandoned):
		return rpc.Refuse(connect.CodeUnavailable, rpc.ReasonOutcomeUnknown, "",
			"leadership changed while the request was being written: it may or may not take effect. Look, or repeat it with the same request id")
	case errors.Is(err, replica.ErrQuarantined):
		return rpc.Refuse(connect.CodeUnavailable, rpc.ReasonQuarantined, "controller "+name, err.Error())
	case errors.Is(err, replica.ErrDiskFull):
		return rpc.Refuse(connect.CodeResourceExhausted, rpc.ReasonDiskFull, "controller "+name,
			fmt.Sprintf("the disk of controller %s is full, so that nothing new can be stored: an operator must make room (%v)", name, err))
	case errors.Is(err, replica.ErrBusy):
		return rpc.Refuse(connect.CodeResourceExhausted, rpc.ReasonBusy, "controller "+name, err.Error()+"; try again in a moment")
	case errors.Is(err, replica.ErrTooLarge):
		return rpc.Refuse(connect.CodeInvalidArgument, rpc.ReasonTooLarge, "", err.Error())
	case errors.Is(err, replica.ErrClosed):
		return rpc.Refuse(connect.CodeUnavailable, rpc.ReasonShuttingDown, "controller "+name, "controller "+name+" is leaving")
	}
	return rpc.Local(err)
}

// notLeader says who leads instead, if that is known.
func (s *Server) notLeader() error {
	detail := &apiv1.ErrorDetail{Reason: rpc.ReasonNotLeader, Subject: "controller " + s.self.GetName(),
		LeaderAddress: s.leaderAddress(), Sentence: fmt.Sprintf("controller %s does not lead", s.self.GetName())}
	if detail.LeaderAddress != "" {
		detail.Sentence += "; ask the one at " + detail.LeaderAddress
	}
	return rpc.WithDetail(connect.CodeFailedPrecondition, detail)
}

// aRead is what onLeader does for reads, which change nothing: whether they were answered is never in doubt.
const aRead = "a read"

// noLeader is what a caller is told whose deadline passed. Sent is the error after which something may have been written, if any.
func (s *Server) noLeader(what string, sent, last, err error) error {
	switch {
	case sent != nil:
		last = sent
	case last == nil:
		last = err
	}
	if sent == nil {
		return rpc.Refuse(connect.CodeUnavailable, rpc.ReasonNoLeader, "controller "+s.self.GetName(), fmt.Sprintf(
			"controller %s found no leader for %s in time (%s); a quorum of controllers must be up and connected: see `muster cluster`",
			s.self.GetName(), what, rpc.Sentence(last)))
	}
	return rpc.Refuse(connect.CodeUnavailable, rpc.ReasonOutcomeUnknown, "controller "+s.self.GetName(), fmt.Sprintf(
		"the leader did not answer %s in time (%s): it may or may not take effect. Look, or repeat it with the same request id",
		what, rpc.Sentence(last)))
}

// stamp makes the command for a user's request: who, which id, which content, which trace.
func stamp(ctx context.Context, requestID string, request proto.Message) (*logv1.Command, error) {
	encoded, err := encode(request)
	if err != nil {
		return nil, err
	}
	return stampEncoded(ctx, requestID, encoded)
}

// stampEncoded is stamp for a request whose encoding is at hand.
func stampEncoded(ctx context.Context, requestID string, encoded []byte) (*logv1.Command, error) {
	if err := checkRequestID(requestID); err != nil {
		return nil, err
	}
	hash := sha256.Sum256(encoded)
	command := &logv1.Command{RequestId: requestID, Principal: rpc.PrincipalOf(ctx), PayloadSha256: hash[:]}
	if info, ok := connect.CallInfoForServerContext(ctx); ok {
		if trace := info.RequestHeader().Get("traceparent"); len(trace) <= maxTraceparent {
			command.Traceparent = trace
		}
	}
	return command, nil
}

// maxTraceparent is the length of a W3C trace context, with room for later versions.
const maxTraceparent = 128

// checkRequestID refuses what is no UUID of version 7.
func checkRequestID(id string) error {
	ok := len(id) == 36 && id[8] == '-' && id[13] == '-' && id[18] == '-' && id[23] == '-' && id[14] == '7'
	for i := 0; ok && i < len(id); i++ {
		switch c := id[i]; {
		case i == 8 || i == 13 || i == 18 || i == 23:
		case c >= '0' && c <= '9', c >= 'a' && c <= 'f':
		default:
			ok = false
		}
	}
	if !ok {
		return rpc.Refuse(connect.CodeInvalidArgument, "REQUEST_ID_INVALID", "request_id", fmt.Sprintf(
			"request_id %q is no UUID of version 7 in lower case: mint one for each request and keep it when you repeat the request", id))
	}
	return nil
}

// requestKey returns the binary form of an id that checkRequestID has accepted.
func requestKey(id string) state.RequestID {
	var key state.RequestID
	// Only digits are left, an even number of them for 16 bytes, so this cannot fail.
	_, _ = hex.Decode(key[:], []byte(strings.ReplaceAll(id, "-", "")))
	return key
}

// partID derives the request id of one part of a request that needs several commands. Part 0 has the id itself. The time
// stays, so that all parts expire together, and the same part gets the same id when the request is repeated.
func partID(id string, part int) string {
	if part == 0 {
		return id
	}
	hash := sha256.Sum256(fmt.Appendf(nil, "%s part %d", id, part))
	text := hex.EncodeToString(hash[:])
	return id[:15] + text[:3] + "-" + "8" + text[3:6] + "-" + text[6:18]
}
