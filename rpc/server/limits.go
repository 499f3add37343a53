package server

import "time"

// Bounds of the server; rows of docs/limits.md.
const (
	compressMinBytes     = 4 << 10
	readHeaderTimeout    = 10 * time.Second
	idleTimeout          = 3 * time.Minute
	maxConcurrentStreams = 10_000

	// retryPause is the wait before a command is offered again while the leader has not changed.
	retryPause = 20 * time.Millisecond
	// silenceOfLeader ends a question to the leader that shares many callers, so that it is asked again.
	silenceOfLeader = 3 * time.Second
	// behindWait is how long a Sync or a read at a revision waits for this controller to catch up.
	behindWait = 250 * time.Millisecond

	// maxPartBytes bounds the encoded specs and blobs of one command; a log entry takes 256 KiB.
	maxPartBytes = 160 << 10
	// maxInlineBlobs bounds the blobs that travel inside a command instead of before it.
	maxInlineBlobs = 96 << 10
	// maxIDsPerCommand bounds the job ids of one command.
	maxIDsPerCommand = 20_000
	// maxReportBytes bounds the reports of one command.
	maxReportBytes = 128 << 10
	// maxConditions bounds the conditions of one Sync, as the protocol says.
	maxConditions = 64
	// maxReports bounds the reports of one Sync.
	maxReports = 1000
	// maxNames bounds names, job ids and values in one request.
	maxNames = 100_000

	// hookTimeout is how long the site's submission program may take, and maxHooks how many may run at a time.
	hookTimeout = 5 * time.Second
	maxHooks    = 8
	// maxHookOutput bounds what is read of it.
	maxHookOutput = 1 << 20

	// stepPageBytes ends a page of ListJobs with all_steps after the job whose steps reach it.
	stepPageBytes = 8 << 20

	// watchBatch bounds the items of one message of a watch.
	watchBatch = 1000
	// watchPause is the shortest time between two messages of a watch, so that bursts are one message.
	watchPause = 10 * time.Millisecond
	// watchBeat is how often an idle watch says its revision and looks whether this controller still serves.
	watchBeat = time.Second

	// statusTimeout is how long another controller may take to say how it is, for GetCluster.
	statusTimeout = 400 * time.Millisecond
	// noQuorumAfter is how long there may be no leader before the others are asked whether they are there: an election is over
	// by then. quorumCheck is how often they are asked.
	noQuorumAfter = 3 * time.Second
	quorumCheck   = 500 * time.Millisecond
	// behindEntries is how many entries a controller may lack before that is called trouble.
	behindEntries = 500
	// newLeaderWait is how long an answer to a change of members waits for the leader that it shows.
	newLeaderWait = 2 * time.Second
	// beatBatch bounds the beats of one message to the leader.
	beatBatch = 4096
	// announcePause and joinPause are the waits between tries.
	announcePause = 500 * time.Millisecond
	joinPause     = 300 * time.Millisecond
	// catchUpCheck is how often a joining controller looks whether it was added.
	catchUpCheck = 50 * time.Millisecond
)
