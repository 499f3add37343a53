package replica

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

func TestAcknowledgedCommandsSurviveARestart(t *testing.T) {
	dir := t.TempDir()
	m := bootstrapped(t, dir)
	id := m.ID()
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			if _, err := m.Propose(t.Context(), tick(fmt.Sprint("a", i))); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	want, index := m.View().Digest(), m.Applied()
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	m = openTest(t, testConfig(t, dir))
	if m.ID() != id {
		t.Fatalf("id %s became %s", id, m.ID())
	}
	v, err := m.WaitIndex(t.Context(), index)
	if err != nil {
		t.Fatal(err)
	}
	if v.Digest() != want || len(v.Ids) != 201 {
		t.Fatalf("the state differs after a restart: %d commands", len(v.Ids))
	}
	if err := m.Bootstrap(&logv1.Bootstrap{ClusterId: "again"}); !errors.Is(err, ErrBootstrapped) {
		t.Fatalf("a second bootstrap: %v", err)
	}
}

func TestCommandsProposedTogetherShareEntries(t *testing.T) {
	m := bootstrapped(t, t.TempDir())
	before := m.Applied()
	var wg sync.WaitGroup
	for i := range 500 {
		wg.Go(func() {
			if _, err := m.Propose(t.Context(), tick(fmt.Sprint(i))); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := m.Applied() - before; n > 250 {
		t.Fatalf("500 commands took %d entries", n)
	}
	seen := map[string]int{}
	for _, id := range m.View().Ids {
		seen[id]++
	}
	for i := range 500 {
		if seen[fmt.Sprint(i)] != 1 {
			t.Fatalf("command %d was applied %d times", i, seen[fmt.Sprint(i)])
		}
	}
}

func TestBoundsOfProposals(t *testing.T) {
	dir := t.TempDir()
	cfg := testConfig(t, dir)
	cfg.QueueCommands = 4
	m := openTest(t, cfg)
	if _, err := m.Propose(t.Context(), tick("early")); !errors.Is(err, ErrNotLeader) {
		t.Errorf("before the bootstrap: %v", err)
	}
	if err := m.Bootstrap(&logv1.Bootstrap{ClusterId: "x"}); err != nil {
		t.Fatal(err)
	}
	big := tick("big")
	big.Traceparent = strings.Repeat("x", maxEntryBytes)
	if _, err := m.Propose(t.Context(), big); !errors.Is(err, ErrTooLarge) {
		t.Errorf("a command of 256 KiB: %v", err)
	}
	m.cfg.LevelOf = func(*logv1.Command) uint32 { return 2 }
	if r, err := m.Propose(t.Context(), tick("new")); err != nil || r.GetRefusal().GetReason() != "LEVEL_NOT_RAISED" {
		t.Errorf("a command of a higher level: %v, %v", r, err)
	}
	m.cfg.LevelOf = levelOne

	// A disk that does not answer: two entries are in flight, four commands wait, the next is refused.
	gate := make(chan struct{})
	block := func() error { <-gate; return nil }
	m.bolt.inject.Store(&block)
	var flying []*proposal
	for i := range entriesInFlight {
		cmd := tick(fmt.Sprint("flying", i))
		cmd.Level, cmd.ProposedAt = 1, timestamppb.Now()
		data, err := proto.Marshal(cmd)
		if err != nil {
			t.Fatal(err)
		}
		p := &proposal{data: data, done: make(chan outcome, 1)}
		if err := m.queue.put(p); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the entry is in flight", func() bool { return p.state.Load() == proposalTaken })
		flying = append(flying, p)
	}
	var wg sync.WaitGroup
	results := make(chan error, 20)
	for i := range 10 {
		wg.Go(func() {
			_, err := m.Propose(t.Context(), tick(fmt.Sprint("q", i)))
			results <- err
		})
	}
	eventually(t, "six are refused", func() bool { return len(results) == 6 })
	for range 6 {
		if err := <-results; !errors.Is(err, ErrBusy) {
			t.Errorf("a full queue: %v", err)
		}
	}
	// A caller that gives up while its command waits knows that it was not written.
	m.bolt.inject.Store(nil)
	close(gate)
	wg.Wait()
	for _, p := range flying {
		<-p.done
	}
}

func TestACallerThatGivesUpKnowsWhetherTheCommandMayHaveBeenWritten(t *testing.T) {
	m := bootstrapped(t, t.TempDir())
	gate := make(chan struct{})
	block := func() error { <-gate; return nil }
	m.bolt.inject.Store(&block)
	ctx, cancel := context.WithCancel(t.Context())
	errs := make(chan error, 3)
	for i := range 3 {
		go func() {
			_, err := m.Propose(ctx, tick(fmt.Sprint("c", i)))
			errs <- err
		}()
		if i < 2 {
			eventually(t, "the entry is in flight", func() bool { m.queue.mu.Lock(); defer m.queue.mu.Unlock(); return len(m.queue.items) == 0 })
			time.Sleep(10 * time.Millisecond) // until the lane has it; a late one only makes the test easier
		} else {
			eventually(t, "it waits", func() bool { m.queue.mu.Lock(); defer m.queue.mu.Unlock(); return len(m.queue.items) == 1 })
		}
	}
	cancel()
	unknown, not := 0, 0
	for range 3 {
		switch err := <-errs; {
		case errors.Is(err, ErrOutcomeUnknown):
			unknown++
		case errors.Is(err, context.Canceled):
			not++
		default:
			t.Error(err)
		}
	}
	close(gate)
	m.bolt.inject.Store(nil)
	if unknown != 2 || not != 1 {
		t.Fatalf("%d unknown, %d not written", unknown, not)
	}
	propose(t, "last", m)
	if m.View().has("c2") != 0 {
		t.Fatal("a command whose caller was told that it was not written was applied")
	}
}

func TestThreeMembersAgreeAndOutliveTheirLeader(t *testing.T) {
	ms := cluster(t, 3, nil)
	for i := range 20 {
		propose(t, fmt.Sprint("a", i), ms...)
	}
	agree(t, ms...)
	old := leaderOf(t, ms...)
	term := old.Leader().Term
	rest := slices.DeleteFunc(slices.Clone(ms), func(m *member) bool { return m == old })
	changed := rest[0].LeaderChanged()
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	propose(t, "b", rest...)
	t.Logf("from the end of the leader to the next acknowledgement: %v", time.Since(began))
	select {
	case <-changed:
	default:
		t.Error("LeaderChanged said nothing")
	}
	l := leaderOf(t, rest...).Leader()
	if l.Term <= term || l.ID == old.ID() {
		t.Errorf("leader after %s at term %d: %+v", old.ID(), term, l)
	}
	agree(t, rest...)
	back := openTest(t, again(old))
	agree(t, append(rest, back)...)
}

func TestFollowersRefuseAndNameTheLeader(t *testing.T) {
	ms := cluster(t, 2, nil)
	eventually(t, "the follower knows the leader", func() bool { return ms[1].Leader().ID == ms[0].ID() })
	_, err := ms[1].Propose(t.Context(), tick("x"))
	mustContain(t, err, ms[0].ID(), ms[0].Address())
	if !errors.Is(err, ErrNotLeader) {
		t.Error(err)
	}
	if _, err := ms[1].ReadIndex(t.Context()); !errors.Is(err, ErrNotLeader) {
		t.Error(err)
	}
}

func TestReadIndexOfTheLeaderIsReachedByFollowers(t *testing.T) {
	ms := cluster(t, 3, nil)
	for i := range 30 {
		id := fmt.Sprint("r", i)
		propose(t, id, ms[0])
		index, err := ms[0].ReadIndex(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range ms {
			v, err := m.WaitIndex(t.Context(), index)
			if err != nil {
				t.Fatal(err)
			}
			if v.has(id) != 1 {
				t.Fatalf("a read after the acknowledgement of %s does not see it", id)
			}
		}
	}
}

func TestChangedIsClosedAtTheNextPublication(t *testing.T) {
	m := bootstrapped(t, t.TempDir())
	c := m.Changed()
	select {
	case <-c:
		t.Fatal("closed without a change")
	default:
	}
	propose(t, "x", m)
	select {
	case <-c:
	default:
		t.Fatal("not closed though the command was applied")
	}
}

func TestDigestsAreKeptAtMarkedEntriesOnly(t *testing.T) {
	ms := cluster(t, 3, nil)
	mark := func(on bool) uint64 {
		c := tick("t")
		c.GetTick().MarkDigest = on
		r, err := ms[0].Propose(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		return r.Revision.Index
	}
	plain, first := mark(false), mark(true)
	want := ms[0].View().Digest()
	for range keptDigests - 1 {
		mark(true)
	}
	agree(t, ms...)
	for _, m := range ms {
		if _, ok := m.DigestAt(plain); ok {
			t.Error("an entry without mark has a digest")
		}
		if got, ok := m.DigestAt(first); !ok || got != want {
			t.Errorf("digest at the mark: %x %v, want %x", got, ok, want)
		}
	}
	mark(true)
	if _, ok := ms[0].DigestAt(first); ok {
		t.Error("more than 64 digests are kept")
	}
}

func TestALogOfFewBigEntriesStaysSmall(t *testing.T) {
	const limit, part = 512 << 10, 50 << 10
	ms := cluster(t, 3, func(c *Config) {
		c.Profile.SnapshotBytes, c.Profile.SnapshotInterval = limit, time.Hour // by count it is never due
	})
	lead := leaderOf(t, ms...)
	last := ""
	put := func() {
		last += "x"
		c := tick(last)
		c.Traceparent = strings.Repeat("b", part)
		if _, err := lead.Propose(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	for range 4 * limit / part {
		put()
	}
	for _, m := range ms { // each by itself
		eventually(t, "a snapshot is taken and the log compacted", func() bool {
			n, err := m.bolt.bytesAfter(0)
			return err == nil && n <= 2*limit+2*part // since the snapshot, and before it
		})
		if n, err := m.bolt.bytesAfter(0); err != nil || n < limit/2 {
			t.Errorf("only %d bytes stay in the log for followers that lag (%v)", n, err)
		}
	}
	fresh := openTest(t, testConfig(t, t.TempDir()))
	addVoter(t, lead, fresh)
	put()
	agree(t, append(ms, fresh)...)
	if fresh.View().has("x") != 1 || fresh.View().has(last) != 1 {
		t.Error("the learner lacks commands")
	}
}

func TestALearnerFarBehindGetsASnapshotAndIsPromotedOnlyThen(t *testing.T) {
	small := func(c *Config) {
		c.Profile.SnapshotThreshold, c.Profile.TrailingLogs, c.Profile.SnapshotInterval = 50, 10, 50*time.Millisecond
	}
	ms := cluster(t, 1, small)
	lead := ms[0]
	for i := range 200 {
		propose(t, fmt.Sprint("a", i), lead)
	}
	eventually(t, "the log was compacted", func() bool { first, _ := lead.bolt.FirstIndex(); return first > 100 })
	cfg := testConfig(t, t.TempDir())
	small(&cfg)
	l := openTest(t, cfg)
	if err := lead.Promote(t.Context(), l.ID()); !errors.Is(err, ErrUnknownMember) {
		t.Errorf("promotion of a stranger: %v", err)
	}
	if err := lead.AddLearner(t.Context(), "0123456789abcdef0123456789abcdef", "127.0.0.1:1"); err != nil {
		t.Fatal(err)
	}
	if err := lead.Promote(t.Context(), "0123456789abcdef0123456789abcdef"); !errors.Is(err, ErrNotCaughtUp) {
		t.Errorf("promotion of a learner that does not answer: %v", err)
	}
	addVoter(t, lead, l)
	agree(t, lead, l)
	if snaps, err := listSnapshots(filepath.Join(cfg.Dir, snapshotDir)); err != nil || len(snaps) == 0 || snaps[len(snaps)-1].Index < 100 {
		t.Errorf("the learner did not get a snapshot: %v %v", snaps, err)
	}
	// and after a restart it is all still there, from its own snapshot
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l = openTest(t, again(l))
	if n := len(l.View().Ids); n < 100 {
		t.Errorf("the snapshot restored %d commands", n)
	}
	propose(t, "z", lead, l)
	agree(t, lead, l)
}

func TestAWipedMemberComesBackUnderItsAddressWithANewIdAndIsNotTakenForTheOldOne(t *testing.T) {
	ms := cluster(t, 3, nil)
	lead := ms[0]
	old := ms[2]
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	cfg := again(old)
	if err := SetAside(cfg.Dir); err != nil {
		t.Fatal(err)
	}
	if aside, _ := filepath.Glob(filepath.Join(cfg.Dir, "damaged-*", "raft", "raft.db")); len(aside) != 1 {
		t.Fatalf("what was set aside: %v", aside)
	}
	back := openTest(t, cfg)
	if back.ID() == old.ID() {
		t.Fatal("the id was reused")
	}
	// The leader keeps knocking at that address for the old id. The new member must take nothing of it.
	for i := range 20 {
		propose(t, fmt.Sprint("w", i), ms[:2]...)
		time.Sleep(5 * time.Millisecond)
	}
	if n := back.raft.LastIndex(); n != 0 {
		t.Fatalf("the new member took %d entries that were meant for the old one", n)
	}
	addVoter(t, lead, back)
	agree(t, ms[0], ms[1], back)
	if got := lead.Servers(); len(got) != 3 {
		t.Errorf("members: %+v", got)
	}
}

func TestTransferHandsOverQuicklyAndAfterTheDutiesEnded(t *testing.T) {
	ms := cluster(t, 3, nil)
	var mu sync.Mutex
	running := map[string]bool{}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for _, m := range ms {
		wg.Go(func() {
			_ = m.Lead(ctx, func(ctx context.Context, _ uint64) error {
				mu.Lock()
				running[m.ID()] = true
				if len(running) > 1 {
					t.Errorf("duties run in %d members", len(running))
				}
				mu.Unlock()
				<-ctx.Done()
				mu.Lock()
				delete(running, m.ID())
				mu.Unlock()
				return nil
			})
		})
	}
	var gaps []time.Duration
	for i := range 10 {
		l := leaderOf(t, ms...)
		propose(t, fmt.Sprint("before", i), l)
		began := time.Now()
		if err := l.Transfer(t.Context(), "-"); err != nil {
			t.Fatal(err)
		}
		propose(t, fmt.Sprint("after", i), ms...)
		gaps = append(gaps, time.Since(began))
	}
	slices.Sort(gaps)
	t.Logf("gaps: median %v, worst %v", gaps[len(gaps)/2], gaps[len(gaps)-1])
	if gaps[len(gaps)/2] > 150*time.Millisecond {
		t.Errorf("the median gap of a transfer is %v", gaps[len(gaps)/2])
	}
}

func TestLeadRunsOneScopeForEachTermAfterABarrier(t *testing.T) {
	m := bootstrapped(t, t.TempDir())
	propose(t, "x", m)
	ctx, cancel := context.WithCancel(t.Context())
	runs := make(chan uint64, 10)
	ended := make(chan error, 1)
	n := 0
	go func() {
		ended <- m.Lead(ctx, func(ctx context.Context, term uint64) error {
			if m.View().has("x") != 1 {
				t.Error("the scope began before everything was applied")
			}
			runs <- term
			if n++; n == 1 {
				return errors.New("boom") // alone in the cluster, it leads again after a pause
			}
			<-ctx.Done()
			return ctx.Err()
		})
	}()
	if a, b := <-runs, <-runs; a != m.Leader().Term || b != a {
		t.Errorf("terms %d %d, now %d", a, b, m.Leader().Term)
	}
	if err := m.Lead(ctx, nil); err == nil {
		t.Error("Lead ran twice")
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestAScopeThatFailsHandsLeadershipOver(t *testing.T) {
	ms := cluster(t, 3, nil)
	l := leaderOf(t, ms...)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { _ = l.Lead(ctx, func(context.Context, uint64) error { return errors.New("can't plan") }) })
	eventually(t, "another member leads", func() bool {
		for _, m := range ms {
			if m != l && m.Leader().IsSelf {
				return true
			}
		}
		return false
	})
}

func TestCloseLeavesNoGoroutine(t *testing.T) {
	before := runtime.NumGoroutine()
	ms := cluster(t, 3, nil)
	for i := range 10 {
		propose(t, fmt.Sprint(i), ms...)
	}
	for _, m := range ms {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
	deadline := time.Now().Add(5 * time.Second)
	for runtime.NumGoroutine() > before {
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<20)
			t.Fatalf("%d goroutines before, %d after:\n%s", before, runtime.NumGoroutine(), buf[:runtime.Stack(buf, true)])
		}
		time.Sleep(5 * time.Millisecond)
	}
	if _, err := ms[0].Propose(t.Context(), tick("late")); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	if _, err := ms[0].WaitIndex(t.Context(), 1<<40); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

func TestMembersAreRemovedAndLeadershipGoesToAChosenOne(t *testing.T) {
	ms := cluster(t, 3, nil)
	lead := ms[0]
	if err := lead.Transfer(t.Context(), "nobody"); !errors.Is(err, ErrUnknownMember) {
		t.Errorf("transfer to a stranger: %v", err)
	}
	if err := lead.Remove(t.Context(), "nobody"); !errors.Is(err, ErrUnknownMember) {
		t.Errorf("removal of a stranger: %v", err)
	}
	if err := lead.Transfer(t.Context(), ms[2].ID()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the chosen one leads", func() bool { return ms[2].Leader().IsSelf })
	if err := lead.Remove(t.Context(), ms[1].ID()); !errors.Is(err, ErrNotLeader) {
		t.Errorf("removal by a follower: %v", err)
	}
	eventually(t, "a follower is removed", func() bool { return ms[2].Remove(t.Context(), ms[1].ID()) == nil })
	if got := ms[2].Servers(); len(got) != 2 {
		t.Errorf("members: %+v", got)
	}
	// The leader removes itself; the last one goes on.
	_ = ms[2].Remove(t.Context(), ms[2].ID()) // it loses leadership by that, perhaps before it can answer
	propose(t, "alone", ms[0])
	if got := ms[0].Servers(); len(got) != 1 {
		t.Errorf("members: %+v", got)
	}
}

func TestConfigurationsThatCanNotWorkAreRefusedWithASentence(t *testing.T) {
	for word, change := range map[string]func(*Config){
		"Dir":       func(c *Config) { c.Dir = "" },
		"HOST:PORT": func(c *Config) { c.RaftListen = "" },
		"level":     func(c *Config) { c.LevelOf = nil },
		"lease":     func(c *Config) { c.Profile.Lease = time.Hour },
		"RootCAs":   func(c *Config) { c.TLS = &tls.Config{} },
		"advertise": func(c *Config) { c.RaftListen = "0.0.0.0:0" },
	} {
		cfg := testConfig(t, t.TempDir())
		change(&cfg)
		_, err := OpenMember(cfg, &listMachine{})
		mustContain(t, err, word)
	}
}
