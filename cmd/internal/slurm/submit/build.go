package submit

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// Error is an option value that is refused.
type Error struct {
	// Text is the message after "sbatch: error: ".
	Text string
	// Fatal prints "sbatch: fatal: " instead.
	Fatal bool
	// Code is the exit code.
	Code int
}

// Error returns the text.
func (e *Error) Error() string { return e.Text }

// Exit codes of refusals on the client.
const (
	// CodeUsage is for words that cannot be parsed.
	CodeUsage = 255
	// CodeRefused is for everything else.
	CodeRefused = 1
)

func invalid(name string) error {
	return &Error{Text: "Invalid --" + name + " specification", Code: CodeUsage}
}

func refused(format string, args ...any) error {
	return &Error{Text: fmt.Sprintf(format, args...), Code: CodeRefused}
}

// longText is the most bytes of a job name or comment.
const longText = 1024

// TooLong is Slurm's message for a parameter over its bound.
const TooLong = "Batch job submission failed: Pathname of a file, directory or other parameter too long"

// Caller is where and by whom a job is submitted.
type Caller struct {
	// Dir is the working directory.
	Dir string
	// Host is the name of the host.
	Host string
	// Umask is the file mode creation mask.
	Umask uint32
	// UID is the caller.
	UID uint32
	// UserID finds a user.
	UserID func(name string) (uint32, error)
	// Now is the clock's time.
	Now time.Time
	// Hostfile is SLURM_HOSTFILE, which says on which node each rank is; empty if it is not set.
	Hostfile string
	// SoftLimit tells a limit of the submitting process (a name without RLIMIT_); nil asks the kernel.
	SoftLimit func(name string) (uint64, error)
	// Batch tells that there is a batch shell, to which signals can go.
	Batch bool
}

// Merge lays the command line over the environment over the script. Of options that exclude each other (--mem and its
// relatives) those of the highest layer win.
func Merge(line, env, script *option.Set) *option.Set {
	for _, pair := range [][2]*option.Set{{env, script}, {line, env}, {line, script}} {
		for _, group := range [][]string{memoryNames} {
			if count(pair[0], group) > 0 {
				for _, name := range group {
					pair[1].Drop(name)
				}
			}
		}
	}
	return line.Over(env.Over(script))
}

var memoryNames = []string{"mem", "mem-per-cpu", "mem-per-gpu"}

func count(s *option.Set, names []string) int {
	n := 0
	for _, name := range names {
		if s.Has(name) {
			n++
		}
	}
	return n
}

// Job reads the options that sbatch and srun share into a specification; the caller adds what runs, the files and the
// environment.
func Job(o *option.Set, c Caller) (*apiv1.JobSpec, error) {
	spec := &apiv1.JobSpec{
		Name: o.Text("job-name"), Account: o.Text("account"), Comment: o.Text("comment"), Qos: o.Text("qos"),
		Wckey: o.Text("wckey"), Hold: o.Has("hold"), Umask: c.Umask, SubmitHost: c.Host, Requeue: true,
		WorkDir: Absolute(c.Dir, o.Text("chdir")), TaskOptions: &apiv1.TaskOptions{},
	}
	for _, text := range []string{spec.GetName(), spec.GetComment()} {
		if len(text) > longText {
			return nil, refused("%s\n%d bytes were given; the most that is kept is %d", TooLong, len(text), longText)
		}
	}
	for _, read := range []func(*option.Set, Caller, *apiv1.JobSpec) error{
		readTime, readWho, readPriority, readRequeue, readSignal,
	} {
		if err := read(o, c, spec); err != nil {
			return nil, err
		}
	}
	var err error
	if spec.Resources, err = Resources(o, c); err != nil {
		return nil, err
	}
	return spec, readTasks(o, c, spec)
}

func readTime(o *option.Set, c Caller, spec *apiv1.JobSpec) error {
	if v, ok := o.Get("time"); ok {
		limit, err := value.TimeLimit(v.Text)
		if err != nil {
			return invalid("time")
		}
		spec.TimeLimitS = limit
	}
	if v, ok := o.Get("begin"); ok {
		at, err := value.Moment(v.Text, c.Now, true)
		if err != nil {
			return invalid("begin")
		}
		if at.After(c.Now) {
			spec.BeginTime = timestamppb.New(at)
		}
	}
	return nil
}

