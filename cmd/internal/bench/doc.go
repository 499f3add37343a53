// Package bench measures a local cluster: how many durable submissions it takes a second, how long a launch takes, how it lists
// 100,000 jobs, and how long users wait after the leader was killed. Every claim of speed stands on it: `muster bench`.
//
// Invariants: the machine is measured first (fsync, starting a program, an HTTP echo), because figures of different
// machines compare only as ratios to those; every figure is the median of several runs, all of which are printed; a
// figure without its target met is said, not hidden; nothing is measured that was not acknowledged.
package bench
