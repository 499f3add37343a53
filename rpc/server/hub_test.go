package server

import (
	"fmt"
	"testing"
	"time"
)

func TestOnlyTouchedNodesWake(t *testing.T) {
	c := newCluster(t, 1)
	leader := c.members[0]
	const n = 200
	var waiters []*waiter
	for i := range n {
		number, _ := c.join(fmt.Sprintf("n%d", i+1))
		w, done := leader.server.hub.node(number)
		defer done()
		waiters = append(waiters, w)
	}
	id := submitOne(t, c.user(1000, "alice"), "a")
	job, done := leader.server.hub.job(id)
	defer done()
	// The hub must have seen the joins before the placement is made; a waiter of its own tells.
	settle := func() {
		t.Helper()
		for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
			leader.server.hub.mu.Lock()
			last := leader.server.hub.last
			leader.server.hub.mu.Unlock()
			if last.GetIndex() == leader.View().Revision().GetIndex() {
				return
			}
			if time.Now().After(deadline) {
				t.Fatal("the hub does not follow")
			}
		}
	}
	settle()
	for _, w := range append([]*waiter{job}, waiters...) {
		select {
		case <-w.wake:
		default:
		}
	}
	submitOne(t, c.user(1000, "alice"), "of no concern")
	c.place(id, 3, 5)
	settle()
	for i, w := range waiters {
		select {
		case <-w.wake:
			if i+1 != 3 && i+1 != 5 {
				t.Errorf("node %d was woken", i+1)
			}
		default:
			if i+1 == 3 || i+1 == 5 {
				t.Errorf("node %d was not woken", i+1)
			}
		}
	}
	select {
	case <-job.wake:
	default:
		t.Error("the waiter of the job was not woken")
	}
	if len(leader.server.hub.nodes) != n {
		t.Errorf("%d nodes wait", len(leader.server.hub.nodes))
	}
}
