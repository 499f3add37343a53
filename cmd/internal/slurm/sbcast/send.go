package sbcast

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect/v2"

	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
	"github.com/muster-hpc/muster/rpc"
)

// Pauses before a node is asked again, and the time for a last word to it; rows of docs/limits.md.
const (
	retryFirst   = 20 * time.Millisecond
	retryMost    = time.Second
	abortTimeout = 2 * time.Second
	// notYet is how long a node may not know that the job has begun there.
	notYet = 5 * time.Second
)

// send sends the file to all nodes, some at a time.
func (c *cast) send(ctx context.Context, cluster session.Cluster, shares []*apiv1.NodeShare, attempt uint32) int {
	name := strings.ReplaceAll(c.s.RequestID(), "_", "-")
	slots := make(chan struct{}, c.fanout)
	errs := make([]error, len(shares))
	var group sync.WaitGroup
	for i, share := range shares {
		group.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			t := &transfer{cast: c, node: cluster.Node(share.GetAgentAddress()), attempt: attempt, name: fmt.Sprintf("%s-%d", name, i)}
			errs[i] = t.run(ctx)
		})
	}
	group.Wait()
	code := 0
	for i, err := range errs {
		switch {
		case err == nil:
			if c.options.Has("verbose") {
				c.s.Line("%s: %d bytes are at %s", shares[i].GetNode(), c.size, c.dest)
			}
			continue
		case errors.Is(err, context.Canceled):
			c.s.Errorf("%s: interrupted before %s was there", shares[i].GetNode(), c.dest)
		default:
			submit.Explain(c.s, "REQUEST_FILE_BCAST("+shares[i].GetNode()+")", err)
		}
		code = submit.CodeRefused
	}
	return code
}

// transfer is the file on its way to one node.
type transfer struct {
	*cast
	node    nodev1connect.NodeServiceClient
	attempt uint32
	name    string
	again   bool // it was begun anew once, because what arrived was not what was sent
}

func (t *transfer) request() *nodev1.PutFileRequest {
	return &nodev1.PutFileRequest{JobId: t.job, Attempt: t.attempt, Path: t.dest, Transfer: t.name, Force: t.force}
}

// run sends all pieces and then the end, going on after broken calls as long as there is progress.
func (t *transfer) run(ctx context.Context) error {
	offset, pause, progress := int64(0), retryFirst, time.Now()
	for {
		next, done, err := t.step(ctx, offset)
		switch {
		case err == nil && done:
			return nil
		case err == nil:
			if next != offset {
				progress, pause = time.Now(), retryFirst
			}
			offset = next
			continue
		case rpc.Reason(err) == "TRANSFER_UNKNOWN" && offset > 0:
			offset = 0 // its directory was emptied meanwhile
		case rpc.Reason(err) == "HASH_MISMATCH" && !t.again:
			t.again, offset = true, 0
		case rpc.Reason(err) == "JOB_NOT_HERE" && offset == 0 && time.Since(progress) < notYet && ctx.Err() == nil:
			// The controllers know of the job's start before its nodes do.
		case ctx.Err() != nil, permanent(err), time.Since(progress) > t.timeout:
			t.abort(ctx)
			return errors.Join(ctx.Err(), err)
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
		pause = min(2*pause, retryMost)
	}
}

// step sends the piece at an offset, or the end, and returns where to go on.
func (t *transfer) step(ctx context.Context, offset int64) (next int64, done bool, err error) {
	r := t.request()
	r.Offset = uint64(offset)
	if offset >= t.size && (t.size > 0 || offset < 0) {
		r.End, r.Sha256, r.Mode, r.Modified = true, t.sha256, t.mode, t.modified
	} else {
		piece := make([]byte, min(int64(t.piece), t.size-offset))
		n, err := t.file.ReadAt(piece, offset)
		if err != nil && !errors.Is(err, io.EOF) || n < len(piece) {
			return offset, false, &submit.Error{Text: fmt.Sprintf("%s was made shorter, or cannot be read, while it was sent: %v", t.source, err), Code: submit.CodeRefused}
		}
		r.Data = piece
	}
	call, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	answer, err := t.node.PutFile(call, r)
	if err != nil {
		return offset, false, err
	}
	if r.GetEnd() {
		return offset, int64(answer.GetOffset()) == t.size, nil
	}
	if t.size == 0 { // it is there; the end follows
		r = t.request()
		r.End, r.Sha256, r.Mode, r.Modified = true, t.sha256, t.mode, t.modified
		_, err := t.node.PutFile(call, r)
		return 0, err == nil, err
	}
	return int64(answer.GetOffset()), false, nil
}

// abort removes what is there of the file. A node that does not answer keeps it, under a hidden name.
func (t *transfer) abort(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortTimeout)
	defer cancel()
	r := t.request()
	r.Abort = true
	_, _ = t.node.PutFile(ctx, r) // what went wrong before is what the user must know
}

// permanent tells whether sending again is pointless.
func permanent(err error) bool {
	var own *submit.Error
	if errors.As(err, &own) {
		return true
	}
	switch connect.CodeOf(err) {
	case connect.CodePermissionDenied, connect.CodeInvalidArgument, connect.CodeUnimplemented, connect.CodeUnauthenticated,
		connect.CodeAlreadyExists, connect.CodeResourceExhausted, connect.CodeNotFound, connect.CodeDataLoss:
		return true
	}
	return false
}
