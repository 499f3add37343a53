package sched

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// shapesOf returns what a class asks of each of its partitions, as the cluster is configured now.
func (v *View) shapesOf(c *class) []classShape {
	if c.shapeOf == v.idx.generation {
		return c.shapes
	}
	c.shapes, c.shapeOf = c.shapes[:0], v.idx.generation
	j := c.queue[c.cursor]
	for _, name := range c.partitions {
		part := v.partitions[name]
		if part == nil {
			part = &partition{Partition: Partition{Name: name}, slots: newBitset(len(v.idx.nodes))}
			c.shapes = append(c.shapes, classShape{part: part, never: Reason{BadConstraints, fmt.Sprintf("there is no partition %s any more", name)}})
			continue
		}
		c.shapes = append(c.shapes, v.shapeFor(j, part))
	}
	return c.shapes
}

// shapeFor brings a job's request into normal form for a partition and finds out whether it can ever start there.
func (v *View) shapeFor(j *job, part *partition) classShape {
	s := classShape{part: part}
	var sentence string
	if s.shape, sentence = shapeOf(&j.Request, &part.Partition); sentence != "" {
		s.never = Reason{BadConstraints, sentence}
		return s
	}
	switch {
	case part.Down:
		s.never = Reason{PartitionDown, fmt.Sprintf("partition %s is down", part.Name)}
	case part.MaxNodes > 0 && s.nodesMin > part.MaxNodes:
		s.never = Reason{PartitionNodeLimit, fmt.Sprintf("asks for %d nodes; partition %s allows %d", s.nodesMin, part.Name, part.MaxNodes)}
	case part.MaxTimeS > 0 && j.TimeLimitS > part.MaxTimeS:
		s.never = Reason{PartitionTimeLimit, fmt.Sprintf("asks for %s; partition %s allows %s", duration(j.TimeLimitS), part.Name, duration(part.MaxTimeS))}
	}
	if s.never.Code != None {
		return s
	}
	if part.MaxNodes > 0 {
		s.nodesMax = min(s.nodesMax, part.MaxNodes)
	}
	typ, known := v.idx.typeOf[s.gpuType]
	if !known {
		s.never = Reason{BadConstraints, fmt.Sprintf("asks for GPUs of type %s; no node has them", s.gpuType)}
		return s
	}
	s.typ = typ
	if s.extra, s.never = v.idx.extras(&s.shape); s.never.Code != None {
		return s
	}
	for k, n := range part.all {
		if n > 0 {
			s.largest = max(s.largest, v.idx.capacity(k, &s))
		}
	}
	s.never = v.named(j, &s)
	if s.never.Code == None {
		s.never = v.possible(&s)
	}
	return s
}

// named resolves the nodes that must or must not be part.
func (v *View) named(j *job, s *classShape) Reason {
	for _, name := range j.Request.Exclude {
		if n := v.names[name]; n != nil && s.part.slots.has(n.slot) {
			s.exclude = append(s.exclude, n.slot)
		}
	}
	for _, name := range j.Request.Include {
		n := v.names[name]
		switch {
		case n == nil:
			return Reason{BadConstraints, fmt.Sprintf("asks for node %s, which the cluster does not have", name)}
		case !s.part.slots.has(n.slot):
			return Reason{BadConstraints, fmt.Sprintf("asks for node %s, which is not in partition %s", name, s.part.Name)}
		case slices.Contains(s.exclude, n.slot):
			return Reason{BadConstraints, fmt.Sprintf("asks for node %s and excludes it", name)}
		case v.idx.capacity(n.kind, s) == 0:
			return Reason{BadConstraints, fmt.Sprintf("asks for node %s, which is smaller than the job asks for: %s", name, need(s))}
		case !v.idx.up.has(n.slot):
			return Reason{NodeNotAvail, "needs node " + nodeState(n)}
		}
		if !slices.Contains(s.include, n.slot) {
			s.include = append(s.include, n.slot)
		}
	}
	return Reason{}
}

