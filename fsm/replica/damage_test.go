package replica

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/raft"
)

// usedDir makes a data directory with a log, a term, a vote and two snapshots.
func usedDir(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "used")
	cfg := testConfig(t, dir)
	cfg.Profile.TrailingLogs = 60
	m := openTest(t, cfg)
	if err := m.Bootstrap(bootstrapCommand()); err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range 150 {
		c := tick(fmt.Sprint("command ", i))
		c.Traceparent = strings.Repeat("t", rng.IntN(3000))
		if _, err := m.Propose(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		if i == 60 || i == 120 {
			if err := m.raft.Snapshot().Error(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if err := VerifyDir(dir); err != nil {
		t.Fatalf("a sound directory is refused: %v", err)
	}
	return dir
}

// contents is everything that a member would use of a directory, read as the member reads it.
func contents(t *testing.T, dir string) string {
	t.Helper()
	var out strings.Builder
	id, err := readID(dir)
	if err != nil {
		t.Fatal(err)
	}
	sp := newSpace(dir, 0, 0, testLog(t))
	failed := func(err error) { t.Errorf("damage was noticed only when it was read: %v", err) }
	s, err := openBolt(dbPath(dir), sp, func() bool { return false }, failed)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	fmt.Fprintln(&out, id, s.first, s.last, maps.Collect(maps.All(s.stable)))
	for i := s.first; i <= s.last; i++ {
		var l raft.Log
		if err := s.GetLog(i, &l); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(&out, l)
	}
	snaps, err := newSnapStore(filepath.Join(dir, snapshotDir), sp, failed)
	if err != nil {
		t.Fatal(err)
	}
	all, err := snaps.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, meta := range all {
		_, r, err := snaps.Open(meta.ID)
		if err != nil {
			t.Fatal(err)
		}
		state, err := io.ReadAll(r)
		if err := errors.Join(err, r.Close()); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&out, "%+v %x\n", meta, state)
	}
	return out.String()
}

func copyDir(t *testing.T, from string) string {
	t.Helper()
	to := t.TempDir()
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
	return to
}

// damagedFiles are the kinds of file that a member trusts.
func damagedFiles(t *testing.T, dir string) map[string]string {
	t.Helper()
	snaps, err := listSnapshots(filepath.Join(dir, snapshotDir))
	if err != nil || len(snaps) != 2 {
		t.Fatalf("snapshots: %v %v", snaps, err)
	}
	return map[string]string{
		"log":          filepath.Join(raftDir, dbFile),
		"snapshot":     filepath.Join(snapshotDir, snaps[0].id()+snapSuffix),
		"old snapshot": filepath.Join(snapshotDir, snaps[1].id()+snapSuffix),
		"id":           idFile,
	}
}

// refusedOrEqual: a damaged directory is refused with the remedy, or the damage was where nothing is stored.
func refusedOrEqual(t *testing.T, dir, want, what string) (refused bool) {
	t.Helper()
	err := VerifyDir(dir)
	if err == nil {
		if got := contents(t, dir); got != want {
			t.Errorf("%s: accepted, and the contents differ", what)
		}
		return false
	}
	if !errors.Is(err, ErrDamaged) {
		t.Errorf("%s: not an ErrDamaged: %v", what, err)
	}
	mustContain(t, err, dir, "muster-controller rejoin --dir "+dir)
	return true
}

func TestFlippedBitsAreNeverServed(t *testing.T) {
	dir := usedDir(t)
	want := contents(t, dir)
	for kind, name := range damagedFiles(t, dir) {
		t.Run(kind, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(60, uint64(len(kind))))
			clean, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil {
				t.Fatal(err)
			}
			d := copyDir(t, dir)
			path := filepath.Join(d, name)
			refused, n := 0, 60
			headers := 0
			if kind == "log" {
				headers = 60 // and as many in the headers of bolt's pages, which have no checksum
			}
			for i := range n + headers {
				at := rng.IntN(len(clean))
				if i >= n {
					at = at/4096*4096 + rng.IntN(48)
				}
				bit := byte(1) << rng.IntN(8)
				dirty := bytes.Clone(clean)
				dirty[at] ^= bit
				if err := os.WriteFile(path, dirty, 0o600); err != nil {
					t.Fatal(err)
				}
				if refusedOrEqual(t, d, want, fmt.Sprintf("bit %08b of byte %d", bit, at)) {
					refused++
				}
			}
			t.Logf("%d of %d were refused, the others hit unused space", refused, n+headers)
			if refused < n/4 {
				t.Errorf("only %d were noticed", refused)
			}
		})
	}
}

