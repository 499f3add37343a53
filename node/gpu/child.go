package gpu

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxLine bounds one JSON document: pairs of GPUs are the most of it, some 60 bytes each.
	maxLine = 8 << 20
	// maxStderr bounds what is kept of a probe's standard error: its beginning, because a loader's or runtime's complaint
	// says there what is wrong.
	maxStderr = 300
	// killWait is how long a killed probe may take to go; one in an uninterruptible call takes as long as the driver does.
	killWait = 2 * time.Second
	// maxStuck is how many probes that can't be killed there may be.
	maxStuck = 2
)

// errStuck says that no probe may be started.
var errStuck = errors.New("probes that were killed are still there: they hang in the driver")

// children starts probes and keeps account of those that can't be killed. It is safe for concurrent use.
type children struct {
	program string
	// kill ends a process group; replaced in tests that need a probe that can't be killed.
	kill func(group int) error

	mu    sync.Mutex
	live  int
	stuck []int
}

func newChildren(program string) *children {
	return &children{program: program, kill: func(group int) error { return syscall.Kill(-group, syscall.SIGKILL) }}
}

// child is one running probe.
type child struct {
	owner  *children
	pid    int
	stdin  *os.File
	stdout *os.File
	lines  *bufio.Scanner
	stderr *head
	reaped bool

	mu          sync.Mutex
	interrupted bool
}

// start starts a probe in a process group of its own. It ends by itself when stdin is closed, also because we died.
func (c *children) start(args ...string) (*child, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reap()
	if len(c.stuck) >= maxStuck || len(c.stuck) > 0 && c.live > 0 {
		return nil, errStuck
	}
	p := &child{owner: c, stderr: &head{done: make(chan struct{})}}
	var theirs [3]*os.File
	var err error
	if theirs[0], p.stdin, err = os.Pipe(); err != nil {
		return nil, fmt.Errorf("start the GPU probe: %w", err)
	}
	defer theirs[0].Close()
	if p.stdout, theirs[1], err = os.Pipe(); err != nil {
		p.stdin.Close()
		return nil, fmt.Errorf("start the GPU probe: %w", err)
	}
	defer theirs[1].Close()
	said, err := p.stderr.pipe()
	if err != nil {
		p.stdin.Close()
		p.stdout.Close()
		return nil, fmt.Errorf("start the GPU probe: %w", err)
	}
	theirs[2] = said
	defer said.Close()
	process, err := os.StartProcess(c.program, append([]string{c.program}, args...), &os.ProcAttr{
		Files: theirs[:], Env: environment(), Sys: &syscall.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		p.stdin.Close()
		p.stdout.Close()
		p.stderr.close()
		return nil, fmt.Errorf("start the GPU probe %s: %w", c.program, err)
	}
	p.pid = process.Pid
	// We wait for it ourselves, without blocking: nobody may wait for a process that hangs in the driver.
	_ = process.Release()
	p.lines = bufio.NewScanner(p.stdout)
	p.lines.Buffer(nil, maxLine)
	c.live++
	return p, nil
}

// environment is what a probe gets of ours: what its library is found by, and nothing else.
func environment() []string {
	env := []string{"LANG=C"}
	for _, name := range []string{"PATH", "LD_LIBRARY_PATH"} {
		if v, ok := os.LookupEnv(name); ok && v != "" {
			env = append(env, name+"="+v)
		}
	}
	return env
}

// reap collects stuck probes that have ended meanwhile.
func (c *children) reap() {
	still := c.stuck[:0]
	for _, pid := range c.stuck {
		if gone, _ := collect(pid); !gone {
			still = append(still, pid)
		}
	}
	c.stuck = still
}

// collect reaps a process if it has ended.
func collect(pid int) (bool, unix.WaitStatus) {
	var status unix.WaitStatus
	for {
		got, err := unix.Wait4(pid, &status, unix.WNOHANG, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return true, status // ECHILD: somebody else collected it.
		default:
			return got == pid, status
		}
	}
}

// next returns the next line, which must come before the deadline. At the end of output it returns io.EOF.
func (p *child) next(deadline time.Time) ([]byte, error) {
	p.mu.Lock()
	if p.interrupted {
		p.mu.Unlock()
		return nil, os.ErrDeadlineExceeded
	}
	err := p.stdout.SetReadDeadline(deadline)
	p.mu.Unlock()
	if err != nil {
		return nil, fmt.Errorf("read from the GPU probe: %w", err)
	}
	if p.lines.Scan() {
		return p.lines.Bytes(), nil
	}
	if err := p.lines.Err(); err != nil {
		return nil, err
	}
	return nil, io.EOF
}

// interrupt makes a running next, and every further one, return at once with os.ErrDeadlineExceeded. It may be called at any time.
func (p *child) interrupt() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.interrupted = true
	_ = p.stdout.SetReadDeadline(time.Unix(1, 0))
}

// end ends the probe's process group, and says how the probe ended. One that does not go within killWait is left behind as stuck.
func (p *child) end(patience time.Duration) string {
	p.stdin.Close()
	how := p.wait(patience)
	if !p.reaped {
		_ = p.owner.kill(p.pid)
		if how = p.wait(killWait); p.reaped {
			how = "killed"
		}
	}
	p.stdout.Close()
	p.owner.mu.Lock()
	p.owner.live--
	if !p.reaped {
		p.owner.stuck = append(p.owner.stuck, p.pid)
		how = fmt.Sprintf("can't be killed (process %d)", p.pid)
	}
	p.owner.mu.Unlock()
	p.stderr.close()
	if said := p.stderr.String(); said != "" {
		how += ": " + said
	}
	return how
}

// wait waits for the end of the process, up to a limit.
func (p *child) wait(limit time.Duration) string {
	for began, pause := time.Now(), time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		gone, status := collect(p.pid)
		switch {
		case gone:
			p.reaped = true
			if status.Signaled() {
				return fmt.Sprintf("ended by signal %d (%s)", int(status.Signal()), status.Signal())
			}
			return fmt.Sprintf("left with %d", status.ExitStatus())
		case time.Since(began) >= limit:
			return "still there"
		}
		time.Sleep(min(pause, limit))
	}
}

// head keeps the beginning of what a probe wrote to its standard error. It never waits for a stuck probe.
type head struct {
	read *os.File
	done chan struct{}
	mu   sync.Mutex
	text []byte
}

// pipe returns the probe's end, and starts the goroutine that reads the other; close ends it.
func (t *head) pipe() (*os.File, error) {
	read, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	t.read = read
	go func() {
		defer close(t.done)
		_, _ = io.Copy(t, read)
	}()
	return write, nil
}

// Write keeps the beginning.
func (t *head) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p[:min(len(p), maxStderr-len(t.text))]...)
	return len(p), nil
}

func (t *head) close() {
	// What was written before is read first; a process that lives on keeps the pipe open, and is not waited for.
	_ = t.read.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	<-t.done
	t.read.Close()
}

// String returns what was kept, as one line.
func (t *head) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.ReplaceAll(bytes.TrimSpace(t.text), []byte("\n"), []byte("; ")))
}
