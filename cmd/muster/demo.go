package main

import (
	"github.com/spf13/cobra"

	"github.com/muster-hpc/muster/cmd/internal/demo"
)

func (a *app) demoCommand() *cobra.Command {
	o := demo.Options{}
	c := &cobra.Command{
		Use: "demo", Short: "Show that a training job outlives its controllers", Args: noArguments,
		Long: `Start a cluster of 3 controllers and 4 nodes, submit a training with sbatch, kill the leader twice and an agent once while it trains,
and show what anybody noticed. Under two minutes; nothing is left behind. Fails if anything is not as claimed.`,
		RunE: func(c *cobra.Command, _ []string) error {
			o.Out, o.Colour = a.out, a.colour
			if dir := c.Flags().Lookup("dir"); dir != nil && dir.Changed {
				o.Dir = dir.Value.String()
			}
			return demo.Run(c.Context(), o)
		},
	}
	c.Flags().StringVar(&o.Script, "script", "", "batch `script` (default: examples/train/train.sbatch of the repository)")
	c.Flags().StringVar(&o.Bin, "bin", "", "`directory` of the programs (default: that of this one)")
	return c
}
