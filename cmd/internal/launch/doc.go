// Package launch attaches a terminal to a step: it reads the output of all its nodes, writes stdin to its tasks, and
// returns when the exits of all tasks are known.
//
// Invariants:
//   - Within one stream of one task the order of bytes is kept, and nothing is printed twice: after a broken connection
//     reading resumes at the offset reached. With labels, every printed line belongs to one task and one stream.
//   - Losing controllers, an agent or a connection never ends an attachment: it retries until the step's end is known
//     from the agents (their exits) or from the controllers (the step's record), or until the context ends.
//   - It never ends or signals a step; whoever attached decides that.
//
// It is called by srun and by `muster run`. It never creates steps or jobs, and never interprets output.
package launch
