package supervise

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/muster-hpc/muster/node/run"
	"github.com/muster-hpc/muster/node/run/private"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"golang.org/x/sys/unix"
)

// fallbackDir is used when the working directory cannot be.
const fallbackDir = "/tmp"

// prepared is what tasks are executed with. Descriptors are closed on exec.
type prepared struct {
	workDir string
	// sentence is what the user should know though everything is ready.
	sentence string
	tasks    []preparedTask
	// inputs are descriptors that only tasks need; outputs are also used for notices.
	inputs, outputs []int
	// pipes are the writing ends of stdin pipes, and the keyboards of terminals.
	pipes []io.WriteCloser
	// groups are the step's control groups; nil if it has none.
	groups *confinement
	// namespace is the mount namespace of the tasks; nil for the node's.
	namespace *os.File
}

type preparedTask struct {
	stdin, stdout, stderr int
	// program is the path to execute; if lookup is set there is none.
	program string
	lookup  unix.Errno
	// terminal is the one whose slave is its standard streams; nil if it has none.
	terminal *terminal
	// manager is the task's end of its connection to the process manager; 0 if it has none.
	manager int
}

// close closes everything; a nil receiver has nothing.
func (p *prepared) close() {
	if p == nil {
		return
	}
	p.closeInputs()
	for _, fd := range p.outputs {
		_ = unix.Close(fd)
	}
	for _, pipe := range p.pipes {
		_ = pipe.Close()
	}
	for _, t := range p.tasks {
		if t.terminal != nil {
			_ = t.terminal.master.Close()
		}
	}
	p.outputs, p.pipes = nil, nil
	if p.namespace != nil {
		_ = p.namespace.Close()
		p.namespace = nil
	}
}

// drain waits a bounded time until what the terminals showed is in their files; false if it may still be written.
func (p *prepared) drain() bool {
	drained := true
	if p != nil {
		p.closeInputs() // our own slaves
		for _, t := range p.tasks {
			drained = (t.terminal == nil || t.terminal.finish()) && drained
		}
	}
	return drained
}

// closeInputs closes what is of no use once the tasks have it: a pipe must have no reader but them.
func (p *prepared) closeInputs() {
	for _, fd := range p.inputs {
		_ = unix.Close(fd)
	}
	p.inputs = nil
}

// fault is why a step cannot be prepared.
type fault struct {
	sentence string
	users    bool
}

// prepare checks and opens everything as the user. It may block as long as the user's file systems do.
func prepare(plan *supervisorv1.StepPlan, log *slog.Logger) (*prepared, *fault) {
	type outcome struct {
		p *prepared
		f *fault
	}
	c := make(chan outcome)
	go func() {
		// The thread takes the user's identity and ends with this goroutine because it is never unlocked.
		runtime.LockOSThread()
		p := new(prepared)
		f := p.fill(plan)
		if f != nil {
			p.close()
			p.groups.remove(log)
		}
		c <- outcome{p, f}
	}()
	o := <-c
	return o.p, o.f
}

func (p *prepared) fill(plan *supervisorv1.StepPlan) *fault {
	spools, err := p.openSpools(plan)
	if err == nil {
		p.groups, err = confine(plan)
	}
	if err == nil {
		err = becomeUser(plan)
	}
	if err != nil {
		return &fault{sentence: err.Error()}
	}
	p.tasks = make([]preparedTask, len(plan.GetTasks()))
	if f := p.openFiles(plan, spools); f != nil {
		return f
	}
	if err := p.separate(plan); err != nil {
		return &fault{sentence: err.Error()}
	}
	p.workDir = plan.GetWorkDir()
	if err := enterable(p.workDir); err != nil {
		p.sentence = fmt.Sprintf("The working directory %s cannot be entered (%s); %s is used instead.",
			plan.GetWorkDir(), errnoText(err), fallbackDir)
		p.workDir = fallbackDir
	}
	for i, t := range plan.GetTasks() {
		p.tasks[i].program, p.tasks[i].lookup = find(t.GetArgs()[0], pathOf(t.GetEnv()), p.workDir)
	}
	return nil
}

