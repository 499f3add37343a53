// Package failover kills, pauses and replaces controllers and agents of a real local cluster while jobs run and users submit, and
// checks what the README promises: every acknowledged request exists exactly once, no task notices, and how long it takes
// until the next request is acknowledged. `make campaign` runs it long.
package failover
