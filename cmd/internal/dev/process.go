package dev

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// pollInterval is the time between two looks at something that cannot be waited for.
	pollInterval = 20 * time.Millisecond
	// killWait bounds how long a killed process may take to disappear; only one in an uninterruptible call takes longer
	// than milliseconds.
	killWait = 10 * time.Second
)

// procStat is what /proc says of a process.
type procStat struct {
	parent, session int
	state           byte   // R, S, D, T, Z, …
	start           uint64 // clock ticks from the machine's boot
}

// statOf reads /proc/PID/stat. The error is fs.ErrNotExist, or ESRCH, if there is no such process.
func statOf(pid int) (procStat, error) { return parseStat("/proc/" + strconv.Itoa(pid) + "/stat") }

func parseStat(path string) (procStat, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return procStat{}, err
	}
	// The program's name is in brackets and may contain anything.
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	if len(fields) < 20 {
		return procStat{}, fmt.Errorf("%s has %d fields after the name", path, len(fields))
	}
	var s procStat
	s.state = fields[0][0]
	var errs [3]error
	s.parent, errs[0] = strconv.Atoi(fields[1])
	s.session, errs[1] = strconv.Atoi(fields[3])
	s.start, errs[2] = strconv.ParseUint(fields[19], 10, 64)
	return s, errors.Join(errs[:]...)
}

// running reports whether that very process runs: a zombie does not, nor does another with the same pid. A killed process shows as a zombie
// as soon as its first thread is gone, while another may still be in the kernel, writing to the disk, and hold every file and port.
func running(pid int, start uint64) bool {
	if pid <= 0 {
		return false
	}
	s, err := statOf(pid)
	switch {
	case err != nil || s.start != start || s.state == 'X':
		return false
	case s.state != 'Z':
		return true
	}
	threads, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/task")
	return err == nil && len(threads) > 1
}

// send signals that very process. It reports false if it does not run any more.
func send(pid int, start uint64, signal syscall.Signal) (bool, error) {
	if !running(pid, start) {
		return false, nil
	}
	handle, err := os.FindProcess(pid) // a pidfd: the pid cannot change hands from here on
	if err != nil {
		return false, fmt.Errorf("find process %d: %w", pid, err)
	}
	defer func() { _ = handle.Release() }()
	if !running(pid, start) {
		return false, nil
	}
	err = handle.Signal(signal)
	if errors.Is(err, os.ErrProcessDone) {
		return false, nil
	} else if err != nil {
		return false, fmt.Errorf("send %v to process %d: %w", signal, pid, err)
	}
	return true, nil
}

// awaitEnd waits until that very process does not run any more, and reaps it if it is a child of this program.
func awaitEnd(pid int, start uint64, limit time.Duration) error {
	for deadline := time.Now().Add(limit); running(pid, start); time.Sleep(pollInterval / 4) {
		if time.Now().After(deadline) {
			return fmt.Errorf("process %d still runs %v after it was told to end", pid, limit)
		}
	}
	if pid > 0 {
		var status unix.WaitStatus
		_, _ = unix.Wait4(pid, &status, unix.WNOHANG, nil) // ECHILD: somebody else's
	}
	return nil
}

// awaitStop waits until every thread of a process is stopped: SIGSTOP reaches them one by one.
func awaitStop(pid int, start uint64) error {
	for deadline := time.Now().Add(killWait); running(pid, start); time.Sleep(pollInterval / 20) {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		if err != nil {
			return err
		}
		stopped := len(threads) > 0
		for _, path := range threads {
			s, err := parseStat(path)
			stopped = stopped && (err != nil || s.state == 'T' || s.state == 'Z') // it may have ended
		}
		if stopped {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("process %d is not stopped %v after SIGSTOP", pid, killWait)
		}
	}
	return fmt.Errorf("process %d ended", pid)
}

// machineBoot returns the kernel's boot id: recorded pids mean nothing after a reboot.
func machineBoot() (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the machine's boot id: %w", err)
	}
	return strings.TrimSpace(string(text)), nil
}

// launch starts a program in a session of its own, with its output appended to a file, and returns where in that file
// its output begins. The program outlives this one.
func launch(program string, args []string, logPath, dir string) (pid int, start uint64, offset int64, err error) {
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return 0, 0, 0, fmt.Errorf("open the log: %w", err)
	}
	defer log.Close()
	offset, err = log.Seek(0, io.SeekEnd)
	if err != nil {
		return 0, 0, 0, fmt.Errorf("open the log: %w", err)
	}
	command := exec.Command(program, args...)
	command.Stdout, command.Stderr = log, log
	command.Dir = dir
	command.Env = cleanEnvironment(os.Environ())
	command.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := command.Start(); err != nil {
		return 0, 0, 0, fmt.Errorf("start %s: %w (build it with `make build`)", program, err)
	}
	pid = command.Process.Pid
	s, err := statOf(pid)
	if err != nil {
		_ = command.Process.Kill()
		return 0, 0, 0, fmt.Errorf("look at process %d, which was just started: %w", pid, err)
	}
	return pid, s.start, offset, command.Process.Release()
}

// cleanEnvironment leaves out what belongs to the caller's job or cluster: a cluster started from within a job must not
// look like a part of it. How much its processes log, and with which probe its nodes read GPUs, is the caller's business.
func cleanEnvironment(environment []string) []string {
	var kept []string
	for _, entry := range environment {
		callers := strings.HasPrefix(entry, "MUSTER_LOG_LEVEL=") || strings.HasPrefix(entry, "MUSTER_GPU_PROBE=")
		if callers || !strings.HasPrefix(entry, "SLURM_") && !strings.HasPrefix(entry, "MUSTER_") {
			kept = append(kept, entry)
		}
	}
	return kept
}

// awaitReady waits for the line "ready …" in the log behind offset, one for each node of an agent process. If the
// process ends first, or does not get ready in time, the error has the last lines of its log.
func awaitReady(ctx context.Context, p *process, logPath string, offset int64) error {
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		alive := running(p.Pid, p.Start)
		text, err := readFrom(logPath, offset)
		if err != nil {
			return fmt.Errorf("read the log of %s: %w", p.Name, err)
		}
		ready := 0
		for line := range strings.Lines(string(text)) {
			if strings.HasPrefix(line, "ready ") || line == "ready\n" {
				ready++
			}
		}
		if ready >= max(len(p.Nodes), 1) {
			return nil
		}
		if !alive {
			return fmt.Errorf("%s ended before it was ready; the end of %s:\n%s", p.Name, logPath, lastLines(text, 8))
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready (%w); the end of %s:\n%s", p.Name, context.Cause(ctx), logPath, lastLines(text, 8))
		case <-ticker.C:
		}
	}
}

func readFrom(path string, offset int64) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	if _, err := file.Seek(offset, io.SeekStart); err != nil {
		return nil, err
	}
	return io.ReadAll(file)
}

func lastLines(text []byte, count int) string {
	lines := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	lines = lines[max(0, len(lines)-count):]
	return "    " + strings.Join(lines, "\n    ")
}