// openFiles opens the tasks' input and output, as the node sees them: they outlive the job.
func (p *prepared) openFiles(plan *supervisorv1.StepPlan, spools map[string]int) *fault {
	files := make(map[string]int)
	var err error
	for i, t := range plan.GetTasks() {
		task := &p.tasks[i]
		if t.GetTerminal() != nil {
			if f := p.openTerminal(task, t, files, spools); f != nil {
				return f
			}
			continue
		}
		if task.stdin, err = p.openInput(t); err != nil {
			return openFault("standard input", t.GetStdinPath(), err)
		}
		if task.stdout, err = p.openOutput(files, spools, t.GetStdoutPath(), run.OutFile(t.GetRank()), t.GetAppend()); err != nil {
			return openFault("standard output", t.GetStdoutPath(), err)
		}
		if task.stderr, err = p.openOutput(files, spools, t.GetStderrPath(), run.ErrFile(t.GetRank()), t.GetAppend()); err != nil {
			return openFault("standard error", t.GetStderrPath(), err)
		}
	}
	return nil
}

// openTerminal gives a task a terminal of its own, whose output goes where its standard output would.
func (p *prepared) openTerminal(task *preparedTask, t *supervisorv1.TaskPlan, files, spools map[string]int) *fault {
	out, err := p.openOutput(files, spools, t.GetStdoutPath(), run.OutFile(t.GetRank()), t.GetAppend())
	if err != nil {
		return openFault("standard output", t.GetStdoutPath(), err)
	}
	term, slave, err := openTerminal(t.GetTerminal())
	if err != nil {
		return &fault{sentence: fmt.Sprintf("The node has no terminal for the task: %s.", err)}
	}
	term.out = out
	p.inputs, p.pipes = append(p.inputs, slave), append(p.pipes, term)
	task.terminal, task.stdin, task.stdout, task.stderr = term, slave, slave, slave
	return nil
}

// separate moves the thread to where the job has directories of its own, if the plan says so. The thread is the user
// before and after.
func (p *prepared) separate(plan *supervisorv1.StepPlan) error {
	dirs := private.Dirs{Tmp: plan.GetPrivateTmp(), Shm: plan.GetPrivateShm()}
	if dirs == (private.Dirs{}) {
		return nil
	}
	if err := becomeRoot(); err != nil {
		return err
	}
	var err error
	if p.namespace, err = dirs.Enter(); err != nil {
		return err
	}
	return becomeUser(plan)
}

func openFault(what, path string, err error) *fault {
	// Descriptors and memory of the node are not the user's.
	users := !errors.Is(err, unix.EMFILE) && !errors.Is(err, unix.ENFILE) && !errors.Is(err, unix.ENOMEM)
	return &fault{sentence: fmt.Sprintf("The %s %s cannot be opened: %s.", what, path, errnoText(err)), users: users}
}

// becomeUser gives the calling thread the user's effective identity. The real one stays the supervisor's, so that the
// user cannot signal the thread.
func becomeUser(plan *supervisorv1.StepPlan) error {
	if os.Getuid() != 0 {
		return nil
	}
	// Raw calls concern this thread only; those of package syscall would change the whole process.
	if err := setThreadGroups(plan.GetGroups()); err != nil {
		return fmt.Errorf("taking the user's groups: %w", err)
	}
	keep := ^uintptr(0)
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, keep, uintptr(plan.GetGid()), keep); e != 0 {
		return fmt.Errorf("taking group id %d: %w", plan.GetGid(), e)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(plan.GetUid()), keep); e != 0 {
		return fmt.Errorf("taking user id %d: %w", plan.GetUid(), e)
	}
	return nil
}

// becomeRoot takes the effective identity back that becomeUser gave away.
func becomeRoot() error {
	keep := ^uintptr(0)
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, keep, 0, keep); e != 0 {
		return fmt.Errorf("taking root's identity again, to give the job directories of its own: %w", e)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, keep, 0, keep); e != 0 {
		return fmt.Errorf("taking root's group again: %w", e)
	}
	return nil
}

// enterable checks that a directory exists and can be entered.
func enterable(dir string) error {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return errors.Join(unix.Faccessat(unix.AT_FDCWD, dir, unix.X_OK, unix.AT_EACCESS), unix.Close(fd))
}

