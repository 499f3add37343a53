package health

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// run is how a program ended.
type run struct {
	// why is why nothing is known: it took too long, could not be started, or was ended from outside. nil if it ended by itself.
	why error
	// cut: the caller ended it.
	cut    bool
	code   int
	output []byte
	took   time.Duration
}

// ErrUnknown is wrapped by errors of programs that gave no verdict.
var ErrUnknown = errors.New("unknown")

// tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex
	data []byte
}

// Write never fails.
func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.data = append(t.data, p...)
	if over := len(t.data) - maxOutput; over > maxOutput {
		t.data = append(t.data[:0], t.data[over:]...)
	}
	return len(p), nil
}

func (t *tail) text() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]byte(nil), t.data[max(0, len(t.data)-maxOutput):]...)
}

// runner starts programs and knows those that could not be killed.
type runner struct {
	mu    sync.Mutex
	stuck map[string]int // by name: its process id
}

// run runs a program to its end, or to the end of the time or the context. It never waits longer than leaveAfter for what can't be killed.
func (r *runner) run(ctx context.Context, name string, argv, env []string, timeout time.Duration) run {
	r.mu.Lock()
	pid := r.stuck[name]
	r.mu.Unlock()
	if pid != 0 {
		return run{why: fmt.Errorf("%w: process %d of the run before can't be killed and still exists", ErrUnknown, pid)}
	}
	if len(argv) == 0 {
		return run{why: fmt.Errorf("%w: no program is named", ErrUnknown)}
	}
	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	out := &tail{}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env, cmd.Dir, cmd.Stdout, cmd.Stderr, cmd.WaitDelay = env, "/", out, out, drainAfter
	// The group ends with it; and the program itself with the agent, whose next life runs it again.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	began := time.Now()
	started, ended := make(chan error, 1), make(chan error, 1)
	go func() { // waited for below; left behind only with a process that can't be killed
		runtime.LockOSThread() // the kernel takes the end of the thread for the parent's
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			ended <- cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return run{why: fmt.Errorf("%w: it can't be started: %w", ErrUnknown, err)}
	}
	group := cmd.Process.Pid
	var err error
	select {
	case err = <-ended:
	case <-limited.Done():
		_ = syscall.Kill(-group, syscall.SIGKILL)
		select {
		case <-ended:
		case <-time.After(leaveAfter):
			r.leave(name, group, ended)
			return run{why: fmt.Errorf("%w: it took longer than %v, and process %d can't be killed", ErrUnknown, timeout, group),
				cut: ctx.Err() != nil, output: out.text(), took: time.Since(began)}
		}
		if ctx.Err() != nil {
			return run{why: fmt.Errorf("%w: it was ended: %w", ErrUnknown, ctx.Err()), cut: true, output: out.text(), took: time.Since(began)}
		}
		return run{why: fmt.Errorf("%w: it took longer than %v and was killed", ErrUnknown, timeout), output: out.text(), took: time.Since(began)}
	}
	_ = syscall.Kill(-group, syscall.SIGKILL) // what it left behind in its group
	return verdictOf(cmd, err, out.text(), time.Since(began))
}

// verdictOf is how a program ended that nobody ended.
func verdictOf(cmd *exec.Cmd, err error, output []byte, took time.Duration) run {
	var exit *exec.ExitError
	switch {
	case err == nil, errors.Is(err, exec.ErrWaitDelay):
		return run{output: output, took: took}
	case !errors.As(err, &exit):
		return run{why: fmt.Errorf("%w: its end can't be read: %w", ErrUnknown, err), output: output, took: took}
	case cmd.ProcessState.ExitCode() < 0:
		return run{why: fmt.Errorf("%w: it was ended by %v", ErrUnknown, exit), output: output, took: took}
	}
	return run{code: cmd.ProcessState.ExitCode(), output: output, took: took}
}

// leave remembers a program that can't be killed until it is gone.
func (r *runner) leave(name string, pid int, ended <-chan error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stuck == nil {
		r.stuck = map[string]int{}
	}
	r.stuck[name] = pid
	go func() { // ends with the process, which nobody can hurry
		<-ended
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.stuck, name)
	}()
}
