package bind

import (
	"cmp"
	"slices"

	"github.com/muster-hpc/muster/proto/notation"
)

// Place is where a CPU is: numbers of its socket and of its core, unique in the machine.
type Place struct{ Socket, Core int }

// Topology has the place of each CPU, by its number.
type Topology []Place

// Regular is the topology of a machine that is built of equal parts, numbered one after the other: the threads of a core, the
// cores of a socket, the sockets. It is that of nodes whose resources are declared. Zeros count as one.
func Regular(cpus, sockets, cores, threads uint32) Topology {
	threads = max(threads, 1)
	perSocket := max(cores, 1) * threads
	if sockets == 0 || perSocket*sockets < cpus { // what was said is not the whole machine
		perSocket = max(cpus, 1)
	}
	t := make(Topology, cpus)
	for i := range t {
		t[i] = Place{Socket: i / int(perSocket), Core: i / int(threads)}
	}
	return t
}

// place of a CPU; one beyond the topology is a core of the last socket.
func (t Topology) place(cpu int) Place {
	if cpu < len(t) {
		return t[cpu]
	}
	last := 0
	for _, p := range t {
		last = max(last, p.Socket)
	}
	return Place{Socket: last, Core: 1<<20 + cpu}
}

// unit is CPUs that are handed out together.
type unit struct {
	socket int
	cpus   []int
}

// units cuts a mask into threads, cores or sockets, by socket, core and number.
func (t Topology) units(mask notation.Mask, kind string) []unit {
	cpus := mask.Devices()
	slices.SortStableFunc(cpus, func(a, b int) int {
		p, q := t.place(a), t.place(b)
		return cmp.Or(cmp.Compare(p.Socket, q.Socket), cmp.Compare(p.Core, q.Core))
	})
	var units []unit
	for i, cpu := range cpus {
		here, same := t.place(cpu), false
		if i > 0 {
			before := t.place(cpus[i-1])
			same = kind == sockets && before.Socket == here.Socket || kind == cores && before == here
		}
		if same {
			last := &units[len(units)-1]
			last.cpus = append(last.cpus, cpu)
			continue
		}
		units = append(units, unit{here.Socket, []int{cpu}})
	}
	return units
}
