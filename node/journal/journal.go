package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

const (
	header = "MUSTERJ1"
	// frame is the length of length and checksum in front of each record.
	frame = 8
	// maxRecord bounds one record: a report with its exits.
	maxRecord = 1 << 20
	// compactAbove is the size from which the file is written anew once most of it is acknowledged.
	compactAbove = 256 << 10
)

// ErrNoSpace is wrapped by errors of Append and Reserve when the file system is full.
var ErrNoSpace = errors.New("no space left on the node's disk")

var table = crc32.MakeTable(crc32.Castagnoli)

// File is what the journal needs of an *os.File.
type File interface {
	io.ReaderAt
	io.WriterAt
	Truncate(size int64) error
	Sync() error
	Close() error
	Fd() uintptr
}

// Journal is one agent's journal. It is safe for concurrent use.
type Journal struct {
	path string
	open func(path string, flags int) (File, error)

	mu      sync.Mutex
	f       File
	size    int64
	next    uint64
	waiting []*logv1.TaskReport
	// bytes is the encoded size of waiting, with frames.
	bytes int64
	// broken is why nothing can be appended any more: a failed append could not be undone.
	broken error
}

// Damage says what was wrong with the end of a journal that was opened.
type Damage struct {
	// Offset is where the file is good up to; Bytes is what was cut off behind it.
	Offset, Bytes int64
	// Why is a short phrase.
	Why string
}

// Open opens or makes the journal at path and reads what waits. Damage is non-nil if the tail was cut off.
func Open(path string) (*Journal, *Damage, error) { return openWith(path, openFile) }

func openFile(path string, flags int) (File, error) {
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		return nil, err
	}
	return f, nil
}

func openWith(path string, open func(string, int) (File, error)) (*Journal, *Damage, error) {
	data, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("read the journal: %w", err)
	}
	j := &Journal{path: path, open: open, next: 1}
	good, why := j.parse(data)
	var damage *Damage
	if cut := int64(len(data)) - good; cut > 0 {
		damage = &Damage{Offset: good, Bytes: cut, Why: why}
	}
	if j.f, err = open(path, os.O_RDWR|os.O_CREATE); err != nil {
		return nil, nil, fmt.Errorf("open the journal: %w", err)
	}
	if err := j.begin(good, damage != nil); err != nil {
		j.f.Close()
		return nil, nil, fmt.Errorf("repair the journal %s: %w", path, noSpace(err))
	}
	return j, damage, nil
}

// begin makes the file ready to be appended to at offset good.
func (j *Journal) begin(good int64, cut bool) error {
	if cut {
		if err := j.f.Truncate(good); err != nil {
			return err
		}
	}
	j.size = good
	if good == 0 {
		if _, err := j.f.WriteAt([]byte(header), 0); err != nil {
			return err
		}
		j.size = int64(len(header))
	}
	if good == 0 || cut {
		if err := j.f.Sync(); err != nil {
			return err
		}
		return syncDir(filepath.Dir(j.path))
	}
	return nil
}

// parse takes in the records of data and returns up to where they are good, and why not further.
func (j *Journal) parse(data []byte) (good int64, why string) {
	if len(data) == 0 {
		return 0, ""
	}
	if len(data) < len(header) || string(data[:len(header)]) != header {
		return 0, "it does not begin like a journal"
	}
	at := len(header)
	for at < len(data) {
		report, n, why := decode(data[at:])
		if why != "" {
			return int64(at), why
		}
		at += n
		j.next = max(j.next, report.JournalId+1)
		if report.Event == nil { // an acknowledgement
			j.drop(report.JournalId)
			continue
		}
		j.waiting = append(j.waiting, report)
		j.bytes += int64(n)
	}
	return int64(at), ""
}

func decode(data []byte) (report *logv1.TaskReport, n int, why string) {
	if len(data) < frame {
		return nil, 0, "the last record is torn"
	}
	length := binary.BigEndian.Uint32(data)
	if length == 0 || length > maxRecord {
		return nil, 0, "a record has an impossible length"
	}
	if int(length) > len(data)-frame {
		return nil, 0, "the last record is torn"
	}
	payload := data[frame : frame+int(length)]
	if crc32.Checksum(payload, table) != binary.BigEndian.Uint32(data[4:]) {
		return nil, 0, "a record's checksum is wrong"
	}
	report = new(logv1.TaskReport)
	if err := proto.Unmarshal(payload, report); err != nil {
		return nil, 0, "a record cannot be decoded"
	}
	return report, frame + int(length), ""
}

func encode(report *logv1.TaskReport) ([]byte, error) {
	out := make([]byte, frame, frame+proto.Size(report))
	out, err := proto.MarshalOptions{}.MarshalAppend(out, report)
	if err != nil {
		return nil, fmt.Errorf("encode a report: %w", err)
	}
	if len(out)-frame > maxRecord {
		return nil, fmt.Errorf("a report has %d bytes; the limit is %d", len(out)-frame, maxRecord)
	}
	binary.BigEndian.PutUint32(out, uint32(len(out)-frame))
	binary.BigEndian.PutUint32(out[4:], crc32.Checksum(out[frame:], table))
	return out, nil
}

