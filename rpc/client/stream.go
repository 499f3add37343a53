package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/proto"

	"github.com/muster-hpc/muster/rpc"
)

// firstMessageTimeout is how long a controller may take to send the first message of a stream: it sends one at once,
// even if nothing has changed.
const firstMessageTimeout = 3 * time.Second

// serverStream is the stream of one server-streaming call. Controllers are tried in order until one sends a first
// message; from then on the stream is that controller's, and its end is the caller's to handle.
type serverStream struct {
	balancer *balancer
	ctx      context.Context
	spec     connect.Spec
	request  *frame
	inner    connect.ClientStream
	cancel   context.CancelFunc
}

func (s *serverStream) SendHeaders() error { return nil }
func (s *serverStream) CloseSend() error   { return nil }

func (s *serverStream) Close() error {
	if s.cancel != nil {
		s.cancel()
	}
	if s.inner != nil {
		return s.inner.Close()
	}
	return nil
}

func (s *serverStream) Send(msg any) error {
	message, ok := msg.(proto.Message)
	if !ok {
		return fmt.Errorf("send a request: a %T is no message", msg)
	}
	data, err := proto.Marshal(message)
	if err != nil {
		return fmt.Errorf("encode the request: %w", err)
	}
	s.request = &frame{data: data}
	return nil
}

func (s *serverStream) Receive(msg any) error {
	if s.inner != nil {
		return s.inner.Receive(msg)
	}
	var said []string
	var noQuorum error
	renewed := false
	order := s.balancer.order()
	for i := 0; i < len(order); i++ {
		t := order[i]
		tokens := s.balancer.credentials.current(s.ctx)
		err := s.open(t, tokens.controllers, msg)
		if err == nil || errors.Is(err, io.EOF) {
			return err
		}
		if cause := s.ctx.Err(); cause != nil {
			return cause
		}
		if rpc.Reason(err) == rpc.ReasonNoQuorum {
			noQuorum = err
		}
		said = append(said, t.address+": "+rpc.Sentence(err))
		switch judge(err) {
		case final:
			return rpc.Local(err)
		case renew:
			if renewed || s.balancer.credentials.renew(s.ctx, tokens, (*voucher).insist) != nil {
				return rpc.Local(err)
			}
			renewed = true
			i--
		case again, wrongPeer:
		}
	}
	if noQuorum != nil {
		return rpc.Local(noQuorum)
	}
	return rpc.Refuse(connect.CodeUnavailable, "NO_ANSWER", strings.TrimPrefix(s.spec.Procedure, "/"),
		"no controller would begin the stream ("+strings.Join(said, "; ")+"); it only reads, so that it can be asked for again")
}

// open begins the stream at one controller and waits for its first message.
func (s *serverStream) open(t *target, token string, msg any) error {
	ctx, cancel := context.WithCancel(s.ctx)
	ctx, info := connect.NewClientContext(ctx)
	if outer, ok := connect.CallInfoForClientContext(s.ctx); ok {
		for key, values := range outer.RequestHeader().All() {
			info.RequestHeader().SetValues(key, values)
		}
	}
	authorize(info, token)
	late := time.AfterFunc(firstMessageTimeout, cancel)
	stream, err := t.client.CallServerStream(ctx, s.spec, s.request)
	if err == nil {
		err = stream.Receive(msg)
	}
	if !late.Stop() && s.ctx.Err() == nil {
		err = connect.NewError(connect.CodeUnavailable, "silence")
	}
	if err != nil {
		cancel()
		if stream != nil {
			err = errors.Join(err, stream.Close())
		}
		return err
	}
	s.inner, s.cancel = stream, cancel
	return nil
}
