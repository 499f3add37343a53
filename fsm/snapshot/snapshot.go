package snapshot

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/cespare/xxhash/v2"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

const (
	// Magic begins every snapshot; its last byte is the version of the container.
	Magic = "MUSTSNP\x01"
	// Format is the number of the record format, written into the header.
	Format uint32 = 1
	// blockSize is the payload size at which a block is closed: large enough that checksums cost nothing, small enough to
	// hold in memory.
	blockSize = 1 << 20
	// maxBlock bounds what a reader allocates for a block: a full block and the largest record (a blob of 4 MiB).
	maxBlock = 8 << 20

	blockHeader = 4 + 8
)

// ErrTruncated is in the chain of errors about a snapshot that ends before its trailer.
var ErrTruncated = errors.New("the snapshot is truncated")

// Writer writes a snapshot.
type Writer struct {
	w       io.Writer
	block   []byte
	records uint64
	began   bool
}

// NewWriter returns a writer of a snapshot to w.
func NewWriter(w io.Writer) *Writer {
	return &Writer{w: w, block: make([]byte, blockHeader, blockHeader+blockSize)}
}

// Write appends a record.
func (w *Writer) Write(r *logv1.Record) error {
	var err error
	w.block = protowire.AppendVarint(w.block, uint64(proto.Size(r)))
	if w.block, err = (proto.MarshalOptions{Deterministic: true}).MarshalAppend(w.block, r); err != nil {
		return fmt.Errorf("encode record %d: %w", w.records, err)
	}
	w.records++
	if len(w.block) >= blockHeader+blockSize {
		return w.flush()
	}
	return nil
}

// Close writes the trailer. It does not close the underlying writer.
func (w *Writer) Close() error {
	trailer := &logv1.SnapshotTrailer{Records: w.records}
	if err := w.Write(&logv1.Record{Item: &logv1.Record_Trailer{Trailer: trailer}}); err != nil {
		return err
	}
	return w.flush()
}

func (w *Writer) flush() error {
	if !w.began {
		if _, err := io.WriteString(w.w, Magic); err != nil {
			return fmt.Errorf("write the snapshot's beginning: %w", err)
		}
		w.began = true
	}
	payload := w.block[blockHeader:]
	if len(payload) == 0 {
		return nil
	}
	binary.LittleEndian.PutUint32(w.block, uint32(len(payload)))
	binary.LittleEndian.PutUint64(w.block[4:], xxhash.Sum64(payload))
	if _, err := w.w.Write(w.block); err != nil {
		return fmt.Errorf("write a block of the snapshot: %w", err)
	}
	w.block = w.block[:blockHeader]
	return nil
}

// Reader reads a snapshot.
type Reader struct {
	r       io.Reader
	buf     []byte
	block   []byte // rest of the present block
	blocks  int
	records uint64
	done    bool
}

// NewReader returns a reader of a snapshot from r.
func NewReader(r io.Reader) *Reader { return &Reader{r: r} }

// Read returns the next record. After the trailer, which it checks and does not return, it returns io.EOF.
func (r *Reader) Read() (*logv1.Record, error) {
	if r.done {
		return nil, io.EOF
	}
	if len(r.block) == 0 {
		if err := r.next(); err != nil {
			return nil, fmt.Errorf("snapshot block %d: %w", r.blocks, err)
		}
	}
	size, n := protowire.ConsumeVarint(r.block)
	if n < 0 || size > uint64(len(r.block)-n) {
		return nil, fmt.Errorf("snapshot block %d: record %d has an impossible length", r.blocks, r.records)
	}
	record := &logv1.Record{}
	if err := proto.Unmarshal(r.block[n:n+int(size)], record); err != nil {
		return nil, fmt.Errorf("snapshot record %d: %w", r.records, err)
	}
	r.block = r.block[n+int(size):]
	if trailer := record.GetTrailer(); trailer != nil {
		return nil, r.finish(trailer)
	}
	r.records++
	return record, nil
}

// finish checks the trailer and that nothing follows it.
func (r *Reader) finish(trailer *logv1.SnapshotTrailer) error {
	if trailer.Records != r.records {
		return fmt.Errorf("the snapshot's trailer counts %d records, %d were read", trailer.Records, r.records)
	}
	if len(r.block) > 0 {
		return fmt.Errorf("%d bytes follow the snapshot's trailer", len(r.block))
	}
	var extra [1]byte
	switch _, err := io.ReadFull(r.r, extra[:]); {
	case err == nil:
		return errors.New("something follows the snapshot's trailer")
	case errors.Is(err, io.EOF):
		r.done = true
		return io.EOF
	default:
		return fmt.Errorf("read after the snapshot's trailer: %w", err)
	}
}

// next reads and verifies a block.
func (r *Reader) next() error {
	if r.blocks == 0 {
		var magic [len(Magic)]byte
		if _, err := io.ReadFull(r.r, magic[:]); err != nil {
			return truncated(err)
		}
		if string(magic[:]) != Magic {
			return fmt.Errorf("this is not a snapshot that this program can read: it begins with %q", magic)
		}
	}
	r.blocks++
	var header [blockHeader]byte
	if _, err := io.ReadFull(r.r, header[:]); err != nil {
		return truncated(err)
	}
	size := binary.LittleEndian.Uint32(header[:])
	if size == 0 || size > maxBlock {
		return fmt.Errorf("impossible length %d", size)
	}
	if int(size) > cap(r.buf) {
		r.buf = make([]byte, size)
	}
	r.block = r.buf[:size]
	if _, err := io.ReadFull(r.r, r.block); err != nil {
		return truncated(err)
	}
	if xxhash.Sum64(r.block) != binary.LittleEndian.Uint64(header[4:]) {
		return errors.New("checksum mismatch: the snapshot is damaged")
	}
	return nil
}

func truncated(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("%w: %w", ErrTruncated, io.ErrUnexpectedEOF)
	}
	return err
}
