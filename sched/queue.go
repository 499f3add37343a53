package sched

import (
	"cmp"
	"container/heap"
	"slices"
	"strconv"
)

// job is a waiting job and where it waits.
type job struct {
	Job
	class *class
	// wake is when it may be considered; 0 if it may now, Never if only a change of it can tell.
	wake Time
	// deferred is a back-off that the caller set; see View.Defer.
	deferred Time
	// loose: the reason to show is to be looked at; it is in View.loose then.
	loose bool
}

// class is the jobs that ask for the same thing: where one does not fit, none behind it does.
type class struct {
	key        string
	partitions []string
	tier       uint32
	// queue has those that may be considered, by priority and submit order.
	queue []*job
	// members counts all jobs of the class, also those that may not be considered.
	members int
	// pass state
	cursor int
	// headPriority and headID are those of the job at the cursor.
	headPriority uint32
	headID       JobID
	verdict      verdict
	// told is the verdict on those behind the first, and head the first, when changes were asked for last.
	told    Reason
	head    *job
	shapes  []classShape
	shapeOf int // generation of the index for which shapes were made
}

// verdict is what a pass found out about a class.
type verdict struct {
	// known: the class had its turn in this pass.
	known bool
	// first is for the job at the cursor, rest for those behind it.
	first, rest Reason
}

func before(a, b *job) int {
	return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(a.ID, b.ID))
}

// headBefore orders classes by the job at their cursors.
func headBefore(a, b *class) bool {
	if a.tier != b.tier {
		return a.tier > b.tier
	}
	if a.headPriority != b.headPriority {
		return a.headPriority > b.headPriority
	}
	return a.headID < b.headID
}

func (c *class) insert(j *job) {
	if n := len(c.queue); n == 0 || before(c.queue[n-1], j) < 0 {
		c.queue = append(c.queue, j)
		return
	}
	i, _ := slices.BinarySearchFunc(c.queue, j, before)
	c.queue = slices.Insert(c.queue, i, j)
}

func (c *class) remove(j *job) {
	i, found := slices.BinarySearchFunc(c.queue, j, before)
	if !found {
		return
	}
	if i == 0 {
		c.queue[0] = nil
		c.queue = c.queue[1:]
		return
	}
	c.queue = slices.Delete(c.queue, i, i+1)
}

// classKey writes everything that a placement of the job depends on besides its place in the order.
func classKey(j *Job) string {
	b := make([]byte, 0, 96)
	r := &j.Request
	for _, n := range []uint64{
		uint64(j.TimeLimitS), uint64(r.NodesMin), uint64(r.NodesMax), uint64(r.Tasks), uint64(r.TasksPerNode), uint64(r.CPUsPerTask),
		r.MemoryPerNodeMB, r.MemoryPerCPUMB, r.MemoryPerGPUMB, uint64(r.GPUsPerNode), uint64(r.GPUsTotal), uint64(r.GPUsPerTask),
		uint64(r.TasksPerGPU), uint64(r.CPUsPerGPU),
	} {
		b = strconv.AppendUint(b, n, 36)
		b = append(b, ' ')
	}
	b = strconv.AppendBool(b, r.MemoryAll)
	b = strconv.AppendBool(b, r.Whole)
	b = strconv.AppendBool(b, r.Overcommit)
	b = strconv.AppendQuote(b, r.GPUType)
	for _, list := range [][]string{j.Partitions, r.Include, r.Exclude} {
		b = append(b, '|')
		for _, s := range list {
			b = strconv.AppendQuote(b, s)
		}
	}
	for _, g := range r.Gres {
		b = append(b, '|')
		b = strconv.AppendQuote(strconv.AppendQuote(b, g.Name), g.Type)
		b = strconv.AppendUint(b, uint64(g.Count), 36)
	}
	return string(b)
}

// SetJob adds a waiting job or replaces what was known of it.
func (v *View) SetJob(n Job) {
	j := v.jobs[n.ID]
	if j == nil {
		j = &job{}
		v.jobs[n.ID] = j
	} else {
		shown := n.Shown
		n.Shown = j.Shown
		if sameJob(&j.Job, &n) {
			if j.Shown != shown {
				j.Shown = shown
				v.loosen(j)
			}
			return
		}
		n.Shown = shown
		v.unqueue(j)
	}
	j.Job = n
	v.dirty = true
	key := classKey(&n)
	c := v.classes[key]
	if c == nil {
		c = &class{key: key, partitions: n.Partitions, tier: v.tierOf(n.Partitions), shapeOf: -1}
		v.classes[key] = c
	}
	c.members++
	j.class = c
	v.enqueue(j)
}

