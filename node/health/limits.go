package health

import "time"

// Bounds; each is a row of docs/limits.md.
const (
	// defaultInterval and defaultTimeout are those of a check that names none.
	defaultInterval = 300 * time.Second
	defaultTimeout  = 60 * time.Second
	// defaultPrologTimeout is that of prolog and epilog where the cluster names none.
	defaultPrologTimeout = 300 * time.Second
	// maxOutput is how much of a program's output is kept: its end.
	maxOutput = 64 << 10
	// maxReason bounds a sentence, in bytes; maxFindings the findings of one program.
	maxReason   = 500
	maxFindings = 16
	// maxConditions bounds what is told of a node by its programs: the agent has findings of its own.
	maxConditions = 40
	// drainAfter is how long output is read after a program has ended: what it left behind may hold it open.
	drainAfter = time.Second
	// leaveAfter is how long a killed program may take to end before it is left alone.
	leaveAfter = 5 * time.Second
	// tellAgain is the pause before the log says again that a check is not run.
	tellAgain = 10 * time.Minute
	// idleQuiet is how long a node must have been without work before a check for idle nodes starts: jobs come in bursts.
	idleQuiet = 5 * time.Second
)
