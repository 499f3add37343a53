package node

import (
	"context"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"github.com/muster-hpc/muster/proto/notation"

	"github.com/muster-hpc/muster/node/run"
	"github.com/muster-hpc/muster/node/run/cgroup"
)

// resources are the limits that tasks take over from the submitting process, by their names.
var resources = map[string]uint32{
	"AS": unix.RLIMIT_AS, "CORE": unix.RLIMIT_CORE, "CPU": unix.RLIMIT_CPU, "DATA": unix.RLIMIT_DATA, "FSIZE": unix.RLIMIT_FSIZE,
	"MEMLOCK": unix.RLIMIT_MEMLOCK, "NOFILE": unix.RLIMIT_NOFILE, "NPROC": unix.RLIMIT_NPROC, "RSS": unix.RLIMIT_RSS, "STACK": unix.RLIMIT_STACK,
	"LOCKS": unix.RLIMIT_LOCKS, "MSGQUEUE": unix.RLIMIT_MSGQUEUE, "NICE": unix.RLIMIT_NICE, "RTPRIO": unix.RLIMIT_RTPRIO, "RTTIME": unix.RLIMIT_RTTIME,
	"SIGPENDING": unix.RLIMIT_SIGPENDING,
}

// confine says in the plan what the step's processes may use, and makes the job's private directories.
func (a *Agent) confine(s *step, src source, l *layout, plan *supervisorv1.StepPlan) error {
	order := s.record.GetOrder()
	job, attempt := order.GetJob().GetId(), order.GetFence().GetAttempt()
	plan.Node = a.cfg.Spec.GetName()
	for _, l := range src.options.GetRlimits() {
		resource, ok := resources[l.GetName()]
		if !ok {
			return &prepareError{sentence: fmt.Sprintf("the resource limit %q is not known; tasks can take over %v", l.GetName(), resourceNames()), usersFault: true}
		}
		plan.ResourceLimits = append(plan.ResourceLimits, &supervisorv1.ResourceLimit{Resource: resource, Soft: l.GetSoft()})
	}
	if nice := src.options.GetNice(); nice != 0 {
		own, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
		if err != nil {
			return fmt.Errorf("reading the agent's nice value: %w", err)
		}
		nice += int32(20 - own) // the kernel's answer is 20 less the value
		plan.Nice = &nice
	}
	if a.cfg.Private != nil {
		dirs, err := a.cfg.Private.Make(job, attempt)
		if err != nil {
			return err
		}
		plan.PrivateTmp, plan.PrivateShm = dirs.Tmp, dirs.Shm
	}
	if a.cfg.Groups == nil {
		return nil
	}
	limits := func(cpus notation.Mask, memoryMB uint64) *supervisorv1.GroupLimits {
		l := &supervisorv1.GroupLimits{MemoryMb: memoryMB}
		if a.cfg.BindCPUs {
			l.CpuMask, l.CpuShares = cpus, sharesPerCPU*uint64(cpus.Count())
		}
		return l
	}
	cpus, gpus, memoryMB := l.own(order)
	groups := &supervisorv1.ControlGroups{
		Version: uint32(a.cfg.Groups.Version()), JobId: job, Attempt: attempt, StepId: s.id,
		Job: limits(order.GetCpuMask(), order.GetMemoryMb()), Step: limits(cpus, memoryMB),
	}
	for controller, path := range a.cfg.Groups.Roots() {
		groups.Roots = append(groups.Roots, &supervisorv1.ControlRoot{Controller: controller, Path: path})
	}
	groups.Step.Pids = stepPIDs
	var err error
	if groups.Step.DeniedDevices, err = deniedDevices(a.cfg.Spec.GetGpus(), gpus); err != nil {
		return err
	}
	plan.ControlGroups = groups
	return nil
}

