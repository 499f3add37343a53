// Package virtual tests the whole system in virtual time: guarantees G1, G2, G5 and G8 of the design, whatever crashes, is
// lost, comes late or comes twice.
//
// Two ways. The simulation (sim_test.go and its neighbours) is one event heap: a virtual day of three controllers, fifty agents
// and their users. The state machine, the planner, the leader's decisions (sched/control.Manual), the orders for nodes
// (rpc/server.Desired) and the agent's node.Reconcile are the real ones; the replicated log, the network, the serving of Syncs,
// disks and processes are models. It is exactly repeatable: the same seed gives the same trace. The other way
// (raft_test.go) is real Raft and the real sched/control.Control with their goroutines inside testing/synctest; it is not
// repeatable to the last event.
//
// What is checked after every event is in check_test.go: processes are counted where they run, in the models of the nodes, and
// acknowledgements where they arrive, in the users' ledger, and neither asks the state machine. The state machine's own
// CheckInvariants looks at everything and is therefore called at every checkEvery-th entry, after every restore, and at the end.
// When the day is over the faults stop; then every job must end, with the exit code that its model process had, and nothing
// may be left on any node.
//
// A guarantee counts only when a planted bug makes a test fail: planted_test.go. Two bugs are planted where they live:
// reading through VerifyLeader in fsm/replica, answering below what an agent has seen also in rpc/server.
//
//	go test ./e2e/virtual                          a dozen seeds
//	MUSTER_CAMPAIGN=1 go test -timeout 2h ./e2e/virtual   a thousand seeds, and more runs of Raft
//	MUSTER_SEED=17 go test -run Day ./e2e/virtual  one seed, with its trace on stdout
//	MUSTER_SEED=17 go test -run Raft ./e2e/virtual one run of Raft
//
// It is called by nobody and imports everything. It never opens a socket or a file, never starts a process, and never reads the
// real clock but to say how long it took.
package virtual
