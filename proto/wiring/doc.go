// Package wiring chooses which of a node's free accelerators work best together: those with the fewest hops between
// them, then the most NVLinks, then the fewest NUMA nodes; among equals those that leave the others best connected.
//
// Invariants:
//   - Choose depends on its arguments only, and gives the same answer every time and everywhere.
//   - The answer is a subset of the free devices with exactly as many as were asked for.
//   - While there are at most maxSets sets to look at (16 free devices, always) it is the best by Score; beyond that it is
//     a good one.
//
// It is called by package node/gpu, which knows the wiring, and by package sched, which decides where work runs. It has no I/O, clock or
// randomness, and imports nothing of ours.
package wiring
