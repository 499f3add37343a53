package fsm

import (
	"errors"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"

	"github.com/muster-hpc/muster/fsm/level"
	"github.com/muster-hpc/muster/fsm/state"
)

const (
	// BatchStep is the id of the step that runs a batch script.
	BatchStep = state.BatchStep
	// Unlimited as a time limit in seconds means that there is none.
	Unlimited = state.Unlimited
	// MaxLevel is the highest feature level that this program knows.
	MaxLevel = level.Max
)

type (
	// View is the state at one revision; everything it returns is immutable.
	View = state.View
	// Change says that a record changed, and when.
	Change = state.Change
	// ChangeKind is the kind of record that changed.
	ChangeKind = state.ChangeKind
	// NodeSet is an immutable set of node numbers.
	NodeSet = state.NodeSet
)

const (
	// ChangeJob is a change of a job.
	ChangeJob = state.ChangeJob
	// ChangeAttempt is a change of an attempt.
	ChangeAttempt = state.ChangeAttempt
	// ChangeStep is a change of a step.
	ChangeStep = state.ChangeStep
	// ChangeNode is a change of a node.
	ChangeNode = state.ChangeNode
	// ChangeCluster is a change of the configuration, the members or the level.
	ChangeCluster = state.ChangeCluster
)

// CompareRevisions orders revisions: negative if a comes before b. nil is the lowest.
func CompareRevisions(a, b *apiv1.Revision) int { return state.RevOf(a).Compare(state.RevOf(b)) }

// LevelOf returns the feature level that a command is proposed with: what it needs, or MaxLevel for the bootstrap that begins a cluster's
// first incarnation, because no older controller can be part of a cluster that does not exist yet. 0 for a command without operation.
func LevelOf(cmd *logv1.Command) uint32 {
	if cmd.GetBootstrap().GetIncarnation() == 1 {
		return MaxLevel
	}
	return level.Current().Of(cmd)
}

// Ended reports whether a job state is final.
func Ended(s apiv1.JobState) bool { return state.Ended(s) }

// StepEnded reports whether a step state is final.
func StepEnded(s apiv1.StepState) bool { return state.StepEnded(s) }

// DefaultSettings returns the settings with every 0 replaced by its default; nil means all defaults.
func DefaultSettings(s *apiv1.Settings) *apiv1.Settings { return state.Defaults(s) }

// ErrStopped is returned by Apply after it has failed once: the replica must not go on with this machine.
var ErrStopped = errors.New("the state machine stopped at an entry it could not apply")

// EntryError says which entry, and which command in it, could not be applied. The replica must stop.
type EntryError struct {
	// Index of the entry.
	Index uint64
	// Ordinal of the command, from 0; -1 if the entry as a whole is at fault.
	Ordinal int
	// Command is the operation's name, if known.
	Command string
	// Err says what is wrong.
	Err error
}

// Error names the entry, the command and the fault.
func (e *EntryError) Error() string {
	switch {
	case e.Ordinal < 0:
		return fmt.Sprintf("log entry %d: %v", e.Index, e.Err)
	case e.Command == "":
		return fmt.Sprintf("log entry %d, command %d: %v", e.Index, e.Ordinal, e.Err)
	default:
		return fmt.Sprintf("log entry %d, command %d (%s): %v", e.Index, e.Ordinal, e.Command, e.Err)
	}
}

// Unwrap returns the fault.
func (e *EntryError) Unwrap() error { return e.Err }

// Machine is the state machine. It belongs to one goroutine.
type Machine struct {
	s      *state.State
	ladder *level.Ladder
	faults Faults
	// principals makes remembered requests share their principals. It is a cache and no part of the state.
	principals map[principalKey]*apiv1.Principal
	stopped    error

	// The command being applied.
	cmd *logv1.Command
	rev *apiv1.Revision
}

// An Option changes a new Machine.
type Option func(*Machine)

// New returns a machine with the empty state before Bootstrap.
func New(options ...Option) *Machine {
	m := &Machine{s: state.New(), ladder: level.Current(), principals: make(map[principalKey]*apiv1.Principal)}
	for _, option := range options {
		option(m)
	}
	return m
}

