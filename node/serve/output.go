package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"time"

	"connectrpc.com/connect/v2"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
	"github.com/muster-hpc/muster/rpc"
)

// source is one stream of one task, being read.
type source struct {
	rank   uint32
	kind   nodev1.OutputStream
	stream Stream
	offset int64
	file   *os.File
	// empty: there is nothing to read and never will be.
	empty bool
}

// reader streams the output of one step to one client.
type reader struct {
	s       *nodeService
	req     *nodev1.ReadOutputRequest
	send    func(*nodev1.ReadOutputResponse) error
	step    Step
	sources []*source
	buffer  []byte
	started bool
	// chosen: sources has the streams of all tasks. A step is known before the files of its tasks are.
	chosen bool
	// ended are the ranks whose ends were told.
	ended map[uint32]bool
}

// ReadOutput streams output from the spool, or from the files that the user named. With follow it ends when all tasks of
// this node have ended and everything was sent; otherwise when everything that is there now was sent.
func (s *nodeService) ReadOutput(ctx context.Context, req *nodev1.ReadOutputRequest, stream nodev1connect.NodeServiceReadOutputServerStream) error {
	step, err := s.await(ctx, req.GetJobId(), req.GetAttempt(), req.GetStepId(), time.Duration(req.GetWaitMs())*time.Millisecond)
	if err != nil {
		return err
	}
	r := &reader{s: s, req: req, send: stream.Send, step: step, buffer: make([]byte, maxPiece), ended: map[uint32]bool{}}
	defer r.close()
	return r.run(ctx)
}

// choose lists the streams that were asked for, as soon as the step's preparation has named their files. A stderr that
// goes to the same file as stdout is not read twice.
func (r *reader) choose() error {
	if r.chosen || len(r.step.Tasks) == 0 && !r.step.Over {
		return nil
	}
	r.chosen = true
	ranks := r.req.GetRanks()
	for _, rank := range ranks {
		if !slices.ContainsFunc(r.step.Tasks, func(t Task) bool { return t.Rank == rank }) {
			return rpc.Refuse(connect.CodeInvalidArgument, "RANK_NOT_HERE", subject(r.req.GetJobId(), r.req.GetStepId()),
				fmt.Sprintf("rank %d of step %d.%s does not run on node %s", rank, r.req.GetJobId(), stepName(r.req.GetStepId()),
					r.s.host.Status().GetNode()))
		}
	}
	for _, t := range r.step.Tasks {
		if len(ranks) > 0 && !slices.Contains(ranks, t.Rank) {
			continue
		}
		if r.req.GetStream() != nodev1.OutputStream_OUTPUT_STREAM_STDERR {
			r.add(t.Rank, nodev1.OutputStream_OUTPUT_STREAM_STDOUT, t.Stdout)
		}
		separate := t.Stderr.Path != t.Stdout.Path
		if r.req.GetStream() == nodev1.OutputStream_OUTPUT_STREAM_STDERR || r.req.GetStream() == nodev1.OutputStream_OUTPUT_STREAM_UNSPECIFIED && separate {
			r.add(t.Rank, nodev1.OutputStream_OUTPUT_STREAM_STDERR, t.Stderr)
		}
	}
	return nil
}

func (r *reader) add(rank uint32, kind nodev1.OutputStream, stream Stream) {
	if !stream.Spool && slices.ContainsFunc(r.sources, func(o *source) bool { return o.stream == stream }) {
		return // tasks that share a file: it is read once, for the first of them
	}
	src := &source{rank: rank, kind: kind, stream: stream}
	for _, o := range r.req.GetOffsets() {
		if o.GetRank() == rank && o.GetStream() == kind {
			src.offset = int64(min(o.GetOffset(), 1<<62))
		}
	}
	r.sources = append(r.sources, src)
}

func (r *reader) close() {
	for _, src := range r.sources {
		if src.file != nil {
			_ = src.file.Close() // only read
		}
	}
}

