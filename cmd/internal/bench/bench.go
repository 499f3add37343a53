package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/dev"
	"github.com/muster-hpc/muster/rpc/client"
)

// Options say what to measure and how.
type Options struct {
	// Names of benchmarks, in Names; empty means all.
	Names []string
	// Repeat is the number of runs of each; default 3.
	Repeat int
	// Bin is the directory of the programs; empty means that of the running one.
	Bin string
	// Clients is how many callers submit at a time; default 256.
	Clients int
	// Seconds is how long one run of "submit" lasts; default 5.
	Seconds int
	// Pending is how many jobs "list" puts in the queue; default 100,000.
	Pending int
	// Minutes is how long "steady" loads the cluster; default 10.
	Minutes int
	// Nodes is over how many declared nodes "wide" launches; default 1,000.
	Nodes int
	// BatchNodes is over how many the script of "wide" calls srun; default 500, at most Nodes.
	BatchNodes int
	// Agents is how many virtual agents "agents" runs; default 10,000.
	Agents int
	// Ranks is how many tasks write in "output"; default 64.
	Ranks int
	// Bytes is how much each of them writes, such as 100M; default 100M.
	Bytes string
	// Progress is told what goes on; nil: nobody is.
	Progress func(string)
}

// benchmark is one of them: it gets a fresh cluster.
type benchmark struct {
	measure func(ctx context.Context, r *run) error
	// size is the cluster that it needs; nil: 3 controllers and 4 nodes.
	size func(Options) dev.Options
	// named: it takes minutes, and is only run when it is named.
	named bool
}

// benchmarks are all of them, in their order.
var benchmarks = []struct {
	name string
	benchmark
}{
	{"submit", benchmark{measure: submit}},
	{"throughput", benchmark{measure: throughput}},
	{"launch", benchmark{measure: launches}},
	{"list", benchmark{measure: list}},
	{"failover", benchmark{measure: failover}},
	{"steady", benchmark{measure: steady, named: true}},
	{"wide", benchmark{measure: wide, size: wideCluster, named: true}},
	{"agents", benchmark{measure: agents, size: agentsCluster, named: true}},
	{"output", benchmark{measure: output, named: true}},
}

// Names returns the names of all benchmarks, or only of those that "all" stands for.
func Names(all bool) []string {
	var names []string
	for _, b := range benchmarks {
		if all || !b.named {
			names = append(names, b.name)
		}
	}
	return names
}

// run is one benchmark on its cluster.
type run struct {
	Options
	name    string
	cluster *dev.Cluster
	report  *Report
	dir     string
	env     []string
	bin     string
}

func (r *run) add(name, unit string, target float64, higher bool, values []float64) {
	r.report.Figures = append(r.report.Figures, figure(r.name, name, unit, target, higher, values))
}

// tell adds a figure without a target.
func (r *run) tell(name, unit string, values ...float64) {
	r.report.Figures = append(r.report.Figures, Figure{Benchmark: r.name, Name: name, Unit: unit, Values: values, Median: median(values), Met: true, Untargeted: true})
}

func (r *run) say(format string, args ...any) {
	if r.Progress != nil {
		r.Progress(r.name + ": " + fmt.Sprintf(format, args...))
	}
}

// client opens a client as the user who measures.
func (r *run) client(ctx context.Context) (*client.Client, error) {
	for _, v := range r.env {
		if socket, ok := strings.CutPrefix(v, client.SocketVariable+"="); ok {
			return client.Open(ctx, client.Config{Socket: socket, Timeout: time.Minute})
		}
	}
	return nil, errors.New("the local cluster's environment names no agent socket")
}

// Run measures and returns the report; each benchmark has a cluster of its own.
func Run(ctx context.Context, o Options) (*Report, error) {
	for _, n := range []struct {
		value     *int
		otherwise int
	}{
		{&o.Repeat, 3}, {&o.Clients, 256}, {&o.Seconds, 5}, {&o.Pending, 100_000}, {&o.Minutes, 10}, {&o.Nodes, 1000},
		{&o.BatchNodes, 500}, {&o.Agents, 10_000}, {&o.Ranks, 64},
	} {
		if *n.value <= 0 {
			*n.value = n.otherwise
		}
	}
	if o.Bytes == "" {
		o.Bytes = "100M"
	}
	if len(o.Names) == 0 || slices.Contains(o.Names, "all") {
		o.Names = Names(false)
	}
	report := &Report{}
	dir, err := os.MkdirTemp("", "muster-bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if report.Machine, err = measureMachine(ctx, dir); err != nil {
		return nil, err
	}
	for _, name := range o.Names {
		i := slices.IndexFunc(benchmarks, func(b struct {
			name string
			benchmark
		}) bool {
			return b.name == name
		})
		if i < 0 {
			return nil, fmt.Errorf("there is no benchmark %q; there are %s", name, strings.Join(Names(true), ", "))
		}
		if err := one(ctx, o, name, filepath.Join(dir, name), report, benchmarks[i].benchmark); err != nil {
			return report, fmt.Errorf("benchmark %s: %w", name, err)
		}
	}
	return report, nil
}

// one runs one benchmark on a fresh cluster and takes the cluster down.
func one(ctx context.Context, o Options, name, dir string, report *Report, b benchmark) (err error) {
	r := &run{Options: o, name: name, report: report, dir: dir, bin: o.Bin}
	size := dev.Options{Nodes: 4, GPUs: -1}
	if b.size != nil {
		size = b.size(o)
	}
	size.Dir, size.Bin = dir, o.Bin
	r.say("starting 3 controllers and %d nodes", size.Nodes)
	if r.cluster, _, err = dev.Up(ctx, size); err != nil {
		if c, openErr := dev.Open(dir); openErr == nil {
			err = errors.Join(err, c.Down())
		}
		return err
	}
	defer func() { err = errors.Join(err, r.cluster.Down()) }()
	variables, err := r.cluster.Env("")
	if err != nil {
		return err
	}
	r.env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "SLURM_") || strings.HasPrefix(v, "MUSTER_") })
	for _, v := range variables {
		value := v.Value
		if v.Name == "PATH" {
			value += string(os.PathListSeparator) + os.Getenv("PATH")
		}
		r.env = append(r.env, v.Name+"="+value)
	}
	return b.measure(ctx, r)
}
