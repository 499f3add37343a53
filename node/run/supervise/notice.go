package supervise

import (
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxNotices bounds the lines that wait to be written.
	maxNotices = 64
	// noticeTimeout bounds the wait for them at the end of a step.
	noticeTimeout = 500 * time.Millisecond
)

// notices writes the supervisor's own lines into the tasks' output. Files of users may block for ever, so it has a
// goroutine of its own, and what cannot be written is given up.
type notices struct {
	lines chan notice
	done  chan struct{}
}

type notice struct {
	fd   int
	line string
}

func newNotices() *notices {
	n := &notices{lines: make(chan notice, maxNotices), done: make(chan struct{})}
	go func() {
		defer close(n.done)
		for m := range n.lines {
			_, _ = unix.Write(m.fd, []byte(m.line+"\n"))
		}
	}()
	return n
}

// write queues a line; false if too many wait.
func (n *notices) write(fd int, line string) bool {
	select {
	case n.lines <- notice{fd, line}:
		return true
	default:
		return false
	}
}

// flush waits a bounded time until everything is written; false if something still is, so that its descriptor must
// stay open. Nothing may be written after it.
func (n *notices) flush() bool {
	close(n.lines)
	select {
	case <-n.done:
		return true
	case <-time.After(noticeTimeout):
		return false
	}
}
