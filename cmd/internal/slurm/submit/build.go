package submit

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
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
		readTime, readWho, readPriority, readRequeue, readLayout,
	} {
		if err := read(o, c, spec); err != nil {
			return nil, err
		}
	}
	resources, err := Resources(o)
	spec.Resources = resources
	spec.TaskOptions.BindGpusPerTask = resources.GetGpusPerTask() > 0
	return spec, err
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

func readLayout(o *option.Set, _ Caller, spec *apiv1.JobSpec) error {
	v, ok := o.Get("distribution")
	if !ok {
		return nil
	}
	switch word := strings.ToLower(v.Text); word {
	case "block", "cyclic":
		spec.TaskOptions.Distribution = word
	case "*", "block:block", "block:cyclic", "block:*", "*:*":
		spec.TaskOptions.Distribution = "block" // what follows the colon is about sockets, to which nothing is bound
	case "cyclic:block", "cyclic:cyclic", "cyclic:*":
		spec.TaskOptions.Distribution = "cyclic"
	default:
		return refused("--distribution=%s is not supported yet: ranks are laid out by block or cyclic", v.Text)
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

// Resources reads what is asked of nodes.
func Resources(o *option.Set) (*apiv1.ResourceRequest, error) {
	r := &apiv1.ResourceRequest{}
	var err error
	for _, field := range []struct {
		to   *uint32
		name string
		low  uint32
	}{
		{&r.Ntasks, "ntasks", 1}, {&r.NtasksPerNode, "ntasks-per-node", 1}, {&r.CpusPerTask, "cpus-per-task", 1},
	} {
		if *field.to, err = number(o, field.name, field.low); err != nil {
			return nil, err
		}
	}
	if v, ok := o.Get("nodes"); ok {
		if r.NodesMin, r.NodesMax, err = value.NodeCount(v.Text); err != nil {
			return nil, refused("Invalid node count: --nodes=%s", v.Text)
		}
	}
	if v, ok := o.Get("exclusive"); ok {
		if v.Given && v.Text != "" {
			return nil, refused("--exclusive=%s is not supported yet: only whole nodes (--exclusive)", v.Text)
		}
		r.Exclusive = true
	}
	r.Oversubscribe = o.Has("oversubscribe")
	for _, read := range []func(*option.Set, *apiv1.ResourceRequest) error{readHosts, readMemory, readGPUs} {
		if err := read(o, r); err != nil {
			return nil, err
		}
	}
	if most := r.NodesMax; most > 0 && r.NtasksPerNode > 0 && r.Ntasks > most*r.NtasksPerNode {
		// Beside --ntasks, --ntasks-per-node is a wish: Slurm accepts more tasks than it allows.
		r.NtasksPerNode = (r.Ntasks + most - 1) / most
	}
	if r.Ntasks == 0 && r.NtasksPerNode > 0 && r.NodesMin > 0 && r.NodesMin == r.NodesMax {
		r.Ntasks = r.NtasksPerNode * r.NodesMin
	}
	if r.GpusPerTask > 0 && r.Ntasks == 0 && r.GpusTotal == 0 {
		return nil, &Error{Fatal: true, Code: CodeRefused,
			Text: "--gpus-per-task needs --ntasks, or --nodes with --ntasks-per-node, or --gpus, to say how many tasks there are"}
	}
	return r, nil
}

func readHosts(o *option.Set, r *apiv1.ResourceRequest) error {
	for name, to := range map[string]*[]string{"nodelist": &r.NodeList, "exclude": &r.Exclude} {
		v, ok := o.Get(name)
		if !ok {
			continue
		}
		list := v.Text
		if strings.Contains(list, "/") {
			data, err := os.ReadFile(list)
			if err != nil {
				return refused("--%s: %v", name, err)
			}
			list = strings.Join(strings.Fields(string(data)), ",")
		}
		hosts, err := notation.Expand(list)
		if err != nil {
			return refused("Batch job submission failed: Invalid node name specified\n--%s: %v", name, err)
		}
		seen := map[string]bool{}
		for _, host := range hosts {
			if !seen[host] {
				seen[host] = true
				*to = append(*to, host)
			}
		}
	}
	if n := uint32(len(r.NodeList)); n > r.NodesMin {
		if r.NodesMax != 0 && n > r.NodesMax {
			return refused("--nodelist names %d nodes, but --nodes allows %d", n, r.NodesMax)
		}
		if r.NodesMin = n; r.NodesMax < n {
			r.NodesMax = n
		}
	}
	return nil
}

func readMemory(o *option.Set, r *apiv1.ResourceRequest) error {
	if count(o, memoryNames) > 1 {
		return &Error{Fatal: true, Code: CodeRefused, Text: "--mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive."}
	}
	for name, to := range map[string]*uint64{
		"mem": &r.MemoryPerNodeMb, "mem-per-cpu": &r.MemoryPerCpuMb, "mem-per-gpu": &r.MemoryPerGpuMb,
	} {
		if v, ok := o.Get(name); ok {
			mb, err := value.MemoryMB(v.Text)
			if err != nil {
				return invalid(name)
			}
			*to = mb
			r.MemoryAll = name == "mem" && mb == 0
		}
	}
	return nil
}

func readGPUs(o *option.Set, r *apiv1.ResourceRequest) error {
	typed := func(name, kind string) error {
		if kind != "" && r.GpuType != "" && kind != r.GpuType {
			return refused("--%s asks for GPUs of type %s, another option for type %s: a job has one type", name, kind, r.GpuType)
		}
		if kind != "" {
			r.GpuType = kind
		}
		return nil
	}
	if v, ok := o.Get("gres"); ok {
		kind, n, err := value.Gres(v.Text)
		if err != nil {
			return refused("%v", err)
		}
		r.GpusPerNode, r.GpusOption = n, "gres"
		if err := typed("gres", kind); err != nil {
			return err
		}
	}
	for _, field := range []struct {
		name string
		to   *uint32
	}{{"gpus", &r.GpusTotal}, {"gpus-per-node", &r.GpusPerNode}, {"gpus-per-task", &r.GpusPerTask}} {
		v, ok := o.Get(field.name)
		if !ok {
			continue
		}
		kind, n, err := value.GPUs(v.Text)
		if err != nil {
			return invalid(field.name)
		}
		if field.name == "gpus-per-node" {
			if r.GpusOption == "gres" && r.GpusPerNode > 0 && r.GpusPerNode != n {
				return refused("--gres asks for %d GPUs on each node, --gpus-per-node for %d", r.GpusPerNode, n)
			}
			r.GpusOption = "gpus-per-node"
		}
		*field.to = n
		if err := typed(field.name, kind); err != nil {
			return err
		}
	}
	if r.GpusPerNode == 0 {
		r.GpusOption = ""
	}
	return nil
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
