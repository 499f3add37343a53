package scontrol

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
)

const operands = "COMMAND [ARGUMENTS...]"

// Table is the option table of scontrol.
func Table() *option.Table {
	const none, required, optional = option.None, option.Required, option.Optional
	const oneCluster = "there is one cluster here, and no federation"
	return &option.Table{Options: []option.Option{
		{Long: "all", Short: 'a', Arity: none, Help: "also hidden partitions", Harmless: "no partition is hidden", Env: "SCONTROL_ALL"},
		{Long: "clusters", Short: 'M', Arity: required, Meta: "NAMES", Help: "must name this cluster, or all", Env: "SLURM_CLUSTERS"},
		{Long: "details", Short: 'd', Arity: none, Help: "more details"},
		{Long: "federation", Arity: none, Help: "the federation", Harmless: oneCluster, Env: "SCONTROL_FEDERATION"},
		{Long: "future", Short: 'F', Arity: none, Help: "also nodes that do not exist yet", Harmless: "nodes exist when they have joined", Env: "SCONTROL_FUTURE"},
		{Long: "help", Short: 'h', Arity: none, Help: "this text"},
		{Long: "hide", Arity: none, Help: "leave out hidden partitions", Harmless: "no partition is hidden"},
		{Long: "json", Arity: optional, Meta: "PARSER", Help: "show jobs, nodes and partitions as JSON"},
		{Long: "local", Arity: none, Help: "this cluster only", Harmless: oneCluster, Env: "SCONTROL_LOCAL"},
		{Long: "oneliner", Short: 'o', Arity: none, Help: "a line for each object"},
		{Long: "quiet", Short: 'Q', Arity: none, Help: "no messages besides errors", Harmless: "there are no others"},
		{Long: "sibling", Arity: none, Help: "jobs of other clusters", Harmless: oneCluster, Env: "SCONTROL_SIB"},
		{Long: "uid", Short: 'u', Arity: required, Refused: "changes are made as the user who asks"},
		{Long: "verbose", Short: 'v', Arity: none, Help: "say more", Harmless: "nothing more is to be said"},
		{Long: "version", Short: 'V', Arity: none, Help: "the release of Slurm whose dialect is spoken"},
		{Long: "yaml", Arity: optional, Refused: "use --json"},
	}}
}

// call is one call of scontrol.
type call struct {
	s       *session.Session
	options *option.Set
	words   []string // after the command
}

// verb is a command of scontrol.
type verb struct {
	name   string
	run    func(context.Context, *call) error
	refuse string
}

// verbs are the commands and what runs for each; a sentence alone refuses by name.
var verbs = []verb{
	{name: "show", run: show},
	{name: "hold", run: hold},
	{name: "uhold", run: hold},
	{name: "release", run: release},
	{name: "requeue", run: requeue},
	{name: "requeuehold", run: requeueHold},
	{name: "update", run: update},
	{name: "ping", run: ping},
	{name: "version", run: sayVersion},
	{name: "help"}, // needs this table itself: see dispatch
	{name: "write", run: write},
	{name: "abort", refuse: "stop controllers with the service manager of their hosts"},
	{name: "cancel_reboot", refuse: "nodes are not rebooted"},
	{name: "cluster", refuse: "there is one cluster here"},
	{name: "completing", refuse: "use squeue --states=COMPLETING"},
	{name: "create", refuse: "partitions are part of the configuration; change it with `muster cluster configure`"},
	{name: "delete", refuse: "partitions are part of the configuration; change it with `muster cluster configure`"},
	{name: "errnumstr", refuse: "errors carry a sentence and a reason code instead of a number"},
	{name: "fsdampeningfactor", refuse: "there is no fair share yet"},
	{name: "listjobs", refuse: "use squeue --nodelist"},
	{name: "listpids", refuse: "the agent knows its processes; use `muster nodes`"},
	{name: "liststeps", refuse: "use squeue --steps"},
	{name: "notify", refuse: "messages to jobs come with a later release"},
	{name: "pidinfo", refuse: "the agent knows its processes; use `muster nodes`"},
	{name: "power", refuse: "Muster does not manage power"},
	{name: "reboot", refuse: "nodes are not rebooted"},
	{name: "reconfigure", refuse: "the configuration is replicated; change it with `muster cluster configure`"},
	{name: "resume", refuse: "jobs are not suspended"},
	{name: "schedloglevel", refuse: "the log level is a setting of each controller"},
	{name: "setdebug", refuse: "the log level is a setting of each controller"},
	{name: "setdebugflags", refuse: "the log level is a setting of each controller"},
	{name: "shutdown", refuse: "stop controllers with the service manager of their hosts"},
	{name: "suspend", refuse: "jobs are not suspended"},
	{name: "takeover", refuse: "controllers agree on a leader by themselves; move it with `muster cluster transfer`"},
	{name: "token", refuse: "the agent vouches for users"},
	{name: "top", refuse: "the order of jobs is their priority; an operator can change it"},
	{name: "wait_job", refuse: "a job's processes start only when all its nodes are ready"},
}

