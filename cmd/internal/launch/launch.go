package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/muster/api/v1/apiv1connect"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
	"github.com/muster-hpc/muster/proto/notation"
)

// Bounds of an attachment; each is a row of docs/limits.md.
const (
	// stepPoll is how long a controller may hold the question for the step's end.
	stepPoll = 20 * time.Second
	// stepWait is how long an agent may wait for the step to appear on its node.
	stepWait = 10 * time.Second
	// drainAfterEnd is how long a silent agent is waited for once the controllers know the step's end. It is counted in
	// looks drainLook apart at which nothing came and nothing was being written, so that neither a slow reader of the
	// output nor a process that was stopped counts as a silent agent.
	drainAfterEnd = 5 * time.Second
	drainLook     = 250 * time.Millisecond
	// watchAfter is when the controllers begin to be asked for the step's end: short steps are over by then, and longer ones
	// do not notice.
	watchAfter = 250 * time.Millisecond
	// retryFirst and retryMost bound the pause before an agent or the controllers are asked again.
	retryFirst = 20 * time.Millisecond
	retryMost  = time.Second
	// inputPiece is the largest piece of stdin that is sent at once.
	inputPiece = 64 << 10
	// longestLine is the longest line that is kept whole for a label; a longer one is broken.
	longestLine = 1 << 20
	// unpreparedSignal marks tasks that could not be prepared; no bound, but what agents report.
	unpreparedSignal = 53
)

// Cluster is the part of rpc/client.Client that an attachment needs.
type Cluster interface {
	// Jobs answers questions about the step.
	Jobs() apiv1connect.JobServiceClient
	// Node reaches the agent at an address ("host:port").
	Node(address string) nodev1connect.NodeServiceClient
}

// Options say what to attach to and where to.
type Options struct {
	// Program is the name in front of messages ("srun").
	Program string
	// Job, Attempt and Step name the step. Attempt 0 means the latest that has this step.
	Job, Attempt, Step uint32
	// Label puts "RANK: " in front of every line.
	Label bool
	// Stdin is sent to the tasks; nil sends nothing, not even its end.
	Stdin io.Reader
	// Stdout and Stderr take the output of tasks.
	Stdout, Stderr io.Writer
	// Messages takes messages about the step; nil means Stderr.
	Messages io.Writer
	// StdinRank is the rank that gets Stdin; negative means all.
	StdinRank int
	// OnlyStdout and OnlyStderr limit a stream to one rank; nil means all.
	OnlyStdout, OnlyStderr *uint32
	// NoStdout and NoStderr leave a stream out: it goes to a file that the user named.
	NoStdout, NoStderr bool
	// FirstEnd, if set, is called once, when the first task has ended and others run.
	FirstEnd func()
	// Started, if set, is called once, when the tasks of a node were executed and before any output is written.
	Started func()
	// Progress, if set, is told which tasks run and have ended.
	Progress *Progress
	// Terminal, if set, is the terminal of rank 0 (a step with a pty): its size is sent to the step, at the start and after each
	// value of Resized.
	Terminal *Terminal
	// Resized tells that the size of Terminal has changed.
	Resized <-chan os.Signal
	// Abandon, if set, ends the attachment when it is closed: nodes that have not told the ends of their tasks are not waited for
	// any longer. They are named in a message.
	Abandon <-chan struct{}
	// Quiet leaves out the messages about how tasks ended.
	Quiet bool
	// Created is the answer of CreateStep, if the caller has it: it saves a question.
	Created *apiv1.Step
	// Shares are the nodes of Created in rank order.
	Shares []*apiv1.NodeShare
	// Trace, if set, is told the stages of the launch.
	Trace *Trace
}

// Outcome is how the step ended.
type Outcome struct {
	// ExitCode is what srun returns: the highest of the tasks' exit codes, a signal counting as 128 plus its number.
	ExitCode int
	// Step is the newest record of the step that was seen. It may not show the end yet: agents tell the exits first.
	Step *apiv1.Step
	// Exits are the ends of all tasks that are known.
	Exits []*apiv1.TaskExit
	// Cut tells that output may be missing, which was said on Stderr; ExitCode is not 0 then.
	Cut bool
}

