package replica

import (
	"bytes"
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
	names map[string]bool // of buckets
}

// buckets are those of raft-boltdb.
var buckets = []string{"conf", "logs"}

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
	c := &pageCheck{f: f, size: int64(le.Uint32(m0[8:])), seen: map[uint64]bool{0: true, 1: true}, names: map[string]bool{}}
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
	if err := c.walk(le.Uint64(meta[16:]), nil, nil); err != nil {
		return err
	}
	for _, name := range buckets {
		if !c.names[name] {
			return fmt.Errorf("it has no bucket %q: it was not written by this format of the program", name)
		}
	}
	return nil
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

// walk checks the tree under a page, whose keys are at least low and below high (nil: no bound). It ends because no page is visited twice.
func (c *pageCheck) walk(id uint64, low, high []byte) error {
	p, err := c.read(id)
	if err != nil {
		return err
	}
	if err := c.elements(p, low, high); err != nil {
		return fmt.Errorf("page %d: %w", id, err)
	}
	return nil
}

// elements checks the elements of a branch or leaf page and what is under them.
func (c *pageCheck) elements(p, low, high []byte) error {
	flags, count := le.Uint16(p[8:]), int(le.Uint16(p[10:]))
	if flags != flagBranch && flags != flagLeaf {
		return fmt.Errorf("its kind is %x", flags)
	}
	if pageHeader+count*elementSize > len(p) {
		return fmt.Errorf("it can't hold %d elements", count)
	}
	keys, values := make([][]byte, count), make([][]byte, count)
	for i := range count {
		at := pageHeader + i*elementSize
		e := p[at:]
		distance, key, value := le.Uint32(e), le.Uint32(e[4:]), uint32(0)
		if flags == flagLeaf {
			distance, key, value = le.Uint32(e[4:]), le.Uint32(e[8:]), le.Uint32(e[12:])
		}
		begin := uint64(at) + uint64(distance)
		end := begin + uint64(key) + uint64(value)
		if end > uint64(len(p)) {
			return errors.New("an element reaches beyond its page")
		}
		keys[i], values[i] = p[begin:begin+uint64(key)], p[begin+uint64(key):end]
		if i > 0 && bytes.Compare(keys[i-1], keys[i]) >= 0 || bytes.Compare(keys[i], low) < 0 || high != nil && bytes.Compare(keys[i], high) >= 0 {
			return fmt.Errorf("the key of element %d is out of order", i)
		}
	}
	for i := range count {
		e := p[pageHeader+i*elementSize:]
		if err := c.under(flags, e, keys, values[i], i, high); err != nil {
			return err
		}
	}
	return nil
}

// under checks what is under element i.
func (c *pageCheck) under(flags uint16, e []byte, keys [][]byte, value []byte, i int, high []byte) error {
	if flags == flagBranch {
		if i+1 < len(keys) {
			high = keys[i+1]
		}
		return c.walk(le.Uint64(e[8:]), keys[i], high)
	}
	switch le.Uint32(e) {
	case 0:
		return nil
	case flagBucket:
		c.names[string(keys[i])] = true
		return c.bucket(value)
	}
	return fmt.Errorf("element %d has the flags %x", i, le.Uint32(e))
}

func (c *pageCheck) bucket(v []byte) error {
	if len(v) < bucketHeader {
		return fmt.Errorf("a bucket has %d bytes", len(v))
	}
	if root := le.Uint64(v); root != 0 {
		return c.walk(root, nil, nil)
	}
	if len(v) < bucketHeader+pageHeader {
		return fmt.Errorf("a bucket within its parent has %d bytes", len(v))
	}
	return c.elements(v[bucketHeader:], nil, nil)
}
