package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/muster-hpc/muster/cmd/internal/bench"
)

const benchHelp = `Measure a local cluster of 3 controllers and 4 nodes (unless said otherwise) that is started for each benchmark:

  submit      durable submissions a second: one job a call, and 100 jobs a call
  throughput  1,000 jobs of one "true" each, from submission to the last end
  launch      sbatch and srun on an idle cluster, from exec to exit
  list        squeue and scontrol with 100,000 pending jobs, and the controllers' memory
  failover    SIGKILL of the leader to the next acknowledged submission
  all         all of the above, also when nothing is named

These take minutes, and are only run when they are named:

  steady      full load for --minutes; counts elections
  wide        one task on each of --nodes declared nodes (100 of them share a process): srun, and a batch script for --batch-nodes that
              calls srun; prints the stages; the last exec and all exit codes as the controllers have them, start skew, CPU of
              each part
  agents      --agents virtual agents of this process with a certificate and a TLS connection each, for a minute: CPU of leader, followers
              and agents per agent and minute, memory, log entries, leases lost
  output      --ranks tasks on 4 nodes write --bytes each through srun --label: every byte is compared with what was written; rate, and the
              highest memory of any agent, supervisor, controller and of srun

The machine is measured first, because figures of different machines compare only as ratios.
With --json: {"machine": {"cpus", "fsync_ms", "fork_exec_ms", "http_echo_per_second"}, "figures": [{"benchmark", "name", "unit",
"median", "values", "target", "higher_is_better", "met", "no_target"}]}. Exit code 1 if a target is missed.`

func (a *app) benchCommand() *cobra.Command {
	o := bench.Options{}
	c := &cobra.Command{
		Use: "bench [NAME…]", Short: "Measure a local cluster", Long: benchHelp,
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 2 && args[0] == bench.EmitCommand { // a task of "output"
				return emit(a.out, args[1])
			}
			o.Names = args
			o.Progress = func(line string) { fmt.Fprintln(a.errOut, line) }
			report, err := bench.Run(c.Context(), o)
			if report != nil {
				print := func() error { return report.Print(a.out) }
				if a.json {
					print = func() error { return a.printValue(report) }
				}
				err = errors.Join(err, print())
			}
			if err != nil {
				return err
			}
			var missed []string
			for _, f := range report.Figures {
				if !f.Met {
					missed = append(missed, f.Benchmark+" "+f.Name)
				}
			}
			if len(missed) > 0 {
				fmt.Fprintf(a.errOut, "muster: targets missed: %s\n", strings.Join(missed, ", "))
				return &exitError{code: exitFailed}
			}
			return nil
		},
	}
	c.Flags().IntVar(&o.Repeat, "repeat", 3, "`runs` of each; the median counts")
	c.Flags().IntVar(&o.Clients, "clients", 256, "`callers` at a time in submit and steady")
	c.Flags().IntVar(&o.Seconds, "seconds", 5, "`length` of one run of submit")
	c.Flags().IntVar(&o.Pending, "pending", 100_000, "`jobs` in the queue of list")
	c.Flags().IntVar(&o.Minutes, "minutes", 10, "`length` of steady")
	c.Flags().IntVar(&o.Nodes, "nodes", 1000, "declared `nodes` of wide")
	c.Flags().IntVar(&o.BatchNodes, "batch-nodes", 500, "`nodes` of the batch script of wide")
	c.Flags().IntVar(&o.Agents, "agents", 10_000, "virtual `agents` of agents")
	c.Flags().IntVar(&o.Ranks, "ranks", 64, "`tasks` of output")
	c.Flags().StringVar(&o.Bytes, "bytes", "100M", "`size` of what each of them writes (M: MiB)")
	c.Flags().StringVar(&o.Bin, "bin", "", "`directory` of the programs (default: that of this one)")
	return c
}

// emit writes so many bytes as the rank that the environment names.
func emit(out io.Writer, size string) error {
	bytes, err := strconv.ParseInt(size, 10, 64)
	if err != nil {
		return fmt.Errorf("the number of bytes: %w", err)
	}
	rank, err := strconv.Atoi(os.Getenv("SLURM_PROCID"))
	if err != nil {
		return fmt.Errorf("the rank in SLURM_PROCID: %w", err)
	}
	return bench.Emit(out, rank, bytes)
}
