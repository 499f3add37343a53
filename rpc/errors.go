package rpc

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connectproto"
	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// Refuse makes the error for a refused call. The reason is upper snake case and stable; the subject names the thing
// ("job 17"), and may be empty; the sentence says what was wrong, where, and what to do.
func Refuse(code connect.Code, reason, subject, sentence string) error {
	return WithDetail(code, &apiv1.ErrorDetail{Reason: reason, Subject: subject, Sentence: sentence})
}

// WithDetail is Refuse for a detail that exists already.
func WithDetail(code connect.Code, detail *apiv1.ErrorDetail) error {
	e := connect.NewError(code, detail.Sentence)
	packed, err := connectproto.NewErrorDetail(detail)
	if err != nil { // only for strings that are not UTF-8
		return connect.NewError(connect.CodeInternal, "the error could not be encoded: "+err.Error())
	}
	return e.WithDetail(packed)
}

// FromDetail makes the error for a refusal that Apply or a peer gave; CodeOf chooses its code by the reason. It
// returns nil for nil.
func FromDetail(detail *apiv1.ErrorDetail) error {
	if detail == nil {
		return nil
	}
	return WithDetail(CodeOf(detail.Reason), detail)
}

// Detail returns the detail that travels in err, or nil if there is none.
func Detail(err error) *apiv1.ErrorDetail {
	var e *connect.Error
	if !errors.As(err, &e) {
		return nil
	}
	for _, packed := range e.Details() {
		if packed.Type != detailType {
			continue
		}
		detail := new(apiv1.ErrorDetail)
		if proto.Unmarshal(packed.Value, detail) == nil {
			return detail
		}
	}
	return nil
}

var detailType = string((*apiv1.ErrorDetail)(nil).ProtoReflect().Descriptor().FullName())

// Sentence returns what a person should read of err: the detail's sentence if there is one, the message of a connect
// error, or the error's text.
func Sentence(err error) string {
	if detail := Detail(err); detail != nil && detail.Sentence != "" {
		return detail.Sentence
	}
	var e *connect.Error
	if errors.As(err, &e) && e.Message() != "" {
		return e.Message()
	}
	return err.Error()
}

// AsOf says how old an answer is that was given without a quorum, after the error err which said so.
func AsOf(info *apiv1.ReadInfo, err error) string {
	age := time.Duration(info.GetAgeMs()) * time.Millisecond
	if age > 365*24*time.Hour { // the controller has not heard of a leader since it was started
		age = time.Since(info.GetStateTime().AsTime())
	}
	return fmt.Sprintf("as of %v ago: no quorum: %s", age.Round(time.Second), Sentence(err))
}

// Reason returns the reason code of err, or "" if it carries none.
func Reason(err error) string { return Detail(err).GetReason() }

// Local makes an error fit to be returned by a handler: errors that came from a peer are made the handler's own (they
// would be hidden otherwise), context errors keep their code, and anything else keeps its text as an internal error,
// because callers inside a cluster are better served by a reason than by "unknown".
func Local(err error) error {
	if err == nil {
		return nil
	}
	var e *connect.Error
	switch {
	case errors.As(err, &e):
		if !e.IsRemote() {
			return e
		}
		own := connect.NewError(e.Code(), e.Message()).WithCause(err)
		for _, detail := range e.Details() {
			own = own.WithDetail(detail)
		}
		return own
	case errors.Is(err, context.DeadlineExceeded):
		return connect.NewError(connect.CodeDeadlineExceeded, err.Error()).WithCause(err)
	case errors.Is(err, context.Canceled):
		return connect.NewError(connect.CodeCanceled, err.Error()).WithCause(err)
	}
	return connect.NewError(connect.CodeInternal, err.Error()).WithCause(err)
}
