package supervise

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"golang.org/x/sys/unix"
)

const (
	// drainTimeout bounds the wait for the last output of a terminal at the end of a step. A row of docs/limits.md.
	drainTimeout = time.Second
	// typeTimeout bounds the typing of the end-of-file character.
	typeTimeout = 50 * time.Millisecond
	// defaultRows and defaultColumns are those of a terminal of which nobody says the size.
	defaultRows, defaultColumns = 24, 80
)

// terminal is that of a task: the task has its slave, the supervisor types input into its master and puts what comes out into a file.
// It is the keyboard among the step's stdin pipes.
type terminal struct {
	master *os.File
	// out is where its output goes; the descriptor belongs to prepared.outputs.
	out int
	// done is closed when everything was read; nil before begin.
	done chan struct{}
	// last is the last byte that was typed.
	last atomic.Uint32
	// closed: the end of the input was typed.
	closed atomic.Bool
}

// openTerminal makes a terminal as the calling thread, whose user gets it, and returns the descriptor of its slave.
func openTerminal(size *supervisorv1.Terminal) (*terminal, int, error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, -1, fmt.Errorf("opening /dev/ptmx: %w", err)
	}
	t := &terminal{master: os.NewFile(uintptr(fd), "terminal")}
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return nil, -1, errors.Join(fmt.Errorf("unlocking the terminal: %w", err), t.master.Close())
	}
	// Not by its name: what is mounted at /dev/pts need not be what the master belongs to.
	peer, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if e != 0 {
		return nil, -1, errors.Join(fmt.Errorf("opening the terminal: %w", e), t.master.Close())
	}
	slave := int(peer)
	if err := t.resize(size); err != nil {
		return nil, -1, errors.Join(err, unix.Close(slave), t.master.Close())
	}
	return t, slave, nil
}

// control calls a function with the master's descriptor, if it is still open.
func (t *terminal) control(f func(fd int) error) error {
	raw, err := t.master.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = f(int(fd)) }); err != nil {
		return err
	}
	return inner
}

// resize sets the size; the kernel tells the processes in the foreground if it changed.
func (t *terminal) resize(size *supervisorv1.Terminal) error {
	w := &unix.Winsize{Row: uint16(min(size.GetRows(), 65535)), Col: uint16(min(size.GetColumns(), 65535))}
	if w.Row == 0 || w.Col == 0 {
		w.Row, w.Col = defaultRows, defaultColumns
	}
	if err := t.control(func(fd int) error { return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, w) }); err != nil {
		return fmt.Errorf("setting the size of a terminal: %w", err)
	}
	return nil
}

// begin copies what comes out into the file until nobody has the slave any more.
func (t *terminal) begin() {
	t.done = make(chan struct{})
	go func() {
		defer close(t.done)
		b := make([]byte, 32<<10)
		for {
			n, err := t.master.Read(b)
			for rest := b[:n]; len(rest) > 0; {
				w, werr := unix.Write(t.out, rest)
				if errors.Is(werr, unix.EINTR) {
					continue
				}
				if werr != nil {
					break // a full disk: the task goes on, as with a file
				}
				rest = rest[w:]
			}
			if err != nil { // EIO: the last slave was closed
				return
			}
		}
	}()
}

// Write types.
func (t *terminal) Write(b []byte) (int, error) {
	n, err := t.master.Write(b)
	if n > 0 {
		t.last.Store(uint32(b[n-1]))
	}
	return n, err
}

// Close types the end-of-file character, once; twice where a line is not complete, because the first one only hands that line over.
func (t *terminal) Close() error {
	if !t.closed.CompareAndSwap(false, true) {
		return nil
	}
	char := byte(4)
	if err := t.control(func(fd int) error {
		settings, err := unix.IoctlGetTermios(fd, unix.TCGETS)
		if err == nil {
			char = settings.Cc[unix.VEOF]
		}
		return err
	}); err != nil {
		return err
	}
	end := []byte{char}
	if last := byte(t.last.Load()); last != 0 && last != '\n' && last != '\r' {
		end = append(end, char)
	}
	_ = t.master.SetWriteDeadline(time.Now().Add(typeTimeout)) // also of a write that waits
	_, err := t.master.Write(end)
	return err
}

// finish waits a bounded time for the last output and gives the terminal up; false if the output may still be written.
func (t *terminal) finish() bool {
	drained := true
	if t.done != nil {
		select {
		case <-t.done:
		case <-time.After(drainTimeout):
			// Somebody whom nothing ends has the slave, or the file takes nothing.
			_ = t.master.SetReadDeadline(time.Unix(1, 0))
			select {
			case <-t.done:
			case <-time.After(typeTimeout):
				drained = false
			}
		}
	}
	_ = t.master.Close()
	return drained
}
