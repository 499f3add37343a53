package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
)

// Bounds of retries; rows of docs/limits.md.
const (
	firstBackoff = 50 * time.Millisecond
	maxBackoff   = time.Second
	// maxPollExtra bounds by how much the wait of a long poll delays the hedge.
	maxPollExtra = 5 * time.Second
	// noQuorumWait is how long a read goes on after a controller has said that there is no quorum: another one may know better, or
	// may just have been elected.
	noQuorumWait = 1500 * time.Millisecond
	// noControllerWait is how long a read goes on while every controller's host refuses connections: they may just be restarted.
	noControllerWait = 2500 * time.Millisecond
)

// unary is the stream of one unary call: Send remembers the encoded request, Receive does all the work.
type unary struct {
	balancer *balancer
	ctx      context.Context
	spec     connect.Spec
	request  []byte
	wait     time.Duration // of a long poll
	done     bool
}

func (u *unary) SendHeaders() error { return nil }
func (u *unary) CloseSend() error   { return nil }
func (u *unary) Close() error       { return nil }

func (u *unary) Send(msg any) error {
	message, ok := msg.(proto.Message)
	if !ok {
		return fmt.Errorf("send a request: a %T is no message", msg)
	}
	data, err := proto.Marshal(message)
	if err != nil {
		return fmt.Errorf("encode the request: %w", err)
	}
	if len(data) > rpc.MaxRequestBytes {
		return rpc.Refuse(connect.CodeInvalidArgument, rpc.ReasonTooLarge, u.spec.Procedure,
			fmt.Sprintf("the request has %d bytes; the limit is %d", len(data), rpc.MaxRequestBytes))
	}
	if poll, ok := msg.(*apiv1.GetStepRequest); ok {
		u.wait = time.Duration(poll.WaitEndMs) * time.Millisecond
	}
	u.request = data
	return nil
}

func (u *unary) Receive(msg any) error {
	if u.done {
		return io.EOF
	}
	u.done = true
	message, ok := msg.(proto.Message)
	if !ok {
		return fmt.Errorf("receive an answer: a %T is no message", msg)
	}
	data, err := u.run()
	if err != nil {
		return err
	}
	if err := proto.Unmarshal(data, message); err != nil {
		return fmt.Errorf("decode the answer: %w", err)
	}
	return nil
}

// answer is how one try ended.
type answer struct {
	target *target
	data   []byte
	leader string
	tokens tokens
	err    error
}

// attempts is the state of one call over all its tries.
type attempts struct {
	u       *unary
	ctx     context.Context
	answers chan answer
	running map[*target]bool  // tries whose answer is not in yet
	round   []*target         // still to be tried in this round
	said    map[string]string // last error by address
	wrong   map[*target]bool
	renewed bool
	hinted  int // hints followed in this round, so that two controllers that name each other end it
	backoff time.Duration
	pause   <-chan time.Time // set between rounds
	unclear bool             // a try has ended that may have had an effect
	quorum  error            // the newest answer that says that there is no quorum
	enough  <-chan time.Time // of a read after such an answer
	refused map[*target]bool // where the last try found nobody who listens
	nobody  <-chan time.Time // of a read, set while that is so everywhere
}

// bounded is the caller's context, with the default deadline if it has none. A deadline of the caller ends the call through the caller's
// context, not through a second timer that may come first.
func (u *unary) bounded() (context.Context, context.CancelFunc) {
	if _, ok := u.ctx.Deadline(); ok {
		return context.WithCancel(u.ctx)
	}
	return context.WithTimeout(u.ctx, u.balancer.timeout+u.wait)
}

func (u *unary) run() ([]byte, error) {
	ctx, cancel := u.bounded()
	a := &attempts{u: u, ctx: ctx, answers: make(chan answer), running: map[*target]bool{},
		said: map[string]string{}, wrong: map[*target]bool{}, refused: map[*target]bool{}, backoff: firstBackoff}
	data, err := a.loop()
	cancel()
	for range a.running { // the losers end at once, by cancellation
		<-a.answers
	}
	return data, err
}

func (a *attempts) loop() ([]byte, error) {
	began := time.Now()
	a.round = a.u.balancer.order()
	if len(a.round) == 0 {
		return nil, rpc.Refuse(connect.CodeUnavailable, "NO_CONTROLLERS", "", "no address of a controller is known")
	}
	a.next()
	silence := a.u.balancer.hedgeAfter + min(a.u.wait, maxPollExtra)
	hedge := time.NewTimer(silence)
	defer hedge.Stop()
	for {
		select {
		case <-a.ctx.Done():
			return nil, a.giveUp(began)
		case <-a.enough:
			return nil, rpc.Local(a.quorum)
		case <-a.nobody:
			return nil, a.giveUp(began)
		case <-hedge.C:
			if a.pause == nil {
				a.next()
			}
			hedge.Reset(silence)
		case <-a.pause:
			a.pause = nil
			a.round = a.u.balancer.order()
			a.next()
			hedge.Reset(silence)
		case got := <-a.answers:
			delete(a.running, got.target)
			if got.err == nil {
				a.prefer(got)
				return got.data, nil
			}
			if a.ctx.Err() != nil {
				return nil, a.giveUp(began)
			}
			if err := a.failed(got); err != nil {
				return nil, err
			}
		}
	}
}

// next starts a try with the next controller of this round that has none running. It reports whether there was one.
func (a *attempts) next() bool {
	for len(a.round) > 0 {
		t := a.round[0]
		a.round = a.round[1:]
		if !a.running[t] {
			a.start(t)
			return true
		}
	}
	return false
}

