package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Bounds; rows of docs/limits.md.
const (
	// RemoveTimeout bounds the wait for a group to become empty.
	RemoveTimeout = 5 * time.Second
	// removePause is the first pause between two tries to remove a group, doubled up to removePauseMost.
	removePause     = time.Millisecond
	removePauseMost = 100 * time.Millisecond
	// killRounds bounds the rounds of one Kill in which new processes appear.
	killRounds = 20
)

type kind int

const (
	kindJob kind = iota
	kindStep
	kindTask
)

// Group is the group of a job, step or task: one directory for each controller.
type Group struct {
	h    *Hierarchy
	kind kind
	dirs map[string]string
}

// Task makes the group of a task in that of its step, or finds it.
func (g *Group) Task(rank uint32) (*Group, error) {
	t := &Group{h: g.h, kind: kindTask, dirs: maps.Clone(g.dirs)}
	for controller, dir := range g.dirs {
		if g.h.version == V1 && !g.counts(dir) {
			continue
		}
		t.dirs[controller] = filepath.Join(dir, fmt.Sprintf("task_%d", rank))
		if err := makeDir(t.dirs[controller]); err != nil {
			return nil, err
		}
		if g.h.version == V1 && controller == CPUSet { // mounted together with one that counts
			if err := inherit(t.dirs[controller]); err != nil {
				return nil, err
			}
		}
	}
	// A task of which one process is killed for memory would hang or compute nonsense: all of it goes. Kernels before
	// 4.19 do not have the file.
	if g.h.version == V2 && exists(t.dirs[Unified], "memory.oom.group") {
		if err := write(t.dirs[Unified], "memory.oom.group", "1"); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// counts reports whether a directory of version 1 belongs to a controller that counts by task.
func (g *Group) counts(dir string) bool { return g.dirs[Memory] == dir || g.dirs[CPUAcct] == dir }

// unique are the group's directories, each once, those of tasks first.
func (g *Group) unique() []string {
	return slices.Compact(slices.Sorted(maps.Values(g.dirs)))
}

// Files are those into which a process writes "0" to enter the group, with all its threads.
func (g *Group) Files() []string {
	files := g.unique()
	for i := range files {
		files[i] = filepath.Join(files[i], "cgroup.procs")
	}
	return files
}

// Attach moves a process into the group, with all its threads.
func (g *Group) Attach(pid int) error {
	for _, dir := range g.unique() {
		if err := write(dir, "cgroup.procs", fmt.Sprint(pid)); err != nil {
			return err
		}
	}
	return nil
}

// Descriptor opens the group for clone3 with CLONE_INTO_CGROUP. nil, without an error, in version 1, where a process
// must enter by Files.
func (g *Group) Descriptor() (*os.File, error) {
	if g.h.version != V2 {
		return nil, nil
	}
	f, err := os.OpenFile(g.dirs[Unified], unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fmt.Errorf("opening a control group: %w", err)
	}
	return f, nil
}

// list is the directory that lists all processes of the group.
func (g *Group) list() string { return g.dirs[g.h.main()] }

// Procs are the processes in the group and below it; none if it does not exist. In version 1 those of a task cannot be
// told from its step's where no controller counts by task.
func (g *Group) Procs() ([]int, error) {
	dir := g.list()
	if g.kind == kindTask && g.h.version == V1 {
		for _, controller := range []string{Memory, CPUAcct} {
			if g.dirs[controller] != "" {
				dir = g.dirs[controller]
			}
		}
	}
	pids, err := procs(nil, dir)
	slices.Sort(pids)
	return slices.Compact(pids), err
}

// Kill sends KILL to every process in the group. Those that are being born meanwhile may survive it: call it until
// Procs is empty. A frozen group is thawed, so that its processes can die.
func (g *Group) Kill() error {
	if dir := g.list(); g.h.version == V2 && exists(dir, "cgroup.kill") {
		if err := write(dir, "cgroup.kill", "1"); err != nil && !gone(err) {
			return err
		}
		return g.tolerate(g.Thaw())
	}
	// Frozen, they cannot be born faster than they are killed. Where that is not possible there are more rounds.
	_ = g.Freeze()
	err := g.killAll()
	return errors.Join(err, g.tolerate(g.Thaw()))
}

// tolerate is nil for a group that is gone.
func (g *Group) tolerate(err error) error {
	if gone(err) {
		return nil
	}
	return err
}

// killAll sends KILL until no process appears that did not have it.
func (g *Group) killAll() error {
	sent := make(map[int]bool)
	for range killRounds {
		pids, err := g.Procs()
		if err != nil {
			return err
		}
		fresh := false
		for _, pid := range pids {
			if pid == os.Getpid() {
				return fmt.Errorf("killing a control group: this process (%d) is in it", pid)
			}
			fresh = fresh || !sent[pid]
			sent[pid] = true
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("killing process %d of a control group: %w", pid, err)
			}
		}
		if !fresh {
			return nil
		}
	}
	return nil
}

// Freeze stops every process in the group where it is; Kill and Thaw end that. It does not wait.
// Error: errors.ErrUnsupported where the machine has no freezer.
func (g *Group) Freeze() error { return g.freeze("1", "FROZEN") }

// Thaw lets a frozen group go on.
func (g *Group) Thaw() error { return g.freeze("0", "THAWED") }

func (g *Group) freeze(v2, v1 string) error {
	switch {
	case g.h.version == V2 && exists(g.dirs[Unified], "cgroup.freeze"):
		return write(g.dirs[Unified], "cgroup.freeze", v2)
	case g.h.version == V1 && g.dirs[Freezer] != "":
		return write(g.dirs[Freezer], "freezer.state", v1)
	}
	if dir := g.list(); !exists(dir, "cgroup.procs") {
		return fmt.Errorf("freezing %s: %w", dir, fs.ErrNotExist)
	}
	return fmt.Errorf("freezing a control group: %w", errors.ErrUnsupported)
}

// Destroy kills everything in the group and removes it. It returns the processes that do not end, with an error, when
// ctx ends or after RemoveTimeout.
func (g *Group) Destroy(ctx context.Context) ([]Process, error) { return g.remove(ctx, true) }

// Remove removes the group and those below it once the processes in it are gone, for which it waits until ctx ends, and
// no longer than RemoveTimeout. It returns those that are still there then, with an error. What does not exist is removed.
func (g *Group) Remove(ctx context.Context) ([]Process, error) { return g.remove(ctx, false) }

func (g *Group) remove(ctx context.Context, kill bool) ([]Process, error) {
	ctx, cancel := context.WithTimeout(ctx, RemoveTimeout)
	defer cancel()
	var left []string
	for _, dir := range g.unique() {
		if g.kind == kindTask && g.h.version == V1 && !strings.HasPrefix(filepath.Base(dir), "task_") {
			continue // the step's
		}
		left = append(left, dir)
	}
	for pause := removePause; ; pause = min(2*pause, removePauseMost) {
		if kill {
			if err := g.Kill(); err != nil {
				return nil, err
			}
		}
		var failure error
		left = slices.DeleteFunc(left, func(dir string) bool {
			err := removeTree(dir)
			failure = errors.Join(failure, err)
			return err == nil
		})
		if len(left) == 0 {
			return nil, nil
		}
		if !errors.Is(failure, unix.EBUSY) {
			return nil, failure
		}
		select {
		case <-ctx.Done():
			stuck := g.Stuck()
			return stuck, fmt.Errorf("%w: %s", failure, Describe(stuck))
		case <-time.After(pause):
		}
	}
}

// removeTree removes a group and all below it.
func removeTree(dir string) error {
	children, err := below(dir)
	if err != nil {
		return err
	}
	for _, child := range children {
		if err := removeTree(child); err != nil {
			return err
		}
	}
	return removeDir(dir)
}

func removeDir(dir string) error {
	if err := unix.Rmdir(dir); err != nil && !gone(err) {
		return fmt.Errorf("removing the control group %s: %w", dir, err)
	}
	return nil
}
