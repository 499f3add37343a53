package run

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"golang.org/x/sys/unix"
)

const (
	// IdlePrefix begins the only argument of a supervisor that waits for its step's directory. The argument is idleArgument
	// bytes long: the supervisor writes the directory over it, so that it is known by its command line like any other.
	IdlePrefix   = "idle-"
	idleArgument = 1024
	// IdleFD is the socket at which an idle supervisor waits.
	IdleFD = 3
	// refillAfter is how long after the last launch missing supervisors are started: not while a step is being launched.
	refillAfter = 100 * time.Millisecond
)

// Pool has supervisors that were started ahead: what a process needs to begin is behind them, and a step gets one at once.
// An idle supervisor waits at a socket for the directory of its step. Until it has one it belongs to the pool and ends with it,
// also when the agent is killed; from then on it is like any other.
//
// A pool whose program was replaced gives out no supervisor of the old one. It is safe for concurrent use.
type Pool struct {
	program string
	size    int
	log     *slog.Logger

	mu     sync.Mutex
	idle   []*spare
	refill *time.Timer
	closed bool
}

// spare is an idle supervisor.
type spare struct {
	cmd    *exec.Cmd
	socket *os.File // this side's end
	origin os.FileInfo
}

// NewPool returns a pool that holds up to size supervisors of the program, an absolute path. It is empty until Fill; with
// size 0 every launch starts a process. Close ends what is idle.
func NewPool(program string, size int, log *slog.Logger) *Pool {
	return &Pool{program: program, size: size, log: log}
}

// Fill starts the supervisors that are missing. One that cannot be started is told in the log and not tried again before the
// next launch, which starts a process of its own.
func (p *Pool) Fill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for !p.closed && len(p.idle) < p.size {
		s, err := p.start()
		if err != nil {
			p.log.Warn("no supervisor could be started ahead; the next step waits for one of its own", "program", p.program, "err", err)
			return
		}
		p.idle = append(p.idle, s)
	}
}

// Close ends the idle supervisors. Launch works afterwards, without them.
func (p *Pool) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	if p.refill != nil {
		p.refill.Stop()
	}
	for _, s := range p.idle {
		s.release()
	}
	p.idle = nil
}

// release lets an idle supervisor end: nobody will send it a directory.
func (s *spare) release() { _ = s.socket.Close() }

// start starts one idle supervisor.
func (p *Pool) start() (*spare, error) {
	origin, err := os.Stat(p.program)
	if err != nil {
		return nil, fmt.Errorf("looking at the supervisor's program: %w", err)
	}
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("making the socket of an idle supervisor: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(ends[0]), "supervisor"), os.NewFile(uintptr(ends[1]), "agent")
	defer theirs.Close()
	cmd := command(p.program, IdlePrefix+strings.Repeat("-", idleArgument-len(IdlePrefix)))
	cmd.Dir = "/"
	cmd.ExtraFiles = []*os.File{theirs}
	if err := launch(cmd); err != nil {
		return nil, errors.Join(err, ours.Close())
	}
	return &spare{cmd: cmd, socket: ours, origin: origin}, nil
}

// take returns an idle supervisor of the program as it is now, nil if there is none, and arranges that its place is filled.
func (p *Pool) take() *spare {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.size == 0 {
		return nil
	}
	if p.refill == nil {
		p.refill = time.AfterFunc(refillAfter, p.Fill)
	} else {
		p.refill.Reset(refillAfter)
	}
	now, err := os.Stat(p.program)
	for len(p.idle) > 0 {
		s := p.idle[0]
		p.idle = p.idle[1:]
		if err == nil && os.SameFile(now, s.origin) && now.ModTime().Equal(s.origin.ModTime()) && now.Size() == s.origin.Size() {
			return s
		}
		s.release()
	}
	return nil
}

// Launch is as the function Launch, with a supervisor that was started ahead if there is one.
func (p *Pool) Launch(ctx context.Context, dir string, plan *supervisorv1.StepPlan) (*Handle, error) {
	return launchIn(ctx, dir, plan, func(fds *inheritance) error {
		if s := p.take(); s != nil {
			if s.give(dir, fds) {
				return nil
			}
			p.log.Warn("an idle supervisor has ended; another one is started", "pid", s.cmd.Process.Pid)
		}
		return spawn(dir, p.program, fds)
	})
}

// give hands a step's directory over; false if the supervisor has ended. From then on it is not the pool's.
func (s *spare) give(dir string, fds *inheritance) bool {
	defer s.release()
	if len(dir) > idleArgument {
		return false
	}
	rights := unix.UnixRights(int(fds.listener.Fd()), int(fds.lock.Fd()), int(fds.log.Fd()))
	return unix.Sendmsg(int(s.socket.Fd()), []byte(dir), rights, nil, unix.MSG_NOSIGNAL) == nil
}

// Handed is what an idle supervisor was given.
type Handed struct {
	// Dir is the step's directory.
	Dir string
	// Listener and Lock are as those that Launch hands down; Log is to take the place of the standard error.
	Listener, Lock, Log *os.File
}

// AwaitHanded waits at IdleFD for a step's directory; nil without error if the agent went away first.
func AwaitHanded() (*Handed, error) {
	dir, rights := make([]byte, idleArgument+1), make([]byte, unix.CmsgSpace(3*4))
	for {
		n, rn, flags, _, err := unix.Recvmsg(IdleFD, dir, rights, unix.MSG_CMSG_CLOEXEC)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return nil, fmt.Errorf("waiting for a step: %w", err)
		case n == 0:
			return nil, nil
		case n > idleArgument || flags&(unix.MSG_CTRUNC|unix.MSG_TRUNC) != 0:
			return nil, errors.New("waiting for a step: a message that is too long came")
		}
		fds, err := handedFDs(rights[:rn])
		if err != nil {
			return nil, fmt.Errorf("taking a step over: %w", err)
		}
		return &Handed{
			Dir: string(dir[:n]), Listener: os.NewFile(uintptr(fds[0]), SocketFile), Lock: os.NewFile(uintptr(fds[1]), LockFile),
			Log: os.NewFile(uintptr(fds[2]), LogFile),
		}, nil
	}
}

func handedFDs(rights []byte) ([]int, error) {
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return nil, err
	}
	if len(messages) != 1 {
		return nil, fmt.Errorf("%d control messages came, not one", len(messages))
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err == nil && len(fds) != 3 {
		err = fmt.Errorf("%d descriptors came, not three", len(fds))
	}
	return fds, err
}

// command is a supervisor's, with the environment that it has of its own.
func command(program, argument string, more ...string) *exec.Cmd {
	cmd := exec.Command(program, argument)
	// One thread of Go code and no collector below the memory limit: a supervisor starts fast and stays small.
	cmd.Env = append([]string{"PATH=/usr/local/bin:/usr/bin:/bin", "GOMAXPROCS=1", "GOGC=off", "GOMEMLIMIT=16MiB", "GOTRACEBACK=all"}, more...)
	return cmd
}

// launch starts a supervisor in a session of its own, and collects it whenever it ends.
func launch(cmd *exec.Cmd) error {
	pidfd := -1
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, PidFD: &pidfd}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting the supervisor: %w", err)
	}
	// Ends with the supervisor, which may be long after the handle; it holds nothing but the process's number.
	go collect(cmd, pidfd)
	return nil
}