func (r *reader) run(ctx context.Context) error {
	pause := pollMin
	for {
		changed := r.s.host.Changed()
		// Over is read before the files: what is in them afterwards is all there will ever be.
		if step, ok := r.s.host.Step(r.req.GetJobId(), r.step.Attempt, r.req.GetStepId()); ok {
			r.step = step
		} else {
			return r.s.unknown(r.req.GetJobId(), r.req.GetStepId()) // removed meanwhile
		}
		if err := r.choose(); err != nil {
			return err
		}
		if err := r.tell(); err != nil {
			return err
		}
		moved, err := r.pass(ctx)
		if err != nil {
			return err
		}
		if r.step.Over {
			return r.finish()
		}
		if !r.req.GetFollow() {
			return nil
		}
		if moved {
			pause = pollMin
		}
		if err := r.pause(ctx, changed, pause); err != nil {
			return err
		}
		pause = min(2*pause, pollMax)
	}
}

// tell sends to one who follows that the tasks were started, and the ends of tasks while others run.
func (r *reader) tell() error {
	if !r.req.GetFollow() {
		return nil
	}
	if r.step.Started && !r.started {
		r.started = true
		if err := r.send(&nodev1.ReadOutputResponse{Started: true}); err != nil {
			return err
		}
	}
	var ends []*apiv1.TaskExit
	for _, exit := range r.step.Ended {
		if !r.ended[exit.GetFirstRank()] {
			r.ended[exit.GetFirstRank()] = true
			ends = append(ends, exit)
		}
	}
	if len(ends) == 0 {
		return nil
	}
	return r.send(&nodev1.ReadOutputResponse{Ended: ends})
}

// pause waits until something may be new. A change of the node may be the end of the step.
func (r *reader) pause(ctx context.Context, changed <-chan struct{}, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	if !r.step.Started {
		timer.Stop() // nothing is written before the start, which is a change
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-changed:
	case <-timer.C:
	}
	return nil
}

// pass sends what is there, a piece of each stream in turn.
func (r *reader) pass(ctx context.Context) (moved bool, err error) {
	for more := true; more; {
		more = false
		for _, src := range r.sources {
			n, err := r.piece(src)
			if err != nil {
				return moved, err
			}
			moved, more = moved || n > 0, more || n == maxPiece
		}
		if ctx.Err() != nil {
			return moved, ctx.Err()
		}
	}
	return moved, nil
}

// piece sends one piece of a stream and returns its length; 0 if nothing more is there now.
func (r *reader) piece(src *source) (int, error) {
	if src.empty {
		return 0, nil
	}
	if src.file == nil {
		file, err := open(src.stream, r.step.Owner)
		if errors.Is(err, fs.ErrNotExist) {
			return 0, nil // the task has not been executed, or its file was removed
		}
		if errors.Is(err, errNotRegular) { // /dev/null, say
			src.empty = true
			return 0, nil
		}
		if err != nil {
			return 0, rpc.Refuse(connect.CodeFailedPrecondition, "OUTPUT_UNREADABLE", subject(r.req.GetJobId(), r.req.GetStepId()),
				fmt.Sprintf("the output of rank %d cannot be read: %v", src.rank, err))
		}
		src.file = file
	}
	n, err := src.file.ReadAt(r.buffer, src.offset)
	if err != nil && !errors.Is(err, io.EOF) {
		return 0, fmt.Errorf("read the output of rank %d: %w", src.rank, err)
	}
	if n == 0 {
		return 0, nil
	}
	err = r.send(&nodev1.ReadOutputResponse{Rank: src.rank, Stream: src.kind, Offset: uint64(src.offset), Data: r.buffer[:n]})
	src.offset += int64(n)
	return n, err
}

// finish says that every stream has ended, and with follow how the tasks ended.
func (r *reader) finish() error {
	for _, src := range r.sources {
		if err := r.send(&nodev1.ReadOutputResponse{Rank: src.rank, Stream: src.kind, Offset: uint64(src.offset), End: true}); err != nil {
			return err
		}
	}
	if !r.req.GetFollow() {
		return nil
	}
	return r.send(&nodev1.ReadOutputResponse{Exits: r.step.Exits})
}
