package replica

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

func TestTheRealStateMachineIsEqualOnAllMembersAlsoThroughSnapshotsAndRestarts(t *testing.T) {
	base := t.TempDir()
	open := func(i int, address string) *Replica {
		cfg := testConfig(t, filepath.Join(base, fmt.Sprint("c", i)))
		cfg.RaftListen = address
		cfg.Profile.SnapshotThreshold, cfg.Profile.TrailingLogs, cfg.Profile.SnapshotInterval = 20, 5, 50*time.Millisecond
		r, err := Open(cfg, fsm.New())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = r.Close() })
		return r
	}
	rs := []*Replica{open(1, "127.0.0.1:0"), open(2, "127.0.0.1:0")}
	lead := rs[0]
	err := lead.Bootstrap(&logv1.Bootstrap{Incarnation: 1, ClusterId: "00000000-0000-4000-8000-000000000001", Configuration: realConfiguration()})
	if err != nil {
		t.Fatal(err)
	}
	put := func() uint64 {
		t.Helper()
		self := &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_MEMBER, Name: "c1"}
		r, err := lead.Propose(t.Context(), &logv1.Command{Principal: self, Op: &logv1.Command_Tick{Tick: &logv1.Tick{MarkDigest: true}}})
		if err != nil || r.Refusal != nil {
			t.Fatal(err, r)
		}
		return r.Revision.Index
	}
	for range 100 {
		put()
	}
	eventually(t, "the log was compacted", func() bool { first, _ := lead.bolt.FirstIndex(); return first > 20 })
	learner := rs[1]
	if err := lead.AddLearner(t.Context(), learner.ID(), learner.Address()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it can be promoted", func() bool { return lead.Promote(t.Context(), learner.ID()) == nil })
	index := put()
	for _, r := range rs {
		if _, err := r.WaitIndex(t.Context(), index); err != nil {
			t.Fatal(err)
		}
	}
	want, ok := lead.DigestAt(index)
	if got, ok2 := learner.DigestAt(index); !ok || !ok2 || got != want {
		t.Fatalf("digests at entry %d: %016x %v, %016x %v", index, want, ok, got, ok2)
	}
	if err := learner.Close(); err != nil {
		t.Fatal(err)
	}
	learner = open(2, learner.Address())
	eventually(t, "the leader is back", func() bool { return lead.Leader().IsSelf || learner.Leader().IsSelf })
	eventually(t, "equal after a restart", func() bool {
		return learner.View().Digest() == lead.View().Digest() && learner.View().Revision().Index >= index
	})
	if learner.View().ClusterID() != "00000000-0000-4000-8000-000000000001" || learner.View().Level() != lead.View().Level() {
		t.Error("the restored view differs")
	}
}

func TestALevelThatTheClusterHasNotReachedIsRefused(t *testing.T) {
	r, err := Open(testConfig(t, t.TempDir()), fsm.New())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cmd := &logv1.Command{Op: &logv1.Command_Tick{Tick: &logv1.Tick{}}}
	if r.checkLevel(cmd).GetReason() != "NOT_BOOTSTRAPPED" {
		t.Error("a tick before the bootstrap is not refused")
	}
	if _, err := openedLeader(t).Propose(t.Context(), &logv1.Command{}); err == nil {
		t.Error("a command without operation is written")
	}
	if d := r.checkLevel(&logv1.Command{Op: &logv1.Command_Bootstrap{Bootstrap: &logv1.Bootstrap{}}}); d != nil {
		t.Errorf("the bootstrap is refused: %v", d)
	}
}

// openedLeader is a bootstrapped cluster of one with the real state machine.
func openedLeader(t *testing.T) *Replica {
	t.Helper()
	r, err := Open(testConfig(t, t.TempDir()), fsm.New())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	if err := r.Bootstrap(&logv1.Bootstrap{Incarnation: 1, ClusterId: "00000000-0000-4000-8000-000000000001", Configuration: realConfiguration()}); err != nil {
		t.Fatal(err)
	}
	return r
}

func realConfiguration() *apiv1.Configuration {
	return &apiv1.Configuration{ClusterName: "test", Partitions: []*apiv1.Partition{{Name: "all", Nodes: "ALL", IsDefault: true}}}
}
