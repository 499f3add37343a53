package launch

import (
	"context"
	"errors"
	"io"
	"sync"

	"connectrpc.com/connect/v2"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// source names one stream of one task.
type source struct {
	rank   uint32
	stream nodev1.OutputStream
}

// read copies the output of one node until the exits of its tasks are known.
func (a *attachment) read(ctx context.Context, reader *nodeReader) {
	offsets := a.skipped(reader)
	pause := retryFirst
	for ctx.Err() == nil {
		exits, progress, err := a.readOnce(ctx, reader, offsets)
		reader.contact.broke(err)
		switch {
		case exits != nil:
			a.tell(ctx, event{reader: reader, exits: exits})
			return
		case ctx.Err() != nil:
			return
		case err != nil && refused(err):
			a.tell(ctx, event{err: err})
			return
		}
		if progress {
			pause = retryFirst
		}
		sleep(ctx, pause)
		pause = min(2*pause, retryMost)
	}
}

// beyond is an offset that no output reaches: a stream read from there sends nothing but its end.
const beyond = uint64(1) << 62

// skipped are the offsets to begin at: beyond everything for streams that nobody wants to see.
func (a *attachment) skipped(reader *nodeReader) map[source]uint64 {
	offsets := map[source]uint64{}
	for _, rank := range reader.ranks {
		for _, stream := range []nodev1.OutputStream{nodev1.OutputStream_OUTPUT_STREAM_STDOUT, nodev1.OutputStream_OUTPUT_STREAM_STDERR} {
			if at := (source{rank, stream}); !a.wanted(at) {
				offsets[at] = beyond
			}
		}
	}
	return offsets
}

// readOnce follows one connection. It returns the exits when they came, and whether anything came at all.
func (a *attachment) readOnce(ctx context.Context, reader *nodeReader, offsets map[source]uint64) (exits []*apiv1.TaskExit, progress bool, err error) {
	request := &nodev1.ReadOutputRequest{
		JobId: a.options.Job, Attempt: a.options.Attempt, StepId: a.options.Step,
		Follow: true, WaitMs: uint32(stepWait.Milliseconds()),
	}
	for at, offset := range offsets {
		request.Offsets = append(request.Offsets, &nodev1.OutputOffset{Rank: at.rank, Stream: at.stream, Offset: offset})
	}
	stream, err := a.cluster.Node(reader.share.GetAgentAddress()).ReadOutput(ctx, request)
	if err != nil {
		return nil, false, err
	}
	defer stream.Close()
	for {
		reader.contact.waits()
		piece, err := stream.Receive()
		if errors.Is(err, io.EOF) {
			return nil, progress, nil
		}
		if err != nil {
			return nil, progress, err
		}
		progress = true
		reader.contact.came()
		switch {
		case len(piece.GetExits()) > 0:
			return piece.GetExits(), true, nil
		case piece.GetStarted():
			a.options.Trace.Mark("started on " + reader.share.GetNode())
			a.started()
			a.tell(ctx, event{reader: reader, started: true})
			continue
		case len(piece.GetEnded()) > 0:
			a.tell(ctx, event{reader: reader, ended: piece.GetEnded()})
			continue
		}
		a.started()
		a.print(reader, piece, offsets)
	}
}

// print writes a piece, less what was written before, and moves the offset.
func (a *attachment) print(reader *nodeReader, piece *nodev1.ReadOutputResponse, offsets map[source]uint64) {
	at := source{rank: piece.GetRank(), stream: piece.GetStream()}
	if !a.wanted(at) {
		return
	}
	data, have := piece.GetData(), offsets[at]
	switch begin := piece.GetOffset(); {
	case begin > have:
		reader.contact.mu.Lock()
		reader.contact.missing = true
		reader.contact.mu.Unlock()
		a.printer.message("error: task %d: %d bytes of output are missing", at.rank, begin-have)
	case begin+uint64(len(data)) <= have:
		data = nil
	default:
		data = data[have-begin:]
	}
	if end := piece.GetOffset() + uint64(len(piece.GetData())); end > have {
		offsets[at] = end
	}
	a.printer.write(at, data)
	if piece.GetEnd() {
		a.printer.end(at)
	}
}

// wanted tells whether a stream of a task is printed.
func (a *attachment) wanted(at source) bool {
	only, none := a.options.OnlyStdout, a.options.NoStdout
	if at.stream == nodev1.OutputStream_OUTPUT_STREAM_STDERR {
		only, none = a.options.OnlyStderr, a.options.NoStderr
	}
	return !none && (only == nil || *only == at.rank)
}

// refused tells whether asking an agent again is pointless.
func refused(err error) bool {
	switch connect.CodeOf(err) {
	case connect.CodePermissionDenied, connect.CodeInvalidArgument, connect.CodeUnimplemented:
		return true
	}
	return false
}

// feed sends stdin to the tasks, a piece at a time; the next is read when all nodes have taken the one before.
func (a *attachment) feed(ctx context.Context) {
	buffer := make([]byte, inputPiece)
	offset := uint64(0)
	for ctx.Err() == nil {
		n, err := a.options.Stdin.Read(buffer)
		if n > 0 || err != nil {
			a.targetsMu.Lock()
			targets := append([]string(nil), a.targets...)
			a.targetsMu.Unlock()
			var group sync.WaitGroup
			for _, address := range targets {
				group.Add(1)
				go func() {
					defer group.Done()
					a.input(ctx, address, offset, buffer[:n], err != nil)
				}()
			}
			group.Wait()
			offset += uint64(n)
		}
		if err != nil {
			return
		}
	}
}

// input gives one piece to one node, again and again until it is taken, refused, or the attachment ends.
func (a *attachment) input(ctx context.Context, address string, offset uint64, data []byte, end bool) {
	for pause := retryFirst; ctx.Err() == nil; pause = min(2*pause, retryMost) {
		_, err := a.cluster.Node(address).WriteInput(ctx, &nodev1.WriteInputRequest{
			JobId: a.options.Job, Attempt: a.options.Attempt, StepId: a.options.Step, Offset: offset, Data: data, End: end,
		})
		if err == nil || refused(err) || connect.CodeOf(err) == connect.CodeFailedPrecondition {
			return // taken, or its tasks have ended
		}
		sleep(ctx, pause)
	}
}
