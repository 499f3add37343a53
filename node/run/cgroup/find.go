package cgroup

import (
	"fmt"
	"maps"
	"path/filepath"
)

// FindTask is the group of a task in that of its step, whether it exists or not, to read what is used. In version 1 only the controllers
// that count by task have one.
func (g *Group) FindTask(rank uint32) *Group {
	t := &Group{h: g.h, kind: kindTask, dirs: maps.Clone(g.dirs)}
	for controller, dir := range g.dirs {
		if g.h.version == V2 || g.counts(dir) {
			t.dirs[controller] = filepath.Join(dir, fmt.Sprintf("task_%d", rank))
		}
	}
	return t
}

// CountsTasks reports whether FindTask's groups list the processes of one task and no others.
func (g *Group) CountsTasks() bool {
	return g.h.version == V2 || g.dirs[Memory] != "" || g.dirs[CPUAcct] != ""
}
