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
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
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
	// Progress is told what goes on; nil: nobody is.
	Progress func(string)
}

// benchmark is one of them: it gets a fresh cluster.
type benchmark func(ctx context.Context, r *run) error

var benchmarks = map[string]benchmark{
	"submit": submit, "throughput": throughput, "launch": launch, "list": list, "failover": failover, "steady": steady,
}

// Names are the benchmarks in their order; "steady" is only run when it is named, because it takes ten minutes.
var Names = []string{"submit", "throughput", "launch", "list", "failover"}

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

// Run measures and returns the report; each benchmark has a cluster of 3 controllers and 4 nodes of its own.
func Run(ctx context.Context, o Options) (*Report, error) {
	if o.Repeat <= 0 {
		o.Repeat = 3
	}
	if o.Clients <= 0 {
		o.Clients = 256
	}
	if o.Seconds <= 0 {
		o.Seconds = 5
	}
	if o.Pending <= 0 {
		o.Pending = 100_000
	}
	if o.Minutes <= 0 {
		o.Minutes = 10
	}
	if len(o.Names) == 0 || slices.Contains(o.Names, "all") {
		o.Names = Names
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
		f, ok := benchmarks[name]
		if !ok {
			return nil, fmt.Errorf("there is no benchmark %q; there are %s and steady", name, strings.Join(Names, ", "))
		}
		if err := one(ctx, o, name, filepath.Join(dir, name), report, f); err != nil {
			return report, fmt.Errorf("benchmark %s: %w", name, err)
		}
	}
	return report, nil
}

// one runs one benchmark on a fresh cluster and takes the cluster down.
func one(ctx context.Context, o Options, name, dir string, report *Report, f benchmark) (err error) {
	r := &run{Options: o, name: name, report: report, dir: dir, bin: o.Bin}
	r.say("starting 3 controllers and 4 nodes")
	settings := &apiv1.Settings{}
	if r.cluster, _, err = dev.Up(ctx, dev.Options{Dir: dir, Bin: o.Bin, GPUs: -1, Settings: settings}); err != nil {
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
	return f(ctx, r)
}
