package launch

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"connectrpc.com/connect/v2"
	"golang.org/x/term"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// resizeTimeout bounds the call that tells a step the size of its terminal; a row of docs/limits.md. A size that does not arrive
// is told again with the next change.
const resizeTimeout = 5 * time.Second

// Terminal is the user's terminal, on which a step with a pty is shown. A nil *Terminal is none, and its methods do nothing. It is
// safe for concurrent use.
//
// Invariant: between Raw and Restore every key goes to the step; Restore puts the terminal back as it was before the first Raw, whoever
// calls it, and how often.
type Terminal struct {
	in *os.File

	mu     sync.Mutex
	before *term.State
}

// OpenTerminal returns the terminal that a file is, or nil if it is none.
func OpenTerminal(file any) *Terminal {
	f, ok := file.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return nil
	}
	return &Terminal{in: f}
}

// Raw makes keys go to the program at once and unchanged, Ctrl-C too. The error says what the terminal refused.
func (t *Terminal) Raw() error {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	before, err := term.MakeRaw(int(t.in.Fd()))
	if err != nil {
		return fmt.Errorf("make the terminal raw: %w", err)
	}
	if t.before == nil {
		t.before = before
	}
	return nil
}

// Restore undoes Raw.
func (t *Terminal) Restore() {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.before != nil {
		_ = term.Restore(int(t.in.Fd()), t.before) // a terminal that is gone has nothing to be put back
		t.before = nil
	}
}

// IsRaw tells whether keys go to the step.
func (t *Terminal) IsRaw() bool {
	if t == nil {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.before != nil
}

// Size returns the lines and columns of the terminal; 0 if it does not tell.
func (t *Terminal) Size() (rows, columns uint32) {
	if t == nil {
		return 0, 0
	}
	width, height, err := term.GetSize(int(t.in.Fd()))
	if err != nil || width < 0 || height < 0 {
		return 0, 0
	}
	return uint32(height), uint32(width)
}

// resize sends the terminal's size to the agent of rank 0, at the start and whenever it changes, until ctx ends.
func (a *attachment) resize(ctx context.Context) {
	for {
		select {
		case <-a.sizes:
		case <-a.options.Resized:
		case <-ctx.Done():
			return
		}
		rows, columns := a.options.Terminal.Size()
		a.targetsMu.Lock()
		address := a.terminal
		a.targetsMu.Unlock()
		if rows == 0 || columns == 0 || address == "" {
			continue
		}
		callCtx, cancel := context.WithTimeout(ctx, resizeTimeout)
		_, err := a.cluster.Node(address).ResizeTerminal(callCtx, &nodev1.ResizeTerminalRequest{
			JobId: a.options.Job, Attempt: a.options.Attempt, StepId: a.options.Step, Rows: rows, Columns: columns,
		})
		cancel()
		if err != nil && refused(err) && connect.CodeOf(err) != connect.CodeInvalidArgument {
			return // this agent never will
		}
	}
}
