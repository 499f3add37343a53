// Command muster-controller is one member of the control plane: it keeps the replicated state, answers users, agents and
// the other controllers on one port, and schedules while it leads.
//
//	muster-controller --dir DIR --name NAME --listen HOST:PORT --raft HOST:PORT [--bootstrap CONFIG.json | --join HOST:PORT[,…]]
//	muster-controller rejoin --dir DIR [… --join HOST:PORT[,…]]    sets damaged state aside and comes back as a learner
//	muster-controller verify --dir DIR                             checks all files of a controller that does not run
//	muster-controller version
//
// DIR/tls holds ca.pem, cert.pem and key.pem; the certificate's name is NAME and its role muster-controller. When it
// serves it prints one line, "ready …", to stdout. TERM and INT make it hand over leadership and leave.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/muster-hpc/muster/fsm/replica"
	"github.com/muster-hpc/muster/ops/version"
	"github.com/muster-hpc/muster/rpc"
)

func main() {
	replica.CheckFilesMain()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := command(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	switch {
	case err == nil:
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	default:
		fmt.Fprintln(os.Stderr, "muster-controller: "+rpc.Sentence(err))
		os.Exit(1)
	}
}

// command carries out the verb in args; without one it runs a controller until ctx ends.
func command(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	verb := ""
	if len(args) > 0 && args[0] != "" && args[0][0] != '-' {
		verb, args = args[0], args[1:]
	}
	switch verb {
	case "version":
		_, err := fmt.Fprintln(stdout, "muster-controller", version.Version)
		return err
	case "", "rejoin", "verify":
	default:
		return fmt.Errorf("unknown verb %q: there are rejoin, verify and version; without a verb a controller runs", verb)
	}
	o, err := parse(verb, args, stderr)
	if err != nil {
		return err
	}
	switch verb {
	case "verify":
		if err := replica.VerifyDir(o.dir); err != nil {
			return err
		}
		_, err := fmt.Fprintf(stdout, "the files in %s are whole\n", o.dir)
		return err
	case "rejoin":
		if err := replica.SetAside(o.dir); err != nil {
			return err
		}
		if o.name == "" {
			_, err := fmt.Fprintf(stdout, "the state in %s was set aside; start the controller with --join and it comes back as a learner\n", o.dir)
			return err
		}
	}
	return run(ctx, o, stdout, stderr)
}
