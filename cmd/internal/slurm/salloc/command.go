package salloc

import (
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
)

// command is the user's command, in a process group of its own. On a terminal that group has the foreground.
type command struct {
	args, env   []string
	dir         string
	s           *session.Session
	interactive bool
	ended       chan end // one value

	process *exec.Cmd
	tty     int
}

// end is how the command ended.
type end struct{ code, signal int }

// exit is salloc's exit code for it.
func (e end) exit() int {
	switch syscall.Signal(e.signal) {
	case 0:
		return e.code
	case syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGKILL:
		return 0
	}
	return 1
}

// start executes the command. A goroutine waits for it and sends its end.
func (c *command) start() error {
	path, err := c.find()
	if err != nil {
		return err
	}
	c.ended = make(chan end, 1)
	c.process = &exec.Cmd{
		Path: path, Args: c.args, Env: c.env, Dir: c.dir, Stdin: c.s.Stdin, Stdout: c.s.Stdout, Stderr: c.s.Stderr,
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true},
	}
	if in, ok := c.s.Stdin.(*os.File); ok {
		c.tty = int(in.Fd())
		if front, err := unix.IoctlGetInt(c.tty, unix.TIOCGPGRP); err == nil && front == unix.Getpgrp() {
			c.interactive = true
			c.process.SysProcAttr.Foreground, c.process.SysProcAttr.Ctty = true, c.tty
		}
	}
	if err := c.process.Start(); err != nil {
		return err
	}
	if c.interactive {
		// Not before the start, because it would be inherited: taking the terminal back from the background must not stop us.
		signal.Ignore(unix.SIGTTOU)
	}
	go func() { c.ended <- c.wait() }()
	return nil
}

// find looks the program up in the PATH of its environment.
func (c *command) find() (string, error) {
	name := c.args[0]
	if strings.Contains(name, "/") {
		if !filepath.IsAbs(name) {
			name = filepath.Join(c.s.Dir, name)
		}
		return name, nil
	}
	for dir := range strings.SplitSeq(c.s.Get("PATH"), ":") {
		path := filepath.Join(c.s.Dir, dir, name)
		if filepath.IsAbs(dir) {
			path = filepath.Join(dir, name)
		}
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o111 != 0 {
			return path, nil
		}
	}
	return "", exec.ErrNotFound
}

// wait returns how the command ended. One that is stopped on the terminal stops salloc as well, so that the shell above has the
// terminal; both go on together.
func (c *command) wait() end {
	pid := c.process.Process.Pid
	for c.interactive {
		var info unix.Siginfo
		err := unix.Waitid(unix.P_PID, pid, &info, unix.WEXITED|unix.WSTOPPED|unix.WNOWAIT, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || info.Code != cldStopped {
			break
		}
		_ = unix.Waitid(unix.P_PID, pid, &info, unix.WSTOPPED, nil) // it is known now
		c.front(unix.Getpgrp())
		_ = unix.Kill(0, unix.SIGSTOP) // this process and what shares its group; the call returns after SIGCONT
		c.front(pid)
		c.signal(syscall.SIGCONT)
	}
	err := c.process.Wait()
	if c.interactive {
		c.front(unix.Getpgrp())
	}
	var failed *exec.ExitError
	if err != nil && !errors.As(err, &failed) && c.process.ProcessState == nil {
		return end{code: 1}
	}
	status, ok := c.process.ProcessState.Sys().(syscall.WaitStatus)
	if ok && status.Signaled() {
		return end{signal: int(status.Signal())}
	}
	return end{code: c.process.ProcessState.ExitCode()}
}

// cldStopped is the code of siginfo for a child that was stopped (CLD_STOPPED).
const cldStopped = 5

// front gives the terminal to a process group.
func (c *command) front(group int) {
	_ = unix.IoctlSetPointerInt(c.tty, unix.TIOCSPGRP, group) // a terminal that is gone has no foreground
}

// signal signals the command's process group.
func (c *command) signal(s syscall.Signal) {
	_ = syscall.Kill(-c.process.Process.Pid, s) // it may have ended; the end is on its way then
}