// ErrOutput means that output could not be written: the reader of a pipe is gone or a disk is full.
var ErrOutput = errors.New("cannot write the output of tasks")

// ErrAbandoned means that Options.Abandon was closed before the ends of all tasks were known.
var ErrAbandoned = errors.New("the end of the step is not waited for any longer")

// Attach streams the step's output and stdin until the exits of all tasks are known.
// It returns ctx.Err() when ctx ends first, and an error that wraps ErrOutput when output cannot be written; the step
// goes on in both cases. Refusals (no such step, not the owner) are returned as they came.
func Attach(ctx context.Context, c Cluster, o Options) (Outcome, error) {
	a := &attachment{cluster: c, options: o, nodes: map[string]*nodeReader{}, events: make(chan event), sizes: make(chan struct{}, 1)}
	return a.run(ctx)
}

// event is what goroutines tell the loop; one field is set, and reader besides exits, started and ended.
type event struct {
	step    *apiv1.GetStepResponse
	reader  *nodeReader
	exits   []*apiv1.TaskExit // all of the node's
	started bool              // the tasks of the node were executed
	ended   []*apiv1.TaskExit // tasks of the node that ended while others run
	err     error
}

// attachment is one call of Attach. Its fields belong to the loop in run, except where said otherwise.
type attachment struct {
	cluster Cluster
	options Options
	printer *printer
	events  chan event
	group   sync.WaitGroup

	step  *apiv1.Step
	nodes map[string]*nodeReader // by agent address
	ended *time.Ticker           // runs from the moment the controllers know the end
	looks <-chan time.Time       // of ended
	heard uint64                 // messages of all agents, at the last look
	cut   bool                   // output may be missing
	// toldStart and toldEnd: the trace has the times of the step's record.
	toldStart, toldEnd bool

	targetsMu sync.Mutex // guards targets and terminal, which the feeder and the one who sends sizes read
	targets   []string   // agents that take stdin
	terminal  string     // the agent of rank 0
	sizes     chan struct{}
	start     sync.Once // of Options.Started
}

// nodeReader is one node that has tasks of the step.
type nodeReader struct {
	share  *apiv1.NodeShare
	ranks  []uint32 // there, ascending
	cancel context.CancelFunc
	done   bool
	exits  []*apiv1.TaskExit
	heard  uint64 // of contact, at the last look
	silent int    // looks at which nothing had come

	contact contact
}

// contact is what a reader lets the loop know of its agent.
type contact struct {
	mu      sync.Mutex
	pieces  uint64 // messages that came
	writing bool   // the reader writes, it does not wait for the agent
	missing bool   // there was a gap
	err     error  // why the last connection ended; nil while one is good
}

func (c *contact) came() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pieces, c.writing, c.err = c.pieces+1, true, nil
}

func (c *contact) waits() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.writing = false
}

func (c *contact) broke(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.writing, c.err = false, err
}

func (a *attachment) run(parent context.Context) (Outcome, error) {
	ctx, cancel := context.WithCancel(parent)
	defer func() {
		cancel()
		a.group.Wait()
		if a.ended != nil {
			a.ended.Stop()
		}
	}()
	step, shares := a.options.Created, a.options.Shares
	if step == nil {
		answer, err := a.cluster.Jobs().GetStep(ctx, a.question(0))
		if err != nil {
			return Outcome{}, err
		}
		step, shares = answer.GetStep(), answer.GetShares()
	}
	a.printer = newPrinter(a.options, step.GetNumTasks())
	a.adopt(ctx, step, shares)
	a.spawn(func() { a.watch(ctx) })
	if a.options.Stdin != nil {
		// The feeder is not waited for: a blocked Read of a terminal cannot be interrupted.
		go a.guarded(func() { a.feed(ctx) })
	}
	if a.options.Terminal != nil {
		a.spawn(func() { a.resize(ctx) })
	}
	for !a.finished() {
		select {
		case <-a.options.Abandon:
			return a.abandon()
		case <-parent.Done():
			return a.outcome(), parent.Err()
		case <-a.printer.failed:
			return a.outcome(), fmt.Errorf("%w: %w", ErrOutput, a.printer.err())
		case <-a.looks:
			a.settle()
		case e := <-a.events:
			if err := a.take(ctx, e); err != nil {
				return a.outcome(), err
			}
		}
	}
	a.printer.flush()
	if len(a.nodes) == 0 && a.step.GetStartTime() != nil {
		a.cut = true
		a.printer.message("error: step %d.%d has run, but its nodes are not known any more: its output cannot be read", a.options.Job, a.options.Step)
	}
	a.explain(ctx)
	return a.outcome(), nil
}

