// Package journal keeps what a node has to report until the replicated state has it.
//
// The file is a header and records, each with length and checksum, only ever appended to; when it has grown and little
// of it still waits, it is written anew beside the old one and renamed. A record is on disk (fsync) before it may be
// reported.
//
// Invariants:
//   - Append returns nil only when the record survives a crash of the machine.
//   - A record waits until it was acknowledged; numbers rise and are never used twice while one of the file's records waits.
//   - A torn or damaged tail loses nothing but itself: the agent finds the end of those steps again from their
//     directories.
//   - A failed append leaves the file as it was.
//
// It is called by package node. It never interprets a report.
package journal
