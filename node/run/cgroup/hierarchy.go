package cgroup

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
)

// Version of the kernel's interface.
type Version uint32

// Versions.
const (
	// V1 has a hierarchy for each controller.
	V1 Version = 1
	// V2 has one hierarchy for all.
	V2 Version = 2
)

// Controllers that are used. In version 2 there is one hierarchy, whose root has the name Unified; devices are not a
// controller there.
const (
	Unified = "unified"
	CPU     = "cpu"
	CPUAcct = "cpuacct"
	CPUSet  = "cpuset"
	Memory  = "memory"
	Devices = "devices"
	PIDs    = "pids"
	Freezer = "freezer"
)

// listed are the controllers of version 1 in the order in which a hierarchy is chosen to list and kill processes.
var listed = []string{Freezer, PIDs, CPUSet, Devices, CPU, Memory, CPUAcct}

// Hierarchy is where the groups of one node's jobs are. A nil Hierarchy has none.
type Hierarchy struct {
	version Version
	// roots are the node's groups by controller. Controllers mounted together share one.
	roots map[string]string
}

// New is the hierarchy that another process found: its version and its roots, as Hierarchy.Roots returns them.
func New(version Version, roots map[string]string) (*Hierarchy, error) {
	switch {
	case version == V2 && len(roots) == 1 && roots[Unified] != "":
	case version == V1 && len(roots) > 0:
		for controller := range roots {
			if !slices.Contains(listed, controller) {
				return nil, fmt.Errorf("control groups: there is no controller %q in version 1", controller)
			}
		}
	default:
		return nil, fmt.Errorf("control groups of version %d with %d roots are not understood", version, len(roots))
	}
	return &Hierarchy{version: version, roots: maps.Clone(roots)}, nil
}

// Version is the version of the interface.
func (h *Hierarchy) Version() Version { return h.version }

// Roots are the node's groups by controller: absolute directories.
func (h *Hierarchy) Roots() map[string]string { return maps.Clone(h.roots) }

// main is the controller whose hierarchy lists every process.
func (h *Hierarchy) main() string {
	for _, controller := range listed {
		if h.roots[controller] != "" {
			return controller
		}
	}
	return Unified
}

// Name names the group of a job, or of one of its steps.
type Name struct {
	// Job and Attempt.
	Job, Attempt uint32
	// Step; only if IsStep.
	Step uint32
	// IsStep: the name is that of a step.
	IsStep bool
}

// path is the group below the node's.
func (n Name) path() string {
	job := fmt.Sprintf("job_%d.%d", n.Job, n.Attempt)
	if !n.IsStep {
		return job
	}
	return job + fmt.Sprintf("/step_%d", n.Step)
}

// parse reads a directory's name; step is empty for a job's.
func parse(job, step string) (Name, bool) {
	n := Name{IsStep: step != ""}
	if c, err := fmt.Sscanf(job, "job_%d.%d", &n.Job, &n.Attempt); err != nil || c != 2 {
		return n, false
	}
	if n.IsStep {
		if c, err := fmt.Sscanf(step, "step_%d", &n.Step); err != nil || c != 1 {
			return n, false
		}
	}
	return n, n.path() == strings.TrimSuffix(job+"/"+step, "/")
}

// Job makes the group of a job, or finds it.
func (h *Hierarchy) Job(job, attempt uint32) (*Group, error) {
	return h.make(Name{Job: job, Attempt: attempt})
}

// Step makes the group of a step and that of its job, or finds them.
func (h *Hierarchy) Step(job, attempt, step uint32) (*Group, error) {
	return h.make(Name{Job: job, Attempt: attempt, Step: step, IsStep: true})
}

// Find is a group by its name, whether it exists or not: to kill and remove what may be there.
func (h *Hierarchy) Find(n Name) *Group {
	g := &Group{h: h, dirs: make(map[string]string), kind: kindJob}
	if n.IsStep {
		g.kind = kindStep
	}
	for controller, root := range h.roots {
		g.dirs[controller] = filepath.Join(root, n.path())
	}
	return g
}

