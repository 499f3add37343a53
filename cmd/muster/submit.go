package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
	"github.com/muster-hpc/muster/rpc/client"
)

func (a *app) submitCommand() *cobra.Command {
	var r request
	var wrap, output, errorFile, input string
	var count int
	var appendOutput bool
	c := &cobra.Command{
		Use:   "submit [flags] SCRIPT [ARGUMENT…] | submit [flags] --wrap COMMAND",
		Short: "Submit a batch script",
		Long: `Submit a batch script: it runs once, on the first node of the allocation, and starts programs on all of them with srun.
SCRIPT "-" is read from stdin. The flags are Muster's own; "#SBATCH" lines are read by sbatch, not here.
Prints the job id when the job is stored durably.`,
		Example: `  muster submit -N4 --gpus-per-node 8 --time 2-0 --recover train.sh
  muster submit --wrap 'srun ./evaluate'`,
		RunE: func(c *cobra.Command, args []string) error {
			script, name, err := a.script(wrap, args)
			if err != nil {
				return err
			}
			spec, err := r.spec()
			if err != nil {
				return err
			}
			spec.Kind = apiv1.JobKind_JOB_KIND_BATCH
			spec.StdoutPath, spec.StderrPath, spec.StdinPath, spec.OpenAppend = output, errorFile, input, appendOutput
			if spec.Name == "" {
				spec.Name = name
			}
			if wrap == "" {
				spec.Args = args[1:]
				spec.CommandLine = strings.Join(args, " ")
			}
			return a.submit(c.Context(), spec, script, count)
		},
	}
	c.Flags().SetInterspersed(false)
	r.flags(c.Flags())
	c.Flags().BoolVarP(&r.hold, "hold", "H", false, "submit held; release it with `muster release`")
	c.Flags().StringVar(&wrap, "wrap", "", "submit this shell `command` instead of a script")
	c.Flags().StringVarP(&output, "output", "o", "", "`file` of the output, with %j, %x, %N … (default: slurm-%j.out)")
	c.Flags().StringVarP(&errorFile, "error", "e", "", "`file` of stderr (default: that of the output)")
	c.Flags().StringVarP(&input, "input", "i", "", "`file` for stdin (default: /dev/null)")
	c.Flags().BoolVar(&appendOutput, "append", false, "append to the output instead of replacing it")
	c.Flags().IntVar(&count, "count", 1, "submit `n` such jobs in one request")
	return c
}

// script returns the batch script and the job's name.
func (a *app) script(wrap string, args []string) (script []byte, name string, err error) {
	switch {
	case wrap != "" && len(args) > 0:
		return nil, "", usagef("--wrap and a script (%s) exclude each other", args[0])
	case wrap != "":
		return []byte("#!/bin/sh\n" + wrap + "\n"), "wrap", nil
	case len(args) == 0:
		return nil, "", usagef("submit needs a script, or a command with --wrap")
	}
	name = filepath.Base(args[0])
	if args[0] == "-" {
		name = "stdin"
		script, err = io.ReadAll(io.LimitReader(a.in, rpc.MaxScriptBytes+1))
	} else {
		script, err = os.ReadFile(args[0])
	}
	if err != nil {
		return nil, "", fmt.Errorf("read the script: %w", err)
	}
	switch {
	case len(script) > rpc.MaxScriptBytes:
		return nil, "", fmt.Errorf("%s has more than %d bytes: submit a small script that starts the large one", args[0], rpc.MaxScriptBytes)
	case !strings.HasPrefix(string(script), "#!"):
		return nil, "", fmt.Errorf("%s does not begin with #! and a shell: write, for example, #!/bin/bash as its first line", args[0])
	}
	first, _, _ := strings.Cut(string(script), "\n")
	if strings.HasSuffix(first, "\r") {
		return nil, "", fmt.Errorf("%s has DOS line ends, which no shell understands: convert it with dos2unix", args[0])
	}
	return script, name, nil
}

// submit stores count jobs and prints their ids.
func (a *app) submit(ctx context.Context, spec *apiv1.JobSpec, script []byte, count int) error {
	if count < 1 || count > rpc.MaxJobsPerSubmit {
		return usagef("--count is %d; it must be between 1 and %d", count, rpc.MaxJobsPerSubmit)
	}
	c, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	answer, err := submitJobs(ctx, c, spec, script, count)
	if err != nil {
		return err
	}
	if a.json {
		if err := a.printJSON(answer); err != nil {
			return err
		}
	}
	var refusals []*apiv1.ErrorDetail
	for _, result := range answer.Results {
		for _, warning := range result.Warnings {
			fmt.Fprintln(a.errOut, "muster: note:", warning)
		}
		if result.Refusal != nil {
			refusals = append(refusals, result.Refusal)
		} else if !a.json {
			fmt.Fprintf(a.out, "Submitted job %d\n", result.JobId)
		}
	}
	return a.refused(refusals)
}

// submitJobs sends one request with the caller's environment.
func submitJobs(ctx context.Context, c *client.Client, spec *apiv1.JobSpec, script []byte, count int) (*apiv1.SubmitJobsResponse, error) {
	variables, err := environment()
	if err != nil {
		return nil, err
	}
	in := &apiv1.SubmitJobsRequest{RequestId: client.NewRequestID()}
	for range count {
		in.Jobs = append(in.Jobs, &apiv1.JobSubmission{Spec: spec, Script: script, Environment: variables})
	}
	return c.Jobs().SubmitJobs(ctx, in)
}
