// Command muster-agent runs one node, or many declared nodes in one process: it joins the cluster, launches the work that
// the controllers place here, reports its end, streams its output, and vouches for local users.
//
// It prints one line "ready NAME ADDRESS" on stdout for each node when the node has joined, and logs on stderr. SIGTERM
// makes it leave; work goes on under its supervisors, and the next agent adopts it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/muster-hpc/muster/node"
	"github.com/muster-hpc/muster/node/run"
	"github.com/muster-hpc/muster/ops/version"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	os.Exit(runAgents(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// mostIdle bounds the supervisors that are started ahead of steps, whatever the number of nodes: each holds a few MiB.
const mostIdle = 4

// runAgents is main without the process around it; it returns the exit code.
func runAgents(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	opts, err := parse(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		fmt.Fprintf(stderr, "muster-agent: %v\n", err)
		return 2
	}
	if opts.version {
		fmt.Fprintln(stdout, "muster-agent", version.Version)
		return 0
	}
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: opts.level}))
	out := &lines{w: stdout}
	blobs := node.NewBlobCache()
	supervisors := run.NewPool(opts.supervisor, min(len(opts.nodes)+1, mostIdle), log)
	supervisors.Fill()
	defer supervisors.Close()
	var wg sync.WaitGroup
	failures := make([]error, len(opts.nodes))
	for i, n := range opts.nodes {
		wg.Go(func() {
			if failures[i] = serveNode(ctx, n, supervisors, blobs, out, log); failures[i] != nil {
				fmt.Fprintf(stderr, "muster-agent: node %s: %v\n", n.Name, failures[i])
			}
		})
	}
	wg.Wait()
	if errors.Join(failures...) != nil {
		return 1
	}
	return 0
}

// lines writes whole lines to stdout, from many nodes.
type lines struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *lines) print(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintf(l.w, format+"\n", args...)
}

// levelVariable is the environment variable with the level of the log where --log-level does not say it.
const levelVariable = "MUSTER_LOG_LEVEL"

// options are what the command line says.
type options struct {
	nodes      []declared
	supervisor string
	level      slog.Level
	version    bool
}

const usage = `Usage: muster-agent --dir DIR --name NAME --listen HOST:PORT --controllers A,B,C [options]
       muster-agent --nodes FILE.json [--supervisor PATH]

Options:
`

func parse(args []string, stderr io.Writer) (*options, error) {
	opts := new(options)
	var one declared
	var controllers, file string
	var cpus, gpus int
	fs := flag.NewFlagSet("muster-agent", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Usage = func() { fmt.Fprint(stderr, usage); fs.PrintDefaults() }
	fs.StringVar(&one.Dir, "dir", "", "`directory` of the agent, with its certificates in tls/")
	fs.StringVar(&one.Name, "name", "", "`name` of the node, as in its certificate")
	fs.StringVar(&one.Listen, "listen", "", "`host:port` to answer clients on; port 0 takes a free one")
	fs.StringVar(&one.Advertise, "advertise", "", "`host:port` at which others reach it (default: the address of --listen)")
	fs.StringVar(&one.TaskAddress, "task-address", "", "`host` at which tasks of other nodes reach this node's (default: the host of --advertise)")
	fs.StringVar(&controllers, "controllers", "", "API `addresses` of controllers, separated by commas")
	fs.IntVar(&cpus, "cpus", 0, "declare this `number` of CPUs instead of detecting them")
	fs.StringVar(&one.Memory, "memory", "", "declare this `size` of memory (512G) instead of detecting it")
	fs.IntVar(&gpus, "gpus", 0, "declare this `number` of GPUs")
	fs.StringVar(&one.GPUType, "gpu-type", "", "their `type`, for example h100")
	var probe string
	fs.StringVar(&probe, "gpu-probe", "", "`program` that reads GPUs, with arguments, or none (default also from "+probeVariable+", then muster-gpu\n"+
		"beside this program unless resources are declared)")
	fs.Float64Var(&one.GPUIntervalS, "gpu-interval", 0, "read GPUs every so many `seconds` (default 10)")
	fs.Func("gres", "other devices, `NAME[:TYPE]=COUNT[:FILES]` (ib=2:/dev/infiniband/uverbs[0-1]); may be repeated", func(words string) error {
		one.Gres = append(one.Gres, words)
		return nil
	})
	fs.StringVar(&one.BootID, "boot-id", "", "declare this boot `id` instead of the kernel's")
	fs.StringVar(&one.Cgroups, "cgroups", cgroupsAuto, "`whether` jobs are kept in control groups: on, off, or auto (unless resources are declared)")
	fs.BoolVar(&one.PrivateTmp, "private-tmp", false, "give each job a /tmp and a /dev/shm of its own; needs root")
	fs.StringVar(&file, "nodes", "", "run the declared nodes of this `file`, a JSON list of objects with the keys dir, name, listen, advertise,\n"+
		"task_address, controllers, cpus, memory, gpus, gpu_type, gpu_probe, gpu_interval_s, gres, boot_id, features, cgroups, private_tmp")
	fs.StringVar(&opts.supervisor, "supervisor", "", "`path` of muster-supervisor (default: beside this program)")
	level := slog.LevelInfo
	if word := os.Getenv(levelVariable); word != "" {
		if err := level.UnmarshalText([]byte(word)); err != nil {
			return nil, fmt.Errorf("%s=%s: %w; it is debug, info, warn or error", levelVariable, word, err)
		}
	}
	fs.TextVar(&opts.level, "log-level", level, "`level`: debug, info, warn or error (default also from "+levelVariable+")")
	fs.BoolVar(&opts.version, "version", false, "print the version")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	if opts.version {
		return opts, nil
	}
	if fs.NArg() > 0 {
		return nil, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	if err := opts.findSupervisor(); err != nil {
		return nil, err
	}
	if file != "" {
		if one.Dir != "" || one.Name != "" {
			return nil, errors.New("--nodes stands alone: each node's --dir, --name and so on are in the file")
		}
		var err error
		opts.nodes, err = readNodes(file)
		return opts, err
	}
	one.Controllers = splitList(controllers)
	one.CPUs, one.GPUs, one.GPUProbe = cpus, gpus, strings.Fields(probe)
	opts.nodes = []declared{one}
	return opts, one.check("--")
}

// findSupervisor makes the path of the supervisor's program absolute and checks that it is there.
func (o *options) findSupervisor() error {
	if o.supervisor == "" {
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("find muster-supervisor beside this program: %w", err)
		}
		o.supervisor = filepath.Join(filepath.Dir(self), "muster-supervisor")
	}
	path, err := filepath.Abs(o.supervisor)
	if err != nil {
		return fmt.Errorf("find muster-supervisor: %w", err)
	}
	if info, err := os.Stat(path); err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
		return fmt.Errorf("there is no program %s; say with --supervisor where muster-supervisor is", path)
	}
	o.supervisor = path
	return nil
}

func splitList(list string) []string {
	return strings.FieldsFunc(list, func(r rune) bool { return r == ',' || r == ' ' })
}
