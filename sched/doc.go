// Package sched is the planner: it decides which waiting jobs start now, where, on which devices, and says for every other job
// why it waits.
//
// It is pure: no clock, no randomness, no goroutine, no I/O; the same View and the same time give the same Decisions, bit for bit.
// It speaks its own small types, so that it neither knows what is replicated nor how: sched/control translates.
//
// How it decides. Waiting jobs are considered by partition tier, priority and submit order. A job is placed whole or not at all,
// on the nodes that fit it most tightly, so that free nodes stay whole. The first job of a partition that does not fit gets a
// reservation: the earliest time at which running jobs' time limits promise it its nodes. Jobs behind it start only where they do not
// delay it (the EASY rule): they end before that time, or leave there what it needs.
//
// How it stays fast. Jobs that ask for the same thing form a class: one member that does not fit speaks for all behind it. Nodes by
// number of free GPUs, CPUs and idleness are bit sets, so that "are there 4 nodes with 8 free GPUs in this partition" is a few
// hundred machine words. A pass has bounds (Limits) and says when it stopped at one.
//
// Invariants: free devices are never given twice, nor more than a node has; a placement satisfies every constraint of its request; a
// View fed by changes equals one built from scratch (View.Dump compares them).
//
// Called by sched/control on the leader, and by sched/simulate. It never changes anything but its own View: whether a decision
// holds is for the replicated state machine to check.
package sched
