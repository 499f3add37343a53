package run

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

// Files in a step's directory; see the package documentation.
const (
	PlanFile    = "plan"
	LockFile    = "lock"
	SocketFile  = "socket"
	StartedFile = "started"
	ResultFile  = "result"
	LogFile     = "log"
)

// CookieVariable is the environment variable by which every process of a step is known; its value is StepPlan.cookie.
const CookieVariable = "MUSTER_STEP_COOKIE"

// Version of the supervisor protocol that this package speaks. 2 has signals before the time limit, terminals, lines for the tasks' standard
// error, programs around tasks, and more of what is measured; supervisors of version 1 ignore those in a plan, and refuse Resize.
const Version = 2

// OutFile is the name of the spool file of a task's standard output in the step's directory.
func OutFile(rank uint32) string { return "out." + strconv.FormatUint(uint64(rank), 10) }

// ErrFile is the name of the spool file of a task's standard error in the step's directory.
func ErrFile(rank uint32) string { return "err." + strconv.FormatUint(uint64(rank), 10) }

// BootID returns the kernel's boot id. It is what StepPlan.boot_id must contain for the plan's deadline to hold, also
// on nodes whose boot id is declared: a supervisor only knows the kernel's.
func BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("reading the boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// BootNow returns CLOCK_BOOTTIME in nanoseconds: the clock of all deadlines. It runs while the machine sleeps.
func BootNow() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic("run: CLOCK_BOOTTIME cannot be read: " + err.Error()) // Linux has it since 2.6.39.
	}
	return t.Nano()
}

// ReadPlan returns the plan in a step's directory. It wraps fs.ErrNotExist if there is none.
func ReadPlan(dir string) (*supervisorv1.StepPlan, error) {
	plan := new(supervisorv1.StepPlan)
	if err := readMessage(filepath.Join(dir, PlanFile), plan); err != nil {
		return nil, err
	}
	return plan, nil
}

// ReadResult returns the final state of a step: phase ENDED or FAILED. It wraps fs.ErrNotExist while there is none.
func ReadResult(dir string) (*supervisorv1.StepState, error) {
	state := new(supervisorv1.StepState)
	if err := readMessage(filepath.Join(dir, ResultFile), state); err != nil {
		return nil, err
	}
	return state, nil
}

// ReserveResult sets the space aside that WriteResult needs for the plan's step, so that its end can be written when the
// disk is full by then: room for every task's exit with its launch error, and for sentences.
func ReserveResult(dir string, plan *supervisorv1.StepPlan) (err error) {
	size := resultBytes
	for _, t := range plan.GetTasks() {
		size += exitBytes
		if len(t.GetArgs()) > 0 {
			size += len(t.GetArgs()[0])
		}
	}
	f, err := os.OpenFile(temporary(filepath.Join(dir, ResultFile)), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("reserving space for the result: %w", err)
	}
	// A file system without the call gets bytes written: not a promise on all of them, but the best there is.
	if err = unix.Fallocate(int(f.Fd()), 0, 0, int64(size)); errors.Is(err, unix.EOPNOTSUPP) {
		err = writeAll(f, make([]byte, size))
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("reserving space for the result: %w", err)
	}
	return nil
}

// Space that ReserveResult sets aside; rows of docs/limits.md.
const (
	// resultBytes is for everything but the tasks: two sentences and the file system's rounding.
	resultBytes = 4096
	// exitBytes is for a task's exit, beside the name of its program.
	exitBytes = 128
)

// WriteResult puts a final state on disk: when it returns nil the state survives a crash of the machine.
func WriteResult(dir string, state *supervisorv1.StepState) error {
	return writeMessage(filepath.Join(dir, ResultFile), state)
}

// writePlan puts the plan where the supervisor finds it; it survives the agent, but not a crash of the machine.
func writePlan(dir string, plan *supervisorv1.StepPlan) error {
	path := filepath.Join(dir, PlanFile)
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(plan)
	if err != nil {
		return fmt.Errorf("encoding %s: %w", path, err)
	}
	if err := os.WriteFile(temporary(path), b, 0o600); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	if err := os.Rename(temporary(path), path); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}

func readMessage(path string, m proto.Message) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("reading a step's file: %w", err)
	}
	if err := proto.Unmarshal(b, m); err != nil {
		return fmt.Errorf("decoding %s: %w", path, err)
	}
	return nil
}

func writeMessage(path string, m proto.Message) error {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return fmt.Errorf("encoding %s: %w", path, err)
	}
	return writeDurable(path, b)
}

// temporary is the name under which a file is written before it takes its place.
func temporary(path string) string {
	dir, name := filepath.Split(path)
	return filepath.Join(dir, "."+name+".new")
}

// writeDurable replaces a file: contents to a temporary file, fsync, rename, fsync of the directory. The file is
// readable by its owner only whatever the umask. Space that the temporary file has already is used: it is cut to size at
// the end.
func writeDurable(path string, b []byte) (err error) {
	f, err := os.OpenFile(temporary(path), os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	err = errors.Join(f.Chmod(0o600), writeAll(f, b), f.Truncate(int64(len(b))), f.Sync())
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(temporary(path), path)
	}
	if err == nil {
		err = SyncDir(filepath.Dir(path))
	}
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}

func writeAll(f *os.File, b []byte) error {
	_, err := f.Write(b)
	return err
}

// SyncDir makes the names in a directory durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("making names in %s durable: %w", dir, err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("making names in %s durable: %w", dir, err)
	}
	return nil
}

// Started is the content of the file "started".
type Started struct {
	// BootID is the kernel's boot id at the start.
	BootID string
	// BootNS is CLOCK_BOOTTIME at the start in nanoseconds.
	BootNS int64
	// Time is the wall clock at the start, to the nanosecond.
	Time time.Time
}

// ErrStarted means that tasks of this directory were executed before, or may have been: they are never executed again.
var ErrStarted = errors.New("the tasks of this step were started before")

// ReadStarted returns when tasks were executed. It wraps fs.ErrNotExist if they never were.
func ReadStarted(dir string) (Started, error) {
	path := filepath.Join(dir, StartedFile)
	b, err := os.ReadFile(path)
	if err != nil {
		return Started{}, fmt.Errorf("reading whether a step was started: %w", err)
	}
	var s Started
	var wall int64
	// A torn or empty file still means "started": only its name is durable.
	_, _ = fmt.Sscanf(string(bytes.TrimSpace(b)), "%s %d %d", &s.BootID, &s.BootNS, &wall)
	s.Time = time.Unix(0, wall)
	return s, nil
}

// MarkStarted records durably that tasks are about to be executed. ErrStarted if that was recorded before. After any
// other error the caller must not execute; it may try again (and gets ErrStarted if the record could not be removed).
func MarkStarted(dir string) (Started, error) {
	id, err := BootID()
	if err != nil {
		return Started{}, err
	}
	s := Started{BootID: id, BootNS: BootNow(), Time: time.Now()}
	path := filepath.Join(dir, StartedFile)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return Started{}, ErrStarted
	}
	if err != nil {
		return Started{}, fmt.Errorf("recording the start: %w", err)
	}
	line := fmt.Sprintf("%s %d %d\n", s.BootID, s.BootNS, s.Time.UnixNano())
	// What counts after a crash of the machine is that the name is there; what is in the file is only of use before.
	err = errors.Join(f.Chmod(0o600), writeAll(f, []byte(line)), f.Close())
	if err = errors.Join(err, SyncDir(dir)); err != nil {
		return Started{}, errors.Join(fmt.Errorf("recording the start: %w", err), os.Remove(path))
	}
	return s, nil
}
