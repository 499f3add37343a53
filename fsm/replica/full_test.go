package replica

import (
	"testing"
	"time"
)

// TestANewlyElectedLeaderWithAFullDiskHandsOverAtOnce: it has been full for a while as a follower; the pause between two tries belongs to
// one time of leadership.
func TestANewlyElectedLeaderWithAFullDiskHandsOverAtOnce(t *testing.T) {
	ms := cluster(t, 3, nil)
	l := leaderOf(t, ms...)
	full := ms[0]
	if full == l {
		full = ms[1]
	}
	// Another one owns the disk's space: it counts as full without any write failing.
	full.space.mu.Lock()
	full.space.free = func() (int64, error) { return 0, nil }
	full.space.mu.Unlock()
	eventually(t, "the follower notices", full.DiskFull)
	time.Sleep(2 * spaceInterval) // ticks of a full follower must not count as tries
	term := l.Leader().Term
	if err := l.Transfer(t.Context(), full.ID()); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	eventually(t, "a member that can write leads", func() bool {
		for _, m := range ms {
			if m != full && m.Leader().IsSelf && m.Leader().Term > term+1 {
				return true
			}
		}
		return false
	})
	if d := time.Since(began); d > 3*time.Second {
		t.Errorf("the full leader stayed for %v", d)
	}
	propose(t, "after", ms...)
}

// TestAMemberWithAFullDiskLeavesElectionsToOthers: when the leader dies, one that can write takes over, whoever is first.
func TestAMemberWithAFullDiskLeavesElectionsToOthers(t *testing.T) {
	ms := cluster(t, 3, nil)
	l := leaderOf(t, ms...)
	var rest []*member
	for _, m := range ms {
		if m != l {
			rest = append(rest, m)
		}
	}
	rest[0].space.markFull("a test says so")
	if !rest[0].holdsBack() {
		t.Fatal("a full follower that hears its leader would stand for election")
	}
	if rest[1].holdsBack() {
		t.Fatal("a follower with space would not stand for election")
	}
	if err := rest[0].gate.RequestPreVote("", "", nil, nil); err != errHeld {
		t.Errorf("the question before an election: %v", err)
	}
	rest[0].space.full.Store(false)
}

// TestWhoCouldNotLeadIsTheLastChoice: two full members of three must not hand leadership to each other for ever.
func TestWhoCouldNotLeadIsTheLastChoice(t *testing.T) {
	ms := cluster(t, 3, nil)
	l := leaderOf(t, ms...)
	propose(t, "x", ms...)
	first := Server{}
	eventually(t, "somebody can take over", func() (ok bool) {
		var err error
		first, err = l.successor()
		return err == nil
	})
	l.handed.Store(first.ID)
	eventually(t, "the other one is chosen", func() bool {
		second, err := l.successor()
		return err == nil && second.ID != first.ID
	})
}
