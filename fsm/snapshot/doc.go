// Package snapshot is the container in which a state is written: blocks of length-delimited records, a checksum over each.
//
// Layout: the 8 bytes of Magic; then blocks, each: length of the payload (4 bytes, little endian), xxhash64 of the payload
// (8 bytes, little endian), payload. The payload is a sequence of logv1.Record, each preceded by its length as a varint. A record
// never spans blocks. The first record is the header, the last the trailer with the number of records before it, and
// nothing follows it.
//
// Invariants: a reader that returned io.EOF has seen every record that was written, undamaged; anything else is an error that
// says where. The package compresses nothing (the replica does) and knows nothing of what the records mean.
//
// fsm/state calls it; offline verification may too.
package snapshot
