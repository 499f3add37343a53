package supervise

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"time"
	"unsafe"

	"github.com/muster-hpc/muster/node/run"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"golang.org/x/sys/unix"
)

// Config is what a supervisor does not find in its directory.
type Config struct {
	// Log is where it says what happens.
	Log *slog.Logger
	// Times are its bounds; DefaultTimes in production.
	Times Times
	// WriteResult puts the final state on disk; run.WriteResult in production. nil means that.
	WriteResult func(dir string, state *supervisorv1.StepState) error
	// Fault is called at named points of its life, for tests that stop it there; nil in programs.
	Fault func(point string)
	// Handed is what Await returned; nil for a supervisor that was started for its step.
	Handed *run.Handed
}

// Run is the life of a supervisor: it returns when the step ended, its result is on disk, and it was dismissed or
// nobody came. It changes the process it runs in (directory, umask, signals, subreaper) and must be called from the
// main goroutine. Errors: run.ErrAlive if another supervisor has the directory, run.ErrStarted if tasks were executed
// there and there is no result; others mean that nothing was executed.
func Run(dir string, c Config) error {
	// The tasks' parent-death signal follows this thread, so it must be one that lives as long as the process.
	runtime.LockOSThread()
	if err := os.Chdir(dir); err != nil {
		return fmt.Errorf("entering the step's directory: %w", err)
	}
	if c.Handed == nil {
		if err := secure(); err != nil {
			return err
		}
	}
	lock, socket, err := take(c.Handed)
	if err != nil {
		return err
	}
	defer lock.Close()
	s, err := load(c)
	if err != nil {
		return errors.Join(err, socket.Close())
	}
	if s.alarm, err = newAlarm(); err != nil {
		return errors.Join(err, socket.Close())
	}
	defer s.alarm.close()
	if s.server, err = serve(socket, c.Log); err != nil {
		return err
	}
	err = s.loop()
	s.server.close()
	if removeErr := os.Remove(run.SocketFile); removeErr != nil && !errors.Is(removeErr, fs.ErrNotExist) {
		c.Log.Warn("removing the socket", "error", removeErr)
	}
	return err
}

// secure makes the process fit to be the parent of a user's processes: nothing that was inherited reaches them.
func secure() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("becoming a child subreaper: %w", err)
	}
	// Descriptors that somebody forgot to close on exec.
	if err := unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil && !errors.Is(err, unix.ENOSYS) {
		return fmt.Errorf("marking descriptors to be closed on exec: %w", err)
	}
	// The runtime gives children the default action of every signal that it handles. Of those that it leaves alone,
	// and of those that were ignored when the process began, we do the same here.
	signal.Notify(make(chan os.Signal, 1), unix.SIGHUP, unix.SIGINT)
	// 32 to 34 are those that C libraries keep for themselves and the runtime does not touch.
	for _, sig := range []unix.Signal{unix.SIGTSTP, unix.SIGTTIN, unix.SIGTTOU, unix.SIGCONT, 32, 33, 34} {
		if err := defaultAction(sig); err != nil {
			return fmt.Errorf("resetting signal %d: %w", sig, err)
		}
	}
	var none unix.Sigset_t
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &none, nil); err != nil {
		return fmt.Errorf("clearing the signal mask: %w", err)
	}
	return nil
}

// defaultAction resets a signal that the runtime does not handle.
func defaultAction(sig unix.Signal) error {
	var action [4]uintptr // struct sigaction of the kernel: handler SIG_DFL, no flags, empty mask
	_, _, e := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(&action)), 0, 8, 0, 0)
	if e != 0 {
		return e
	}
	return nil
}