// abandon says which nodes are not waited for any longer.
func (a *attachment) abandon() (Outcome, error) {
	a.printer.flush()
	var silent []string
	for _, reader := range a.nodes {
		if !reader.done {
			silent = append(silent, reader.share.GetNode())
		}
	}
	if len(silent) > 0 {
		nodes, until := "node "+silent[0]+" is", "it answers or is lost"
		if len(silent) > 1 {
			notation.Sort(silent)
			nodes, until = "nodes "+notation.Fold(silent)+" are", "they answer or are lost"
		}
		a.printer.message("error: %s not responding; step %d.%d was told to end, and does so when %s", nodes, a.options.Job, a.options.Step, until)
	}
	return a.outcome(), ErrAbandoned
}

// spawn runs f in a goroutine that run waits for.
func (a *attachment) spawn(f func()) {
	a.group.Add(1)
	go func() { defer a.group.Done(); a.guarded(f) }()
}

// guarded calls f; if that panics, the terminal is put back first, because the panic ends the program.
func (a *attachment) guarded(f func()) {
	defer func() {
		if p := recover(); p != nil {
			a.options.Terminal.Restore()
			panic(p)
		}
	}()
	f()
}

// question asks for the step, held for at most wait.
func (a *attachment) question(wait time.Duration) *apiv1.GetStepRequest {
	return &apiv1.GetStepRequest{
		JobId: a.options.Job, StepId: a.options.Step, Attempt: a.options.Attempt,
		WaitEndMs: uint32(wait.Milliseconds()),
	}
}

// take changes the attachment by one event.
func (a *attachment) take(ctx context.Context, e event) error {
	switch {
	case e.err != nil:
		return e.err
	case e.step != nil:
		a.adopt(ctx, e.step.GetStep(), e.step.GetShares())
		if ended(e.step.GetStep()) && a.ended == nil {
			a.ended = time.NewTicker(drainLook)
			a.looks = a.ended.C
		}
	case e.started:
		a.options.Progress.began(e.reader.ranks)
		select {
		case a.sizes <- struct{}{}: // what the size was when the step was made may be wrong by now
		default:
		}
	case len(e.ended) > 0:
		a.options.Progress.over(e.ended)
		a.firstEnd()
	case e.reader != nil && !e.reader.done:
		e.reader.done, e.reader.exits = true, e.exits
		a.options.Progress.over(e.exits)
		a.options.Trace.Mark("ended on " + e.reader.share.GetNode())
		a.printer.report(e.reader.share.GetNode(), e.exits)
		a.firstEnd()
	}
	return nil
}

// started tells the caller, once, that tasks run. Readers call it: what they write afterwards must find the caller ready.
func (a *attachment) started() {
	if a.options.Started != nil {
		a.start.Do(a.options.Started)
	}
}

// firstEnd tells the caller, once, that a task has ended and others run.
func (a *attachment) firstEnd() {
	if first := a.options.FirstEnd; first != nil && !a.finished() {
		a.options.FirstEnd = nil
		first()
	}
}