func sameJob(a, b *Job) bool {
	return a.Attempt == b.Attempt && a.Priority == b.Priority && a.Held == b.Held && a.Cleaning == b.Cleaning &&
		a.BeginAt == b.BeginAt && a.RetryAt == b.RetryAt && a.Shown == b.Shown && a.TimeLimitS == b.TimeLimitS && classKey(a) == classKey(b)
}

// RemoveJob forgets a job: it was placed, or it ended.
func (v *View) RemoveJob(id JobID) {
	if j := v.jobs[id]; j != nil {
		v.unqueue(j)
		delete(v.jobs, id)
		v.dirty = true
	}
}

// Defer keeps a job from being considered until then; an earlier time is replaced. A decision about it was refused, say.
func (v *View) Defer(id JobID, until Time) {
	j := v.jobs[id]
	if j == nil {
		return
	}
	c := j.class
	v.unqueue(j)
	j.deferred = until
	c.members++
	v.classes[c.key] = c
	j.class = c
	v.enqueue(j)
	v.dirty = true
}

// enqueue puts a job where it waits.
func (v *View) enqueue(j *job) {
	v.loosen(j)
	switch {
	case j.Held != 0, j.Cleaning:
		j.wake = Never
	default:
		j.wake = max(j.BeginAt, j.RetryAt, j.deferred)
	}
	switch j.wake {
	case 0:
		j.class.insert(j)
	case Never:
	default:
		heap.Push(&v.timed, timer{at: j.wake, job: j})
	}
}

// unqueue takes it away from there. A timer is left behind; it is recognised as old when it comes up.
func (v *View) unqueue(j *job) {
	c := j.class
	if j.wake == 0 {
		c.remove(j)
	}
	j.wake = Never
	if c.members--; c.members == 0 {
		delete(v.classes, c.key)
	}
	j.class = nil
}

// wakeUp queues the jobs whose time has come.
func (v *View) wakeUp(now Time) {
	for len(v.timed) > 0 && v.timed[0].at <= now {
		t := heap.Pop(&v.timed).(timer)
		if t.job.wake == t.at && t.job.class != nil {
			t.job.wake = 0
			t.job.class.insert(t.job)
			v.loosen(t.job)
			v.dirty = true
		}
	}
}

// NextWake returns the earliest time at which a job that waits for its time may be considered; Never if there is none.
func (v *View) NextWake() Time {
	for len(v.timed) > 0 {
		if t := v.timed[0]; t.job.wake == t.at && t.job.class != nil {
			return t.at
		}
		heap.Pop(&v.timed)
	}
	return Never
}

type timer struct {
	at  Time
	job *job
}

// timedQueue is a heap of timers by (time, job).
type timedQueue []timer

func (q timedQueue) Len() int { return len(q) }
func (q timedQueue) Less(i, k int) bool {
	return cmp.Or(cmp.Compare(q[i].at, q[k].at), cmp.Compare(q[i].job.ID, q[k].job.ID)) < 0
}
func (q timedQueue) Swap(i, k int) { q[i], q[k] = q[k], q[i] }
func (q *timedQueue) Push(x any)   { *q = append(*q, x.(timer)) }
func (q *timedQueue) Pop() any {
	old := *q
	t := old[len(old)-1]
	old[len(old)-1] = timer{}
	*q = old[:len(old)-1]
	return t
}

// classQueue is a heap of classes by the order of their next jobs.
type classQueue []*class

func (q classQueue) Len() int           { return len(q) }
func (q classQueue) Less(i, k int) bool { return headBefore(q[i], q[k]) }
func (q classQueue) Swap(i, k int)      { q[i], q[k] = q[k], q[i] }
func (q *classQueue) Push(x any)        { *q = append(*q, x.(*class)) }
func (q *classQueue) Pop() any {
	old := *q
	c := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	return c
}
