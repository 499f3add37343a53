package supervise

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"golang.org/x/sys/unix"
)

const (
	// maxProgramOutput bounds what is read of the output of a program before a task; the rest is thrown away.
	maxProgramOutput = 256 << 10
	// outputTimeout bounds the wait for the output of a program that has ended: what it left behind may hold it.
	outputTimeout = 200 * time.Millisecond
)

// program is one that runs before or after a task. It belongs to its task and runs as the user, where the task runs.
type program struct {
	path   string
	before bool
	pid    int
	// ended: it was reaped, with this status; told: its output is complete, or given up.
	ended, told bool
	status      unix.WaitStatus
	read        *os.File // nil after the task
	output      []byte
	// failure is why it was not executed, if its stage said so.
	failure string
	// until is when it is killed; 0 means never. late: it was.
	until bootTime
	late  bool
}

// what names it for people.
func (p *program) what() string {
	if p.before {
		return "task prolog " + p.path
	}
	return "task epilog " + p.path
}

// begin starts a task: its first program before it, or itself. nil unless it is executed by a stage.
func (s *supervisor) begin(i int) *staged {
	t := s.tasks[i]
	if len(t.prologs) == 0 {
		return s.launch(i)
	}
	path := t.prologs[0]
	t.prologs = t.prologs[1:]
	return s.surround(i, path, true)
}

// surround starts a program before or after a task.
func (s *supervisor) surround(i int, path string, before bool) *staged {
	t := s.tasks[i]
	p := &program{path: path, before: before, told: !before}
	if ms := s.plan.GetTaskProgramTimeoutMs(); ms > 0 {
		p.until = now().add(time.Duration(ms) * time.Millisecond)
	}
	stage, err := s.spawn(i, p)
	if err != nil {
		s.unsurrounded(i, p, err)
		return nil
	}
	t.aside = p
	if p.read != nil {
		go func() {
			b, _ := io.ReadAll(io.LimitReader(p.read, maxProgramOutput)) // the deadline ends it, too
			_, _ = io.Copy(io.Discard, p.read)
			_ = p.read.Close()
			s.asides <- func() {
				p.output, p.told = b, true
				s.settleAside(i)
			}
		}()
	}
	return stage
}

// spawn executes a program in the place of a task. It reads nothing; what a program before the task says is read.
func (s *supervisor) spawn(i int, p *program) (*staged, error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	t, ready := s.tasks[i], s.ready.tasks[i]
	e := execution{program: p.path, args: []string{p.path}, env: t.env, stdin: int(null.Fd()), stdout: ready.stdout, stderr: ready.stderr}
	if ready.terminal != nil && !p.before { // the terminal is gone with the task
		e.stdout, e.stderr = ready.terminal.out, ready.terminal.out
	}
	if p.before {
		read, write, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		defer write.Close()
		p.read, e.stdout = read, int(write.Fd())
	}
	stage, pid, err := s.fork(t, i, e)
	if err != nil && p.read != nil {
		return nil, errors.Join(err, p.read.Close())
	}
	if stage != nil {
		stage.aside = p
	}
	p.pid = pid
	return stage, err
}

// asideEnded takes the end of a program; false if the process is none.
func (s *supervisor) asideEnded(pid int, status unix.WaitStatus) bool {
	for i, t := range s.tasks {
		p := t.aside
		if p == nil || p.pid != pid || p.ended {
			continue
		}
		p.ended, p.status = true, status
		if p.read != nil && !p.told {
			_ = p.read.SetReadDeadline(time.Now().Add(outputTimeout))
		}
		s.settleAside(i)
		return true
	}
	return false
}

// settleAside draws the consequences of a program that has ended.
func (s *supervisor) settleAside(i int) {
	t := s.tasks[i]
	p := t.aside
	if p == nil || !p.ended || !p.told || s.over() {
		return
	}
	t.aside, s.changed = nil, true
	switch problem := p.problem(s.plan.GetTaskProgramTimeoutMs()); {
	case problem != "" && p.before && s.ending:
		t.end(&apiv1.TaskExit{Signal: uint32(unix.SIGTERM), EndedBySupervisor: true})
	case problem != "":
		s.unsurrounded(i, p, errors.New(problem))
	case p.before && s.ending: // nothing is executed any more
		t.end(&apiv1.TaskExit{Signal: uint32(unix.SIGTERM), EndedBySupervisor: true})
	case p.before:
		t.obey(p.output)
		s.launching(i)
	}
	s.follow(i)
	s.executedAll()
	s.judge()
}