// adopt takes the step's newest record: readers begin on nodes that are new, and stop on nodes that left the placement.
func (a *attachment) adopt(ctx context.Context, step *apiv1.Step, shares []*apiv1.NodeShare) {
	a.step = step
	a.traceRecord(step)
	if len(shares) == 0 {
		return
	}
	current := map[string]bool{}
	var targets []string
	terminal := ""
	for _, on := range byNode(shares) {
		address := on.share.GetAgentAddress()
		current[address] = true
		if only := a.options.StdinRank; only < 0 || slices.Contains(on.ranks, uint32(only)) {
			targets = append(targets, address)
		}
		if slices.Contains(on.ranks, 0) {
			terminal = address
		}
		if a.nodes[address] != nil {
			continue
		}
		readCtx, cancel := context.WithCancel(ctx)
		reader := &nodeReader{share: on.share, ranks: on.ranks, cancel: cancel}
		a.nodes[address] = reader
		a.spawn(func() { a.read(readCtx, reader) })
	}
	for address, reader := range a.nodes {
		if !current[address] {
			reader.cancel()
			delete(a.nodes, address)
		}
	}
	a.targetsMu.Lock()
	a.targets, a.terminal = targets, terminal
	a.targetsMu.Unlock()
}

// traceRecord notes what the controllers' record says of the step's times.
func (a *attachment) traceRecord(step *apiv1.Step) {
	if a.options.Trace == nil {
		return
	}
	for _, t := range []struct {
		name string
		at   *timestamppb.Timestamp
		told *bool
	}{
		{"committed: start", step.GetStartTime(), &a.toldStart}, {"committed: end", step.GetEndTime(), &a.toldEnd},
	} {
		if t.at != nil && !*t.told {
			*t.told = true
			a.options.Trace.At(t.name, t.at.AsTime())
		}
	}
}

// finished tells whether every node has told the exits of its tasks.
func (a *attachment) finished() bool {
	for _, reader := range a.nodes {
		if !reader.done {
			return false
		}
	}
	return len(a.nodes) > 0 || ended(a.step)
}

// settle ends the wait for agents that stay silent after the controllers knew the step's end; the step's record has
// what is known of their tasks. While any agent says something nobody counts as silent: of a thousand, one waits for its turn.
func (a *attachment) settle() {
	heard := uint64(0)
	for _, reader := range a.nodes {
		reader.contact.mu.Lock()
		heard += reader.contact.pieces
		reader.contact.mu.Unlock()
	}
	if heard != a.heard {
		a.heard = heard
		return
	}
	for _, reader := range a.nodes {
		if reader.done || !reader.isSilent() {
			continue
		}
		reader.cancel()
		reader.done = true
		reader.exits = within(a.step.GetExits(), reader.ranks)
		a.printer.report(reader.share.GetNode(), reader.exits)
		if a.step.GetStartTime() == nil && len(reader.exits) == 0 {
			continue // its tasks were never executed: there is no output
		}
		a.cut = true
		cause := fmt.Sprintf("its agent has sent nothing for %d s since the step ended", int(drainAfterEnd/time.Second))
		reader.contact.mu.Lock()
		if reader.contact.err != nil {
			cause = fmt.Sprintf("its agent cannot be read: %v", reader.contact.err)
		}
		reader.contact.mu.Unlock()
		a.printer.message("error: %s: output of its tasks may be missing: %s", reader.share.GetNode(), cause)
	}
}

// isSilent counts one more look, and tells whether the agent has been silent for long enough.
func (r *nodeReader) isSilent() bool {
	r.contact.mu.Lock()
	defer r.contact.mu.Unlock()
	if r.contact.writing || r.contact.pieces != r.heard {
		r.heard, r.silent = r.contact.pieces, 0
		return false
	}
	r.silent++
	return r.silent >= int(drainAfterEnd/drainLook)
}

