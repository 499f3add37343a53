package bind

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/muster-hpc/muster/proto/notation"
)

// GPURequest is what a binding to accelerators is made of.
type GPURequest struct {
	// Bind is TaskOptions.gpu_bind.
	Bind string
	// GPUs that the step has on the node, by their numbers there, ascending.
	GPUs []int
	// Tasks of the step there, and accelerators of each that were asked for; 0 means that each sees all.
	Tasks, PerTask int
	// Relative: numbers in lists count the step's accelerators from 0, because tasks cannot see others; otherwise they are the node's.
	Relative bool
	// Near has the CPUs near each accelerator, by its number; one without any is near to all.
	Near map[int]notation.Mask
	// CPUs are the tasks' masks, by local id; nil means that the task may use any.
	CPUs []notation.Mask
}

// GPUs returns the accelerators that each task sees, by local id, as numbers on the node, and whether that is to be said. The error
// is a sentence for the user.
func GPUs(r GPURequest) (each [][]int, verbose bool, _ error) {
	word, value, verbose := words(r.Bind)
	each = make([][]int, r.Tasks)
	if len(r.GPUs) == 0 {
		return each, verbose, nil
	}
	count := 0
	if word == "single" || word == "per_task" {
		var err error
		if count, err = strconv.Atoi(value); err != nil || count < 1 {
			return nil, false, fmt.Errorf("tasks cannot be bound to accelerators by %.100q: %s needs a number of at least 1", r.Bind, word)
		}
	}
	switch word {
	case "":
		for i := range each {
			if each[i] = r.GPUs; r.PerTask > 0 {
				each[i] = r.slice(i, r.PerTask)
			}
		}
	case none:
		for i := range each {
			each[i] = r.GPUs
		}
	case "closest":
		for i := range each {
			each[i] = r.closest(i)
		}
	case "single":
		r.single(each, count)
	case "per_task":
		for i := range each {
			each[i] = r.slice(i, count)
		}
	case "map_gpu", "mask_gpu":
		given, err := expand(value, word == "mask_gpu")
		if err != nil {
			return nil, false, fmt.Errorf("the binding %.100q of tasks to accelerators is not understood: %w", r.Bind, err)
		}
		if err := r.choose(each, given); err != nil {
			return nil, false, err
		}
	default:
		return nil, false, fmt.Errorf("tasks cannot be bound to accelerators by %.100q; none, closest, single:N, per_task:N, map_gpu:LIST and mask_gpu:LIST can", r.Bind)
	}
	return each, verbose, nil
}

// slice is the i-th task's share of so many each; it begins anew when there are no more.
func (r GPURequest) slice(i, n int) []int {
	var mine []int
	for k := range min(n, len(r.GPUs)) {
		mine = append(mine, r.GPUs[(i*n+k)%len(r.GPUs)])
	}
	slices.Sort(mine)
	return mine
}

// closest are the accelerators near the CPUs of the i-th task; all if none is, or nothing is known.
func (r GPURequest) closest(i int) []int {
	if i >= len(r.CPUs) || r.CPUs[i] == nil {
		return r.GPUs
	}
	var mine []int
	for _, gpu := range r.GPUs {
		near := r.Near[gpu]
		if near.Count() == 0 || slices.ContainsFunc(r.CPUs[i].Devices(), near.Has) {
			mine = append(mine, gpu)
		}
	}
	if len(mine) == 0 {
		return r.GPUs
	}
	return mine
}

// single gives each task one accelerator, near to it while fewer than n tasks have that, then any that fewer than n have, then the one that
// fewest have.
func (r GPURequest) single(each [][]int, n int) {
	users := make(map[int]int)
	fewest := func(among []int, most int) (int, bool) {
		best, found := 0, false
		for _, gpu := range among {
			if users[gpu] < most && (!found || users[gpu] < users[best]) {
				best, found = gpu, true
			}
		}
		return best, found
	}
	for i := range each {
		gpu, ok := fewest(r.closest(i), n)
		if !ok {
			if gpu, ok = fewest(r.GPUs, n); !ok {
				gpu, _ = fewest(r.GPUs, len(each)+1)
			}
		}
		users[gpu]++
		each[i] = []int{gpu}
	}
}

// choose gives each task its item of a list, which begins anew when it is short.
func (r GPURequest) choose(each [][]int, given []notation.Mask) error {
	for i := range each {
		for _, n := range given[i%len(given)].Devices() {
			gpu := n
			if r.Relative {
				if n >= len(r.GPUs) {
					return fmt.Errorf("task %d of the node is to see accelerator %d; the step has %d there, counted from 0", i, n, len(r.GPUs))
				}
				gpu = r.GPUs[n]
			}
			if !slices.Contains(r.GPUs, gpu) {
				return fmt.Errorf("task %d of the node is to see accelerator %d; the step has %s there", i, n, strings.Trim(fmt.Sprint(r.GPUs), "[]"))
			}
			each[i] = append(each[i], gpu)
		}
	}
	return nil
}