// Append gives the report its number and puts it on disk. The report must have an event and must not be modified
// afterwards. ErrNoSpace if the disk is full: nothing was written, and it may be tried again.
func (j *Journal) Append(report *logv1.TaskReport) (uint64, error) {
	if report.Event == nil {
		return 0, errors.New("append to the journal: the report has no event")
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	report.JournalId = j.next
	n, err := j.write(report)
	if err != nil {
		report.JournalId = 0
		return 0, fmt.Errorf("append to the journal: %w", err)
	}
	j.next++
	j.waiting = append(j.waiting, report)
	j.bytes += n
	return report.JournalId, nil
}

// write appends one record with fsync. If that fails the file is cut back to what it was.
func (j *Journal) write(report *logv1.TaskReport) (int64, error) {
	if j.broken != nil {
		return 0, j.broken
	}
	record, err := encode(report)
	if err != nil {
		return 0, err
	}
	_, err = j.f.WriteAt(record, j.size)
	if err == nil {
		err = j.f.Sync()
	}
	if err != nil {
		if undo := j.f.Truncate(j.size); undo != nil {
			j.broken = fmt.Errorf("a failed write could not be undone: %w", errors.Join(err, undo))
		}
		return 0, noSpace(err)
	}
	j.size += int64(len(record))
	return int64(len(record)), nil
}

// Waiting returns the first reports that are not acknowledged, oldest first, at most n. They must not be modified.
func (j *Journal) Waiting(n int) []*logv1.TaskReport {
	j.mu.Lock()
	defer j.mu.Unlock()
	return append([]*logv1.TaskReport(nil), j.waiting[:min(n, len(j.waiting))]...)
}

// Count returns how many reports wait.
func (j *Journal) Count() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.waiting)
}

// IsWaiting reports whether the report with this number waits.
func (j *Journal) IsWaiting(id uint64) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.waiting) > 0 && id >= j.waiting[0].JournalId && id <= j.waiting[len(j.waiting)-1].JournalId
}

// Acknowledge forgets the reports up to this number and returns them. That is written lazily: after a crash they may be
// reported once more, which changes nothing. An error means that the journal could not be made smaller; nothing is
// lost, and the next acknowledgement tries again.
func (j *Journal) Acknowledge(id uint64) ([]*logv1.TaskReport, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	dropped := j.drop(id)
	if len(dropped) == 0 {
		return nil, nil
	}
	if len(j.waiting) == 0 && j.size > int64(len(header)) || j.size > compactAbove && j.size > 4*j.bytes {
		if err := j.compact(); err != nil {
			return dropped, fmt.Errorf("compact the journal: %w", noSpace(err))
		}
	}
	return dropped, nil
}

func (j *Journal) drop(id uint64) []*logv1.TaskReport {
	n := 0
	for n < len(j.waiting) && j.waiting[n].JournalId <= id {
		j.bytes -= int64(frame + proto.Size(j.waiting[n]))
		n++
	}
	dropped := j.waiting[:n:n]
	j.waiting = j.waiting[n:]
	return dropped
}

// compact leaves only what waits, and the highest number as an acknowledgement, so that numbers go on rising. With
// nothing waiting and a small file the acknowledgement alone is appended without fsync: a lost one is harmless.
func (j *Journal) compact() error {
	mark, err := encode(&logv1.TaskReport{JournalId: j.acknowledged()})
	if err != nil {
		return err
	}
	if j.size <= compactAbove && j.broken == nil {
		if _, err := j.f.WriteAt(mark, j.size); err != nil {
			return errors.Join(err, j.f.Truncate(j.size))
		}
		j.size += int64(len(mark))
		return nil
	}
	content := append([]byte(header), mark...)
	for _, report := range j.waiting {
		record, err := encode(report)
		if err != nil {
			return err
		}
		content = append(content, record...)
	}
	return j.replace(content)
}

// acknowledged is the highest number that is known to be acknowledged.
func (j *Journal) acknowledged() uint64 {
	if len(j.waiting) > 0 {
		return j.waiting[0].JournalId - 1
	}
	return j.next - 1
}

// replace puts a new file in the place of the old one.
func (j *Journal) replace(content []byte) error {
	temporary := j.path + ".new"
	f, err := j.open(temporary, os.O_RDWR|os.O_CREATE|os.O_TRUNC)
	if err != nil {
		return err
	}
	if _, err = f.WriteAt(content, 0); err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = os.Rename(temporary, j.path)
	}
	if err != nil {
		return errors.Join(err, f.Close(), os.Remove(temporary))
	}
	old := j.f
	j.f, j.size, j.broken = f, int64(len(content)), nil
	return errors.Join(syncDir(filepath.Dir(j.path)), old.Close())
}

// Reserve sets space aside on the disk for reports of so many bytes beyond those written, so that work which begins
// now can be reported even if the disk fills up. ErrNoSpace if there is none. File systems that cannot reserve are
// taken at their word.
func (j *Journal) Reserve(bytes int64) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.broken != nil {
		return fmt.Errorf("reserve space for the journal: %w", j.broken)
	}
	err := unix.Fallocate(int(j.f.Fd()), unix.FALLOC_FL_KEEP_SIZE, j.size, bytes)
	if err == nil || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		return nil
	}
	return fmt.Errorf("reserve %d bytes for the journal: %w", bytes, noSpace(err))
}

// Close closes the file.
func (j *Journal) Close() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := j.f.Close(); err != nil {
		return fmt.Errorf("close the journal: %w", err)
	}
	return nil
}

func noSpace(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("%w: %w", ErrNoSpace, err)
	}
	return err
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
