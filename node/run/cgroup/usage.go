package cgroup

import "fmt"

// Usage is what the processes of a group used. What the kernel does not tell is 0.
type Usage struct {
	// UserNS and SystemNS are CPU time in nanoseconds.
	UserNS, SystemNS uint64
	// MemoryBytes is used now, PeakBytes was used at most (version 2: since Linux 5.19).
	MemoryBytes, PeakBytes uint64
}

// Usage reads what was used so far. In version 1 a group without cpuacct has no CPU time.
func (g *Group) Usage() Usage {
	if g.h.version == V2 {
		dir := g.dirs[Unified]
		return Usage{
			UserNS: 1000 * field(dir, "cpu.stat", "user_usec"), SystemNS: 1000 * field(dir, "cpu.stat", "system_usec"),
			MemoryBytes: number(dir, "memory.current"), PeakBytes: number(dir, "memory.peak"),
		}
	}
	cpu, memory := g.dirs[CPUAcct], g.dirs[Memory]
	return Usage{
		UserNS: number(cpu, "cpuacct.usage_user"), SystemNS: number(cpu, "cpuacct.usage_sys"),
		MemoryBytes: number(memory, "memory.usage_in_bytes"), PeakBytes: number(memory, "memory.max_usage_in_bytes"),
	}
}

// OOM is what the kernel did to a group when memory was short.
type OOM struct {
	// Kills counts processes of this group that were killed for memory. In version 1 those of groups below are not
	// in it.
	Kills uint64
	// PeakBytes is the most memory used; 0 if the kernel does not tell. LimitBytes is the limit; 0 if there is none.
	PeakBytes, LimitBytes uint64
}

// OOM reads whether processes of the group were killed for memory, because of this group's limit or that of one above, or
// because the machine had none left.
func (g *Group) OOM() OOM {
	o := OOM{PeakBytes: g.Usage().PeakBytes, LimitBytes: g.limit()}
	if g.h.version == V2 {
		o.Kills = field(g.dirs[Unified], "memory.events", "oom_kill")
	} else {
		o.Kills = field(g.dirs[Memory], "memory.oom_control", "oom_kill")
	}
	return o
}

// Verdict is the sentence for a rank that was killed for memory: what its step used and had. node is the machine's name.
func (o OOM) Verdict(rank uint32, node string) string {
	who := fmt.Sprintf("rank %d was killed for memory: ", rank)
	switch {
	case o.LimitBytes == 0:
		return who + fmt.Sprintf("%s had none left, and its step, which had used %s MiB there, had no limit; ask for as much as it needs with --mem",
			node, mib(o.PeakBytes))
	case o.PeakBytes == 0:
		return who + fmt.Sprintf("its step used all of its %s MiB on %s; ask for more with --mem", mib(o.LimitBytes), node)
	default:
		return who + fmt.Sprintf("its step used %s of %s MiB on %s; ask for more with --mem",
			mib(min(o.PeakBytes, o.LimitBytes)), mib(o.LimitBytes), node)
	}
}

// mib writes bytes as MiB, rounded up, with commas: a process is killed when the next page does not fit any more.
func mib(bytes uint64) string {
	s := fmt.Sprint((bytes + 1<<20 - 1) >> 20)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