// launching starts the next of what belongs to a task after the start of the others.
func (s *supervisor) launching(i int) {
	unprotect(s.log)
	defer protect(s.log)
	if stage := s.begin(i); stage != nil {
		s.settleStages([]*staged{stage})
	}
}

// problem says how a program failed; empty if it did not.
func (p *program) problem(timeoutMS uint32) string {
	switch {
	case p.failure != "":
		return p.failure
	case p.late:
		return fmt.Sprintf("it was killed because it took more than %v", time.Duration(timeoutMS)*time.Millisecond)
	case p.status.Signaled():
		return fmt.Sprintf("it was ended by signal %d (%s)", int(p.status.Signal()), p.status.Signal())
	case p.status.ExitStatus() != 0:
		return fmt.Sprintf("it ended with exit code %d", p.status.ExitStatus())
	}
	return ""
}

// unsurrounded tells why a program did not do its work. Without the one before it, a task is not executed.
func (s *supervisor) unsurrounded(i int, p *program, why error) {
	t := s.tasks[i]
	sentence := fmt.Sprintf("%s: %s", p.what(), reason(why))
	s.log.Warn("a program around a task failed", "rank", t.plan.GetRank(), "what", sentence)
	s.changed = true
	if !p.before {
		s.print(i, s.voice()+sentence)
		return
	}
	code := uint32(1)
	if p.ended && p.status.Exited() && p.status.ExitStatus() > 0 {
		code = uint32(p.status.ExitStatus())
	}
	t.prologs = nil
	t.end(&apiv1.TaskExit{Code: code, LaunchError: sentence})
}

// reason is an error's text, or that of its number.
func reason(err error) string {
	if e := syscall.Errno(0); errors.As(err, &e) {
		return errnoText(err)
	}
	return err.Error()
}

// follow starts the next program after a task that has ended, unless everything is being killed.
func (s *supervisor) follow(i int) {
	t := s.tasks[i]
	for t.exit != nil && t.pid != 0 && t.aside == nil && len(t.epilogs) > 0 && s.killed == 0 && !s.over() {
		path := t.epilogs[0]
		t.epilogs = t.epilogs[1:]
		unprotect(s.log)
		if stage := s.surround(i, path, false); stage != nil {
			s.settleStages([]*staged{stage})
		}
		protect(s.log)
	}
}

// asideAt is when the first of the programs is to be killed; 0 if none is.
func (s *supervisor) asideAt() bootTime {
	var next bootTime
	for _, t := range s.tasks {
		if t.aside != nil && !t.aside.ended && !t.aside.late {
			next = sooner(next, t.aside.until)
		}
	}
	return next
}

// tickAsides kills programs whose time is over.
func (s *supervisor) tickAsides(now bootTime) {
	for _, t := range s.tasks {
		if p := t.aside; p != nil && !p.ended && !p.late && p.until.reached(now) {
			p.late = true
			if err := unix.Kill(-p.pid, unix.SIGKILL); err != nil {
				s.log.Warn("a program around a task cannot be killed", "rank", t.plan.GetRank(), "what", p.what(), "error", err)
			}
		}
	}
}

// busy reports whether programs run around tasks, or are to.
func (s *supervisor) busy() bool {
	return slices.ContainsFunc(s.tasks, func(t *task) bool { return t.aside != nil })
}

// obey changes a task's environment as the output of a program before it says, and notes what it is to print.
func (t *task) obey(output []byte) {
	for line := range bytes.Lines(output) {
		text := strings.TrimRight(string(line), "\r\n")
		word, rest, _ := strings.Cut(strings.TrimLeft(text, " \t"), " ")
		switch word {
		case "export":
			if name, value, ok := strings.Cut(strings.TrimLeft(rest, " "), "="); ok && name != "" && !strings.ContainsRune(text, 0) {
				t.env = append(without(t.env, name), name+"="+value)
			}
		case "unset":
			t.env = without(t.env, strings.TrimSpace(rest))
		case "print":
			t.prints = append(t.prints, rest)
		}
	}
}

// without is an environment less a variable. The mark by which the step's processes are known stays.
func without(env []string, name string) []string {
	if name == cookieVariable {
		return env
	}
	return slices.DeleteFunc(slices.Clone(env), func(v string) bool { return strings.HasPrefix(v, name+"=") })
}