// whole is the room of a node of a kind when nothing runs there.
func (x *index) whole(k, typ int) room {
	return room{cpus: x.kinds[k].cpus, gpus: x.kinds[k].gpus[typ], memory: x.kinds[k].memory, idle: true, memoryWhole: true}
}

// possible finds out whether a shape would fit if nothing ran: on the nodes that are up, or at least on all that there are.
func (v *View) possible(s *classShape) Reason {
	x := v.idx
	all, up := slices.Clone(s.part.all), slices.Clone(s.part.upN)
	for _, slot := range s.exclude {
		k := x.nodes[slot].kind
		all[k]--
		if x.up.has(slot) {
			up[k]--
		}
	}
	if v.enough(s, up) {
		return Reason{}
	}
	if v.enough(s, all) {
		return Reason{NodeNotAvail, v.unavailable(s, up)}
	}
	return Reason{BadConstraints, v.impossible(s, all)}
}

// enough tells whether so many empty nodes of each kind hold the shape. Nodes that must be part are among them.
func (v *View) enough(s *classShape, byKind []int) bool {
	var picks []pick
	left := slices.Clone(byKind)
	for _, slot := range s.include {
		k := v.idx.nodes[slot].kind
		left[k]--
		picks = append(picks, pick{slot, v.idx.capacity(k, s)})
	}
	must, others := len(picks), 0
	type bulk struct{ units, nodes int }
	var rest []bulk
	for k, n := range left {
		if c := v.idx.capacity(k, s); c > 0 && n > 0 {
			rest = append(rest, bulk{int(c), n})
			others += n
		}
	}
	if s.units == 0 {
		return must+others >= int(s.nodesMin)
	}
	slices.SortFunc(rest, func(a, b bulk) int { return b.units - a.units })
	sum, nodes := uint64(0), must
	for _, c := range picks {
		sum += uint64(c.units)
	}
	for _, b := range rest {
		n := min(b.nodes, int(s.nodesMax)-nodes)
		nodes += n
		sum += uint64(n) * uint64(b.units)
	}
	return nodes >= int(s.nodesMin) && sum >= uint64(s.units)
}

// unavailable says which nodes keep a job waiting because they are drained or down.
func (v *View) unavailable(s *classShape, up []int) string {
	n := 0
	for k, c := range up {
		if v.idx.capacity(k, s) > 0 {
			n += c
		}
	}
	return fmt.Sprintf("needs %s in partition %s; %s up%s", need(s), s.part.Name, isAre(n), v.absent(s, true))
}

// absent lists drained, down and silent nodes that could take part: ", 1 is drained".
func (v *View) absent(s *classShape, names bool) string {
	var b strings.Builder
	for _, state := range []struct {
		is   func(n *node) bool
		word string
	}{
		{func(n *node) bool { return n.State == NodeDrained }, "drained"},
		{func(n *node) bool { return n.State == NodeDown }, "down"},
		{func(n *node) bool { return n.State == NodeUp && n.suspect }, "silent"},
		{func(n *node) bool { return n.State == NodeUp && v.idx.capacity(n.usable, s) == 0 }, "short of devices that can be used"},
	} {
		count, first := 0, (*node)(nil)
		s.part.slots.each(func(slot int) bool {
			n := v.idx.nodes[slot]
			if state.is(n) && !slices.Contains(s.exclude, slot) && v.idx.capacity(n.kind, s) > 0 {
				count++
				if first == nil {
					first = n
				}
			}
			return true
		})
		if count > 0 {
			fmt.Fprintf(&b, ", %s %s", isAre(count), state.word)
			why := first.Reason
			if why == "" && first.State == NodeUp {
				why = first.Faults
			}
			if names && why != "" {
				fmt.Fprintf(&b, " (%s: %s)", first.Name, why)
			} else if names {
				fmt.Fprintf(&b, " (%s)", first.Name)
			}
		}
	}
	return b.String()
}

