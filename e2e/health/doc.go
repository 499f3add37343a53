// Package health tests on a real local cluster, with pretended accelerators and a site's programs, what becomes of nodes and jobs when
// something breaks, and that what only looks broken breaks nothing.
package health
