package environ

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// devices sets what a task has of the node, and what it sees of that. SLURM_JOB_GPUS and SLURM_STEP_GPUS are real numbers; what
// libraries read is as they count.
func (r Request) devices(v *vars, p Portion, i int) {
	own := p.CPUs
	if !r.batch() {
		own = r.stepCPUs()
	}
	v.setNumber("SLURM_CPUS_ON_NODE", uint64(own.Count()))
	var binding Binding
	if i < len(r.Bindings) {
		binding = r.Bindings[i]
	}
	if binding.CPU != nil {
		for name, value := range binding.CPU.Variables() {
			v.set(name, value)
		}
	}
	job, step := notation.Mask(r.Order.GetGpuMask()).Devices(), p.GPUs.Devices()
	if len(job) > 0 {
		v.set("SLURM_JOB_GPUS", joinNumbers(job))
	}
	if len(step) == 0 {
		return
	}
	v.setNumber("SLURM_GPUS_ON_NODE", uint64(len(step)))
	if !r.batch() {
		v.set("SLURM_STEP_GPUS", joinNumbers(step))
	}
	sees := step
	if binding.Some {
		sees = binding.GPUs
	}
	names := r.visible(sees)
	for _, variable := range r.visibleVariables(sees) {
		v.set(variable, names)
		if variable == "CUDA_VISIBLE_DEVICES" && !slices.ContainsFunc(sees, func(n int) bool { return r.gpu(n).GetPci() == "" }) {
			// The places are counted along the bus; CUDA's own order is fastest first.
			v.setDefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
		}
	}
}

// stepCPUs are all that the step has on the node.
func (r Request) stepCPUs() notation.Mask {
	var all []int
	for _, p := range Portions(r.Order, r.Step) {
		all = append(all, p.CPUs.Devices()...)
	}
	return notation.MaskOf(all...)
}

func (r Request) gpu(number int) *apiv1.Gpu {
	i := slices.IndexFunc(r.GPUs, func(g *apiv1.Gpu) bool { return int(g.GetIndex()) == number })
	if i < 0 {
		return nil
	}
	return r.GPUs[i]
}

// visible names accelerators for the libraries that use them. MIG instances, and whole ones beside them, go by their unique ids. Others
// go by their places, in the order of their addresses on the bus, among those that processes of the step can open; by their real numbers
// where nothing is kept from them.
func (r Request) visible(gpus []int) string {
	mig := func(n int) bool { return r.gpu(n).MigParent != nil }
	known := func(n int) bool { return r.gpu(n).GetUuid() != "" }
	if slices.ContainsFunc(gpus, func(n int) bool { return r.gpu(n) != nil && mig(n) }) && !slices.ContainsFunc(gpus, func(n int) bool { return !known(n) }) {
		var names []string
		for _, n := range gpus {
			names = append(names, r.gpu(n).GetUuid())
		}
		return strings.Join(names, ",")
	}
	all := r.Reachable
	if all == nil {
		for _, g := range r.GPUs {
			all = append(all, int(g.GetIndex()))
		}
		if slices.ContainsFunc(r.GPUs, func(g *apiv1.Gpu) bool { return g.GetPci() == "" || g.MigParent != nil }) {
			return joinNumbers(gpus) // declared ones, or not all of the machine
		}
	}
	all = slices.Clone(all)
	slices.SortFunc(all, func(a, b int) int {
		return cmp.Or(cmp.Compare(r.gpu(a).GetPci(), r.gpu(b).GetPci()), cmp.Compare(a, b))
	})
	var places []int
	for _, n := range gpus {
		place := slices.Index(all, n)
		if place < 0 {
			place = n
		}
		places = append(places, place)
	}
	slices.Sort(places)
	return joinNumbers(places)
}

// visibleVariables are the variables that the libraries for these accelerators read. Only those of the vendor: where several of them
// filter one after the other, each counts what the one before has left.
func (r Request) visibleVariables(gpus []int) []string {
	kind := ""
	if len(gpus) > 0 {
		kind = strings.ToLower(r.gpu(gpus[0]).GetType())
	}
	digit := func(prefix string) bool {
		rest, ok := strings.CutPrefix(kind, prefix)
		return ok && rest != "" && rest[0] >= '0' && rest[0] <= '9'
	}
	switch {
	case digit("mi"), digit("gfx"), strings.HasPrefix(kind, "instinct"):
		return []string{"ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"}
	case digit("max"), digit("pvc"), kind == "pvc":
		return []string{"ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL"}
	}
	return []string{"CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"}
}

// Terminal returns the variables of a task that has a terminal of this size.
func Terminal(rows, columns uint32) []string {
	v := newVars(nil)
	v.set("SLURM_PTY_WIN_COL", strconv.FormatUint(uint64(columns), 10))
	v.set("SLURM_PTY_WIN_ROW", strconv.FormatUint(uint64(rows), 10))
	return v.strings()
}
