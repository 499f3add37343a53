package replica

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// world is three members in virtual time.
type world struct {
	t       *testing.T
	net     *InMemoryNetwork
	disks   []*InMemoryDisk
	cfg     Config
	mu      sync.Mutex
	members []*member // nil while it is down
}

var ids = []string{"m1", "m2", "m3"}

func newWorld(t *testing.T, change func(*Config)) *world {
	w := &world{t: t, net: NewInMemoryNetwork(), members: make([]*member, len(ids)),
		cfg: Config{Profile: Development(), Log: testLog(t), LevelOf: levelOne}}
	if change != nil {
		change(&w.cfg)
	}
	for i, id := range ids {
		w.disks = append(w.disks, NewInMemoryDisk(id))
		w.start(i)
	}
	if err := w.members[0].Bootstrap(bootstrapCommand()); err != nil {
		t.Fatal(err)
	}
	for _, m := range w.members[1:] {
		addVoter(t, w.members[0], m)
	}
	return w
}

func (w *world) start(i int) {
	cfg := w.cfg
	cfg.Name = ids[i]
	m, err := OpenInMemory(cfg, &listMachine{}, w.disks[i], w.net)
	if err != nil {
		w.t.Fatal(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.members[i] = m
}

// kill ends a member: it is cut off first, so that it can't say goodbye.
func (w *world) kill(i int) {
	w.mu.Lock()
	m := w.members[i]
	w.members[i] = nil
	w.mu.Unlock()
	for _, other := range ids {
		w.net.Cut(ids[i], other)
		w.net.Cut(other, ids[i])
	}
	if err := m.Close(); err != nil {
		w.t.Error(err)
	}
}

func (w *world) up() []*member {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []*member
	for _, m := range w.members {
		if m != nil {
			out = append(out, m)
		}
	}
	return out
}

func (w *world) close() {
	w.net.Heal()
	for _, m := range w.up() {
		if err := m.Close(); err != nil {
			w.t.Error(err)
		}
	}
}

// history is what clients were told. A read must see every write that was acknowledged before the read began.
type history struct {
	mu    sync.Mutex
	acked []string
	last  uint64 // highest index of an acknowledged write
	reads int
}

func (h *history) acknowledge(id string, index uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.acked = append(h.acked, id)
	h.last = max(h.last, index)
}

func (h *history) floor() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.last
}

// client writes and reads at a random member until stop is closed. It never asks twice with the same id.
func (w *world) client(name string, rng *rand.Rand, h *history, stop <-chan struct{}) {
	for i := 0; ; i++ {
		select {
		case <-stop:
			return
		case <-time.After(time.Duration(1+rng.IntN(20)) * time.Millisecond):
		}
		up := w.up()
		if len(up) == 0 {
			continue
		}
		m := up[rng.IntN(len(up))]
		for _, x := range up { // mostly the leader: whoever believes to be it
			if x.Leader().IsSelf && rng.IntN(8) > 0 {
				m = x
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(50+rng.IntN(1000))*time.Millisecond)
		if rng.IntN(2) == 0 {
			id := fmt.Sprint(name, "-", i)
			if r, err := m.Propose(ctx, tick(id)); err == nil && r.Refusal == nil {
				h.acknowledge(id, r.Revision.Index)
			}
		} else {
			w.read(ctx, m, up[rng.IntN(len(up))], h)
		}
		cancel()
	}
}

// read asks one member for an index and reads at another.
func (w *world) read(ctx context.Context, leader, at *member, h *history) {
	floor := h.floor()
	index, err := leader.ReadIndex(ctx)
	if err != nil {
		return
	}
	v, err := at.WaitIndex(ctx, index)
	if err != nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.reads++
	if v.Index < floor {
		w.t.Errorf("stale read: entry %d had been acknowledged before, the view is at %d", floor, v.Index)
	}
}

// nemesis makes one fault, waits, and repairs it.
func (w *world) nemesis(rng *rand.Rand) {
	leader := 0
	for i, m := range w.members {
		if m != nil && m.Leader().IsSelf {
			leader = i
		}
	}
	victim := leader
	if rng.IntN(3) == 0 {
		victim = rng.IntN(len(ids))
	}
	others := []string{ids[(victim+1)%3], ids[(victim+2)%3]}
	pause := time.Duration(200+rng.IntN(1500)) * time.Millisecond
	switch rng.IntN(6) {
	case 0:
		w.kill(victim)
		time.Sleep(pause)
		w.net.Heal()
		w.start(victim)
	case 1:
		w.net.Partition([]string{ids[victim]}, others)
		time.Sleep(pause)
	case 2: // its messages get out, nothing comes in
		for _, o := range others {
			w.net.Cut(o, ids[victim])
		}
		time.Sleep(pause)
	case 3: // it is stopped before it reads the answers
		w.net.Hold(ids[victim])
		time.Sleep(pause)
	case 4: // another one is elected behind the leader's back
		w.net.Hold(ids[victim])
		_ = w.net.CallElection(others[rng.IntN(2)]) // it may be down: no fault then
		time.Sleep(time.Duration(rng.IntN(100)) * time.Millisecond)
	case 5:
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_ = w.members[victim].Transfer(ctx, "-") // refused by a follower
		cancel()
	}
	w.net.Heal()
	time.Sleep(time.Duration(rng.IntN(1200)) * time.Millisecond)
}

func runWorld(t *testing.T, seed uint64, rounds int, change func(*Config)) *history {
	h := &history{}
	synctest.Test(t, func(t *testing.T) {
		rng := rand.New(rand.NewPCG(seed, 1))
		w := newWorld(t, change)
		w.net.SetLatency(0, 3*time.Millisecond, seed)
		stop := make(chan struct{})
		var clients sync.WaitGroup
		for i := range 5 {
			clients.Go(func() { w.client(fmt.Sprint("c", i), rand.New(rand.NewPCG(seed, uint64(100+i))), h, stop) })
		}
		for range rounds {
			w.nemesis(rng)
		}
		close(stop)
		clients.Wait()
		w.net.Heal()
		propose(t, "end", w.up()...)
		agree(t, w.up()...)
		seen := map[string]int{}
		for _, id := range w.up()[0].View().Ids {
			seen[id]++
		}
		for _, id := range h.acked {
			if seen[id] != 1 {
				t.Errorf("%s was acknowledged and is there %d times", id, seen[id])
			}
		}
		w.close()
	})
	return h
}

func TestNothingAcknowledgedIsLostAndReadsAreLinearizableInVirtualTime(t *testing.T) {
	rounds := 40
	if testing.Short() {
		rounds = 10
	}
	for seed := range uint64(3) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			h := runWorld(t, seed, rounds, func(c *Config) {
				c.Profile.SnapshotThreshold, c.Profile.TrailingLogs, c.Profile.SnapshotInterval = 100, 20, time.Second
			})
			t.Logf("%d writes acknowledged, %d linearizable reads", len(h.acked), h.reads)
			if len(h.acked) < 10*rounds || h.reads < 10*rounds {
				t.Error("that is too little to mean anything")
			}
		})
	}
}