// explain says why the step ended if it did not end by itself.
func (a *attachment) explain(ctx context.Context) {
	forced, said := false, ""
	for _, reader := range a.nodes {
		for _, exit := range reader.exits {
			if unprepared(exit) {
				said = exit.GetLaunchError()
			}
			forced = forced || exit.GetEndedBySupervisor()
		}
	}
	if forced && !ended(a.step) {
		ctx, cancel := context.WithTimeout(ctx, drainAfterEnd)
		defer cancel()
		if answer, err := a.cluster.Jobs().GetStep(ctx, a.question(drainAfterEnd)); err == nil {
			a.step = answer.GetStep()
		}
	}
	if sentence := a.step.GetEndSentence(); sentence != "" && sentence != said && a.step.GetState() != apiv1.StepState_STEP_STATE_COMPLETED {
		a.printer.message("error: step %d.%d: %s", a.options.Job, a.options.Step, sentence)
	}
}

// outcome sums up what is known.
func (a *attachment) outcome() Outcome {
	o := Outcome{Step: a.step, Cut: a.cut}
	known := false
	for _, reader := range a.nodes {
		reader.contact.mu.Lock()
		o.Cut = o.Cut || reader.contact.missing
		reader.contact.mu.Unlock()
		o.Exits = append(o.Exits, reader.exits...)
		known = known || len(reader.exits) > 0
	}
	if !known {
		o.Exits = a.step.GetExits()
	}
	for _, exit := range o.Exits {
		o.ExitCode = max(o.ExitCode, ExitCode(exit))
	}
	if o.ExitCode == 0 && ended(a.step) && a.step.GetState() != apiv1.StepState_STEP_STATE_COMPLETED {
		o.ExitCode = 1
	}
	if o.Cut {
		o.ExitCode = max(o.ExitCode, 1)
	}
	return o
}

// ExitCode is the exit code of a shell for such an end: 128 plus the signal's number for a signal, 2 for a program
// that could not be executed, 1 for tasks that could not be prepared (a file that cannot be opened).
func ExitCode(exit *apiv1.TaskExit) int {
	switch {
	case unprepared(exit):
		return 1
	case exit.GetSignal() != 0:
		return 128 + int(exit.GetSignal())
	case exit.GetLaunchError() != "" && exit.GetCode() == 0:
		return 2
	}
	return int(exit.GetCode())
}

// unprepared tells whether tasks failed before any could be executed. Their signal is not one that ended them: it is the number
// with which the node marks that (Slurm's 0:53), and only LaunchError says why.
func unprepared(exit *apiv1.TaskExit) bool {
	return exit.GetLaunchError() != "" && exit.GetSignal() == unpreparedSignal
}

// ended tells whether a step's record shows its end.
func ended(step *apiv1.Step) bool {
	switch step.GetState() {
	case apiv1.StepState_STEP_STATE_UNSPECIFIED, apiv1.StepState_STEP_STATE_PREPARING, apiv1.StepState_STEP_STATE_RUNNING:
		return false
	}
	return true
}

// tell gives an event to the loop, unless the attachment is over.
func (a *attachment) tell(ctx context.Context, e event) {
	select {
	case a.events <- e:
	case <-ctx.Done():
	}
}

// watch asks the controllers for the step's end until it is known.
func (a *attachment) watch(ctx context.Context) {
	pause := retryFirst
	said := false
	if a.options.Created != nil { // the record is new
		sleep(ctx, watchAfter)
	}
	for ctx.Err() == nil {
		answer, err := a.cluster.Jobs().GetStep(ctx, a.question(stepPoll))
		switch {
		case err == nil:
			pause, said = retryFirst, false
			a.tell(ctx, event{step: answer})
			if ended(answer.GetStep()) {
				return
			}
		case ctx.Err() != nil:
			return
		case connect.CodeOf(err) == connect.CodeNotFound && a.options.Attempt != 0:
			// The record left the hot state; only the agents can tell.
			return
		default:
			if !said && pause >= retryMost {
				said = true
				a.printer.message("no controller answers; step %d.%d goes on, waiting for its end", a.options.Job, a.options.Step)
			}
		}
		// A server that does not hold the question must not be asked in a tight loop.
		sleep(ctx, pause)
		if err != nil {
			pause = min(2*pause, retryMost)
		}
	}
}

// sleep waits for d or for the end of ctx.
func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
