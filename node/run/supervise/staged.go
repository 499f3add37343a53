package supervise

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/muster-hpc/muster/node/run"
	"github.com/muster-hpc/muster/node/run/supervise/stage"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
)

// stageTimeout bounds the wait for stages to tell whether they could execute their tasks; less if something else is due. A
// row of docs/limits.md.
const stageTimeout = 5 * time.Second

// staged is a task, or a program around it, whose stage was forked.
type staged struct {
	*task
	aside  *program // nil for the task itself
	status *os.File
}

// wantsStage reports whether an execution needs what belongs to a process and can only be done by itself.
func wantsStage(p *prepared, e execution) bool {
	return p.groups != nil || p.namespace != nil || len(e.prints)+len(e.lines) > 0
}

// adjusts reports whether the plan asks for what can also be done to a process that is stopped before its first instruction: a stage is
// another start of this program, which costs some milliseconds.
func adjusts(plan *supervisorv1.StepPlan) bool {
	return len(plan.GetResourceLimits()) > 0 || plan.Nice != nil
}

// adjust does it.
func adjust(plan *supervisorv1.StepPlan, pid int) error {
	for _, l := range plan.GetResourceLimits() {
		var r unix.Rlimit
		if err := unix.Prlimit(pid, int(l.GetResource()), nil, &r); err != nil {
			return fmt.Errorf("reading resource limit %d of process %d: %w", l.GetResource(), pid, err)
		}
		r.Cur = min(l.GetSoft(), r.Max)
		if err := unix.Prlimit(pid, int(l.GetResource()), &r, nil); err != nil {
			return fmt.Errorf("setting resource limit %d of process %d: %w", l.GetResource(), pid, err)
		}
	}
	if plan.Nice == nil {
		return nil
	}
	// Without root a lower value than ours is not to be had.
	if err := unix.Setpriority(unix.PRIO_PROCESS, pid, int(plan.GetNice())); err != nil && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("setting the nice value of process %d: %w", pid, err)
	}
	return nil
}

// stage starts a stage, from the loop's thread, whose death kills it. The error is one of the node.
func (t *task) stage(plan *supervisorv1.StepPlan, p *prepared, i int, e execution) (*staged, int, error) {
	order := &stage.Plan{
		Parent: os.Getpid(), Namespace: p.namespace != nil, CPUs: e.cpus,
		SetNice: plan.Nice != nil, Nice: int(plan.GetNice()),
		SetUser: os.Geteuid() == 0, UID: plan.GetUid(), GID: plan.GetGid(), Supplement: plan.GetGroups(),
		Dir: p.workDir, Program: e.program, Args: e.args, Env: e.env, Prints: e.prints, Lines: e.lines,
	}
	for _, l := range plan.GetResourceLimits() {
		order.Limits = append(order.Limits, stage.Limit{Resource: int(l.GetResource()), Soft: l.GetSoft()})
	}
	group := p.groups.task(i)
	if group == nil {
		return t.stageIn(plan, p, e, order, nil)
	}
	into, err := group.Descriptor()
	if err != nil {
		return nil, 0, err
	}
	if into != nil {
		defer into.Close()
		s, pid, err := t.stageIn(plan, p, e, order, into)
		// Before Linux 5.7 a process could not be born in a group.
		if !errors.Is(err, unix.ENOSYS) && !errors.Is(err, unix.E2BIG) && !errors.Is(err, unix.EINVAL) {
			return s, pid, err
		}
	}
	order.Groups = group.Files()
	return t.stageIn(plan, p, e, order, nil)
}

func (t *task) stageIn(plan *supervisorv1.StepPlan, p *prepared, e execution, order *stage.Plan, into *os.File) (*staged, int, error) {
	written, err := memory(order.Encode())
	if err != nil {
		return nil, 0, err
	}
	defer written.Close()
	status, statusEnd, err := os.Pipe()
	if err != nil {
		return nil, 0, fmt.Errorf("making a pipe to a stage: %w", err)
	}
	defer statusEnd.Close()
	attr := &syscall.ProcAttr{
		// Nothing of the user's reaches the stage's own runtime.
		Env:   []string{"GOGC=off", "GOMAXPROCS=1", run.CookieVariable + "=" + plan.GetCookie()},
		Files: []uintptr{uintptr(e.stdin), uintptr(e.stdout), uintptr(e.stderr), written.Fd(), statusEnd.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true, Setctty: e.terminal, Pdeathsig: syscall.SIGKILL},
	}
	if p.namespace != nil {
		attr.Files = append(attr.Files, p.namespace.Fd())
	}
	attr.Files = withManager(attr.Files, e.manager)
	if into != nil {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, int(into.Fd())
	}
	pid, err := syscall.ForkExec("/proc/self/exe", []string{stage.Name}, attr)
	if err != nil {
		return nil, 0, errors.Join(fmt.Errorf("starting a stage: %w", err), status.Close())
	}
	return &staged{task: t, status: status}, pid, nil
}

// memory is a file without a name that has the bytes.
func memory(b []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate("plan", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("making a file in memory: %w", err)
	}
	f := os.NewFile(uintptr(fd), "plan")
	_, err = f.Write(b)
	if err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("writing a file in memory: %w", err), f.Close())
	}
	return f, nil
}

// settle waits until the stage executed its task or could not, which becomes the task's exit. trouble is for the log.
func (s *staged) settle(until time.Time) (trouble error) {
	defer s.status.Close()
	if err := s.status.SetReadDeadline(until); err != nil {
		return fmt.Errorf("waiting for a stage: %w", err)
	}
	b, err := io.ReadAll(s.status)
	if err != nil { // It may still succeed; otherwise its exit code says that it did not.
		return fmt.Errorf("waiting for a stage: %w", err)
	}
	started, failed, err := stage.DecodeStatus(b)
	switch {
	case err != nil:
		return err
	case failed != nil && s.aside != nil:
		s.aside.failure = fmt.Sprintf("%s(): %s", failed.Call, errnoText(unix.Errno(failed.Errno)))
		return nil
	case failed != nil:
		s.end(launchFailure(failed.Call, s.plan, unix.Errno(failed.Errno)))
		return nil
	case !started: // Its exit is the task's.
		return errors.New("the stage of a task died before it could execute it")
	}
	return nil
}
