package submit

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// Resources reads what is asked of nodes.
func Resources(o *option.Set, c Caller) (*apiv1.ResourceRequest, error) {
	r := &apiv1.ResourceRequest{}
	var err error
	for _, field := range []struct {
		to   *uint32
		name string
	}{
		{&r.Ntasks, "ntasks"}, {&r.NtasksPerNode, "ntasks-per-node"}, {&r.CpusPerTask, "cpus-per-task"},
		{&r.NtasksPerGpu, "ntasks-per-gpu"}, {&r.CpusPerGpu, "cpus-per-gpu"},
	} {
		if *field.to, err = number(o, field.name, 1); err != nil {
			return nil, err
		}
	}
	if v, ok := o.Get("nodes"); ok {
		if r.NodesMin, r.NodesMax, err = value.NodeCount(v.Text); err != nil {
			return nil, refused("Invalid node count: --nodes=%s", v.Text)
		}
	}
	if v, ok := o.Get("exclusive"); ok {
		if v.Given && v.Text != "" {
			return nil, refused("--exclusive=%s is not supported yet: only whole nodes (--exclusive)", v.Text)
		}
		r.Exclusive = true
	}
	if v, ok := o.Get("relative"); ok {
		n, err := value.Count(v.Text, 0)
		if err != nil {
			return nil, refused("Invalid numeric value \"%s\" for --relative.", v.Text)
		}
		r.Relative = &n
	}
	r.Oversubscribe, r.Overcommit = o.Has("oversubscribe"), o.Has("overcommit")
	r.Exact, r.Overlap = o.Has("exact"), o.Has("overlap")
	for _, read := range []func(*option.Set, Caller, *apiv1.ResourceRequest) error{readHosts, readMemory, readGPUs} {
		if err := read(o, c, r); err != nil {
			return nil, err
		}
	}
	if most := r.NodesMax; most > 0 && r.NtasksPerNode > 0 && r.Ntasks > most*r.NtasksPerNode {
		// Beside --ntasks, --ntasks-per-node is a wish: Slurm accepts more tasks than it allows.
		r.NtasksPerNode = (r.Ntasks + most - 1) / most
	}
	if r.Ntasks == 0 && r.NtasksPerNode > 0 && r.NodesMin > 0 && r.NodesMin == r.NodesMax {
		r.Ntasks = r.NtasksPerNode * r.NodesMin
	}
	if r.GpusPerTask > 0 && r.Ntasks == 0 && r.GpusTotal == 0 && len(r.TaskNodes) == 0 {
		return nil, &Error{Fatal: true, Code: CodeRefused,
			Text: "--gpus-per-task needs --ntasks, or --nodes with --ntasks-per-node, or --gpus, to say how many tasks there are"}
	}
	return r, nil
}

// readHosts reads the lists of nodes: --nodelist, --nodefile and --exclude, and for the distribution "arbitrary" the node of each rank.
func readHosts(o *option.Set, c Caller, r *apiv1.ResourceRequest) error {
	if o.Has("nodefile") && o.Has("nodelist") {
		return refused("--nodefile and --nodelist both name the nodes; give one of them")
	}
	var hosts []string
	for _, field := range []struct {
		name string
		file bool
	}{{"nodelist", false}, {"nodefile", true}} {
		v, ok := o.Get(field.name)
		if !ok {
			continue
		}
		var err error
		if hosts, err = names(field.name, v.Text, field.file || strings.Contains(v.Text, "/"), c.Dir); err != nil {
			return err
		}
	}
	if v, ok := o.Get("exclude"); ok {
		list, err := names("exclude", v.Text, strings.Contains(v.Text, "/"), c.Dir)
		if err != nil {
			return err
		}
		r.Exclude = unique(list)
	}
	done, err := readArbitrary(o, c, r, hosts)
	if err != nil || done {
		return err
	}
	r.NodeList = unique(hosts)
	if n := uint32(len(r.NodeList)); n > r.NodesMin {
		if r.NodesMax != 0 && n > r.NodesMax {
			return refused("--nodelist names %d nodes, but --nodes allows %d", n, r.NodesMax)
		}
		if r.NodesMin = n; r.NodesMax < n {
			r.NodesMax = n
		}
	}
	return nil
}

// readArbitrary reads the node of each rank, if ranks go where a list says: with --distribution=arbitrary the list is --nodelist or
// SLURM_HOSTFILE, and SLURM_HOSTFILE alone asks for it, too.
func readArbitrary(o *option.Set, c Caller, r *apiv1.ResourceRequest, hosts []string) (done bool, err error) {
	v, given := o.Get("distribution")
	_, arbitrary, err := value.Distribution(v.Text)
	switch {
	case given && err != nil:
		return false, nil // readTasks says so
	case given && !arbitrary, !given && (c.Batch || c.Hostfile == "" || len(hosts) > 0):
		return false, nil
	}
	where := "--nodelist"
	if len(hosts) == 0 {
		if c.Hostfile == "" {
			return false, &Error{Fatal: true, Code: CodeRefused,
				Text: "--distribution=arbitrary needs the node of each task: name a file in SLURM_HOSTFILE, or give --nodelist"}
		}
		where = "SLURM_HOSTFILE"
		if hosts, err = names(where, c.Hostfile, true, c.Dir); err != nil {
			return false, err
		}
	}
	switch n := r.Ntasks; {
	case n == 0:
	case int(n) > len(hosts):
		return false, &Error{Fatal: true, Code: CodeRefused, Text: fmt.Sprintf("%s names the nodes of %d tasks; --ntasks asks for %d", where, len(hosts), n)}
	default:
		hosts = hosts[:n]
	}
	r.TaskNodes, r.Ntasks, r.NtasksPerNode = hosts, uint32(len(hosts)), 0
	r.NodesMin = uint32(len(unique(hosts)))
	r.NodesMax = r.NodesMin
	return true, nil
}

