package supervise

import (
	"io"
	"sync"

	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
)

// maxWaitingInputs bounds the pieces of stdin in memory: one that is being written, and these.
const maxWaitingInputs = 4

// input feeds the stdin pipes of all tasks with one stream. Only the loop calls its methods.
type input struct {
	pipes []io.WriteCloser
	// taken is the number of bytes that all pipes took.
	taken uint64
	// ended: nothing follows.
	ended bool
	// writing is the length of the piece that is being written, and whether it is the last; writing < 0 if none is.
	writing int
	last    bool
	// done is told when the piece is written; it has room for one.
	done    chan struct{}
	waiting []request
}

func newInput() *input { return &input{writing: -1, done: make(chan struct{}, 1)} }

// accept looks at a request: refusal says why it is refused; answered that everything of it is taken; otherwise it was
// begun or waits, and comes back from finished.
func (in *input) accept(r request) (answered bool, refusal string) {
	piece := r.Request.GetInput()
	end := piece.GetOffset() + uint64(len(piece.GetData()))
	switch {
	case in.ended || (end <= in.taken && !piece.GetEnd()):
		return true, ""
	case in.writing >= 0:
		if len(in.waiting) >= maxWaitingInputs {
			return false, "BUSY: too many pieces of stdin are waiting; send the next when the last is answered"
		}
		in.waiting = append(in.waiting, r)
		return false, ""
	case piece.GetOffset() > in.taken:
		return false, "GAP: the piece begins beyond the offset reached; send from there"
	}
	in.begin(piece)
	in.waiting = append([]request{r}, in.waiting...)
	return false, ""
}

// begin writes what is new of a piece to all pipes at once.
func (in *input) begin(piece *supervisorv1.Input) {
	skip := min(in.taken-piece.GetOffset(), uint64(len(piece.GetData())))
	data := piece.GetData()[skip:]
	in.writing, in.last = len(data), piece.GetEnd()
	go func() {
		var all sync.WaitGroup
		for _, pipe := range in.pipes {
			all.Go(func() {
				if _, err := pipe.Write(data); err != nil {
					_ = pipe.Close() // Nobody reads: what follows goes nowhere.
				}
			})
		}
		all.Wait()
		in.done <- struct{}{}
	}()
}

// finished accounts for the piece that was written and returns requests to look at again.
func (in *input) finished() []request {
	in.taken += uint64(in.writing)
	if in.last {
		in.close()
	}
	in.writing = -1
	again := in.waiting
	in.waiting = nil
	return again
}

// close ends stdin of all tasks. A write that waits for a reader returns.
func (in *input) close() {
	in.ended = true
	for _, pipe := range in.pipes {
		_ = pipe.Close()
	}
}