// staleRead deposes a leader that has not read the answers to its heartbeats yet, writes on its successor, asks the old leader for a
// read index, and only then delivers the answers. It reports what the read returned.
func staleRead(t *testing.T, faults Faults) (missing bool, err error) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(c *Config) { c.Faults = faults })
		defer w.close()
		old := leaderOf(t, w.up()...)
		propose(t, "first", old)
		agree(t, w.up()...) // the successor must be electable
		var next *member
		for _, m := range w.up() {
			if m != old {
				next = m
			}
		}
		// Heartbeats and entries are sent, and answered; the answers wait at the door of the old leader. So does everything else.
		w.net.Hold(old.ID())
		time.Sleep(w.cfg.Profile.Heartbeat / 5)
		for _, id := range ids {
			if id != old.ID() {
				w.net.Cut(id, old.ID()) // requests of the successor; answers that have arrived are held, not lost
			}
		}
		if e := w.net.CallElection(next.ID()); e != nil {
			t.Fatal(e)
		}
		ctx, cancel := context.WithTimeout(t.Context(), old.cfg.Profile.Lease/2)
		defer cancel()
		for !next.Leader().IsSelf {
			time.Sleep(time.Millisecond)
			if ctx.Err() != nil {
				t.Fatal("the successor was not elected in time")
			}
		}
		if _, e := next.Propose(t.Context(), tick("second")); e != nil {
			t.Fatal(e)
		}
		if !old.Leader().IsSelf {
			t.Fatal("the old leader knows already: the schedule is not the one that is wanted")
		}
		type read struct {
			view *listView
			err  error
		}
		done := make(chan read, 1)
		go func() {
			index, err := old.ReadIndex(t.Context())
			if err != nil {
				done <- read{nil, err}
				return
			}
			v, err := old.WaitIndex(t.Context(), index)
			done <- read{v, err}
		}()
		synctest.Wait()
		w.net.Heal()
		r := <-done
		err = r.err
		missing = err == nil && r.view.has("second") == 0
	})
	return missing, err
}

func TestADeposedLeaderAnswersNoRead(t *testing.T) {
	missing, err := staleRead(t, Faults{})
	if missing {
		t.Fatal("the read does not see a write that was acknowledged before it")
	}
	if !errors.Is(err, ErrNotLeader) {
		t.Errorf("the read: %v", err)
	}
}

func TestThePlantedBugOfReadingThroughVerifyLeaderIsCaught(t *testing.T) {
	missing, err := staleRead(t, Faults{ReadThroughVerifyLeader: true})
	if !missing {
		t.Fatalf("the schedule that makes VerifyLeader confirm a deposed leader no longer does (%v): the test above proves nothing", err)
	}
}

func TestARestartInMemoryKeepsLogVoteAndSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(c *Config) {
			c.Profile.SnapshotThreshold, c.Profile.TrailingLogs, c.Profile.SnapshotInterval = 20, 5, 100*time.Millisecond
		})
		defer w.close()
		for i := range 100 {
			propose(t, fmt.Sprint(i), w.up()...)
		}
		time.Sleep(time.Second)
		for i := range ids {
			w.kill(i)
		}
		w.net.Heal()
		for i := range ids {
			w.start(i)
		}
		propose(t, "after", w.up()...)
		agree(t, w.up()...)
		if n := len(w.up()[0].View().Ids); n != 102 {
			t.Errorf("%d commands", n)
		}
	})
}