// take gets the lock and the listening socket, from the agent or by itself.
func take(handed *run.Handed) (lock, socket *os.File, err error) {
	if handed != nil {
		return handed.Lock, handed.Listener, nil
	}
	if os.Getenv(run.InheritedVariable) == "1" {
		return os.NewFile(run.LockFD, run.LockFile), os.NewFile(run.ListenerFD, run.SocketFile), nil
	}
	if lock, err = run.Lock("."); err != nil {
		return nil, nil, err
	}
	if socket, err = run.Listen("."); err != nil {
		return nil, nil, errors.Join(err, lock.Close())
	}
	return lock, socket, nil
}

// load reads the directory.
func load(c Config) (*supervisor, error) {
	s := &supervisor{log: c.Log, times: c.Times, write: c.WriteResult, tree: newTree(), input: newInput(), notice: newNotices(), fault: c.Fault}
	if s.fault == nil {
		s.fault = func(string) {}
	}
	if s.write == nil {
		s.write = run.WriteResult
	}
	result, err := run.ReadResult(".")
	switch {
	case err == nil:
		s.recall(result)
		return s, nil
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	if _, err := os.Lstat(run.StartedFile); !errors.Is(err, fs.ErrNotExist) {
		if err == nil {
			err = run.ErrStarted
		}
		return nil, fmt.Errorf("the step has no result: %w", err)
	}
	if s.plan, err = run.ReadPlan("."); err != nil {
		return nil, err
	}
	if err := validate(s.plan); err != nil {
		return nil, fmt.Errorf("the plan cannot be carried out: %w", err)
	}
	bootID, err := run.BootID()
	if err != nil {
		return nil, err
	}
	if s.plan.GetBootId() == bootID {
		s.deadline = bootTime(s.plan.GetDeadlineBootNs())
	}
	s.limit = milliseconds(s.plan.GetTimeLimitMs())
	s.warn(s.plan.GetWarnings())
	s.asides = make(chan func(), len(s.plan.GetTasks())) // each task has one at a time
	for _, t := range s.plan.GetTasks() {
		s.tasks = append(s.tasks, &task{plan: t})
	}
	unix.Umask(int(s.plan.GetUmask() & 0o777))
	s.fault("loaded")
	c.Log.Info("preparing", "label", s.plan.GetLabel(), "tasks", len(s.tasks), "pid", os.Getpid())
	return s, nil
}

// recall makes a supervisor that only tells a result that it found.
func (s *supervisor) recall(result *supervisorv1.StepState) {
	s.phase, s.last = result.GetPhase(), result.GetPhase()
	s.plan = new(supervisorv1.StepPlan)
	s.sentence, s.users = result.GetSentence(), result.GetUsersFault()
	s.limitHit, s.deadlineHit = result.GetTimeLimit(), result.GetDeadline()
	s.signals, s.started, s.finished = result.GetSignalsDelivered(), bootTime(result.GetStartBootNs()), bootTime(result.GetEndBootNs())
	if ns := result.GetStartUnixNs(); ns != 0 {
		s.startedAt = time.Unix(0, ns)
	}
	s.input.taken, s.input.ended = result.GetInputOffset(), true
	for _, t := range result.GetTasks() {
		s.tasks = append(s.tasks, &task{plan: &supervisorv1.TaskPlan{Rank: t.GetRank()}, pid: int(t.GetPid()), reaped: true, exit: t.GetExit(), usage: t.GetUsage()})
	}
	s.leaveAt = now().add(s.times.Linger)
}

// validate refuses plans that nobody should write.
func validate(plan *supervisorv1.StepPlan) error {
	if len(plan.GetTasks()) == 0 {
		return errors.New("it has no tasks")
	}
	if plan.GetCookie() == "" {
		return errors.New("it has no cookie, so leftovers could not be found")
	}
	ranks := make(map[uint32]bool)
	for _, t := range plan.GetTasks() {
		if len(t.GetArgs()) == 0 {
			return fmt.Errorf("task %d has no program", t.GetRank())
		}
		if ranks[t.GetRank()] {
			return fmt.Errorf("rank %d occurs twice", t.GetRank())
		}
		ranks[t.GetRank()] = true
	}
	return nil
}