// impossible says what no configuration of the present nodes can give.
func (v *View) impossible(s *classShape, all []int) string {
	var most kind
	fits, nodes := 0, 0
	for k, n := range all {
		if n == 0 {
			continue
		}
		nodes += n
		most.cpus, most.memory = max(most.cpus, v.idx.kinds[k].cpus), max(most.memory, v.idx.kinds[k].memory)
		most.gpus = append(most.gpus, v.idx.kinds[k].gpus[s.typ])
		if v.idx.capacity(k, s) > 0 {
			fits += n
		}
	}
	least, part := s.least(), s.part.Name
	switch {
	case nodes == 0:
		return fmt.Sprintf("partition %s has no node for it", part)
	case int(least.gpus) > slices.Max(most.gpus):
		return fmt.Sprintf("asks for %s per node; the largest node in partition %s has %d", gpus(s, least.gpus, ""), part, slices.Max(most.gpus))
	case int(least.cpus) > most.cpus:
		return fmt.Sprintf("asks for %d CPUs per node; the largest node in partition %s has %d", least.cpus, part, most.cpus)
	case !s.memoryAll && least.memory > most.memory:
		return fmt.Sprintf("asks for %d MiB of memory per node; the largest node in partition %s has %d", least.memory, part, most.memory)
	case fits == 0:
		return fmt.Sprintf("needs %s; no node in partition %s has all of that", need(s), part)
	case fits < int(s.nodesMin):
		return fmt.Sprintf("needs %s; partition %s has %d", need(s), part, fits)
	}
	return fmt.Sprintf("needs %s; partition %s is not large enough", need(s), part)
}

// missing says what the first blocked job waits for.
func (p *pass) missing(shapes []classShape) string {
	i := slices.IndexFunc(shapes, func(s classShape) bool { return s.never.Code == None })
	s := &shapes[i]
	free, units := 0, uint64(0)
	s.part.slots.each(func(slot int) bool {
		if p.x.takes.has(slot) && !slices.Contains(s.exclude, slot) {
			if c := p.capacity(slot, s, nil); c > 0 {
				free++
				units += uint64(c)
			}
		}
		return true
	})
	now := isAre(free) + " free now"
	if s.units > 1 {
		now = "none is free now"
		if free > 0 {
			now = fmt.Sprintf("there is room for %d on %d now", units*uint64(max(s.unit.tasks, 1)), free)
		}
	}
	for _, slot := range s.include {
		if p.capacity(slot, s, nil) == 0 {
			now = fmt.Sprintf("node %s, which it asks for, is not free", p.x.nodes[slot].Name)
		}
	}
	return fmt.Sprintf("needs %s in partition %s; %s%s", need(s), s.part.Name, now, p.v.absent(s, false))
}

// behind says whom a job waits for.
func (p *pass) behind(shapes []classShape) string {
	for i := range shapes {
		if part := shapes[i].part; shapes[i].never.Code == None && part.head != 0 {
			if part.behind == "" {
				part.behind = fmt.Sprintf("waits behind job %d in partition %s", part.head, part.Name)
			}
			return part.behind
		}
	}
	return ""
}

// need describes a shape: "4 nodes with 8 free GPUs".
func need(s *classShape) string {
	if s.units > 1 {
		what := fmt.Sprintf("%s for %d tasks", nodeCount(&s.shape), s.units*s.unit.tasks)
		if s.unit.tasks == 0 {
			what = fmt.Sprintf("%s with %s in all", nodeCount(&s.shape), gpus(s, s.units, ""))
		} else if each := amounts(s, s.unit); each != "" {
			what += " with " + each + " each"
			if s.unit.tasks > 1 {
				what += fmt.Sprintf(" %d", s.unit.tasks)
			}
		}
		if s.fixed.gpus > 0 {
			what += fmt.Sprintf(" and %s on each node", gpus(s, s.fixed.gpus, "free "))
		}
		return what
	}
	return nodeCount(&s.shape) + " with " + amounts(s, s.share(s.units))
}