func (h *Hierarchy) make(n Name) (*Group, error) {
	g := h.Find(n)
	for controller, root := range h.roots {
		dir := root
		if err := h.open(controller, dir); err != nil {
			return nil, err
		}
		for part := range strings.SplitSeq(n.path(), "/") {
			dir = filepath.Join(dir, part)
			if err := h.open(controller, dir); err != nil {
				return nil, err
			}
		}
	}
	return g, nil
}

// open makes one group and makes it fit to have processes (version 1) or limited groups (version 2) in it.
func (h *Hierarchy) open(controller, dir string) error {
	if err := makeDir(dir); err != nil {
		return err
	}
	if h.version == V2 {
		return delegate(dir)
	}
	if controller == CPUSet {
		return inherit(dir)
	}
	return nil
}

// delegate lets the groups below have every controller that this one has. A controller that cannot be passed on, for
// example because real-time processes run, is missing below, and Apply says so.
func delegate(dir string) error {
	has, on := strings.Fields(read(dir, "cgroup.controllers")), strings.Fields(read(dir, "cgroup.subtree_control"))
	for _, controller := range []string{CPU, CPUSet, Memory, PIDs} {
		if !slices.Contains(has, controller) || slices.Contains(on, controller) {
			continue
		}
		if err := write(dir, "cgroup.subtree_control", "+"+controller); err != nil && !gone(err) {
			continue
		} else if err != nil {
			return err
		}
	}
	return nil
}

// inherit gives a group of version 1 the CPUs and memory nodes of its parent: without any it cannot be entered.
func inherit(dir string) error {
	for _, file := range []string{"cpuset.mems", "cpuset.cpus"} {
		if read(dir, file) != "" {
			continue
		}
		if err := write(dir, file, read(filepath.Dir(dir), file)); err != nil {
			return err
		}
	}
	return nil
}

// Names lists the groups that exist: steps first, then jobs, each by number.
func (h *Hierarchy) Names() ([]Name, error) {
	found := make(map[Name]bool)
	for _, root := range h.roots {
		jobs, err := below(root)
		if err != nil {
			return nil, err
		}
		for _, job := range jobs {
			n, ok := parse(filepath.Base(job), "")
			if !ok {
				continue
			}
			found[n] = true
			steps, err := below(job)
			if err != nil {
				return nil, err
			}
			for _, step := range steps {
				if n, ok := parse(filepath.Base(job), filepath.Base(step)); ok {
					found[n] = true
				}
			}
		}
	}
	return slices.SortedFunc(maps.Keys(found), func(a, b Name) int {
		if a.IsStep != b.IsStep {
			if a.IsStep {
				return -1
			}
			return 1
		}
		return cmp.Or(cmp.Compare(a.Job, b.Job), cmp.Compare(a.Attempt, b.Attempt), cmp.Compare(a.Step, b.Step))
	}), nil
}

// Clean kills everything in the groups that are not to be kept and removes them. It returns how many groups were
// removed, and the processes that do not end, with an error, when the time (ctx, or RemoveTimeout for each group) is
// over; it may be called again. A job's group with a kept step must be kept, too.
func (h *Hierarchy) Clean(ctx context.Context, keep func(Name) bool) (int, []Process, error) {
	names, err := h.Names()
	if err != nil {
		return 0, nil, err
	}
	removed := 0
	var stuck []Process
	var errs []error
	for _, n := range names {
		if keep(n) {
			continue
		}
		left, err := h.Find(n).Destroy(ctx)
		stuck = append(stuck, left...)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		removed++
	}
	return removed, stuck, errors.Join(errs...)
}

// RemoveNode removes the node's own groups, if nothing is in them: for a local cluster that goes away. One with jobs
// stays.
func (h *Hierarchy) RemoveNode() error {
	var errs []error
	for _, root := range h.roots {
		if err := removeDir(root); err != nil {
			errs = append(errs, err)
			continue
		}
		_ = removeDir(filepath.Dir(root)) // "muster" goes with the last node.
	}
	return errors.Join(errs...)
}