// names reads a list of nodes, or a file with names and lists between blanks; "#" begins a comment.
func names(option, list string, file bool, dir string) ([]string, error) {
	if file {
		data, err := os.ReadFile(Absolute(dir, list))
		if err != nil {
			return nil, refused("--%s: %v", option, err)
		}
		var words []string
		for line := range strings.Lines(string(data)) {
			line, _, _ = strings.Cut(line, "#")
			words = append(words, strings.Fields(line)...)
		}
		if list = strings.Join(words, ","); list == "" {
			return nil, refused("--%s: there is no node in the file", option)
		}
	}
	hosts, err := notation.Expand(list)
	if err != nil {
		return nil, refused("Batch job submission failed: Invalid node name specified\n--%s: %v", option, err)
	}
	return hosts, nil
}

// unique leaves out repeated names.
func unique(list []string) []string {
	seen := map[string]bool{}
	var out []string
	for _, host := range list {
		if !seen[host] {
			seen[host] = true
			out = append(out, host)
		}
	}
	return out
}

func readMemory(o *option.Set, _ Caller, r *apiv1.ResourceRequest) error {
	if count(o, memoryNames) > 1 {
		return &Error{Fatal: true, Code: CodeRefused, Text: "--mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive."}
	}
	for name, to := range map[string]*uint64{
		"mem": &r.MemoryPerNodeMb, "mem-per-cpu": &r.MemoryPerCpuMb, "mem-per-gpu": &r.MemoryPerGpuMb,
	} {
		if v, ok := o.Get(name); ok {
			mb, err := value.MemoryMB(v.Text)
			if err != nil {
				return invalid(name)
			}
			*to = mb
			r.MemoryAll = name == "mem" && mb == 0
		}
	}
	return nil
}

func readGPUs(o *option.Set, _ Caller, r *apiv1.ResourceRequest) error {
	typed := func(name, kind string) error {
		if kind != "" && r.GpuType != "" && kind != r.GpuType {
			return refused("--%s asks for GPUs of type %s, another option for type %s: a job has one type, or several in --gres", name, kind, r.GpuType)
		}
		if kind != "" {
			r.GpuType = kind
		}
		return nil
	}
	if err := readGres(o, r); err != nil {
		return err
	}
	for _, field := range []struct {
		name string
		to   *uint32
	}{{"gpus", &r.GpusTotal}, {"gpus-per-node", &r.GpusPerNode}, {"gpus-per-task", &r.GpusPerTask}} {
		v, ok := o.Get(field.name)
		if !ok {
			continue
		}
		kind, n, err := value.GPUs(v.Text)
		if err != nil {
			return invalid(field.name)
		}
		if field.name == "gpus-per-node" {
			if r.GpusOption == "gres" && r.GpusPerNode > 0 && r.GpusPerNode != n {
				return refused("--gres asks for %d GPUs on each node, --gpus-per-node for %d", r.GpusPerNode, n)
			}
			r.GpusOption = "gpus-per-node"
		}
		*field.to = n
		if err := typed(field.name, kind); err != nil {
			return err
		}
	}
	if r.GpusPerNode == 0 {
		r.GpusOption = ""
	}
	return nil
}

// readGres reads --gres. GPUs of one type become what --gpus-per-node asks for; several types, and other devices, stay a list.
func readGres(o *option.Set, r *apiv1.ResourceRequest) error {
	v, ok := o.Get("gres")
	if !ok {
		return nil
	}
	list, err := value.GresList(v.Text)
	if err != nil {
		return refused("%v", err)
	}
	isGPU := func(g *apiv1.GresRequest) bool { return g.Name == "gpu" }
	gpus := 0
	for _, g := range list {
		if isGPU(g) {
			gpus++
		}
	}
	if i := slices.IndexFunc(list, isGPU); gpus == 1 {
		r.GpusPerNode, r.GpuType, r.GpusOption = list[i].Count, list[i].Type, "gres"
		list = slices.Delete(list, i, i+1)
	}
	r.Gres = list
	return nil
}

// NoGres tells whether the options ask a step for no device at all, where it would get those of its job: --gres=none, or no GPU by any of
// the options that ask for some (--gres=gpu:0, --gpus=0) and nothing else.
func NoGres(o *option.Set) bool {
	asked := false
	if v, ok := o.Get("gres"); ok {
		list, err := value.GresList(v.Text)
		if err != nil || slices.ContainsFunc(list, func(g *apiv1.GresRequest) bool { return g.Count > 0 }) {
			return false
		}
		asked = true
	}
	for _, name := range []string{"gpus", "gpus-per-node", "gpus-per-task"} {
		if v, ok := o.Get(name); ok {
			if _, n, err := value.GPUs(v.Text); err != nil || n > 0 {
				return false
			}
			asked = true
		}
	}
	return asked
}