// openSpools opens the spool files, in the step's directory, and gives them to the user: /dev/stdout can be opened
// again only by the owner of the file behind it.
func (p *prepared) openSpools(plan *supervisorv1.StepPlan) (map[string]int, error) {
	spools := make(map[string]int)
	for _, t := range plan.GetTasks() {
		var names []string
		if t.GetStdoutPath() == "" {
			names = append(names, run.OutFile(t.GetRank()))
		}
		if t.GetStderrPath() == "" {
			names = append(names, run.ErrFile(t.GetRank()))
		}
		for _, name := range names {
			fd, err := unix.Open(name, unix.O_WRONLY|unix.O_CREAT|unix.O_APPEND|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
			if err != nil {
				return nil, fmt.Errorf("opening the spool file %s: %w", name, err)
			}
			p.outputs = append(p.outputs, fd)
			spools[name] = fd
			err = unix.Fchmod(fd, 0o600)
			if err == nil && os.Geteuid() == 0 {
				err = unix.Fchown(fd, int(plan.GetUid()), int(plan.GetGid()))
			}
			if err != nil {
				return nil, fmt.Errorf("giving the spool file %s to the user: %w", name, err)
			}
		}
	}
	return spools, nil
}

// openOutput opens an output file, once for all tasks of the node that name it, so that they do not overwrite each
// other. It is always written at its end. It is truncated now: when tasks start on other nodes, this one is prepared.
func (p *prepared) openOutput(files, spools map[string]int, path, spool string, keep bool) (int, error) {
	if path == "" {
		return spools[spool], nil
	}
	path = filepath.Clean(path)
	if fd, ok := files[path]; ok {
		return fd, nil
	}
	flags := unix.O_WRONLY | unix.O_CREAT | unix.O_APPEND
	if !keep {
		flags |= unix.O_TRUNC
	}
	fd, err := p.openFile(path, flags)
	if err == nil {
		files[path] = fd
	}
	return fd, err
}

// openInput opens a task's stdin: a file, or the reading end of a new pipe.
func (p *prepared) openInput(t *supervisorv1.TaskPlan) (int, error) {
	if t.GetStdinPath() != "" {
		return p.openFile(t.GetStdinPath(), unix.O_RDONLY)
	}
	var ends [2]int
	if err := unix.Pipe2(ends[:], unix.O_CLOEXEC); err != nil {
		return -1, err
	}
	p.inputs = append(p.inputs, ends[0])
	if err := unix.SetNonblock(ends[1], true); err != nil {
		return -1, errors.Join(err, unix.Close(ends[1]))
	}
	p.pipes = append(p.pipes, os.NewFile(uintptr(ends[1]), "stdin"))
	return ends[0], nil
}

// openFile opens without waiting (for the other end of a FIFO) and returns a descriptor that waits as usual.
func (p *prepared) openFile(path string, flags int) (int, error) {
	for {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC|unix.O_NOCTTY|unix.O_NONBLOCK, 0o666)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return -1, err
		}
		if flags&unix.O_WRONLY != 0 {
			p.outputs = append(p.outputs, fd)
		} else {
			p.inputs = append(p.inputs, fd)
		}
		return fd, unix.SetNonblock(fd, false)
	}
}

// pathOf returns the last PATH in an environment, as execvp and shells see it.
func pathOf(env []string) string {
	path := "/usr/local/bin:/usr/bin:/bin"
	for _, v := range env {
		if value, ok := strings.CutPrefix(v, "PATH="); ok {
			path = value
		}
	}
	return path
}

// find looks a program up like execvp: a name with a slash is a path from the working directory, another is searched
// in path; one that may not be executed hides none behind it. The error is that of execve.
func find(name, path, workDir string) (string, unix.Errno) {
	if strings.Contains(name, "/") {
		return name, executable(absolute(name, workDir))
	}
	if name == "" {
		return "", unix.ENOENT
	}
	failure := unix.ENOENT
	for _, dir := range strings.Split(path, ":") {
		candidate := absolute(filepath.Join(dir, name), workDir)
		switch e := executable(candidate); e {
		case 0:
			return candidate, 0
		case unix.EACCES:
			failure = e
		}
	}
	return "", failure
}

func absolute(path, dir string) string {
	if filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(dir, path)
}

func executable(path string) unix.Errno {
	var st unix.Stat_t
	err := unix.Stat(path, &st)
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		err = unix.EACCES
	}
	if err == nil {
		err = unix.Faccessat(unix.AT_FDCWD, path, unix.X_OK, unix.AT_EACCESS)
	}
	return errno(err)
}

// errno returns the error number in an error, 0 for nil; EIO stands for one without.
func errno(err error) unix.Errno {
	if err == nil {
		return 0
	}
	if e := unix.Errno(0); errors.As(err, &e) {
		return e
	}
	return unix.EIO
}

// errnoText is the text of an error number as C programs print it.
func errnoText(err error) string {
	text := errno(err).Error()
	return strings.ToUpper(text[:1]) + text[1:]
}
