package pmi

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

func initialise(all []*task) {
	for _, c := range all {
		c.ask("cmd=init pmi_version=1 pmi_subversion=1")
	}
}

func TestATaskThatLeavesWhileOthersWaitEndsTheStep(t *testing.T) {
	for _, leaving := range []int{0, 1, 2, 3} {
		for _, first := range []bool{true, false} { // it leaves before the others wait, or after
			t.Run(fmt.Sprintf("rank %d, first: %t", leaving, first), func(t *testing.T) {
				nodes := step(t, DefaultTimes, 2, 1, 1)
				all := tasks(t, nodes)
				initialise(all)
				within(t, func() { each(all, func(c *task) { c.ask("cmd=barrier_in") }) })
				leave := func() {
					if err := all[leaving].file.Close(); err != nil {
						t.Error(err)
					}
				}
				if first {
					leave()
				}
				for i, c := range all {
					if i != leaving {
						c.send("cmd=barrier_in\n")
					}
				}
				if !first {
					leave()
				}
				for i, n := range nodes {
					f := n.failed(t)
					if !strings.Contains(f.Sentence, fmt.Sprintf("task %d ", leaving)) || !strings.Contains(f.Sentence, "wait for it at a barrier") || f.Code != 0 {
						t.Errorf("node %d: %+v", i, f)
					}
				}
			})
		}
	}
}

func TestTasksThatLeaveWhileNobodyWaitsEndNothing(t *testing.T) {
	nodes := step(t, DefaultTimes, 1, 2)
	all := tasks(t, nodes)
	initialise(all)
	within(t, func() { each(all, func(c *task) { c.ask("cmd=barrier_in") }) })
	nodes[0].server.Left(0)
	nodes[1].server.Left(1)
	all[2].expect(all[2].ask("cmd=get_appnum"), "cmd=appnum appnum=0")
	nodes[0].stop()
	all[2].expect(all[2].ask("cmd=finalize"), "cmd=finalize_ack rc=0")
	nodes[1].stop()
	for _, n := range nodes {
		n.alive(t)
	}
}

func TestTheEndOfANodeWhileOthersWaitEndsTheStep(t *testing.T) {
	for ending := range 3 {
		for _, first := range []bool{true, false} {
			t.Run(fmt.Sprintf("node %d, first: %t", ending, first), func(t *testing.T) {
				nodes := step(t, DefaultTimes, 1, 1, 1)
				all := tasks(t, nodes)
				initialise(all)
				within(t, func() { each(all, func(c *task) { c.ask("cmd=barrier_in") }) })
				if first {
					nodes[ending].stop()
				}
				for i, c := range all {
					if i != ending {
						c.send("cmd=barrier_in\n")
					}
				}
				if !first {
					nodes[ending].stop()
				}
				for i, n := range nodes {
					if i == ending {
						continue
					}
					f := n.failed(t)
					if !strings.Contains(f.Sentence, fmt.Sprintf("node n%d ", ending+1)) || !strings.Contains(f.Sentence, "at a barrier") {
						t.Errorf("node %d: %+v", i, f)
					}
				}
			})
		}
	}
}

func TestAConnectionThatBreaksIsMadeAgainAndNothingIsLost(t *testing.T) {
	nodes := step(t, DefaultTimes, 1, 1, 1)
	all := tasks(t, nodes)
	initialise(all)
	stop := make(chan struct{})
	var group sync.WaitGroup
	group.Go(func() { // breaks connections at any point of the fences
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(2 * time.Millisecond):
			}
			leaf := nodes[1+i%2].exchange.(*Leaf)
			leaf.mu.Lock()
			if leaf.link != nil {
				_ = leaf.link.conn.Close()
			}
			leaf.mu.Unlock()
		}
	})
	within(t, func() {
		each(all, func(c *task) {
			for round := range 60 {
				c.ask(fmt.Sprintf("cmd=put kvsname=kvs_17.0 key=r%d-%d value=%d", round, c.rank, round))
				c.expect(c.ask("cmd=barrier_in"), "cmd=barrier_out rc=0")
				for other := range all {
					c.expect(c.ask(fmt.Sprintf("cmd=get kvsname=kvs_17.0 key=r%d-%d", round, other)), fmt.Sprintf("cmd=get_result rc=0 msg=success value=%d", round))
				}
			}
		})
	})
	close(stop)
	group.Wait()
	for _, n := range nodes {
		n.alive(t)
	}
}

