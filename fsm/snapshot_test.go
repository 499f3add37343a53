package fsm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cespare/xxhash/v2"
	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"

	"github.com/muster-hpc/muster/fsm/snapshot"
)

// walked returns a machine after a walk.
func walked(t testing.TB, seed int64) *walk {
	w := newWalk(t, seed)
	for range 300 {
		cmd, minted := w.next()
		if cmd.RequestId != "" {
			w.sent = append(w.sent, sent{cmd, minted})
		}
		w.entry(cmd)
	}
	w.do(alice, &logv1.PutBlob{Piece: &apiv1.PutBlobRequest{Sha256: hashOf([]byte("half")), Size: 4, Data: []byte("ha")}})
	w.must(member, &logv1.AnnounceMember{Member: &apiv1.Member{Id: "m1", Name: "c1", SupportedLevel: MaxLevel}})
	w.must(member, &logv1.Prune{JobIds: []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9}})
	return w
}

func TestDamagedSnapshotsAreRefusedAndChangeNothing(t *testing.T) {
	whole := snapshotOf(t, walked(t, 1).check())
	r := newRig(t)
	r.boot()
	before := r.m.Digest()
	try := func(name string, damaged []byte) {
		if err := r.m.Restore(bytes.NewReader(damaged)); err == nil {
			t.Errorf("%s: restored", name)
		}
		if r.m.Digest() != before {
			t.Fatalf("%s: the state changed", name)
		}
	}
	for i := 0; i < len(whole); i += 1 + len(whole)/200 {
		flipped := bytes.Clone(whole)
		flipped[i] ^= 1 << (i % 8)
		try(fmt.Sprintf("bit flipped at %d", i), flipped)
		try(fmt.Sprintf("cut off at %d", i), whole[:i])
	}
	try("something behind it", append(bytes.Clone(whole), 0))
	try("twice", append(bytes.Clone(whole), whole...))
	if err := r.m.Restore(bytes.NewReader(whole[:len(whole)/2])); !errors.Is(err, snapshot.ErrTruncated) {
		t.Errorf("half a snapshot: %v", err)
	}
	if err := r.m.Restore(bytes.NewReader(whole)); err != nil {
		t.Errorf("the whole one: %v", err)
	}
}

