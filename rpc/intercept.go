package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// Guard is what stands in front of every handler.
type Guard struct {
	// Verifier checks tokens.
	Verifier *Verifier
	// Settings returns the settings in force, which name the operators. Nil: only uid 0 is one.
	Settings func() *apiv1.Settings
	// Refuse is asked first; an error ends the call. Nil: none.
	Refuse func(procedure string) error
	// Log gets panics and internal errors.
	Log *slog.Logger
	// MaxCalls bounds the calls of users that are served at the same time; 0 means MaxUserCalls.
	MaxCalls int64

	userCalls atomic.Int64

	mu sync.Mutex
	// each counts the calls of users who are no operators, by uid.
	each map[uint32]int64
}

// enter counts a call of a user; leave must be called when it ends. An error says that there are too many.
func (g *Guard) enter(procedure string, p *apiv1.Principal, operator bool, limit int64) (leave func(), err error) {
	if g.userCalls.Add(1) > limit {
		g.userCalls.Add(-1)
		return nil, Refuse(connect.CodeResourceExhausted, ReasonBusy, procedure,
			fmt.Sprintf("%d calls of users are being answered here; try again in a moment", limit))
	}
	if operator {
		return func() { g.userCalls.Add(-1) }, nil
	}
	share := max(1, limit/UserShare)
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.each[p.Uid] >= share {
		g.userCalls.Add(-1)
		return nil, Refuse(connect.CodeResourceExhausted, ReasonBusy, procedure,
			fmt.Sprintf("%d calls of %s are being answered here, which is the most for one user; try again when some have ended", share, Caller(p)))
	}
	if g.each == nil {
		g.each = make(map[uint32]int64)
	}
	g.each[p.Uid]++
	return func() {
		g.userCalls.Add(-1)
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.each[p.Uid]--; g.each[p.Uid] == 0 {
			delete(g.each, p.Uid)
		}
	}, nil
}

// Interceptor returns the server interceptor: it recovers panics, finds out who calls, looks into the authorisation
// table, and makes every error fit for the wire. Handlers find the caller by PrincipalOf.
func (g *Guard) Interceptor() connect.ServerInterceptor {
	limit := g.MaxCalls
	if limit == 0 {
		limit = MaxUserCalls
	}
	return func(next connect.ServerFunc) connect.ServerFunc {
		return func(ctx context.Context, spec connect.Spec, stream connect.ServerStream) (err error) {
			defer func() {
				if cause := recover(); cause != nil {
					g.Log.Error("a handler panicked", "procedure", spec.Procedure, "panic", cause, "stack", string(debug.Stack()))
					err = Refuse(connect.CodeInternal, ReasonInternal, spec.Procedure,
						"the call met a bug; the log of the controller or agent that answered has the details")
				}
			}()
			if g.Refuse != nil {
				if err := g.Refuse(spec.Procedure); err != nil {
					return err
				}
			}
			principal, err := g.authenticate(ctx)
			if err != nil {
				return err
			}
			var settings *apiv1.Settings
			if g.Settings != nil {
				settings = g.Settings()
			}
			if err := Authorize(spec.Procedure, principal, settings); err != nil {
				return err
			}
			if principal.Kind == apiv1.PrincipalKind_PRINCIPAL_KIND_USER {
				leave, err := g.enter(spec.Procedure, principal, IsOperator(principal, settings), limit)
				if err != nil {
					return err
				}
				defer leave()
			}
			return g.wire(spec, next(WithPrincipal(ctx, principal), spec, stream))
		}
	}
}

// authenticate finds out who calls: by the certificate of the connection if it has one, otherwise by the token. A
// controller or node that sends a token as well acts as itself. Without either the principal is nobody.
func (g *Guard) authenticate(ctx context.Context) (*apiv1.Principal, error) {
	if info, ok := connecthttp.ServerInfoForContext(ctx); ok {
		name, role, ok, err := PeerOfConnection(info.TLS())
		if err != nil {
			return nil, Refuse(connect.CodeUnauthenticated, ReasonUnauthenticated, "", "the certificate is not usable: "+err.Error())
		}
		if ok && role == RoleController {
			return &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_MEMBER, Name: name}, nil
		} else if ok {
			return &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_NODE, Name: name}, nil
		}
	}
	info, ok := connect.CallInfoForServerContext(ctx)
	if !ok {
		return nobody, nil
	}
	header := info.RequestHeader().Get("Authorization")
	if header == "" {
		return nobody, nil
	}
	token, ok := strings.CutPrefix(header, "Bearer ")
	if !ok {
		return nil, Refuse(connect.CodeUnauthenticated, ReasonUnauthenticated, "", "the Authorization header is not of the form “Bearer TOKEN”")
	}
	principal, err := g.Verifier.Verify(token)
	if errors.Is(err, ErrTokenExpired) {
		return nil, Refuse(connect.CodeUnauthenticated, ReasonTokenExpired, "", err.Error()+"; ask the agent for a new one")
	} else if err != nil {
		return nil, Refuse(connect.CodeUnauthenticated, ReasonUnauthenticated, "", "the token is not accepted: "+err.Error())
	}
	return principal, nil
}

// wire makes an error fit for the wire: it always carries a detail, by which clients tell an answer from a broken
// connection.
func (g *Guard) wire(spec connect.Spec, err error) error {
	if err == nil {
		return nil
	}
	local := Local(err)
	code := connect.CodeOf(local)
	if code == connect.CodeInternal {
		g.Log.Error("a call failed", "procedure", spec.Procedure, "error", err)
	}
	if Detail(local) != nil {
		return local
	}
	// What connect says of a request that it could not read.
	switch text := Sentence(local); {
	case code == connect.CodeResourceExhausted && strings.Contains(text, "larger than configured max"):
		return Refuse(connect.CodeInvalidArgument, ReasonRequestTooLarge, spec.Procedure,
			fmt.Sprintf("the request has more than %d bytes, which is the limit: split it, or upload scripts and environments in pieces", MaxRequestBytes))
	case code == connect.CodeInvalidArgument && strings.Contains(text, "unmarshal message"):
		return Refuse(connect.CodeInvalidArgument, ReasonRequestMalformed, spec.Procedure,
			"the body of the request is no message for "+strings.TrimPrefix(spec.Procedure, "/")+": it must be encoded as its Content-Type says, with the fields of the API's schema ("+text+")")
	}
	reason := ReasonInternal
	if code != connect.CodeInternal {
		reason = strings.ToUpper(code.String())
	}
	return WithDetail(code, &apiv1.ErrorDetail{Reason: reason, Subject: spec.Procedure, Sentence: Sentence(local)})
}