func readWho(o *option.Set, c Caller, spec *apiv1.JobSpec) error {
	if v, ok := o.Get("partition"); ok {
		for name := range strings.SplitSeq(v.Text, ",") {
			if name != "" {
				spec.Partitions = append(spec.Partitions, name)
			}
		}
	}
	if v, ok := o.Get("uid"); ok {
		uid, err := c.UserID(v.Text)
		if err != nil {
			return invalid("uid")
		}
		if uid != c.UID {
			return refused("--uid=%s: a job runs as the user who submits it; call this as that user", v.Text)
		}
	}
	if v, ok := o.Get("mail-type"); ok {
		for word := range strings.SplitSeq(strings.ToUpper(v.Text), ",") {
			switch {
			case word == "NONE":
			case mailTypes[word]:
				return refused("--mail-type=%s is not supported yet: %s", v.Text, laterMail)
			default:
				return invalid("mail-type")
			}
		}
	}
	return nil
}

var mailTypes = map[string]bool{
	"BEGIN": true, "END": true, "FAIL": true, "ALL": true, "REQUEUE": true, "INVALID_DEPEND": true, "STAGE_OUT": true,
	"TIME_LIMIT": true, "TIME_LIMIT_90": true, "TIME_LIMIT_80": true, "TIME_LIMIT_50": true, "ARRAY_TASKS": true,
}

func readPriority(o *option.Set, _ Caller, spec *apiv1.JobSpec) error {
	if v, ok := o.Get("priority"); ok {
		n, err := strconv.ParseUint(v.Text, 10, 32)
		if err != nil || n == math.MaxUint32 {
			return invalid("priority")
		}
		spec.Priority = uint32(n)
		spec.Hold = spec.GetHold() || n == 0
	}
	if v, ok := o.Get("nice"); ok {
		n, err := strconv.ParseInt(v.Text, 10, 32)
		if err != nil || n > math.MaxInt32-3 || n < -(math.MaxInt32-3) {
			return invalid("nice")
		}
		spec.Nice = int32(n)
	}
	return nil
}

func readRequeue(o *option.Set, _ Caller, spec *apiv1.JobSpec) error {
	if v, ok := o.Get("requeue"); ok {
		spec.Requeue = v.Text != "no"
		spec.AutomaticRecovery = v.Text == "yes"
	}
	if v, ok := o.Get("open-mode"); ok {
		switch strings.ToLower(v.Text) {
		case "a", "append":
			spec.OpenAppend = true
		case "t", "truncate":
		default:
			return invalid("open-mode")
		}
	}
	return nil
}

// Absolute joins a directory and a path that may be relative to it.
func Absolute(dir, path string) string {
	switch {
	case path == "" || path == ".":
		return dir
	case strings.HasPrefix(path, "/"):
		return path
	}
	return strings.TrimSuffix(dir, "/") + "/" + strings.TrimPrefix(path, "./")
}

// Pattern makes the filename pattern of an output file absolute; percent signs of the directory stay what they are.
func Pattern(dir, pattern string) string {
	if pattern == "" || strings.HasPrefix(pattern, "/") {
		return pattern
	}
	return Absolute(strings.ReplaceAll(dir, "%", "%%"), pattern)
}

// number reads a count of an option, at least low.
func number(o *option.Set, name string, low uint32) (uint32, error) {
	v, ok := o.Get(name)
	if !ok {
		return 0, nil
	}
	n, err := value.Count(v.Text, low)
	if err != nil {
		return 0, refused("Invalid numeric value \"%s\" for --%s.", v.Text, name)
	}
	return n, nil
}

// CodeOf is the exit code for an error of this package or of the option package.
func CodeOf(err error) int {
	var mine *Error
	if errors.As(err, &mine) {
		return mine.Code
	}
	var refusedOption *option.RefusedError
	if errors.As(err, &refusedOption) {
		return CodeRefused
	}
	return CodeUsage
}
