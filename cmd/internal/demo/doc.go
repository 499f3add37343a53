// Package demo shows, and checks, the sentence that Muster is built around: a training job outlives its controllers.
//
// It makes a local cluster, submits a training with sbatch, kills the leader twice and an agent once while it trains, and
// measures what anybody noticed. Nothing in it is staged: the numbers printed are those of this run, and a claim that does not hold makes
// it fail. It is called by `muster dev demo`.
package demo
