package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/muster-hpc/muster/cmd/internal/bench"
)

const benchHelp = `Measure a local cluster of 3 controllers and 4 nodes that is started for each benchmark:

  submit      durable submissions a second: one job a call, and 100 jobs a call
  throughput  1,000 jobs of one "true" each, from submission to the last end
  launch      sbatch and srun on an idle cluster, from exec to exit
  list        squeue and scontrol with 100,000 pending jobs, and the controllers' memory
  failover    SIGKILL of the leader to the next acknowledged submission
  steady      full load for --minutes; counts elections (only when named)
  all         all but steady

The machine is measured first, because figures of different machines compare only as ratios.
With --json: {"machine": {"cpus", "fsync_ms", "fork_exec_ms", "http_echo_per_second"}, "figures": [{"benchmark", "name", "unit",
"median", "values", "target", "higher_is_better", "met"}]}. Exit code 1 if a target is missed.`

func (a *app) benchCommand() *cobra.Command {
	o := bench.Options{}
	c := &cobra.Command{
		Use: "bench [NAME…]", Short: "Measure a local cluster", Long: benchHelp,
		RunE: func(c *cobra.Command, args []string) error {
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
	c.Flags().StringVar(&o.Bin, "bin", "", "`directory` of the programs (default: that of this one)")
	return c
}
