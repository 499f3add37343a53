package replica

import (
	"errors"
	"fmt"
)

// Errors of this package, to be compared with errors.Is. What is returned wraps them with a sentence.
var (
	// ErrNotLeader: this member does not lead, and nothing was written. Ask the leader.
	ErrNotLeader = errors.New("this member is not the leader")
	// ErrOutcomeUnknown: leadership was lost, or the caller went away, after the command may have been written. It may or may
	// not take effect. Ask again with the same request id.
	ErrOutcomeUnknown = errors.New("outcome unknown")
	// ErrQuarantined: this member must not serve. The sentence says why and what to do.
	ErrQuarantined = errors.New("this member is quarantined")
	// ErrDiskFull: there is too little space for new commands; nothing was written.
	ErrDiskFull = errors.New("the disk of this member is full")
	// ErrBusy: too many commands wait; nothing was written. Try again later.
	ErrBusy = errors.New("too many commands wait")
	// ErrTooLarge: the command does not fit into one log entry; nothing was written.
	ErrTooLarge = errors.New("the command is too large")
	// ErrClosed: the member was closed; nothing was written.
	ErrClosed = errors.New("this member is closed")
	// ErrDamaged: a file does not have the contents that were written to it.
	ErrDamaged = errors.New("damaged file")
	// ErrBootstrapped: the member already belongs to a cluster.
	ErrBootstrapped = errors.New("this member already belongs to a cluster")
	// ErrNotCaughtUp: the learner lacks too many entries, or has not answered lately, to be given a vote.
	ErrNotCaughtUp = errors.New("the learner has not caught up")
	// ErrUnknownMember: no member has that id.
	ErrUnknownMember = errors.New("unknown member")
)

// DamageError says which file is damaged. It is an ErrDamaged.
type DamageError struct {
	// Path of the file.
	Path string
	// Index of the log entry that is damaged; 0 if it is not about one entry.
	Index uint64
	// What is wrong, without the file's name.
	What string
}

// Error is a sentence that names the file and, if known, the log index.
func (e *DamageError) Error() string {
	if e.Index != 0 {
		return fmt.Sprintf("%s is damaged at log index %d: %s", e.Path, e.Index, e.What)
	}
	return fmt.Sprintf("%s is damaged: %s", e.Path, e.What)
}

// Is makes errors.Is(err, ErrDamaged) true.
func (e *DamageError) Is(target error) bool { return target == ErrDamaged }

// remedy is the sentence that ends every report about files that must not be used any more.
func remedy(dir string) string {
	return fmt.Sprintf("This member must not go on with these files. Run `muster-controller rejoin --dir %s`: "+
		"it moves them aside and the member comes back as a learner with a new id", dir)
}