func resourceNames() []string {
	var names []string
	for name := range resources {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// deniedDevices are the devices of the node's accelerators that the step does not have. All that it has stay visible to
// all its tasks: they reach each other's memory through them. A file that one of its own needs, too, stays.
func deniedDevices(gpus []*apiv1.Gpu, mask []uint64) ([]string, error) {
	own := make(map[string]bool)
	has := func(g *apiv1.Gpu) bool {
		word := g.GetIndex() / 64
		return int(word) < len(mask) && mask[word]&(1<<(g.GetIndex()%64)) != 0
	}
	for _, g := range gpus {
		for _, file := range g.GetDeviceFiles() {
			own[file] = own[file] || has(g)
		}
	}
	var denied []string
	for file, yes := range own {
		if yes {
			continue
		}
		d, err := cgroup.DeviceOf(file)
		if err != nil {
			return nil, fmt.Errorf("keeping a job from the accelerators of others: %w", err)
		}
		denied = append(denied, d.String())
	}
	slices.Sort(denied)
	return slices.Compact(denied), nil
}

// reapGroups makes sure that nothing of an attempt is left in its control groups and private directories. It is tried
// again until that is so; false if ctx ended before. While another placement of the attempt is here they are that one's.
//
// Processes that sleep in the kernel whatever is sent to them do not hold it up for ever: once the controllers have been told in a
// condition that the devices of those are not to be used, the rest of the attempt is given back.
func (a *Agent) reapGroups(ctx context.Context, at *attempt) bool {
	job, attempt := at.record.GetJobId(), at.record.GetFence().GetAttempt()
	for began := a.boot(); ; {
		if a.placedAgain(at) {
			return true
		}
		left, err := a.haunted(at), error(nil)
		if len(left) > 0 {
			err = fmt.Errorf("%s: a driver or a file system keeps it; end that, or boot the node anew", cgroup.Describe(left))
		} else {
			left, err = a.destroy(ctx, job, attempt)
		}
		if ctx.Err() != nil {
			return false
		}
		if err == nil {
			return true
		}
		if a.boot()-began >= a.stuckAfter && a.quarantined(at, left) {
			a.log.Error("an attempt is reported as reaped without processes that nothing ends; their devices get no new work", "job", job,
				"attempt", attempt, "processes", cgroup.Describe(left))
			return true
		}
		a.log.Error("something of an attempt is left; it is not reported as reaped, and tried again", "job", job, "attempt", attempt, "err", err)
		if !sleep(ctx, attachRetry) {
			return false
		}
	}
}

// quarantined reports whether all processes that are left sleep in the kernel, and the controllers know that their devices are not to be
// used: since that was noted here they have granted a Sync, each of which says everything that is wrong with the node.
func (a *Agent) quarantined(at *attempt, left []cgroup.Process) bool {
	if len(left) == 0 || slices.ContainsFunc(left, func(p cgroup.Process) bool { return p.State != "D" }) {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(at.steps) == 0 {
		return false // nobody knows which devices it has
	}
	if at.noted == 0 {
		at.noted = a.boot()
		for _, s := range at.steps {
			a.noteStuck(s, &supervisorv1.StepState{Stuck: run.StuckProcesses(left)})
			break // a process is noted once, and with the devices of the attempt
		}
	}
	return a.lease.grantedAt > at.noted+a.stuckAfter/10
}

// placedAgain reports whether another placement of the same attempt is on the node and not over.
func (a *Agent) placedAgain(at *attempt) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for key, other := range a.attempts {
		if other != at && key.job == at.record.GetJobId() && key.attempt == at.record.GetFence().GetAttempt() && !other.record.GetReaped() {
			return true
		}
	}
	return false
}

// haunted are the processes of the attempt's steps that nothing could end when their steps ended, as far as they still live.
func (a *Agent) haunted(at *attempt) []cgroup.Process {
	a.mu.Lock()
	defer a.mu.Unlock()
	var left []cgroup.Process
	for _, s := range at.steps {
		left = append(left, run.Haunted(s.final)...)
	}
	return left
}

// destroy removes what an attempt has here; with an error come the processes that do not end.
func (a *Agent) destroy(ctx context.Context, job, attempt uint32) ([]cgroup.Process, error) {
	if a.cfg.Groups != nil {
		if left, err := a.cfg.Groups.Find(cgroup.Name{Job: job, Attempt: attempt}).Destroy(ctx); err != nil {
			return left, err
		}
	}
	if a.cfg.Private != nil {
		return nil, a.cfg.Private.Remove(job, attempt)
	}
	return nil, nil
}

// tidy removes what earlier lives of the agent left: groups and private directories of attempts that are over or not
// known. Groups with processes stay: nothing is ended because nothing is known of it; the order to end it does that.
func (a *Agent) tidy(ctx context.Context) {
	a.mu.Lock()
	live := make(map[[2]uint32]bool)
	for key, at := range a.attempts {
		if !at.record.GetReaped() {
			live[[2]uint32{key.job, key.attempt}] = true
		}
	}
	a.mu.Unlock()
	if a.cfg.Groups != nil {
		names, err := a.cfg.Groups.Names()
		if err != nil {
			a.log.Error("the node's control groups cannot be listed", "err", err)
		}
		for _, n := range names {
			id := [2]uint32{n.Job, n.Attempt}
			if live[id] {
				continue
			}
			group := a.cfg.Groups.Find(n)
			if pids, err := group.Procs(); err != nil || len(pids) > 0 {
				live[id] = true
				a.log.Warn("processes of an attempt that is not known here go on until it is ordered to end",
					"job", n.Job, "attempt", n.Attempt, "processes", len(pids), "err", err)
				continue
			}
			if _, err := group.Remove(ctx); err != nil {
				a.log.Error("a control group that nobody uses cannot be removed", "job", n.Job, "attempt", n.Attempt, "err", err)
			}
		}
	}
	if a.cfg.Private != nil {
		if _, err := a.cfg.Private.Clean(func(job, attempt uint32) bool { return live[[2]uint32{job, attempt}] }); err != nil {
			a.log.Error("private directories of attempts that are over cannot be removed", "err", err)
		}
	}
}
