package srun

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/launch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

const operands = "PROGRAM [ARGUMENTS...] [: [OPTIONS...] PROGRAM [ARGUMENTS...]]..."

// run is one call of srun.
type run struct {
	s       *session.Session
	table   *option.Table
	options *option.Set
	spec    *apiv1.JobSpec
	parts   []*apiv1.StepSpec // further parts of the step (A : B)
	env     []byte
	streams streams
	heard   <-chan os.Signal // nil hears nothing

	wait      time.Duration    // after the first end; 0: for ever
	immediate *time.Duration   // how long to wait for resources; nil: for ever
	multiProg string           // file with the programs of the ranks
	prolog    string           // programs around the step, on this host
	epilog    string           //
	terminal  *launch.Terminal // of rank 0; nil if there is none
	bindsGPUs bool             // a step of the job has GPUs, whether it asks for some or not

	job      uint32 // the enclosing job; 0 outside
	attempt  uint32 // the attempt in which srun runs; 0 if it does not run in that job
	trace    *launch.Trace
	progress launch.Progress
}

// Run is the command. It returns the exit code of the tasks, 255 for words that cannot be parsed, and 1 for refusals.
func Run(ctx context.Context, s *session.Session) int {
	table := submit.Srun()
	line, words, err := table.Parse(s.Args)
	if err != nil {
		return fail(s, err)
	}
	switch {
	case line.Has("help"):
		fmt.Fprint(s.Stdout, table.Help(s.Program, operands, "Runs a program on all nodes of an allocation, or makes one for it."))
		return 0
	case line.Has("usage"):
		fmt.Fprint(s.Stdout, table.Usage(s.Program, operands))
		return 0
	case line.Has("version"):
		s.Version()
		return 0
	case listsMPI(line):
		fmt.Fprint(s.Stdout, mpiKinds)
		return 0
	}
	trace := launch.NewTrace(s.Get(launch.TraceVariable), s.Now())
	defer func() { trace.Mark("exit"); trace.Print(s.Stderr, s.Program) }()
	r, err := prepare(s, table, line, words)
	if err != nil {
		return fail(s, err)
	}
	r.trace = trace
	return r.connect(ctx)
}

// connect opens the cluster, and runs the program there.
func (r *run) connect(ctx context.Context) int {
	s := r.s
	signal.Ignore(syscall.SIGPIPE) // a reader that left is an error of Write, not the end of this process
	if s.Signals != nil {
		heard, silence := s.Signals(signalsHeard...)
		defer silence()
		r.heard = heard
	}
	cluster, err := s.Cluster(ctx)
	if err != nil {
		s.Errorf("Unable to allocate resources: Unable to contact the cluster\n%s", s.Sentence(err))
		return submit.CodeRefused
	}
	r.trace.Mark("vouched")
	if name := r.options.Text("clusters"); name != "" && !session.NamesCluster(name, cluster.ClusterName()) {
		s.Errorf("'%s' can't be reached now, or it is an invalid entry for --cluster.\nThis is cluster %s; there is no other here.", name, cluster.ClusterName())
		return submit.CodeRefused
	}
	r.env = append(r.env, launchAddress(cluster.Controllers())...)
	defer r.terminal.Restore() // also when this panics
	switch {
	case r.options.Has("test-only"):
		return r.test(ctx, cluster)
	case r.job != 0:
		return r.step(ctx, cluster)
	}
	return r.allocate(ctx, cluster)
}

// launchVariable is environ.LaunchVariable of the agents, which make SLURM_LAUNCH_NODE_IPADDR and SLURM_SRUN_COMM_HOST of it.
const launchVariable = "MUSTER_LAUNCH_ADDRESS"

// launchAddress is a variable with this host's address on the way to the controllers, as a string of an environment; empty
// if the host has none. Connecting a datagram socket sends nothing.
func launchAddress(controllers []string) []byte {
	if len(controllers) == 0 {
		return nil
	}
	conn, err := net.Dial("udp", controllers[0])
	if err != nil {
		return nil
	}
	defer conn.Close()
	host, _, err := net.SplitHostPort(conn.LocalAddr().String())
	if err != nil {
		return nil
	}
	return []byte(launchVariable + "=" + host + "\x00")
}

// lost says why an attachment ended before its step did.
func (r *run) lost(err error) int {
	var left *leftError
	switch {
	case errors.As(err, &left):
		return left.code
	case errors.Is(err, context.Canceled):
		return 128 + int(syscall.SIGINT)
	case errors.Is(err, syscall.EPIPE):
		return 128 + int(syscall.SIGPIPE)
	}
	r.s.Errorf("%s", r.s.Sentence(err))
	return submit.CodeRefused
}

// fail prints an error and returns its exit code.
func fail(s *session.Session, err error) int {
	var usage *option.UsageError
	if errors.As(err, &usage) {
		s.Usage(usage)
		return submit.CodeUsage
	}
	var bad *submit.Error
	if errors.As(err, &bad) && bad.Fatal {
		fmt.Fprintf(s.Stderr, "%s: fatal: %s\n", s.Program, bad.Text)
		return bad.Code
	}
	text := strings.Replace(err.Error(), "Batch job submission failed: ", "Unable to allocate resources: ", 1)
	s.Errorf("%s", text)
	return submit.CodeOf(err)
}

// signalsHeard are the signals that srun handles; others act as usual.
var signalsHeard = []os.Signal{
	syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGCONT, syscall.SIGALRM,
}
