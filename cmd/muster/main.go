package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"connectrpc.com/connect/v2"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/muster-hpc/muster/ops/version"
	"github.com/muster-hpc/muster/rpc"
)

// Exit codes; see the package documentation.
const (
	exitFailed   = 1
	exitUsage    = 2
	exitNoAnswer = 3
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	a := &app{in: os.Stdin, out: os.Stdout, errOut: os.Stderr, colour: term.IsTerminal(int(os.Stdout.Fd())) && os.Getenv("NO_COLOR") == ""}
	code := a.execute(ctx, os.Args[1:])
	stop()
	os.Exit(code)
}

// execute runs one command line and returns the exit code.
func (a *app) execute(ctx context.Context, args []string) int {
	root := a.root()
	root.SetArgs(args)
	root.SetIn(a.in)
	root.SetOut(a.out)
	root.SetErr(a.errOut)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	var code *exitError
	if errors.As(err, &code) {
		if code.err != nil {
			a.complain(code.err)
		}
		return code.code
	}
	a.complain(err)
	var usage *usageError
	switch {
	case errors.As(err, &usage):
		return exitUsage
	case noAnswer(err):
		return exitNoAnswer
	}
	return exitFailed
}

// complain writes an error for people: the sentence of the cluster if it gave one, else what failed.
func (a *app) complain(err error) {
	var remote *connect.Error
	if errors.As(err, &remote) {
		text := rpc.Sentence(err)
		if reason := rpc.Reason(err); reason != "" {
			text += " [" + reason + "]"
		}
		fmt.Fprintln(a.errOut, "muster:", text)
		return
	}
	fmt.Fprintln(a.errOut, "muster:", err)
}

// noAnswer tells whether the cluster did not say yes or no.
func noAnswer(err error) bool {
	var remote *connect.Error
	if errors.As(err, &remote) {
		switch remote.Code() {
		case connect.CodeUnavailable, connect.CodeDeadlineExceeded, connect.CodeUnauthenticated:
			return true
		}
		return false
	}
	return errors.Is(err, errNoAgent)
}

// usageError is a command line that makes no sense.
type usageError struct{ sentence string }

func (e *usageError) Error() string { return e.sentence }

func usagef(format string, args ...any) error { return &usageError{fmt.Sprintf(format, args...)} }

// exitError ends the program with a code of its own.
type exitError struct {
	code int
	err  error // nil: nothing is left to say
}

func (e *exitError) Error() string { return fmt.Sprintf("exit code %d", e.code) }

const rootHelp = `Muster runs AI training jobs on a cluster whose control plane survives the loss of machines.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 nobody answered or the outcome is not known.
With --json, results are the API's messages as JSON; streams (events) print one object a line.`

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use: "muster", Short: "Run training jobs that outlive their controllers", Long: rootHelp,
		SilenceErrors: true, SilenceUsage: true, Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usagef("%v: see `%s --help`", err, c.CommandPath())
	})
	root.CompletionOptions.HiddenDefaultCmd = true
	flags := root.PersistentFlags()
	flags.BoolVar(&a.json, "json", false, "print JSON")
	flags.StringVar(&a.socket, "socket", "", "local agent's `socket` (default: $MUSTER_AGENT_SOCKET, then /run/muster/agent.sock)")
	flags.DurationVar(&a.timeout, "timeout", 0, "give up a call after this long (default: $MUSTER_TIMEOUT, then 30s)")
	root.AddGroup(&cobra.Group{ID: "jobs", Title: "Jobs:"}, &cobra.Group{ID: "cluster", Title: "The cluster:"},
		&cobra.Group{ID: "tools", Title: "Tools:"})
	add := func(group string, commands ...*cobra.Command) {
		for _, c := range commands {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add("jobs", a.submitCommand(), a.runCommand(), a.jobsCommand(), a.showCommand(), a.logsCommand(), a.cancelCommand(),
		a.holdCommand(), a.releaseCommand(), a.requeueCommand(), a.eventsCommand())
	add("cluster", a.nodesCommand(), a.clusterCommand())
	add("tools", a.devCommand(), a.benchCommand(), a.versionCommand())
	return root
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version of this program", Args: noArguments,
		RunE: func(*cobra.Command, []string) error {
			if a.json {
				return a.printValue(map[string]string{"version": version.Version, "slurm": version.Slurm})
			}
			fmt.Fprintf(a.out, "muster %s (speaks Slurm %s)\n", version.Version, version.Slurm)
			return nil
		},
	}
}

// noArguments and atLeastOne are cobra's checks with errors that say what to do.
func noArguments(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if c.HasSubCommands() {
		c.SuggestionsMinimumDistance = 2
		if near := c.SuggestionsFor(args[0]); len(near) > 0 {
			return usagef("%q is no command of %s: did you mean %s?", args[0], c.CommandPath(), strings.Join(near, " or "))
		}
		return usagef("%q is no command of %s: see `%s --help`", args[0], c.CommandPath(), c.CommandPath())
	}
	return usagef("%s takes no argument, but there is %q", c.CommandPath(), args[0])
}

func atLeastOne(what string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return usagef("%s needs %s: %s", c.CommandPath(), what, c.UseLine())
		}
		return nil
	}
}

func exactlyOne(what string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) != 1 {
			return usagef("%s needs %s, but there are %d arguments: %s", c.CommandPath(), what, len(args), c.UseLine())
		}
		return nil
	}
}
