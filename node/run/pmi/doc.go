// Package pmi is the process manager interface of a step: what the ranks of an MPI program ask of whoever started them.
// It speaks both wire protocols that MPI libraries know, PMI-1 (lines) and PMI-2 (messages behind a six-digit length), on
// one socket for each task; the first command of the task says which.
//
// A Server answers the tasks of one node: who they are, where the others are (PMI_process_mapping), key-value pairs,
// attributes of the node, barriers. At every fence the servers of all nodes exchange the pairs that were put since the
// last one (Exchange). With one node that is Alone; with several it is a star: the step's first node has the Root, every
// other one a Leaf, over TCP.
//
// Invariants:
//   - What a task sends costs it at most its own connection: messages, keys, values, stores and waiting requests are
//     bounded, and nobody waits for a task that does not read.
//   - A fence is numbered from 1. Contributions to it are idempotent, so a connection that broke is made again and
//     nothing is lost or doubled.
//   - Pairs live in the servers. They do not depend on rank 0 or any other task being alive.
//   - A fence that cannot complete, because a task or a node has left, ends the step with a sentence; silence alone, as
//     of a stopped process, does not. Connections that are gone matter only while a fence waits for their node.
//   - Nodes prove to each other that they know the step's key, and every frame carries a code made with it. Nothing of a
//     step is told to, or taken from, anybody else. Frames are not encrypted: what ranks put there, they also say to each
//     other in the clear.
//   - Everything that was started ends in Close.
//
// Starting further processes (MPI_Comm_spawn) and publishing names are answered with an error, as the protocols foresee.
//
// It is called by node/run/supervise. It never starts or ends processes itself, and never reads the environment or files.
package pmi
