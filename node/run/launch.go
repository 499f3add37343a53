package run

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"

	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"golang.org/x/sys/unix"
)

// ErrGone means that no supervisor lives in the directory: Conclude tells how the step ended.
var ErrGone = errors.New("the step has no supervisor")

// ErrAlive means that a supervisor lives in the directory: Attach to it.
var ErrAlive = errors.New("the step has a supervisor")

// What a supervisor inherits from Launch: its listening socket and its lock, if the variable is set to "1". Both exist
// from the first moment, so there is no time in which a launched supervisor looks dead.
const (
	ListenerFD        = 3
	LockFD            = 4
	InheritedVariable = "MUSTER_SUPERVISOR_INHERITED"
)

// Launch writes the plan and starts a supervisor in an existing directory (absolute path, mode 0700, of any length).
// It returns as soon as the process exists, with a handle that already watches: the first event comes when the
// supervisor is PREPARED or FAILED. plan.version is filled in.
//
// The supervisor is not bound to this process: it is in a session of its own, inherits no descriptor but /dev/null,
// its log, its lock and its socket, has an environment of its own, and goes on when the agent is killed. It stays in the agent's
// cgroup: a service manager must not kill the group (systemd: KillMode=process). It inherits the agent's resource limits,
// and so do the tasks.
//
// Errors: ErrAlive (attach instead), ErrStarted (conclude instead: tasks were executed, or a result exists); otherwise the
// node could not start a process, and nothing runs. ctx bounds the writing only.
func Launch(ctx context.Context, dir string, plan *supervisorv1.StepPlan, supervisor string) (*Handle, error) {
	return launchIn(ctx, dir, plan, func(fds *inheritance) error { return spawn(dir, supervisor, fds) })
}

// launchIn is Launch with any way to start the supervisor.
func launchIn(ctx context.Context, dir string, plan *supervisorv1.StepPlan, start func(*inheritance) error) (*Handle, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("launching a supervisor: %w", err)
	}
	lock, err := Lock(dir)
	if err != nil {
		return nil, fmt.Errorf("launching a supervisor: %w", err)
	}
	defer lock.Close()
	for _, name := range []string{StartedFile, ResultFile} {
		if _, err := os.Lstat(filepath.Join(dir, name)); !errors.Is(err, fs.ErrNotExist) {
			if err == nil {
				err = ErrStarted
			}
			return nil, fmt.Errorf("launching a supervisor in %s: %w", dir, err)
		}
	}
	plan.Version = Version
	// Not with fsync: after a crash of the machine nothing of the step is left that the plan could speak of.
	if err := writePlan(dir, plan); err != nil {
		return nil, err
	}
	if err := ReserveResult(dir, plan); err != nil {
		return nil, err
	}
	return connect(dir, lock, start)
}

// inheritance is what a supervisor gets from its agent. This side closes its copies.
type inheritance struct{ listener, lock, log *os.File }

// connect makes the listening socket on this side, so that it can be dialled at once, and starts a supervisor with it.
func connect(dir string, lock *os.File, start func(*inheritance) error) (*Handle, error) {
	listener, err := Listen(dir)
	if err != nil {
		return nil, err
	}
	defer listener.Close()
	log, err := os.OpenFile(filepath.Join(dir, LogFile), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening the supervisor's log: %w", err)
	}
	defer log.Close()
	// Dialled before there is a supervisor: if that fails nothing runs.
	conn, err := Dial(dir)
	if err != nil {
		return nil, fmt.Errorf("connecting to the new supervisor: %w", err)
	}
	if err := start(&inheritance{listener, lock, log}); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return newHandle(conn), nil
}

// spawn starts a supervisor of its own for the directory.
func spawn(dir, supervisor string, fds *inheritance) error {
	cmd := command(supervisor, dir, InheritedVariable+"=1")
	cmd.Dir = dir
	cmd.Stdout, cmd.Stderr = fds.log, fds.log
	cmd.ExtraFiles = []*os.File{fds.listener, fds.lock}
	return launch(cmd)
}

// collect waits for a supervisor so that it does not stay a zombie. It waits in the poller: in a system call, each
// supervisor would hold one of the agent's threads for all its life.
func collect(cmd *exec.Cmd, pidfd int) {
	if pidfd >= 0 && unix.SetNonblock(pidfd, true) == nil {
		f := os.NewFile(uintptr(pidfd), "pidfd")
		if raw, err := f.SyscallConn(); err == nil {
			_ = raw.Read(func(fd uintptr) bool { // an error is one of the poller, and Wait does without it
				polled := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
				n, err := unix.Poll(polled, 0)
				return n != 0 || err != nil && !errors.Is(err, unix.EINTR)
			})
		}
		_ = f.Close() // nothing was written
	}
	_ = cmd.Wait() // how it ended is told by its directory
}

// Attach connects to the supervisor that lives in the directory, and watches it. ErrGone if none does, or if it is
// just leaving.
func Attach(ctx context.Context, dir string) (*Handle, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("attaching to a supervisor: %w", err)
	}
	conn, err := Dial(dir)
	if err == nil {
		return newHandle(conn), nil
	}
	alive, aliveErr := Alive(dir)
	if aliveErr != nil {
		return nil, aliveErr
	}
	if !alive {
		return nil, fmt.Errorf("%w: %s: %w", ErrGone, dir, err)
	}
	return nil, fmt.Errorf("attaching to the supervisor in %s: %w", dir, err)
}

// Lock takes the supervisor's lock of the directory; it is held while the file or a copy of its descriptor is open,
// and the kernel drops it with the process. ErrAlive if a supervisor has it.
func Lock(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, LockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening the supervisor's lock: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = ErrAlive
		}
		return nil, errors.Join(fmt.Errorf("locking %s: %w", dir, err), f.Close())
	}
	return f, nil
}

// Alive reports whether a supervisor lives in the directory.
func Alive(dir string) (bool, error) {
	f, err := Lock(dir)
	switch {
	case errors.Is(err, ErrAlive):
		return true, nil
	case err != nil:
		return false, err
	}
	if err := f.Close(); err != nil {
		return false, fmt.Errorf("asking whether a supervisor lives in %s: %w", dir, err)
	}
	return false, nil
}

// socketPath returns a short path of the socket, however long the directory's is: socket addresses end at 108 bytes.
// It holds while the returned descriptor of the directory is open.
func socketPath(dir string) (string, *os.File, error) {
	d, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return "", nil, fmt.Errorf("opening a step's directory: %w", err)
	}
	return "/proc/self/fd/" + strconv.Itoa(int(d.Fd())) + "/" + SocketFile, d, nil
}

// Dial connects to the socket in the directory.
func Dial(dir string) (net.Conn, error) {
	path, d, err := socketPath(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("connecting to the socket in %s: %w", dir, err)
	}
	return conn, nil
}

// Listen makes the listening socket in the directory, in place of an older one. Only its owner can connect.
func Listen(dir string) (*os.File, error) {
	path, d, err := socketPath(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("making a socket: %w", err)
	}
	f := os.NewFile(uintptr(fd), SocketFile)
	if err := unix.Unlink(path); err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, errors.Join(fmt.Errorf("removing the old socket in %s: %w", dir, err), f.Close())
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return nil, errors.Join(fmt.Errorf("binding the socket in %s: %w", dir, err), f.Close())
	}
	if err := errors.Join(unix.Chmod(path, 0o600), unix.Listen(fd, 64)); err != nil {
		return nil, errors.Join(fmt.Errorf("listening at the socket in %s: %w", dir, err), f.Close())
	}
	return f, nil
}
