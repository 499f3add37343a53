package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/muster-hpc/muster/fsm/replica"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// options are the flags.
type options struct {
	dir, name           string
	listen, advertise   string
	raft, raftAdvertise string
	bootstrap           *apiv1.Configuration
	join                []string
	timing              replica.Timing
	level               slog.Level
}

// parse reads the flags for a verb and says what is wrong with them.
func parse(verb string, args []string, stderr io.Writer) (*options, error) {
	o := &options{}
	flags := flag.NewFlagSet("muster-controller "+verb, flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&o.dir, "dir", "", "data `directory`; tls/ in it has the certificates")
	flags.StringVar(&o.name, "name", "", "`name` of this controller, as in its certificate")
	flags.StringVar(&o.listen, "listen", "", "`HOST:PORT` for users, agents and other controllers")
	flags.StringVar(&o.advertise, "advertise", "", "`HOST:PORT` at which they reach it, if not --listen")
	flags.StringVar(&o.raft, "raft", "", "`HOST:PORT` for Raft")
	flags.StringVar(&o.raftAdvertise, "raft-advertise", "", "`HOST:PORT` at which the others reach it, if not --raft")
	bootstrap := flags.String("bootstrap", "", "begin a cluster with the configuration in this `file` (JSON); nothing happens if it has begun")
	join := flags.String("join", "", "join the cluster of these controllers (`HOST:PORT[,…]`); nothing happens if this is a member")
	timing := flags.String("timing", "production", "`profile` of timeouts: production, or development for a dead leader to be replaced sooner")
	flags.TextVar(&o.level, "log-level", slog.LevelInfo, "`level` of the log: debug, info, warn or error")
	if err := flags.Parse(args); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			err = errors.Join(flag.ErrHelp, err)
		}
		return nil, err
	}
	if flags.NArg() > 0 {
		return nil, fmt.Errorf("%q is no flag: all arguments are flags", flags.Arg(0))
	}
	if o.dir == "" {
		return nil, errors.New("--dir is needed: the data directory")
	}
	switch *timing {
	case "production":
		o.timing = replica.Production()
	case "development":
		o.timing = replica.Development()
	default:
		return nil, fmt.Errorf("--timing %q is no profile: there are production and development", *timing)
	}
	if verb == "verify" || verb == "rejoin" && o.name == "" {
		return o, nil
	}
	for _, need := range []struct{ name, value string }{{"name", o.name}, {"listen", o.listen}, {"raft", o.raft}} {
		if need.value == "" {
			return nil, fmt.Errorf("--%s is needed", need.name)
		}
	}
	for _, address := range []struct{ name, value string }{
		{"listen", o.listen}, {"raft", o.raft}, {"advertise", o.advertise}, {"raft-advertise", o.raftAdvertise},
	} {
		if address.value == "" {
			continue
		}
		if _, _, err := net.SplitHostPort(address.value); err != nil {
			return nil, fmt.Errorf("--%s %q is not HOST:PORT", address.name, address.value)
		}
	}
	if *bootstrap != "" && *join != "" {
		return nil, errors.New("--bootstrap begins a cluster and --join enters one: give one of them")
	}
	if verb == "rejoin" && *join == "" {
		return nil, errors.New("rejoin needs --join with the address of a controller that serves, or only --dir")
	}
	if *bootstrap != "" {
		configuration, err := readConfiguration(*bootstrap)
		if err != nil {
			return nil, err
		}
		o.bootstrap = configuration
	}
	for address := range strings.SplitSeq(*join, ",") {
		if address = strings.TrimSpace(address); address == "" {
			continue
		}
		if _, _, err := net.SplitHostPort(address); err != nil {
			return nil, fmt.Errorf("--join: %q is not HOST:PORT", address)
		}
		o.join = append(o.join, address)
	}
	return o, nil
}

func readConfiguration(path string) (*apiv1.Configuration, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	configuration := &apiv1.Configuration{}
	if err := protojson.Unmarshal(data, configuration); err != nil {
		return nil, fmt.Errorf("the configuration in %s: %w", path, err)
	}
	return configuration, nil
}