func TestTruncatedFilesAreNeverServed(t *testing.T) {
	dir := usedDir(t)
	want := contents(t, dir)
	for kind, name := range damagedFiles(t, dir) {
		rng := rand.New(rand.NewPCG(7, uint64(len(kind))))
		clean, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		d := copyDir(t, dir)
		for i := range 15 {
			n := rng.IntN(len(clean))
			if i == 0 {
				n = 0
			}
			if err := os.WriteFile(filepath.Join(d, name), clean[:n], 0o600); err != nil {
				t.Fatal(err)
			}
			refused := refusedOrEqual(t, d, want, fmt.Sprintf("%s cut to %d of %d bytes", kind, n, len(clean)))
			if !refused && kind != "log" {
				t.Errorf("%s cut to %d of %d bytes is accepted", kind, n, len(clean))
			}
		}
	}
}

func TestMissingFilesAreNoticed(t *testing.T) {
	dir := usedDir(t)
	names := damagedFiles(t, dir)
	for _, kind := range []string{"log", "id", "snapshot"} {
		d := copyDir(t, dir)
		gone := []string{names[kind]}
		if kind == "snapshot" {
			gone = append(gone, names["old snapshot"])
		}
		for _, name := range gone {
			if err := os.Remove(filepath.Join(d, name)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := OpenMember(testConfig(t, d), &listMachine{}); !errors.Is(err, ErrDamaged) {
			t.Errorf("without %s: %v", kind, err)
		}
	}
}

func TestADamagedMemberRejoinsWithOneCommand(t *testing.T) {
	ms := cluster(t, 3, nil)
	for i := range 30 {
		propose(t, fmt.Sprint(i), ms[0])
	}
	if err := ms[2].Close(); err != nil {
		t.Fatal(err)
	}
	cfg := again(ms[2])
	if err := os.Truncate(dbPath(cfg.Dir), 9000); err != nil {
		t.Fatal(err)
	}
	_, err := OpenMember(cfg, &listMachine{})
	mustContain(t, err, dbPath(cfg.Dir), "rejoin --dir "+cfg.Dir)
	if err := SetAside(cfg.Dir); err != nil {
		t.Fatal(err)
	}
	m := openTest(t, cfg)
	addVoter(t, ms[0], m)
	agree(t, ms[0], ms[1], m)
}

// corruptEntry flips a bit in the data of a log entry of a running member, on its disk.
func corruptEntry(t *testing.T, path, id string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	n := 0
	for at := bytes.Index(b, []byte(id)); at >= 0; n++ {
		if _, err := f.WriteAt([]byte{b[at] ^ 1}, int64(at)); err != nil {
			t.Fatal(err)
		}
		next := bytes.Index(b[at+1:], []byte(id))
		if next < 0 {
			return
		}
		at += 1 + next
	}
	if n == 0 {
		t.Fatalf("%q is not in %s", id, path)
	}
}

func TestALeaderThatFindsACorruptEntryQuarantinesItself(t *testing.T) {
	ms := cluster(t, 3, nil)
	propose(t, "the-corrupt-one", ms[0])
	index := ms[0].Applied()
	propose(t, "later", ms[0])
	agree(t, ms...)
	l := leaderOf(t, ms...)
	corruptEntry(t, dbPath(l.cfg.Dir), "the-corrupt-one")
	l.bolt.mu.Lock()
	l.bolt.cache.init() // as if it had been written long ago
	l.bolt.mu.Unlock()
	fresh := openTest(t, testConfig(t, t.TempDir())) // needs the whole log
	if err := l.AddLearner(t.Context(), fresh.ID(), fresh.Address()); err != nil && !errors.Is(err, ErrNotLeader) && !errors.Is(err, ErrOutcomeUnknown) && !errors.Is(err, ErrQuarantined) {
		t.Fatal(err)
	}
	eventually(t, "the leader is quarantined", func() bool { return l.Quarantined() != "" })
	mustContain(t, errors.New(l.Quarantined()), dbPath(l.cfg.Dir), fmt.Sprintf("log index %d", index))
	var rest []*member
	for _, m := range ms {
		if m != l {
			rest = append(rest, m)
		}
	}
	propose(t, "goes on", rest...)
	agree(t, append(rest, fresh)...)
	if fresh.View().has("the-corrupt-one") != 1 || fresh.View().has("uhe-corrupt-one") != 0 {
		t.Error("the learner did not get the true entry")
	}
	if _, err := l.Propose(t.Context(), tick("x")); !errors.Is(err, ErrQuarantined) {
		t.Errorf("propose: %v", err)
	}
	if _, err := l.ReadIndex(t.Context()); !errors.Is(err, ErrQuarantined) {
		t.Errorf("read index: %v", err)
	}
	if _, err := l.WaitIndex(t.Context(), 1); !errors.Is(err, ErrQuarantined) {
		t.Errorf("wait index: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	_, err := OpenMember(again(l), &listMachine{})
	if !errors.Is(err, ErrQuarantined) {
		t.Errorf("open: %v", err)
	}
	mustContain(t, err, "rejoin")
}

func TestACorruptEntryThatIsAboutToBeAppliedEndsTheMemberWithoutAPanic(t *testing.T) {
	dir := t.TempDir()
	m := bootstrapped(t, dir)
	propose(t, "the-corrupt-one", m)
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	m = openTest(t, testConfig(t, dir)) // alone: it applies its log when it is elected, in 0.3 s
	corruptEntry(t, dbPath(dir), "the-corrupt-one")
	eventually(t, "it is quarantined", func() bool { return m.Quarantined() != "" })
	mustContain(t, errors.New(m.Quarantined()), dbPath(dir), "log index")
	if m.View().has("uhe-corrupt-one") != 0 {
		t.Error("the corrupt entry was applied")
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

func TestALogThatIsTruncatedWhileItIsOpenQuarantinesTheMember(t *testing.T) {
	ms := cluster(t, 3, nil)
	for i := range 50 {
		propose(t, fmt.Sprint(strings.Repeat("long ", 500), i), ms...)
	}
	agree(t, ms...)
	f := ms[2]
	if err := os.Truncate(dbPath(f.cfg.Dir), 8192); err != nil {
		t.Fatal(err)
	}
	f.bolt.mu.Lock()
	f.bolt.cache.init()
	f.bolt.mu.Unlock()
	var l raft.Log
	first, _ := f.bolt.FirstIndex()
	if err := f.bolt.GetLog(first, &l); !errors.Is(err, ErrDamaged) {
		t.Errorf("reading: %v", err)
	}
	mustContain(t, errors.New(f.Quarantined()), dbPath(f.cfg.Dir))
	propose(t, "goes on", ms[:2]...)
}

func TestQuarantineByTheMajorityOutlastsARestartUntilARejoin(t *testing.T) {
	ms := cluster(t, 3, nil)
	l := leaderOf(t, ms...)
	l.Quarantine("its digest at entry 7 differs from the majority's")
	if err := l.Serving(); !errors.Is(err, ErrQuarantined) {
		t.Error(err)
	}
	var rest []*member
	for _, m := range ms {
		if m != l {
			rest = append(rest, m)
		}
	}
	began := time.Now()
	propose(t, "goes on", rest...)
	t.Logf("the others go on after %v", time.Since(began))
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	_, err := OpenMember(again(l), &listMachine{})
	mustContain(t, err, "digest at entry 7", "rejoin --dir "+l.cfg.Dir)
	if err := SetAside(l.cfg.Dir); err != nil {
		t.Fatal(err)
	}
	m := openTest(t, again(l))
	addVoter(t, leaderOf(t, rest...), m)
	agree(t, append(rest, m)...)
}

func TestAnEntryThatCanNotBeAppliedStopsTheMemberAndSaysWhich(t *testing.T) {
	m := bootstrapped(t, t.TempDir())
	propose(t, "fine", m)
	index := m.Applied() + 1
	_, err := m.Propose(t.Context(), opless())
	if !errors.Is(err, ErrQuarantined) {
		t.Errorf("propose: %v", err)
	}
	mustContain(t, err, fmt.Sprintf("entry %d", index), "no operation")
	eventually(t, "it refuses", func() bool { return m.Serving() != nil })
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if err := VerifyDir(m.cfg.Dir); err != nil {
		t.Errorf("the files are sound, a newer program may know the entry: %v", err)
	}
}

func TestADirectoryInUseIsRefusedButNotCalledDamaged(t *testing.T) {
	m := bootstrapped(t, t.TempDir())
	_, err := OpenMember(testConfig(t, m.cfg.Dir), &listMachine{})
	mustContain(t, err, "in use by another process")
	if errors.Is(err, ErrDamaged) || strings.Contains(err.Error(), "rejoin") {
		t.Errorf("it advises to throw away sound files: %v", err)
	}
	mustContain(t, SetAside(m.cfg.Dir), "in use by another process")
	propose(t, "undisturbed", m)
}

func TestALeaderThatCanNotReadItsSnapshotQuarantinesItself(t *testing.T) {
	ms := cluster(t, 3, func(c *Config) {
		c.Profile.TrailingLogs = 5
	})
	l := leaderOf(t, ms...)
	for i := range 30 {
		propose(t, fmt.Sprint(i), l)
	}
	if err := l.raft.Snapshot().Error(); err != nil {
		t.Fatal(err)
	}
	snaps, err := listSnapshots(filepath.Join(l.cfg.Dir, snapshotDir))
	if err != nil || len(snaps) != 1 {
		t.Fatal(snaps, err)
	}
	path := filepath.Join(l.cfg.Dir, snapshotDir, snaps[0].id()+snapSuffix)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{0xff, 0xfe}, 40); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	fresh := openTest(t, testConfig(t, t.TempDir()))
	_ = l.AddLearner(t.Context(), fresh.ID(), fresh.Address()) // it may be quarantined before this is committed
	eventually(t, "the leader is quarantined", func() bool { return l.Quarantined() != "" })
	mustContain(t, errors.New(l.Quarantined()), path)
	var rest []*member
	for _, m := range ms {
		if m != l {
			rest = append(rest, m)
		}
	}
	propose(t, "goes on", rest...)
}

func TestALogThatASnapshotHasReplacedIsDroppedAtTheStart(t *testing.T) {
	ms := cluster(t, 2, func(c *Config) { c.Profile.TrailingLogs = 5 })
	lead, f := ms[0], ms[1]
	for i := range 20 {
		propose(t, fmt.Sprint("a", i), lead)
	}
	agree(t, ms...)
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	// While the follower is away a snapshot is taken that it gets, but it dies before it has deleted its log.
	alone := bootstrapped(t, t.TempDir())
	for i := range 60 {
		propose(t, fmt.Sprint("b", i), alone)
	}
	if err := alone.raft.Snapshot().Error(); err != nil {
		t.Fatal(err)
	}
	if err := alone.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(filepath.Join(f.cfg.Dir, snapshotDir), os.DirFS(filepath.Join(alone.cfg.Dir, snapshotDir))); err != nil {
		t.Fatal(err)
	}
	f = openTest(t, again(f))
	if e, _ := f.bolt.ends(); e.last != 0 {
		t.Errorf("the log goes from %d to %d", e.first, e.last)
	}
	if f.View().has("b59") != 1 {
		t.Error("the snapshot was not restored")
	}
	next := f.raft.LastIndex() + 1
	if err := f.bolt.StoreLog(&raft.Log{Index: next, Term: 99}); err != nil {
		t.Errorf("entries after the snapshot are refused: %v", err)
	}
}