// errSilent is an error that has been said.
var errSilent = errors.New("said already")

// Run is the command. It returns 0, or 1 if something was refused or could not be asked.
func Run(ctx context.Context, s *session.Session) int {
	table := Table()
	o, words, err := table.Parse(s.Args)
	if err != nil {
		var usage *option.UsageError
		if errors.As(err, &usage) {
			s.Usage(usage)
		} else {
			s.Errorf("%v", err)
		}
		return 1
	}
	switch {
	case o.Has("help"):
		fmt.Fprint(s.Stdout, helpText(s.Program))
		return 0
	case o.Has("version"):
		s.Version()
		return 0
	case len(words) == 0:
		s.Errorf("give a command, for example `scontrol show job 1`; there is no interactive mode yet")
		return 1
	}
	env, err := table.Environment(s.Lookup)
	if err != nil {
		s.Errorf("%v", err)
		return 1
	}
	c := &call{s: s, options: o.Over(env), words: words[1:]}
	if err := c.dispatch(ctx, strings.ToLower(words[0])); err != nil {
		if !errors.Is(err, errSilent) {
			s.Errorf("%v", err)
		}
		return 1
	}
	return 0
}

// dispatch finds a command by its name or a unique prefix.
func (c *call) dispatch(ctx context.Context, word string) error {
	found := -1
	for i, v := range verbs {
		switch {
		case v.name == word:
			found = i
		case strings.HasPrefix(v.name, word) && len(word) > 2 && found < 0:
			found = i
			for _, other := range verbs[i+1:] {
				if strings.HasPrefix(other.name, word) && !strings.HasPrefix(other.name, v.name) {
					return fmt.Errorf("ambiguous keyword: %s", word)
				}
			}
		}
		if v.name == word {
			break
		}
	}
	switch {
	case found < 0:
		fmt.Fprintf(c.s.Stderr, "invalid keyword: %s\n", word)
		return errSilent
	case verbs[found].refuse != "":
		return fmt.Errorf("%s is not supported yet: %s", verbs[found].name, verbs[found].refuse)
	case verbs[found].run == nil:
		fmt.Fprint(c.s.Stdout, helpText(c.s.Program))
		return nil
	}
	return verbs[found].run(ctx, c)
}

// cluster opens the cluster and checks --clusters.
func (c *call) cluster(ctx context.Context) (session.Cluster, error) {
	cluster, err := c.s.Cluster(ctx)
	if err != nil {
		return nil, errors.New(c.s.Sentence(err))
	}
	if name := c.options.Text("clusters"); name != "" && !session.NamesCluster(name, cluster.ClusterName()) {
		return nil, fmt.Errorf("'%s' can't be reached now, or it is an invalid entry for --cluster: this is cluster %s", name, cluster.ClusterName())
	}
	return cluster, nil
}

func sayVersion(_ context.Context, c *call) error {
	c.s.Version()
	return nil
}

func helpText(program string) string {
	var supported, refused []string
	for _, v := range verbs {
		if v.refuse == "" {
			supported = append(supported, v.name)
		} else {
			refused = append(refused, v.name)
		}
	}
	slices.Sort(supported)
	return Table().Help(program, operands, "Shows and changes jobs and nodes. Commands: "+strings.Join(supported, " ")) +
		"\nCommands of Slurm that are refused until they are supported:\n  " + strings.Join(refused, " ") + "\n"
}
