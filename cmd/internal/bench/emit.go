package bench

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"strconv"
)

// lineLength is the length of the lines that the tasks of "output" write, with their end.
const lineLength = 1024

// filler is what their lines end with.
var filler = bytes.Repeat([]byte("0123456789abcdefghijklmnopqrstuvwxyz"), lineLength/36+2) // from any of its 36 beginnings

// line appends the n-th line of a rank: no two are the same, and every byte of it can be told.
func line(to []byte, rank, n int) []byte {
	begin := len(to)
	to = strconv.AppendInt(append(to, 'r'), int64(rank), 10)
	to = append(strconv.AppendInt(append(to, ' '), int64(n), 10), ' ')
	to = append(to, filler[n%36:][:lineLength-1-(len(to)-begin)]...)
	return append(to, '\n')
}

// Emit writes so many bytes, rounded down to whole lines, as a rank of "output" does.
func Emit(out io.Writer, rank int, bytes int64) error {
	w := bufio.NewWriterSize(out, 64<<10)
	var buffer []byte
	for n := range int(bytes / lineLength) {
		buffer = line(buffer[:0], rank, n)
		if _, err := w.Write(buffer); err != nil {
			return err
		}
	}
	return w.Flush()
}

// checker reads the labelled output of all ranks and compares every byte with what they wrote.
type checker struct {
	// next is the number of the next line of each rank.
	next []int
	want []byte
}

// read reads until the end; each line must be the next one of its rank, whole.
func (c *checker) read(in io.Reader) error {
	r := bufio.NewReaderSize(in, 256<<10)
	for {
		text, err := r.ReadSlice('\n')
		if err == io.EOF && len(text) == 0 {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the output: %w after %q", err, text[:min(len(text), 100)])
		}
		label, rest, found := bytes.Cut(text, []byte(": "))
		rank, err := strconv.Atoi(string(bytes.TrimLeft(label, " ")))
		if !found || err != nil || rank < 0 || rank >= len(c.next) {
			return fmt.Errorf("a line has no rank's label: %q", text[:min(len(text), 100)])
		}
		if c.want = line(c.want[:0], rank, c.next[rank]); !bytes.Equal(rest, c.want) {
			return fmt.Errorf("line %d of rank %d is torn or another one: %q, not %q", c.next[rank], rank, rest[:min(len(rest), 100)], c.want[:100])
		}
		c.next[rank]++
	}
}

// check tells whether every rank's lines came, all of them.
func (c *checker) check(lines int) error {
	for rank, n := range c.next {
		if n != lines {
			return fmt.Errorf("of rank %d came %d lines of %d", rank, n, lines)
		}
	}
	return nil
}
