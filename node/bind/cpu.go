package bind

import (
	"fmt"
	"math/big"
	"slices"
	"strconv"
	"strings"

	"github.com/muster-hpc/muster/proto/notation"
)

// Words of cpu_bind.
const (
	none    = "none"
	threads = "threads"
	cores   = "cores"
	sockets = "sockets"
	rank    = "rank"
	mapCPU  = "map_cpu"
	maskCPU = "mask_cpu"
)

// CPURequest is what a binding to CPUs is made of.
type CPURequest struct {
	// Topology of the node.
	Topology Topology
	// CPUs that the step has there.
	CPUs notation.Mask
	// Tasks of the step there, and CPUs of each; 0 means 1.
	Tasks, PerTask int
	// Bind is TaskOptions.cpu_bind, Distribution is TaskOptions.distribution: what is behind its colon says how tasks go over sockets.
	Bind, Distribution string
}

// CPUBinding is which CPUs the tasks of a step use on a node.
type CPUBinding struct {
	// Masks of the tasks, by their local ids; nil means all of the step's.
	Masks []notation.Mask
	// Kind is that of SLURM_CPU_BIND_TYPE: "none", "rank", "map_cpu:" or "mask_cpu:". List is what follows it.
	Kind, List string
	// Verbose: it is said on the tasks' standard error.
	Verbose bool
	// Problems are sentences about what could not be honoured, by local id; empty strings where all is well.
	Problems []string
}

// Variables returns the values of SLURM_CPU_BIND and its parts, by name.
func (b *CPUBinding) Variables() map[string]string {
	voice := "quiet"
	if b.Verbose {
		voice = "verbose"
	}
	return map[string]string{
		"SLURM_CPU_BIND": voice + "," + b.Kind + b.List, "SLURM_CPU_BIND_VERBOSE": voice, "SLURM_CPU_BIND_TYPE": b.Kind, "SLURM_CPU_BIND_LIST": b.List,
	}
}

// Word is how the line on standard error names the kind.
func (b *CPUBinding) Word() string {
	word, _, _ := strings.Cut(b.Kind, "_")
	return strings.ToUpper(word)
}

// CPUs binds the tasks of a step on a node. The error is a sentence for the user.
func CPUs(r CPURequest) (*CPUBinding, error) {
	r.PerTask = max(r.PerTask, 1)
	word, list, verbose := words(r.Bind)
	b := &CPUBinding{Kind: maskCPU + ":", Verbose: verbose, Masks: make([]notation.Mask, r.Tasks), Problems: make([]string, r.Tasks)}
	switch word {
	case "":
		if kind := r.natural(); kind != "" {
			b.Masks = r.hand(kind)
		}
	case none:
		b.Kind = none
		return b, nil
	case threads, cores, sockets:
		b.Masks = r.hand(word)
	case rank:
		b.Kind = rank
		for i, all := 0, r.CPUs.Devices(); i < r.Tasks && len(all) > 0; i++ {
			b.Masks[i] = notation.MaskOf(all[i%len(all)])
		}
		return b, nil
	case mapCPU, maskCPU:
		b.Kind = word + ":"
		given, err := expand(list, word == maskCPU)
		if err != nil {
			return nil, fmt.Errorf("the binding %.100q of tasks to CPUs is not understood: %w", r.Bind, err)
		}
		r.choose(b, given)
		b.List = list
		return b, nil
	default:
		return nil, fmt.Errorf("tasks cannot be bound to CPUs by %.100q; none, threads, cores, sockets, rank, map_cpu:LIST and mask_cpu:LIST can", r.Bind)
	}
	var names []string
	for _, m := range b.Masks {
		if m == nil {
			m = r.CPUs
		}
		names = append(names, Hex(m))
	}
	b.List = strings.Join(names, ",")
	return b, nil
}

// words cuts "verbose," and "quiet," off a binding and splits the rest into its word and its list.
func words(bind string) (word, list string, verbose bool) {
	rest := bind
	for {
		first, more, comma := strings.Cut(rest, ",")
		switch first {
		case "verbose", "v", "quiet", "q":
			verbose = first[0] == 'v'
			if rest = more; comma {
				continue
			}
		}
		word, list, _ = strings.Cut(rest, ":")
		return word, list, verbose
	}
}

// natural is to what tasks are bound that did not ask: to what the step has exactly as many of as its tasks need. "" means to nothing.
func (r CPURequest) natural() string {
	need := r.Tasks * r.PerTask
	for _, kind := range []string{sockets, cores, threads} {
		if len(r.Topology.units(r.CPUs, kind)) == need {
			return kind
		}
	}
	return ""
}

// hand gives each task CPUs of its own while there are any; then it begins anew.
func (r CPURequest) hand(kind string) []notation.Mask {
	masks := make([]notation.Mask, r.Tasks)
	pieces := kind
	if kind == sockets { // CPUs are handed out, and the task may use their sockets
		pieces = threads
	}
	all := r.Topology.units(r.CPUs, pieces)
	if len(all) == 0 {
		return masks
	}
	level := inner(r.Distribution)
	pool, turn := slices.Clone(all), 0
	for i := range masks {
		var mine []int
		for len(mine) < r.PerTask {
			if len(pool) == 0 {
				if len(mine) >= len(all) {
					break // it has everything there is
				}
				pool = slices.Clone(all)
			}
			at := pick(pool, turn, r.PerTask-len(mine), level)
			turn = pool[at].socket
			mine = append(mine, pool[at].cpus...)
			pool = slices.Delete(pool, at, at+1)
			if level == "fcyclic" {
				turn++
			}
		}
		if level == "cyclic" {
			turn++ // the next task begins on the next socket
		}
		if kind == sockets {
			mine = r.wholeSockets(mine)
		}
		masks[i] = notation.MaskOf(mine...)
	}
	return masks
}

