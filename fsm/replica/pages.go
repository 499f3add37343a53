package replica

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"os"
)

// The layout of bolt's version 2 (little endian). Its pages have no checksums, and bolt follows what they say: a flipped bit in a
// header sends it round in circles, beyond the file, or through gigabytes. Every page that is in use is therefore
// looked at before bolt is.
//
//	page      id (8) ‖ flags (2) ‖ count (2) ‖ overflow (4) ‖ elements ‖ keys and values
//	meta      magic (4) ‖ version (4) ‖ page size (4) ‖ flags (4) ‖ root (8) ‖ sequence (8) ‖ freelist (8) ‖ pages (8) ‖ txid (8) ‖ FNV-1a (8)
//	branch    position from here (4) ‖ key size (4) ‖ page (8)
//	leaf      flags (4) ‖ position from here (4) ‖ key size (4) ‖ value size (4); flag 1: the value is a bucket
//	bucket    root (8) ‖ sequence (8) ‖ a leaf page, if root is 0
const (
	pageHeader   = 16
	metaBody     = 64
	elementSize  = 16
	bucketHeader = 16
	flagBranch   = 0x01
	flagLeaf     = 0x02
	flagBucket   = 0x01
	noFreelist   = ^uint64(0)
	maxPageSize  = 64 << 10
)

var le = binary.LittleEndian

// pageCheck walks the pages of a database file.
type pageCheck struct {
	f     *os.File
	size  int64  // of a page
	pages uint64 // in use
	seen  map[uint64]bool
}

// checkPages checks both meta pages, because bolt is content with one and would then silently go back to the state before the last
// transaction, and every page that can be reached. It also notices a truncated file.
func checkPages(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	m0, err := readMetaPage(f, 0)
	if err != nil {
		return err
	}
	c := &pageCheck{f: f, size: int64(le.Uint32(m0[8:])), seen: map[uint64]bool{0: true, 1: true}}
	if c.size < 512 || c.size > maxPageSize {
		return fmt.Errorf("its pages have %d bytes", c.size)
	}
	m1, err := readMetaPage(f, c.size)
	if err != nil {
		return err
	}
	meta := m0
	if le.Uint64(m1[48:]) > le.Uint64(m0[48:]) {
		meta = m1
	}
	c.pages = le.Uint64(meta[40:])
	if c.pages > uint64(st.Size())/uint64(c.size) {
		return fmt.Errorf("it has %d bytes, %d pages of %d bytes are in use", st.Size(), c.pages, c.size)
	}
	if freelist := le.Uint64(meta[32:]); freelist != noFreelist {
		if _, err := c.read(freelist); err != nil {
			return err
		}
	}
	return c.walk(le.Uint64(meta[16:]))
}

func readMetaPage(f io.ReaderAt, at int64) ([]byte, error) {
	b := make([]byte, pageHeader+metaBody)
	if _, err := f.ReadAt(b, at); err != nil {
		return nil, fmt.Errorf("a meta page can't be read: %w", err)
	}
	b = b[pageHeader:]
	sum := fnv.New64a()
	sum.Write(b[:56])
	if le.Uint32(b) != 0xED0CDAED || le.Uint32(b[4:]) != 2 || le.Uint64(b[56:]) != sum.Sum64() {
		return nil, errors.New("the checksum of a meta page differs")
	}
	return b, nil
}

// read reads a page with its overflow, and notes that it is in use; no page may be used twice.
func (c *pageCheck) read(id uint64) ([]byte, error) {
	if id >= c.pages {
		return nil, fmt.Errorf("page %d is referred to, there are %d", id, c.pages)
	}
	h := make([]byte, pageHeader)
	if _, err := c.f.ReadAt(h, int64(id)*c.size); err != nil {
		return nil, fmt.Errorf("page %d: %w", id, err)
	}
	n := uint64(le.Uint32(h[12:])) + 1
	if le.Uint64(h) != id || n > c.pages-id {
		return nil, fmt.Errorf("page %d says it is page %d with %d pages", id, le.Uint64(h), n)
	}
	for i := id; i < id+n; i++ {
		if c.seen[i] {
			return nil, fmt.Errorf("page %d is in use twice", i)
		}
		c.seen[i] = true
	}
	b := make([]byte, int64(n)*c.size)
	if _, err := c.f.ReadAt(b, int64(id)*c.size); err != nil {
		return nil, fmt.Errorf("page %d: %w", id, err)
	}
	return b, nil
}

// walk checks the tree under a page. It ends because no page is visited twice.
func (c *pageCheck) walk(id uint64) error {
	p, err := c.read(id)
	if err != nil {
		return err
	}
	if err := c.elements(p); err != nil {
		return fmt.Errorf("page %d: %w", id, err)
	}
	return nil
}

// elements checks the elements of a branch or leaf page and what is under them.
func (c *pageCheck) elements(p []byte) error {
	flags, count := le.Uint16(p[8:]), int(le.Uint16(p[10:]))
	if flags != flagBranch && flags != flagLeaf {
		return fmt.Errorf("its kind is %x", flags)
	}
	if pageHeader+count*elementSize > len(p) {
		return fmt.Errorf("it can't hold %d elements", count)
	}
	for i := range count {
		at := pageHeader + i*elementSize
		e := p[at:]
		if flags == flagBranch {
			if _, err := span(p, at, le.Uint32(e), le.Uint32(e[4:]), 0); err != nil {
				return err
			}
			if err := c.walk(le.Uint64(e[8:])); err != nil {
				return err
			}
			continue
		}
		v, err := span(p, at, le.Uint32(e[4:]), le.Uint32(e[8:]), le.Uint32(e[12:]))
		if err != nil {
			return err
		}
		switch le.Uint32(e) {
		case 0:
		case flagBucket:
			if err := c.bucket(v); err != nil {
				return err
			}
		default:
			return fmt.Errorf("element %d has the flags %x", i, le.Uint32(e))
		}
	}
	return nil
}

// span returns the value of an element whose key and value are at a distance from it.
func span(p []byte, at int, distance, key, value uint32) ([]byte, error) {
	begin := uint64(at) + uint64(distance) + uint64(key)
	if end := begin + uint64(value); end > uint64(len(p)) {
		return nil, errors.New("an element reaches beyond its page")
	}
	return p[begin : begin+uint64(value)], nil
}

func (c *pageCheck) bucket(v []byte) error {
	if len(v) < bucketHeader {
		return fmt.Errorf("a bucket has %d bytes", len(v))
	}
	if root := le.Uint64(v); root != 0 {
		return c.walk(root)
	}
	if len(v) < bucketHeader+pageHeader {
		return fmt.Errorf("a bucket within its parent has %d bytes", len(v))
	}
	return c.elements(v[bucketHeader:])
}
