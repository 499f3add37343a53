// Package replica is one Raft member: it keeps the replicated state machine of package fsm equal on all controllers and
// on disk.
//
// It hides hashicorp/raft completely: no type of that library appears in an exported name.
//
// # Invariants
//
//   - A result returned by Propose is on the disks of a quorum (fsync) and applied here.
//   - ReadIndex returns an index that includes everything acknowledged before it was called. It commits a barrier; it never
//     asks hashicorp/raft's VerifyLeader, which was seen to confirm a deposed leader.
//   - No byte of the log, the stable store or a snapshot is used before its checksum was compared, also when it is read to be
//     replicated. Damaged state never votes, is never sent to others and is never served: the member quarantines itself with a
//     sentence that names the file. Files are checked in a child process before they are opened, because a broken bolt file can
//     end the process that maps it.
//   - A full disk is a sentence, not a crash: nothing that Raft must write makes it panic.
//   - A connection between members names the member it is meant for. A wiped member that comes back at its old address
//     with a new id is not taken for its former self, so it can't vote twice.
//   - At most one call of the function given to Lead runs at a time in a member, and it has returned before leadership is handed
//     over on purpose.
//
// # Files in Config.Dir
//
//	id            random id of this data directory; made once, never reused
//	raft/raft.db  log and stable store (raft-boltdb), a checksum in every record; docs/design/replica.md has the format
//	snapshots/    TERM-INDEX.snap: description, state (zstd), checksum; the newest two are kept
//	ballast       reserved space, given up when the disk is full
//	quarantine    why this member must not serve; only a rejoin removes it
//
// # Who calls it
//
// cmd/muster-controller opens it; rpc/server and sched/control use it through small interfaces of their own; e2e runs several in virtual
// time through OpenInMemory. Programs that call Open must call CheckFilesMain first in main.
//
// # What it never does
//
// It does not decide anything about jobs or nodes, knows no API, and does not retry proposals: a proposal whose fate is unknown
// is reported as such, and the request id in the command makes it safe for the caller to ask again.
package replica
