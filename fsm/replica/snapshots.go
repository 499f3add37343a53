package replica

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"hash/crc64"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/hashicorp/raft"
)

// A snapshot is one file, so that its description can't be separated from its state:
//
//	"MUSTSNP1" ‖ state ‖ description (JSON) ‖ len(description) (4) ‖ crc32c(description, len) (4) ‖ "MUSTEND1"
//
// The description has the length and the CRC-64 of the state. The file gets its name when all of it is on the disk.
const (
	snapMagic  = "MUSTSNP1"
	snapEnd    = "MUSTEND1"
	snapSuffix = ".snap"
	snapTemp   = ".tmp"
	snapTail   = 4 + 4 + len(snapEnd)
	maxSnapDoc = 1 << 20
)

var crc64Table = crc64.MakeTable(crc64.ECMA)

type snapDescription struct {
	Index              uint64
	Term               uint64
	Configuration      raft.Configuration
	ConfigurationIndex uint64
	Size               int64
	CRC64              uint64
}

func (d *snapDescription) id() string { return fmt.Sprintf("%d-%d", d.Term, d.Index) }

func (d *snapDescription) meta() *raft.SnapshotMeta {
	return &raft.SnapshotMeta{Version: 1, ID: d.id(), Index: d.Index, Term: d.Term, Configuration: d.Configuration,
		ConfigurationIndex: d.ConfigurationIndex, Size: d.Size}
}

// snapStore keeps snapshots in a directory.
type snapStore struct {
	dir    string
	space  *space
	onFail func(error)   // called when a snapshot turns out to be damaged
	newest atomic.Uint64 // last index of the newest snapshot, as far as listed or written
}

func newSnapStore(dir string, sp *space, onFail func(error)) (*snapStore, error) {
	names, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	for _, n := range names {
		if strings.HasSuffix(n.Name(), snapTemp) { // never finished
			if err := os.Remove(filepath.Join(dir, n.Name())); err != nil {
				return nil, fmt.Errorf("remove an unfinished snapshot: %w", err)
			}
		}
	}
	return &snapStore{dir: dir, space: sp, onFail: onFail}, nil
}

// Create begins a snapshot.
func (s *snapStore) Create(version raft.SnapshotVersion, index, term uint64, c raft.Configuration, cIndex uint64, _ raft.Transport) (raft.SnapshotSink, error) {
	if version != 1 {
		return nil, fmt.Errorf("snapshot version %d is unknown to this program", version)
	}
	d := snapDescription{Index: index, Term: term, Configuration: c, ConfigurationIndex: cIndex}
	f, err := os.CreateTemp(s.dir, d.id()+"-*"+snapTemp)
	if err != nil {
		return nil, fmt.Errorf("begin a snapshot: %w", err)
	}
	k := &snapSink{store: s, d: d, f: f, w: bufio.NewWriterSize(f, 1<<20), sum: crc64.New(crc64Table)}
	if _, err := k.w.WriteString(snapMagic); err != nil {
		return nil, errors.Join(fmt.Errorf("begin a snapshot: %w", err), k.Cancel())
	}
	return k, nil
}

// List describes the snapshots, newest first. A damaged one is an error: an older one must not take its place unnoticed.
func (s *snapStore) List() ([]*raft.SnapshotMeta, error) {
	all, err := listSnapshots(s.dir)
	if err != nil {
		s.onFail(err)
		return nil, err
	}
	var out []*raft.SnapshotMeta
	for _, d := range all {
		out = append(out, d.meta())
	}
	s.note(all)
	return out, nil
}

func (s *snapStore) note(all []*snapDescription) {
	if len(all) > 0 {
		s.newest.Store(all[0].Index)
	}
}

// Open verifies all of a snapshot and then reads its state.
func (s *snapStore) Open(id string) (*raft.SnapshotMeta, io.ReadCloser, error) {
	path := filepath.Join(s.dir, id+snapSuffix)
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, fmt.Errorf("open a snapshot: %w", err)
	}
	d, err := verifySnapshot(f)
	if err == nil && d.id() != id {
		err = fmt.Errorf("it describes snapshot %s", d.id())
	}
	if err != nil {
		err = errors.Join(&DamageError{Path: path, What: err.Error()}, f.Close())
		s.onFail(err)
		return nil, nil, err
	}
	if _, err := f.Seek(int64(len(snapMagic)), io.SeekStart); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("read %s: %w", path, err), f.Close())
	}
	return d.meta(), &snapReader{Reader: bufio.NewReaderSize(io.LimitReader(f, d.Size), 1<<20), f: f}, nil
}

type snapReader struct {
	io.Reader
	f *os.File
}

func (r *snapReader) Close() error { return r.f.Close() }

// listSnapshots reads the descriptions in a directory, newest first.
func listSnapshots(dir string) ([]*snapDescription, error) {
	names, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	var out []*snapDescription
	for _, n := range names {
		if !strings.HasSuffix(n.Name(), snapSuffix) {
			continue
		}
		path := filepath.Join(dir, n.Name())
		d, err := describeFile(path)
		if err != nil {
			if errors.Is(err, os.ErrNotExist) {
				continue // reaped meanwhile
			}
			return nil, &DamageError{Path: path, What: err.Error()}
		}
		if d.id()+snapSuffix != n.Name() {
			return nil, &DamageError{Path: path, What: "it describes snapshot " + d.id()}
		}
		out = append(out, d)
	}
	slices.SortFunc(out, func(a, b *snapDescription) int {
		return cmp.Or(cmp.Compare(b.Term, a.Term), cmp.Compare(b.Index, a.Index))
	})
	return out, nil
}