// Apply applies one log entry, an encoded logv1.Batch, committed at an index in a term. It returns one result for each command.
//
// An error means that the replica must stop: the entry is corrupt, or made for a program that knows more. It is an
// *EntryError. Nothing of such an entry is applied, and every later call fails too.
func (m *Machine) Apply(index, term uint64, entry []byte) ([]*logv1.Result, error) {
	if m.stopped != nil {
		return nil, fmt.Errorf("%w: %w", ErrStopped, m.stopped)
	}
	commands, err := m.decode(index, entry)
	if err != nil {
		m.stopped = err
		return nil, err
	}
	results := make([]*logv1.Result, len(commands))
	for i, cmd := range commands {
		if results[i], err = m.command(index, term, uint32(i), cmd); err != nil {
			m.stopped = &EntryError{index, i, operation(cmd), err}
			return nil, m.stopped
		}
	}
	return results, nil
}

// decode reads an entry and makes sure that every part of it is known.
func (m *Machine) decode(index uint64, entry []byte) ([]*logv1.Command, error) {
	whole := func(err error) error { return &EntryError{Index: index, Ordinal: -1, Err: err} }
	batch := &logv1.Batch{}
	if err := proto.Unmarshal(entry, batch); err != nil {
		return nil, whole(fmt.Errorf("cannot be decoded: %w", err))
	}
	if err := clean(batch); err != nil && !m.faults.UnknownIsNoOp {
		return nil, whole(err)
	}
	if len(batch.Commands) == 0 {
		return nil, whole(errors.New("it holds no command"))
	}
	if last := m.s.Revision(); index <= last.GetIndex() && batch.Commands[0].GetBootstrap().GetIncarnation() <= last.GetIncarnation() {
		return nil, whole(fmt.Errorf("it comes after entry %d, which has been applied", last.GetIndex()))
	}
	for i, cmd := range batch.Commands {
		if err := m.known(cmd); err != nil && !m.faults.UnknownIsNoOp {
			return nil, &EntryError{index, i, operation(cmd), err}
		}
	}
	return batch.Commands, nil
}

// known reports what in a command is beyond this program.
func (m *Machine) known(cmd *logv1.Command) error {
	if cmd.Op == nil {
		return errors.New("it holds no operation that this program knows")
	}
	if needs := max(cmd.Level, m.ladder.Of(cmd)); needs > m.ladder.Max() {
		return fmt.Errorf("it needs feature level %d; this program knows levels up to %d", needs, m.ladder.Max())
	}
	return nil
}

// Publish returns a view of the present state that never changes. Only the replica calls it, once per Raft batch: its cost
// grows with the number of records changed since the last call, not with the size of the state.
func (m *Machine) Publish() *View { return m.s.Publish() }

// Digest computes the digest of the present state, as a view published now would have it.
func (m *Machine) Digest() uint64 { return m.s.Digest() }

// Restore replaces the state by that of a snapshot. It verifies everything before: checksums, completeness, contents of blobs,
// digest. On error the state is as it was.
func (m *Machine) Restore(r io.Reader) error {
	restored, err := state.Restore(r, clean)
	if err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	if restored.Level() > m.ladder.Max() {
		return fmt.Errorf("restore: the snapshot's state has feature level %d; this program knows levels up to %d",
			restored.Level(), m.ladder.Max())
	}
	m.s, m.stopped = restored, nil
	return nil
}

// operation returns the name of a command's operation for error messages.
func operation(cmd *logv1.Command) string {
	m := cmd.ProtoReflect()
	if arm := m.WhichOneof(m.Descriptor().Oneofs().ByName("op")); arm != nil {
		return string(arm.Name())
	}
	return ""
}

// now returns the state's time.
func (m *Machine) now() *timestamppb.Timestamp { return m.s.Now() }

// nowNs returns the state's time in nanoseconds since 1970.
func (m *Machine) nowNs() int64 { return m.now().Seconds*1e9 + int64(m.now().Nanos) }
