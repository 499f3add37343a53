// Package health runs a site's programs on a node and knows what they found: checks at intervals, around jobs and on idle nodes
// (Settings.health_checks), and prolog and epilog. What they may print is described in docs/design/health.md; Parse reads it, and is pure.
//
// Invariants:
//   - A program that takes too long, can't be started or was ended from outside means unknown. Unknown never fails a node and never
//     clears what was found before.
//   - A program has a process group of its own, which is killed with it. What can't be killed is left alone, and is not started again
//     before it is gone.
//   - Output is bounded, and everything that is told of it is one printable line.
//   - At most one check at a time runs at an interval. One for idle nodes never starts beside work, and is killed when work comes.
//   - What was found is on disk before a restart of the agent, and stays until its program says otherwise, it expires, or the cluster's
//     configuration no longer has the check.
//   - A prolog runs once for an attempt on a boot and is over before the first step is prepared; the epilog runs when the last has ended,
//     only where a prolog was begun. An agent that dies in the middle of one runs it once more.
//
// It is called by package node. It decides nothing about work: BeforeJob says why a job can't start here, and Conditions what the
// controllers are to know.
package health