func TestANodeThatStaysAwayEndsTheStepAfterItsTimeOnly(t *testing.T) {
	t.Run("never came", func(t *testing.T) {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		failures := make(chan Failure, 4)
		c := StarConfig{Key: testKey, Nodes: 2, Name: func(i int) string { return fmt.Sprintf("n%d", i+1) },
			End: func(f Failure) { failures <- f }, Times: testTimes, Log: testLog(t)}
		root, err := NewRoot(c, listener)
		if err != nil {
			t.Fatal(err)
		}
		root.Start()
		began := time.Now()
		ended := make(chan error, 1)
		go func() {
			_, err := root.Exchange(t.Context(), 1, nil)
			ended <- err
		}()
		f := <-failures
		if took := time.Since(began); took < testTimes.Absent || !strings.Contains(f.Sentence, "node n2 did not begin") {
			t.Errorf("after %s: %+v", took, f)
		}
		root.Close()
		if err := <-ended; !errors.Is(err, ErrEnded) {
			t.Errorf("the exchange ended with %v", err)
		}
	})
	t.Run("was lost", func(t *testing.T) {
		nodes := step(t, testTimes, 1, 1)
		all := tasks(t, nodes)
		initialise(all)
		within(t, func() { each(all, func(c *task) { c.ask("cmd=barrier_in") }) })
		leaf := nodes[1].exchange.(*Leaf)
		leaf.cancel() // as if its supervisor were killed
		leaf.mu.Lock()
		_ = leaf.link.conn.Close()
		leaf.mu.Unlock()
		began := time.Now()
		time.Sleep(2 * testTimes.Lost) // nobody waits for it: nothing may happen, however long
		nodes[0].alive(t)
		all[0].send("cmd=barrier_in\n")
		f := nodes[0].failed(t)
		if took := time.Since(began); took < 3*testTimes.Lost || !strings.Contains(f.Sentence, "node n2 is lost") {
			t.Errorf("after %s: %+v", took, f)
		}
	})
	t.Run("the first node", func(t *testing.T) {
		nodes := step(t, testTimes, 1, 1)
		all := tasks(t, nodes)
		initialise(all)
		within(t, func() { each(all, func(c *task) { c.ask("cmd=barrier_in") }) })
		root := nodes[0].exchange.(*Root)
		_ = root.listener.Close()
		root.mu.Lock()
		_ = root.peers[1].link.conn.Close()
		root.mu.Unlock()
		all[1].send("cmd=barrier_in\n")
		if f := nodes[1].failed(t); !strings.Contains(f.Sentence, "node n2 cannot reach node n1 at 127.0.0.1:") {
			t.Errorf("%+v", f)
		}
	})
}

func TestStrangersLearnAndChangeNothing(t *testing.T) {
	nodes := step(t, DefaultTimes, 1, 1)
	all := tasks(t, nodes)
	initialise(all)
	address := nodes[1].exchange.(*Leaf).address
	dial := func() net.Conn {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(patience))
		return conn
	}
	if _, err := greet(dial(), []byte("another key of some length"), 1); err == nil {
		t.Error("another key is accepted")
	}
	for _, index := range []int{0, 2, -1} {
		if _, err := greet(dial(), testKey, index); err == nil {
			t.Errorf("there is a node of index %d", index)
		}
	}
	var silent []net.Conn
	for range 3 * maxStrangers {
		silent = append(silent, dial())
	}
	for i, conn := range silent {
		if i%2 == 0 {
			_, _ = conn.Write([]byte(strings.Repeat("x", 100)))
		}
		_ = conn.Close()
	}
	// A frame of somebody who saw the handshake but does not know the key, here one with a wrong number, ends a connection only.
	link, err := greet(dial(), testKey, 1)
	if err != nil {
		t.Fatal(err)
	}
	go link.sendAll()
	link.recvKey, link.sendKey = link.sendKey, link.recvKey
	link.send(kindFail, encodeFailure(Failure{Rank: 1, Code: 9, Sentence: "false"}))
	if _, _, err := link.receive(maxStore); err == nil {
		t.Error("a frame with a wrong code is answered")
	}
	link.finish()
	within(t, func() {
		each(all, func(c *task) { c.expect(c.ask("cmd=barrier_in"), "cmd=barrier_out rc=0") })
	})
	for _, n := range nodes {
		n.alive(t)
	}
}

func TestTheFirstNodesTaskMayDieAndThePairsRemain(t *testing.T) {
	nodes := step(t, DefaultTimes, 1, 1)
	all := tasks(t, nodes)
	initialise(all)
	within(t, func() {
		each(all, func(c *task) {
			c.ask(fmt.Sprintf("cmd=put kvsname=kvs_17.0 key=k%d value=v%d", c.rank, c.rank))
			c.ask("cmd=barrier_in")
		})
	})
	_ = all[0].file.Close()
	nodes[0].stop()
	all[1].expect(all[1].ask("cmd=get kvsname=kvs_17.0 key=k0"), "cmd=get_result rc=0 msg=success value=v0")
	nodes[1].alive(t)
}

func TestAThousandNodesExchangeInOneStar(t *testing.T) {
	if testing.Short() {
		t.Skip("a thousand connections take a while")
	}
	const size = 1000
	shape := make([]int, size)
	for i := range shape {
		shape[i] = 1
	}
	nodes := step(t, DefaultTimes, shape...)
	var group sync.WaitGroup
	began := time.Now()
	for i, n := range nodes {
		group.Go(func() {
			all, err := n.exchange.Exchange(t.Context(), 1, []Pair{{fmt.Sprintf("card-%d", i), strings.Repeat("x", 200)}})
			if err != nil || len(all) != size || all[i].Key != fmt.Sprintf("card-%d", i) {
				t.Errorf("node %d got %d pairs: %v", i, len(all), err)
			}
		})
	}
	group.Wait()
	t.Logf("a fence of %d nodes took %s", size, time.Since(began))
}