// Damage under valid checksums: records left out, doubled or changed must be found by the digest and the checks of records.
func TestSnapshotsWithOtherRecordsAreRefused(t *testing.T) {
	whole := snapshotOf(t, walked(t, 2).check())
	var records []*logv1.Record
	reader := snapshot.NewReader(bytes.NewReader(whole))
	for {
		record, err := reader.Read()
		if err != nil {
			break
		}
		records = append(records, record)
	}
	write := func(records []*logv1.Record) []byte {
		var b bytes.Buffer
		w := snapshot.NewWriter(&b)
		for _, record := range records {
			if err := w.Write(record); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	if !bytes.Equal(write(records), whole) {
		t.Fatal("rewriting does not give the same bytes")
	}
	restore := func(b []byte) error { return New().Restore(bytes.NewReader(b)) }
	kinds := make(map[string]bool)
	for i, record := range records {
		kind := fmt.Sprintf("%T", record.Item)
		kinds[kind] = true
		without := append(append([]*logv1.Record{}, records[:i]...), records[i+1:]...)
		if restore(write(without)) == nil {
			t.Errorf("restored without record %d (%s)", i, kind)
		}
		twice := append(append([]*logv1.Record{}, records...), record)
		if restore(write(twice)) == nil {
			t.Errorf("restored with record %d (%s) twice", i, kind)
		}
		changed := proto.Clone(record).(*logv1.Record)
		switch item := changed.Item.(type) {
		case *logv1.Record_Header:
			item.Header.Digest++
		case *logv1.Record_Cluster:
			item.Cluster.NextJobId++
		case *logv1.Record_Job:
			item.Job.Status.Restarts++
		case *logv1.Record_Attempt:
			item.Attempt.TimeLimitS++
		case *logv1.Record_Step:
			item.Step.NumTasks++
		case *logv1.Record_Node:
			item.Node.LaunchFailures++
		case *logv1.Record_Member:
			item.Member.Version += "x"
		case *logv1.Record_Blob:
			item.Blob.Data = append(bytes.Clone(item.Blob.Data[1:]), item.Blob.Data[0])
		case *logv1.Record_Request:
			item.Request.Result.StepId++
		case *logv1.Record_Tombstone:
			item.Tombstone.Key++
		}
		altered := append([]*logv1.Record{}, records...)
		altered[i] = changed
		if restore(write(altered)) == nil {
			t.Errorf("restored with record %d (%s) changed", i, kind)
		}
		unknown := proto.Clone(record).(*logv1.Record)
		unknown.ProtoReflect().SetUnknown(unknownField(nil))
		altered[i] = unknown
		if i > 0 && restore(write(altered)) == nil {
			t.Errorf("restored with an unknown field in record %d (%s)", i, kind)
		}
	}
	if len(kinds) != 10 {
		t.Errorf("the snapshot has %d kinds of records, the test wants all 10: %v", len(kinds), kinds)
	}
}

func TestStateOfAHigherLevelIsNotRestored(t *testing.T) {
	r := newRig(t)
	r.boot()
	r.m.s.SetLevel(MaxLevel + 1)
	b := snapshotOf(t, r.m.Publish())
	if err := New().Restore(bytes.NewReader(b)); err == nil {
		t.Error("restored")
	}
}

// The log in testdata was recorded by the first program of its level. Whoever changes what an entry does, or how the state is
// written, at that level, breaks this test: that is a new level.
func TestRecordedLogGivesTheRecordedState(t *testing.T) {
	dirs, err := filepath.Glob("testdata/level*")
	if err != nil {
		t.Fatal(err)
	}
	if newest := fmt.Sprintf("testdata/level%d", MaxLevel); *update && !slices.Contains(dirs, newest) {
		record(t, newest)
		dirs = append(dirs, newest)
	}
	if len(dirs) != int(MaxLevel) {
		t.Fatalf("%d recordings for %d levels; to record a new level run go test ./fsm -run Recorded -update", len(dirs), MaxLevel)
	}
	for _, dir := range dirs {
		entries, snapshot, digest := readRecording(t, dir)
		m := New()
		for i, e := range entries {
			if _, err := m.Apply(uint64(i)+1, 1, e); err != nil {
				t.Fatalf("%s: %v", dir, err)
			}
		}
		v := m.Publish()
		if got := fmt.Sprintf("%016x", v.Digest()); got != digest {
			t.Errorf("%s: the log gives digest %s, recorded %s", dir, got, digest)
		}
		if !bytes.Equal(snapshotOf(t, v), snapshot) {
			t.Errorf("%s: the log gives another snapshot", dir)
		}
		if err := CheckInvariants(v); err != nil {
			t.Errorf("%s: %v", dir, err)
		}
		restored := New()
		if err := restored.Restore(bytes.NewReader(snapshot)); err != nil {
			t.Errorf("%s: %v", dir, err)
		} else if got := fmt.Sprintf("%016x", restored.Digest()); got != digest {
			t.Errorf("%s: the snapshot gives digest %s, recorded %s", dir, got, digest)
		}
	}
}

// record writes a recording: the entries, each after its length as four bytes, big endian; the snapshot; the digest.
func record(t *testing.T, dir string) {
	w := walked(t, 4711)
	r := w.rig
	job := r.submit(alice, usualSpecForRecording())
	r.join("n9", 8, 4)
	r.start(job, r.placement(3, 1, r.m.s.NodeByName("n9").Number))
	r.must(alice, &logv1.CreateStep{JobId: job, Spec: &apiv1.StepSpec{Name: "s", Args: []string{"s"}, WorkDir: "/", Resources: &apiv1.ResourceRequest{Ntasks: 2}}})
	r.must(alice, &logv1.CancelJobs{JobIds: []uint32{job}, Signal: 10, BatchOnly: true})
	v := r.check()
	var log bytes.Buffer
	for _, e := range r.log {
		log.Write(binary.BigEndian.AppendUint32(nil, uint32(len(e))))
		log.Write(e)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{
		"log": log.Bytes(), "snapshot": snapshotOf(t, v), "digest": fmt.Appendf(nil, "%016x\n", v.Digest()),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func usualSpecForRecording() *apiv1.JobSpec {
	spec := batchSpec()
	spec.Comment, spec.Args, spec.TimeLimitS, spec.Requeue = "recorded", []string{"a", "b"}, 600, true
	spec.TaskOptions = &apiv1.TaskOptions{Label: true}
	return spec
}

func readRecording(t testing.TB, dir string) (entries [][]byte, snapshot []byte, digest string) {
	read := func(name string) []byte {
		content, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return content
	}
	for log := read("log"); len(log) > 0; {
		n := binary.BigEndian.Uint32(log)
		entries = append(entries, log[4:4+n])
		log = log[4+n:]
	}
	return entries, read("snapshot"), string(bytes.TrimSpace(read("digest")))
}

// FuzzApply: whatever decodes is applied without a panic, and the state stays right; whatever does not changes nothing.
func FuzzApply(f *testing.F) {
	w := walked(f, 3)
	state := snapshotOf(f, w.check())
	for _, e := range w.log {
		f.Add(e)
	}
	f.Fuzz(func(t *testing.T, entry []byte) {
		m := New()
		if err := m.Restore(bytes.NewReader(state)); err != nil {
			t.Fatal(err)
		}
		before := m.Digest()
		_, err := m.Apply(1<<40, 1, entry)
		if err != nil && m.Digest() != before {
			t.Fatalf("a part was applied: %v", err)
		}
		if err := CheckInvariants(m.Publish()); err != nil {
			t.Fatal(err)
		}
	})
}

// FuzzRestore: no input makes a restore panic or give a state that does not hold together. The input is the payload of a block, so
// that the checksum does not stop everything at the door.
func FuzzRestore(f *testing.F) {
	const header = len(snapshot.Magic) + 12
	f.Add(snapshotOf(f, walked(f, 5).check())[header:])
	r := newRig(f)
	r.boot()
	f.Add(snapshotOf(f, r.m.Publish())[header:])
	f.Fuzz(func(t *testing.T, payload []byte) {
		content := binary.LittleEndian.AppendUint32([]byte(snapshot.Magic), uint32(len(payload)))
		content = binary.LittleEndian.AppendUint64(content, xxhash.Sum64(payload))
		m := New()
		if err := m.Restore(bytes.NewReader(append(content, payload...))); err == nil {
			if err := CheckInvariants(m.Publish()); err != nil {
				t.Fatal(err)
			}
		}
	})
}
