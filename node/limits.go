package node

import "time"

// Bounds of the agent; each is a row of docs/limits.md.
const (
	// defaultLease is the lease assumed until a controller has told the cluster's.
	defaultLease = 10 * time.Second
	// joinRetryMin and joinRetryMax bound the back-off between joins.
	joinRetryMin = 50 * time.Millisecond
	joinRetryMax = 2 * time.Second
	// joinTimeout bounds one join.
	joinTimeout = 5 * time.Second
	// syncSlack is the silence beyond the hold after which another controller is asked. It is doubled, up to syncSlackMost, each time that
	// all of them were too slow in turn, and halved by each answer: asking again what is only slow makes it slower.
	syncSlack     = time.Second
	syncSlackMost = 4 * time.Second
	// syncSpacing is the least time between two Syncs that local changes cause, so that changes travel together.
	syncSpacing = 3 * time.Millisecond
	// syncRetryMin and syncRetryMax bound the back-off once every controller has failed.
	syncRetryMin = 50 * time.Millisecond
	syncRetryMax = time.Second
	// idleSpacing is the least time between Syncs that controllers answer at once with nothing.
	idleSpacing = 100 * time.Millisecond
	// warmEvery is how often a second controller is asked, which keeps a connection to it open.
	warmEvery = 25 * time.Second
	// maxOutstanding bounds Syncs without an answer.
	maxOutstanding = 4
	// maxReports bounds the journal's lines in one Sync.
	maxReports = 1000
	// maxSent bounds the sending times remembered for grants.
	maxSent = 64
	// repeatAfter is the time after which an acknowledged report is sent again if it is still asked for.
	repeatAfter = 5 * time.Second
	// maxPasses bounds the passes of one reconciliation.
	maxPasses = 64
	// defaultPrepareTimeout bounds a prepare until a controller has told the cluster's.
	defaultPrepareTimeout = 60 * time.Second
	// blobRetryMin and blobRetryMax bound the back-off between tries to fetch a blob.
	blobRetryMin = 50 * time.Millisecond
	blobRetryMax = 2 * time.Second
	// appendRetryMin and appendRetryMax bound the back-off while the journal cannot be written.
	appendRetryMin = 250 * time.Millisecond
	appendRetryMax = 10 * time.Second
	// commandTimeout bounds one request to a supervisor.
	commandTimeout = 10 * time.Second
	// pulseEvery is the silence after which a supervisor is asked whether it lives; one that does not answer is continued, and killed
	// pulsePatience later.
	pulseEvery    = 10 * time.Second
	pulsePatience = time.Minute
	// stuckAfter is how long processes that sleep in the kernel are waited for before a step or an attempt ends without them.
	stuckAfter = time.Minute
	// attachRetry is the pause before a supervisor that lives but does not answer is tried again.
	attachRetry = 500 * time.Millisecond
	// forceAfter is how long beyond the grace a supervisor may take to end its step before it is killed; forceAgain is
	// the pause before that is done again; deadlineSlack is the same for a lease deadline, which knows no grace.
	forceAfter    = 20 * time.Second
	forceAgain    = 10 * time.Second
	deadlineSlack = 500 * time.Millisecond
	// leavePoll is the pause between looks whether the supervisor of an earlier placement has left.
	leavePoll = 5 * time.Millisecond
	// leftoverTimeout bounds one hunt for leftovers; it is repeated until none is left.
	leftoverTimeout = 10 * time.Second
	// reserveBytes is the space in the journal set aside for a step before it is prepared.
	reserveBytes = 32 << 10
	// keepFinished, keepCount and keepBytes bound what is kept of attempts that are over: output can be read that long.
	keepFinished = time.Hour
	keepCount    = 1000
	keepBytes    = 10 << 30
	// sweepEvery is how often finished attempts are looked at, while there are any.
	sweepEvery = time.Minute
	// portMin and portMax bound rendezvous ports: below the range from which the kernel takes ports by itself.
	portMin, portMax = 20000, 31999
	// portTries bounds the search for a free one.
	portTries = 200
	// stepPIDs bounds the processes and threads of a step on a node that has control groups.
	stepPIDs = 65536
	// sharesPerCPU is the weight of a job for each of its CPUs, as everybody counts them.
	sharesPerCPU = 1024
	// blobCacheCount and blobCacheBytes bound the remembered scripts and environments of a process.
	blobCacheCount = 64
	blobCacheBytes = 16 << 20
	// groupsTimeout bounds the question for a user's groups where they are not in files.
	groupsTimeout = 10 * time.Second
	// accountTTL is how long a user's groups are remembered.
	accountTTL = time.Minute
	// defaultPrologTimeout bounds each program around a task unless the cluster sets another bound.
	defaultPrologTimeout = 300 * time.Second
	// limitSlack is the difference from which a supervisor is told that its time limit was set before the step's start was known.
	limitSlack = 100 * time.Millisecond
	// tellAgain is the pause before the log says again why a step is not over.
	tellAgain = time.Minute
	// selfEvery is how often the agent looks at its own surroundings; stuckEvery while processes that can't be killed are known.
	selfEvery  = time.Minute
	stuckEvery = 5 * time.Second
	// spoolLeast is the room in the agent's directory below which the node gets no work; spoolLow that below which others are preferred.
	spoolLeast = 32 << 20
	spoolLow   = 512 << 20
	// clockFar is the difference from the controllers' clock that is told, if clockStrikes answers in a row have it.
	clockFar     = 10 * time.Second
	clockStrikes = 3
	// maxStuck bounds the processes that are remembered as not to be killed.
	maxStuck = 256
	// maxConditions bounds what a Sync says, as the protocol does; maxGPUConditions is the part of accelerators.
	maxConditions    = 64
	maxGPUConditions = 20
	// healthEvery is how often what is known of accelerators is looked at again: some of it is forgotten by itself.
	healthEvery = time.Minute
	// unknownAfter is how long a probe may say nothing before that is told.
	unknownAfter = time.Minute
	// inventorySettle is how long the accelerators must be others than before, before the node joins with them.
	inventorySettle = 10 * time.Second
	// processesFirst, processesEvery and processesAgain are when the processes on accelerators are asked: after the start, now and then, and
	// while some of no job are known. processesSettle is the pause after a job has left.
	processesFirst  = 30 * time.Second
	processesEvery  = 5 * time.Minute
	processesAgain  = 15 * time.Second
	processesSettle = 2 * time.Second
	// maxAncestors bounds the search for the step that a process belongs to.
	maxAncestors = 64
	// maxSentence bounds a sentence in a report, in bytes.
	maxSentence = 1000
)