func describeFile(path string) (*snapDescription, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return describe(f)
}

// describe reads the description at the end of a snapshot and verifies it, and the length of the file.
func describe(f *os.File) (*snapDescription, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	tail := make([]byte, snapTail)
	if st.Size() < int64(len(snapMagic)+snapTail) {
		return nil, fmt.Errorf("it has only %d bytes", st.Size())
	}
	if _, err := f.ReadAt(tail, st.Size()-int64(snapTail)); err != nil {
		return nil, err
	}
	if string(tail[8:]) != snapEnd {
		return nil, errors.New("its end is missing")
	}
	n := int64(binary.BigEndian.Uint32(tail))
	at := st.Size() - int64(snapTail) - n
	if n > maxSnapDoc || at < int64(len(snapMagic)) {
		return nil, errors.New("its description has an impossible length")
	}
	doc := make([]byte, n, n+4)
	if _, err := f.ReadAt(doc, at); err != nil {
		return nil, err
	}
	if crc32.Checksum(append(doc, tail[:4]...), castagnoli) != binary.BigEndian.Uint32(tail[4:]) {
		return nil, errors.New("the checksum of its description differs")
	}
	d := new(snapDescription)
	if err := json.Unmarshal(doc, d); err != nil {
		return nil, fmt.Errorf("its description: %w", err)
	}
	if d.Size != at-int64(len(snapMagic)) {
		return nil, fmt.Errorf("its state has %d bytes, the description says %d", at-int64(len(snapMagic)), d.Size)
	}
	return d, nil
}

// verifySnapshot reads all of a snapshot and compares the checksums.
func verifySnapshot(f *os.File) (*snapDescription, error) {
	d, err := describe(f)
	if err != nil {
		return nil, err
	}
	magic := make([]byte, len(snapMagic))
	if _, err := f.ReadAt(magic, 0); err != nil {
		return nil, err
	}
	if string(magic) != snapMagic {
		return nil, errors.New("its beginning is not that of a snapshot")
	}
	sum := crc64.New(crc64Table)
	if _, err := io.Copy(sum, io.NewSectionReader(f, int64(len(snapMagic)), d.Size)); err != nil {
		return nil, err
	}
	if sum.Sum64() != d.CRC64 {
		return nil, errors.New("the checksum of its state differs")
	}
	return d, nil
}

// snapSink writes a snapshot.
type snapSink struct {
	store *snapStore
	d     snapDescription
	f     *os.File
	w     *bufio.Writer
	sum   hash.Hash64
	done  bool
}

// ID of the snapshot.
func (k *snapSink) ID() string { return k.d.id() }

// Write appends to the state.
func (k *snapSink) Write(p []byte) (int, error) {
	n, err := k.w.Write(p)
	k.sum.Write(p[:n])
	k.d.Size += int64(n)
	if err != nil && noSpace(err) {
		k.store.space.markFull("a snapshot found no space")
	}
	return n, err
}

// Cancel removes what was written.
func (k *snapSink) Cancel() error {
	if k.done {
		return nil
	}
	k.done = true
	return errors.Join(k.f.Close(), os.Remove(k.f.Name()))
}

// Close makes the snapshot durable and gives it its name, then removes older ones.
func (k *snapSink) Close() error {
	if k.done {
		return nil
	}
	if err := k.finish(); err != nil {
		if noSpace(err) {
			k.store.space.markFull("a snapshot found no space")
		}
		return errors.Join(fmt.Errorf("finish snapshot %s: %w", k.ID(), err), k.Cancel())
	}
	k.done = true
	path := filepath.Join(k.store.dir, k.ID()+snapSuffix)
	if err := os.Rename(k.f.Name(), path); err != nil {
		return fmt.Errorf("finish snapshot %s: %w", k.ID(), err)
	}
	if err := syncDir(k.store.dir); err != nil {
		return fmt.Errorf("finish snapshot %s: %w", k.ID(), err)
	}
	all, err := listSnapshots(k.store.dir)
	if err != nil {
		return err
	}
	k.store.note(all)
	for _, old := range all[min(len(all), keptSnapshots):] {
		if err := os.Remove(filepath.Join(k.store.dir, old.id()+snapSuffix)); err != nil {
			return fmt.Errorf("remove an old snapshot: %w", err)
		}
	}
	return nil
}

func (k *snapSink) finish() error {
	k.d.CRC64 = k.sum.Sum64()
	doc, err := json.Marshal(&k.d)
	if err != nil {
		return err
	}
	length := binary.BigEndian.AppendUint32(nil, uint32(len(doc)))
	end := append(doc, length...)
	end = binary.BigEndian.AppendUint32(end, crc32.Checksum(end, castagnoli))
	if _, err := k.w.Write(append(end, snapEnd...)); err != nil {
		return err
	}
	if err := k.w.Flush(); err != nil {
		return err
	}
	if err := k.f.Sync(); err != nil {
		return err
	}
	return k.f.Close()
}

// syncDir makes the names in a directory durable.
func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
