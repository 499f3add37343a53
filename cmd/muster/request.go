package main

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/cmd/internal/config"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
)

// request is what `submit` and `run` can ask for.
type request struct {
	name, partition, account, comment, qos string
	nodes, gpus, memory, memoryPerCPU      string
	memoryPerGPU, timeLimit, begin         string
	tasks, tasksPerNode, cpusPerTask       uint32
	gpusTotal, gpusPerTask                 uint32
	exclusive, hold, recover               bool
	noRequeue, noRendezvous                bool
	nodeList, exclude, directory           string
	nice                                   int32
	priority, grace                        uint32
	cpusPerGPU, tasksPerGPU                uint32
	gres                                   string
	overcommit                             bool
	launch                                 launchFlags
}

func (r *request) flags(f *pflag.FlagSet) {
	f.StringVarP(&r.name, "name", "J", "", "job `name` (default: the program's)")
	f.StringVarP(&r.partition, "partition", "p", "", "`partition`s in order of preference (default: the cluster's)")
	f.StringVarP(&r.nodes, "nodes", "N", "", "`number` of nodes, or a range (2-4)")
	f.Uint32VarP(&r.tasks, "tasks", "n", 0, "`number` of tasks (default: one on each node)")
	f.Uint32Var(&r.tasksPerNode, "tasks-per-node", 0, "`number` of tasks on each node")
	f.Uint32VarP(&r.cpusPerTask, "cpus-per-task", "c", 0, "CPUs of each task (default: 1)")
	f.StringVar(&r.gpus, "gpus-per-node", "", "GPUs on each node, `[TYPE:]NUMBER`")
	f.Uint32Var(&r.gpusTotal, "gpus", 0, "GPUs in all")
	f.Uint32Var(&r.gpusPerTask, "gpus-per-task", 0, "GPUs of each task")
	f.StringVar(&r.memory, "memory", "", "memory on each node, `SIZE` as in 64G; \"all\": all of it")
	f.StringVar(&r.memoryPerCPU, "memory-per-cpu", "", "memory for each CPU, `SIZE`")
	f.StringVar(&r.memoryPerGPU, "memory-per-gpu", "", "memory for each GPU, `SIZE`")
	f.StringVarP(&r.timeLimit, "time", "t", "", "time limit: minutes, H:M:S or D-H:M:S (default: the partition's) `TIME`")
	f.StringVar(&r.begin, "begin", "", "do not start before this `TIME`, 2006-01-02T15:04[:05] or +DURATION (+1h30m)")
	f.BoolVar(&r.exclusive, "exclusive", false, "whole nodes, shared with nobody")
	f.StringVarP(&r.nodeList, "nodelist", "w", "", "nodes that must be part of it, `n[1-2]`")
	f.StringVarP(&r.exclude, "exclude", "x", "", "nodes that must not be part of it, `n[1-2]`")
	f.BoolVar(&r.recover, "recover", false, "recover from lost nodes: the job stops itself where contact is lost, and starts again on others")
	f.BoolVar(&r.noRequeue, "no-requeue", false, "never start again, whatever the reason of a failure")
	f.BoolVar(&r.noRendezvous, "no-rendezvous", false, "do not set MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, LOCAL_RANK")
	f.StringVarP(&r.account, "account", "A", "", "`account` to charge")
	f.StringVar(&r.qos, "qos", "", "quality of service `name`")
	f.StringVar(&r.comment, "comment", "", "free `text`")
	f.Int32Var(&r.nice, "nice", 0, "a higher `value` lowers the priority")
	f.Uint32Var(&r.priority, "priority", 0, "explicit `priority` (operators)")
	f.Uint32Var(&r.grace, "grace", 0, "`seconds` between TERM and KILL (default: the cluster's)")
	f.StringVarP(&r.directory, "chdir", "D", "", "working `directory` (default: the current one)")
	f.StringVar(&r.gres, "gres", "", "other devices on each node, and GPUs of several types, `NAME[:TYPE][:N],…`")
	f.Uint32Var(&r.cpusPerGPU, "cpus-per-gpu", 0, "CPUs for each GPU")
	f.Uint32Var(&r.tasksPerGPU, "tasks-per-gpu", 0, "tasks for each GPU")
	f.BoolVarP(&r.overcommit, "overcommit", "O", false, "more tasks than CPUs may be put on a node")
	r.launch.flags(f)
}

// spec makes the part of a job's specification that both kinds share.
func (r *request) spec() (*apiv1.JobSpec, error) {
	resources, err := r.resources()
	if err != nil {
		return nil, err
	}
	spec := &apiv1.JobSpec{
		Name: r.name, Account: r.account, Comment: r.comment, Qos: r.qos, Nice: r.nice, Priority: r.priority, Hold: r.hold,
		Resources: resources, Requeue: !r.noRequeue, AutomaticRecovery: r.recover, KillGraceS: r.grace,
		TaskOptions: &apiv1.TaskOptions{NoRendezvousEnvironment: r.noRendezvous, BindGpusPerTask: r.gpusPerTask > 0},
		Umask:       uint32(umask()), CommandLine: "(null)",
	}
	if r.partition != "" {
		spec.Partitions = strings.Split(r.partition, ",")
	}
	if r.timeLimit != "" {
		if spec.TimeLimitS, err = config.ParseTime(r.timeLimit); err != nil {
			return nil, usagef("--time: %v", err)
		}
	}
	if spec.BeginTime, err = parseBegin(r.begin, time.Now()); err != nil {
		return nil, err
	}
	if spec.WorkDir = r.directory; spec.WorkDir == "" || !strings.HasPrefix(spec.WorkDir, "/") {
		here, err := os.Getwd()
		if err != nil {
			return nil, fmt.Errorf("find the working directory: %w", err)
		}
		if spec.WorkDir = here; r.directory != "" {
			spec.WorkDir = here + "/" + r.directory
		}
	}
	if spec.SubmitHost, err = os.Hostname(); err != nil {
		return nil, fmt.Errorf("find this host's name: %w", err)
	}
	return spec, r.launch.fill(spec)
}