func nodeCount(s *shape) string {
	word := "nodes"
	if s.nodesMax == 1 || s.nodesMin == 1 && s.units <= 1 {
		word = "node"
	}
	if s.whole {
		word = "whole " + word
	}
	if s.units > 1 && s.nodesMin != s.nodesMax {
		return word
	}
	return fmt.Sprintf("%d %s", s.nodesMin, word)
}

func amounts(s *classShape, a amount) string {
	var parts []string
	if a.gpus > 0 {
		parts = append(parts, gpus(s, a.gpus, "free "))
	}
	if a.cpus > 1 || a.gpus == 0 {
		parts = append(parts, plural(int(a.cpus), "free CPU"))
	}
	if s.memoryAll {
		parts = append(parts, "all memory free")
	} else if a.memory > 0 {
		parts = append(parts, fmt.Sprintf("%d MiB of free memory", a.memory))
	}
	if n := len(parts); n > 1 {
		return strings.Join(parts[:n-1], ", ") + " and " + parts[n-1]
	}
	return parts[0]
}

// gpus counts GPUs of the asked type; quality is a word in front of them.
func gpus(s *classShape, n uint32, quality string) string {
	if s.gpuType == "" {
		return plural(int(n), quality+"GPU")
	}
	return plural(int(n), quality+s.gpuType+" GPU")
}

func plural(n int, word string) string {
	if n == 1 {
		return "1 " + word
	}
	return fmt.Sprintf("%d %ss", n, word)
}

func isAre(n int) string {
	switch n {
	case 0:
		return "none is"
	case 1:
		return "1 is"
	}
	return fmt.Sprintf("%d are", n)
}

func nodeState(n *node) string {
	state := "drained"
	if n.State == NodeDown {
		state = "down"
	}
	if n.Reason == "" {
		return fmt.Sprintf("%s, which is %s", n.Name, state)
	}
	return fmt.Sprintf("%s, which is %s (%s)", n.Name, state, n.Reason)
}

func duration(seconds uint32) string {
	if seconds == Unlimited {
		return "no time limit"
	}
	return (time.Duration(seconds) * time.Second).String()
}

// hope orders reasons by how soon they may pass, for jobs with several partitions.
var hope = []Code{NodeNotAvail, PartitionDown, PartitionNodeLimit, PartitionTimeLimit, BadConstraints}

// worst returns the reason to show for a job that can start in none of its partitions: the one that may pass first.
func worst(shapes []classShape) Reason {
	for _, code := range hope {
		for i := range shapes {
			if shapes[i].never.Code == code {
				return shapes[i].never
			}
		}
	}
	return Reason{BadConstraints, "it names no partition"}
}

// reason is what Decisions say of a waiting job.
func (d *Decisions) reason(j *job) Reason {
	switch {
	case j.Cleaning:
		return j.keep(Cleaning)
	case j.Held == 1:
		return j.keep(HeldUser)
	case j.Held != 0:
		return j.keep(HeldAdmin)
	case j.wake != 0 && j.wake == j.deferred:
		return j.Shown
	case j.wake != 0 && j.wake == j.RetryAt:
		return j.keep(Backoff)
	case j.wake != 0:
		return Reason{BeginTime, fmt.Sprintf("begins no earlier than %s", time.UnixMilli(int64(j.BeginAt)).UTC().Format("2006-01-02 15:04:05 MST"))}
	}
	c := j.class
	if !c.verdict.known {
		return j.Shown // The pass stopped before its turn.
	}
	if c.cursor < len(c.queue) && c.queue[c.cursor] == j {
		return c.verdict.first
	}
	return c.verdict.rest
}

// keep returns the reason with this code, in the words that are shown if they have it: who held a job said why.
func (j *job) keep(code Code) Reason {
	if j.Shown.Code == code {
		return j.Shown
	}
	return Reason{Code: code}
}