// inner is how tasks go over the sockets of a node: "block", "cyclic" (the default) or "fcyclic".
func inner(distribution string) string {
	_, rest, _ := strings.Cut(distribution, ":")
	second, _, _ := strings.Cut(rest, ":")
	switch second, _, _ = strings.Cut(second, ","); second {
	case "block", "fcyclic":
		return second
	}
	return "cyclic"
}

// pick returns the index of the next unit: of the socket whose turn it is, or, if that does not have as many CPUs as are still
// needed, of the next one that has; if none has, of the socket whose turn it is or the next that has any.
func pick(pool []unit, turn, need int, level string) int {
	if level == "block" {
		return 0
	}
	free, last := map[int]int{}, 0
	for _, u := range pool {
		free[u.socket] += len(u.cpus)
		last = max(last, u.socket)
	}
	if level == "fcyclic" {
		need = 1
	}
	for _, enough := range []int{need, 1} {
		for step := range last + 1 {
			socket := (turn + step) % (last + 1)
			if free[socket] >= enough {
				return slices.IndexFunc(pool, func(u unit) bool { return u.socket == socket })
			}
		}
	}
	return 0
}

// wholeSockets adds everything that the step has on the sockets of some CPUs.
func (r CPURequest) wholeSockets(cpus []int) []int {
	var all []int
	for _, u := range r.Topology.units(r.CPUs, sockets) {
		if slices.ContainsFunc(cpus, func(cpu int) bool { return r.Topology.place(cpu).Socket == u.socket }) {
			all = append(all, u.cpus...)
		}
	}
	return all
}

// choose gives each task its item of a list, which begins anew when it is short, as far as the step has those CPUs.
func (r CPURequest) choose(b *CPUBinding, given []notation.Mask) {
	for i := range b.Masks {
		wanted := given[i%len(given)]
		var mine []int
		for _, cpu := range wanted.Devices() {
			if r.CPUs.Has(cpu) {
				mine = append(mine, cpu)
			}
		}
		if len(mine) == 0 {
			b.Problems[i] = fmt.Sprintf("it was to be bound to the CPUs %s of the node, of which the step has none: it may use all of the step's (%s)", wanted, r.CPUs)
			continue
		}
		b.Masks[i] = notation.MaskOf(mine...)
	}
}

// maxList bounds the items of a list in a binding, repetitions counted; maxDevice the numbers in it.
const (
	maxList   = 1 << 13
	maxDevice = 1 << 13
)

// expand reads "0,3-5,1*2" as devices, or "0x3,c*2" as masks.
func expand(list string, masks bool) ([]notation.Mask, error) {
	var all []notation.Mask
	for item := range strings.SplitSeq(list, ",") {
		text, count, repeated := strings.Cut(item, "*")
		n := 1
		if repeated {
			var err error
			if n, err = strconv.Atoi(count); err != nil || n < 1 || n > maxList {
				return nil, fmt.Errorf("%q is no number of repetitions", count)
			}
		}
		these, err := readItem(text, masks)
		if err != nil {
			return nil, err
		}
		if len(all)+n*len(these) > maxList {
			return nil, fmt.Errorf("the list has more than %d items", maxList)
		}
		for range n {
			all = append(all, these...)
		}
	}
	return all, nil
}

func readItem(text string, mask bool) ([]notation.Mask, error) {
	if mask {
		digits := strings.TrimPrefix(strings.TrimPrefix(text, "0x"), "0X")
		value, ok := new(big.Int).SetString(digits, 16)
		if !ok || value.Sign() < 1 || value.BitLen() > maxDevice || strings.ContainsAny(digits, "+-_") {
			return nil, fmt.Errorf("%q is no mask", text)
		}
		var devices []int
		for i := range value.BitLen() {
			if value.Bit(i) == 1 {
				devices = append(devices, i)
			}
		}
		return []notation.Mask{notation.MaskOf(devices...)}, nil
	}
	low, high, ranged := strings.Cut(text, "-")
	first, err := strconv.ParseUint(low, 0, 16)
	last := first
	if err == nil && ranged {
		last, err = strconv.ParseUint(high, 0, 16)
	}
	if err != nil || first > last || last >= maxDevice {
		return nil, fmt.Errorf("%q is no number of a device", text)
	}
	var all []notation.Mask
	for n := first; n <= last; n++ {
		all = append(all, notation.MaskOf(int(n)))
	}
	return all, nil
}

// Hex writes a mask as "0x1f".
func Hex(m notation.Mask) string {
	value := new(big.Int)
	for _, n := range m.Devices() {
		value.SetBit(value, n, 1)
	}
	return "0x" + value.Text(16)
}