func (a *attempts) start(t *target) {
	a.running[t] = true
	go func() { a.answers <- a.try(t) }() // run waits for it
}

func (a *attempts) try(t *target) answer {
	ctx, info := connect.NewClientContext(a.ctx)
	if outer, ok := connect.CallInfoForClientContext(a.ctx); ok {
		for key, values := range outer.RequestHeader().All() {
			info.RequestHeader().SetValues(key, values)
		}
	}
	tokens := a.u.balancer.credentials.current(ctx)
	authorize(info, tokens.controllers)
	var got frame
	err := t.client.CallUnary(ctx, a.u.spec, &frame{data: a.u.request}, &got)
	return answer{target: t, data: got.data, leader: info.ResponseHeader().Get(rpc.LeaderHeader), tokens: tokens, err: err}
}

// prefer lets later calls begin with the leader, or else with whoever answered.
func (a *attempts) prefer(got answer) {
	if got.leader != "" {
		a.u.balancer.prefer(got.leader)
	} else {
		a.u.balancer.prefer(got.target.address)
	}
}

// failed decides what follows a try that failed; an error ends the call.
func (a *attempts) failed(got answer) error {
	a.said[got.target.address] = rpc.Sentence(got.err)
	a.u.balancer.log.Debug("a call failed at one controller", "procedure", a.u.spec.Procedure,
		"address", got.target.address, "error", got.err)
	a.unclear = a.unclear || !nothingDone(got.err)
	if rpc.Reason(got.err) == rpc.ReasonNoQuorum {
		a.quorum = got.err
		if a.enough == nil && a.u.hasty() {
			a.enough = time.After(noQuorumWait)
		}
	}
	a.refused[got.target] = refused(got.err)
	switch {
	case !a.allRefused():
		a.nobody = nil
	case a.nobody == nil && a.u.hasty():
		a.nobody = time.After(noControllerWait)
	}
	switch judge(got.err) {
	case final:
		return rpc.Local(got.err)
	case renew:
		if a.renewed {
			return rpc.Local(got.err)
		}
		a.renewed = true
		if a.u.balancer.credentials.renew(a.ctx, got.tokens, (*voucher).insist) != nil {
			return rpc.Local(got.err)
		}
		a.start(got.target)
		return nil
	case wrongPeer:
		a.wrong[got.target] = true
		if len(a.wrong) == len(a.u.balancer.order()) {
			return rpc.Refuse(connect.CodeUnavailable, "WRONG_PEER", got.target.address,
				fmt.Sprintf("no controller of this cluster answers at %s: %s", got.target.address, rpc.Sentence(got.err)))
		}
	case again:
	}
	if hint := rpc.Detail(got.err).GetLeaderAddress(); hint != "" && hint != got.target.address && a.hinted < len(a.said)+1 {
		a.hinted++
		t := a.u.balancer.prefer(hint)
		if i := slices.Index(a.round, t); i >= 0 {
			a.round = slices.Delete(a.round, i, i+1)
		}
		if !a.running[t] {
			a.start(t)
		}
		return nil
	}
	if a.next() || len(a.running) > 0 || a.pause != nil {
		return nil
	}
	a.hinted = 0
	wait := a.backoff/2 + rand.N(a.backoff/2+1)
	a.backoff = min(2*a.backoff, maxBackoff)
	a.pause = time.After(wait)
	return nil
}

// giveUp says who was tried and what each said.
func (a *attempts) giveUp(began time.Time) error {
	if cause := a.u.ctx.Err(); errors.Is(cause, context.Canceled) {
		return connect.NewError(connect.CodeCanceled, "the call was cancelled").WithCause(cause)
	}
	for t := range a.running {
		if _, ok := a.said[t.address]; !ok {
			a.said[t.address] = "silence"
		}
	}
	var tried []string
	for _, t := range a.u.balancer.order() {
		if said, ok := a.said[t.address]; ok {
			tried = append(tried, t.address+": "+said)
		}
	}
	name := a.u.balancer.cluster
	if name != "" {
		name = " of cluster " + name
	}
	sentence := fmt.Sprintf("no controller%s gave an answer within %s (%s)", name, time.Since(began).Round(100*time.Millisecond), strings.Join(tried, "; "))
	reason := "NO_ANSWER"
	switch {
	case a.allRefused():
		sentence = fmt.Sprintf("no controller%s answers: nothing listens at %s; running work goes on", name, strings.Join(a.u.balancer.addresses(), ", "))
	case a.quorum != nil:
		reason, sentence = rpc.ReasonNoQuorum, rpc.Sentence(a.quorum)
	}
	switch {
	case a.u.reads():
	case a.unclear || len(a.running) > 0:
		sentence += "; whether the request took effect is not known: look before you repeat it"
	default:
		sentence += "; nothing was decided"
	}
	return rpc.Refuse(connect.CodeUnavailable, reason, strings.TrimPrefix(a.u.spec.Procedure, "/"), sentence)
}

// allRefused reports whether the last try at every controller found nobody who listens there.
func (a *attempts) allRefused() bool {
	order := a.u.balancer.order()
	return len(order) > 0 && !slices.ContainsFunc(order, func(t *target) bool { return !a.refused[t] })
}

// reads reports whether the call changes nothing.
func (u *unary) reads() bool { return u.spec.IdempotencyLevel == connect.IdempotencyNoSideEffects }

// hasty reports whether the caller is better served by a soon "nobody can answer now" than by waiting for the answer. A long poll
// outlives such a time, as the work does that it waits for.
func (u *unary) hasty() bool { return u.reads() && u.wait == 0 && !u.balancer.patient }
