package replica

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

func TestMain(m *testing.M) {
	CheckFilesMain()
	os.Exit(m.Run())
}

// listMachine is the simplest state machine: the list of request ids in the order in which they were applied.
type listMachine struct{ s listState }

type listState struct {
	Cluster string
	Ids     []string
	Sum     uint64
	Index   uint64
}

// listView is a published view of a listMachine.
type listView struct{ listState }

func (v *listView) Digest() uint64    { return v.Sum }
func (v *listView) Level() uint32     { return 1 }
func (v *listView) ClusterID() string { return v.Cluster }
func (v *listView) WriteSnapshot(w io.Writer) error {
	return json.NewEncoder(w).Encode(v.listState)
}
func (v *listView) has(id string) int {
	n := 0
	for _, x := range v.Ids {
		if x == id {
			n++
		}
	}
	return n
}

func (m *listMachine) Publish() *listView { return &listView{m.s} }

func (m *listMachine) Restore(r io.Reader) error {
	var s listState
	if err := json.NewDecoder(r).Decode(&s); err != nil {
		return err
	}
	m.s = s
	return nil
}

func (m *listMachine) Apply(index, _ uint64, entry []byte) ([]*logv1.Result, error) {
	var b logv1.Batch
	if err := proto.Unmarshal(entry, &b); err != nil {
		return nil, err
	}
	var out []*logv1.Result
	for i, c := range b.Commands {
		if c.Op == nil {
			return nil, fmt.Errorf("command %d has no operation", i)
		}
		if boot := c.GetBootstrap(); boot != nil {
			m.s.Cluster = boot.ClusterId
		}
		m.s.Index = index
		m.s.Ids = append(m.s.Ids, c.RequestId)
		h := fnv.New64a()
		fmt.Fprint(h, m.s.Sum, c.RequestId, index, i)
		m.s.Sum = h.Sum64()
		out = append(out, &logv1.Result{Revision: &apiv1.Revision{Incarnation: 1, Index: index, Ordinal: uint32(i)}})
	}
	return out, nil
}

func tick(id string) *logv1.Command {
	return &logv1.Command{RequestId: id, Op: &logv1.Command_Tick{Tick: &logv1.Tick{}}}
}

func levelOne(*logv1.Command) uint32 { return 1 }

func testLog(t testing.TB) *slog.Logger {
	level := slog.LevelWarn + 8
	if os.Getenv("REPLICA_LOG") != "" {
		level = slog.LevelDebug
	}
	return slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: level}))
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	fmt.Fprint(os.Stderr, string(p))
	return len(p), nil
}

// patient is the profile of tests in real time: other tests of other packages may take the CPU away for a while.
func patient() Timing {
	p := Production()
	p.Lease = 400 * time.Millisecond
	return p
}

func testConfig(t testing.TB, dir string) Config {
	return Config{Dir: dir, Name: filepath.Base(dir), RaftListen: "127.0.0.1:0", Profile: patient(), Log: testLog(t),
		BallastBytes: 1 << 20, LowSpaceBytes: 1 << 20, LevelOf: levelOne}
}

type member = Member[*listView]

func openTest(t testing.TB, cfg Config) *member {
	t.Helper()
	m, err := OpenMember(cfg, &listMachine{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	return m
}

// again is how a member is opened a second time: at the address that the others know.
func again(m *member) Config {
	cfg := m.cfg
	cfg.RaftListen = m.Address()
	return cfg
}

// bootstrapped opens a cluster of one.
func bootstrapped(t testing.TB, dir string) *member {
	t.Helper()
	m := openTest(t, testConfig(t, dir))
	if err := m.Bootstrap(&logv1.Bootstrap{ClusterId: "test"}); err != nil {
		t.Fatal(err)
	}
	return m
}

// cluster opens n members; the first leads.
func cluster(t testing.TB, n int, change func(*Config)) []*member {
	t.Helper()
	base := t.TempDir()
	var ms []*member
	for i := range n {
		cfg := testConfig(t, filepath.Join(base, fmt.Sprintf("c%d", i+1)))
		if change != nil {
			change(&cfg)
		}
		ms = append(ms, openTest(t, cfg))
	}
	if err := ms[0].Bootstrap(&logv1.Bootstrap{ClusterId: "test"}); err != nil {
		t.Fatal(err)
	}
	for _, m := range ms[1:] {
		addVoter(t, ms[0], m)
	}
	return ms
}

func addVoter(t testing.TB, leader, m *member) {
	t.Helper()
	eventually(t, "the learner is added", func() bool { return leader.AddLearner(t.Context(), m.ID(), m.Address()) == nil })
	eventually(t, "the learner can be promoted", func() bool { return leader.Promote(t.Context(), m.ID()) == nil })
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 20 s: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// leaderOf waits until one of the members leads.
func leaderOf(t testing.TB, ms ...*member) *member {
	t.Helper()
	var l *member
	eventually(t, "a member leads", func() bool {
		for _, m := range ms {
			if m.Leader().IsSelf {
				l = m
				return true
			}
		}
		return false
	})
	return l
}

// propose writes through whoever leads, again and again until the outcome is known to be a success.
func propose(t testing.TB, id string, ms ...*member) {
	t.Helper()
	eventually(t, "proposal "+id+" succeeds", func() bool {
		for _, m := range ms {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			r, err := m.Propose(ctx, tick(id))
			cancel()
			if err == nil {
				if r.Refusal != nil {
					t.Fatalf("refused: %v", r.Refusal)
				}
				return true
			}
		}
		return false
	})
}

func agree(t testing.TB, ms ...*member) {
	t.Helper()
	eventually(t, "all members have the same state", func() bool {
		for _, m := range ms[1:] {
			if m.View().Digest() != ms[0].View().Digest() || m.Applied() != ms[0].Applied() {
				return false
			}
		}
		return true
	})
}

func mustContain(t testing.TB, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error; expected one that says %q", words)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("the error %q does not say %q", err, w)
		}
	}
}

func bootstrapCommand() *logv1.Bootstrap { return &logv1.Bootstrap{ClusterId: "test"} }

// opless is a command that no program knows.
func opless() *logv1.Command { return &logv1.Command{RequestId: "unknown"} }

func encodeBatch(t *testing.T, cmds ...*logv1.Command) []byte {
	t.Helper()
	b, err := proto.Marshal(&logv1.Batch{Commands: cmds})
	if err != nil {
		t.Fatal(err)
	}
	return b
}