func (r *request) resources() (*apiv1.ResourceRequest, error) {
	q := &apiv1.ResourceRequest{
		Ntasks: r.tasks, NtasksPerNode: r.tasksPerNode, CpusPerTask: r.cpusPerTask, GpusTotal: r.gpusTotal,
		GpusPerTask: r.gpusPerTask, Exclusive: r.exclusive, CpusPerGpu: r.cpusPerGPU, NtasksPerGpu: r.tasksPerGPU, Overcommit: r.overcommit,
	}
	var err error
	if q.NodesMin, q.NodesMax, err = parseRange(r.nodes); err != nil {
		return nil, err
	}
	if q.Gres, err = value.GresList(r.gres); err != nil {
		return nil, usagef("--gres %q: write names and numbers, for example ib:1 or gpu:a100:2,gpu:h100:2", r.gres)
	}
	if r.gpus != "" {
		kind, number, typed := strings.Cut(r.gpus, ":")
		if !typed {
			kind, number = "", r.gpus
		}
		count, err := strconv.ParseUint(number, 10, 32)
		if err != nil || typed && kind == "" {
			return nil, usagef("--gpus-per-node %q: write a number, or a type and a number as in h100:8", r.gpus)
		}
		q.GpusPerNode, q.GpuType, q.GpusOption = uint32(count), strings.ToLower(kind), "gpus-per-node"
	}
	asked := 0
	for _, m := range []struct {
		flag, text string
		into       *uint64
	}{
		{"--memory", r.memory, &q.MemoryPerNodeMb}, {"--memory-per-cpu", r.memoryPerCPU, &q.MemoryPerCpuMb},
		{"--memory-per-gpu", r.memoryPerGPU, &q.MemoryPerGpuMb},
	} {
		if m.text == "" {
			continue
		}
		asked++
		if m.flag == "--memory" && (m.text == "all" || m.text == "0") {
			q.MemoryAll = true
			continue
		}
		if *m.into, err = config.ParseMemory(m.text); err != nil {
			return nil, usagef("%s: %v", m.flag, err)
		}
	}
	if asked > 1 {
		return nil, usagef("--memory, --memory-per-cpu and --memory-per-gpu exclude each other")
	}
	for _, list := range []struct {
		text string
		into *[]string
	}{{r.nodeList, &q.NodeList}, {r.exclude, &q.Exclude}} {
		if list.text != "" {
			if *list.into, err = parseNames([]string{list.text}); err != nil {
				return nil, err
			}
		}
	}
	return q, nil
}

func parseRange(text string) (low, high uint32, err error) {
	if text == "" {
		return 0, 0, nil
	}
	first, last, isRange := strings.Cut(text, "-")
	if !isRange {
		last = first
	}
	from, err1 := strconv.ParseUint(first, 10, 32)
	to, err2 := strconv.ParseUint(last, 10, 32)
	if err1 != nil || err2 != nil || from == 0 || to < from {
		return 0, 0, usagef("--nodes %q: write a number or a range, for example 4 or 2-4", text)
	}
	return uint32(from), uint32(to), nil
}

// parseBegin reads "+1h30m" or a local date and time.
func parseBegin(text string, now time.Time) (*timestamppb.Timestamp, error) {
	if text == "" {
		return nil, nil
	}
	if after, ok := strings.CutPrefix(text, "+"); ok {
		d, err := time.ParseDuration(after)
		if err != nil || d < 0 || d > math.MaxInt32*time.Second {
			return nil, usagef("--begin %q: write a duration after the +, for example +1h30m", text)
		}
		return timestamppb.New(now.Add(d)), nil
	}
	for _, layout := range []string{"2006-01-02T15:04:05", "2006-01-02T15:04", "2006-01-02"} {
		if t, err := time.ParseInLocation(layout, text, time.Local); err == nil {
			return timestamppb.New(t), nil
		}
	}
	return nil, usagef("--begin %q: write 2006-01-02T15:04, or +1h30m from now", text)
}

// environment is the caller's, as the API takes it.
func environment() ([]byte, error) {
	var b bytes.Buffer
	for _, variable := range os.Environ() {
		b.WriteString(variable)
		b.WriteByte(0)
	}
	if b.Len() > rpc.MaxEnvironmentBytes {
		return nil, fmt.Errorf("the environment has %d bytes; a job may have %d: unset what it does not need", b.Len(), rpc.MaxEnvironmentBytes)
	}
	return b.Bytes(), nil
}

func umask() int {
	mask := syscall.Umask(0o077)
	syscall.Umask(mask)
	return mask
}
