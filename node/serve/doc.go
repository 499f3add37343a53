// Package serve is what an agent answers: to clients over TLS it streams the output of tasks and takes their input; to
// programs on the node, over a Unix socket, it vouches for their user.
//
// Invariants:
//   - Output and input of a step are for the owner of its job and for operators only.
//   - A file that a user named as output is opened with that user's rights, so that a link in its place shows nothing
//     that the user could not read.
//   - A user's identity is what the kernel says of the socket's other end when it connected, never what a request says.
//   - Nothing is kept of output that a client does not take: the client's pace is the reader's.
//
// Both services are mounted by cmd/muster-agent, which gives them an agent as Host. The package never changes what runs.
// (The witness that peers ask, and the relay of their Syncs, will be two more services here.)
package serve
