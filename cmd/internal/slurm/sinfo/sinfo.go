package sinfo

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/slurm/document"
	"github.com/muster-hpc/muster/cmd/internal/slurm/fetch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/format"
	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// Table is the option table of sinfo.
func Table() *option.Table {
	const none, required, optional = option.None, option.Required, option.Optional
	const oneCluster = "there is one cluster here, and no federation"
	return &option.Table{Options: []option.Option{
		{Long: "all", Short: 'a', Arity: none, Help: "all partitions", Harmless: "no partition is hidden", Env: "SINFO_ALL"},
		{Long: "clusters", Short: 'M', Arity: required, Meta: "NAMES", Help: "must name this cluster, or all", Env: "SLURM_CLUSTERS"},
		{Long: "dead", Short: 'd', Arity: none, Help: "nodes that do not answer"},
		{Long: "exact", Short: 'e', Arity: none, Help: "do not put nodes of different sizes in one line"},
		{Long: "federation", Arity: none, Help: "all clusters of the federation", Harmless: oneCluster, Env: "SINFO_FEDERATION"},
		{Long: "format", Short: 'o', Arity: required, Meta: "FORMAT", Help: "columns by letters, as \"%N %.6D %t\"", Env: "SINFO_FORMAT"},
		{Long: "Format", Short: 'O', Arity: required, Meta: "FIELDS", Help: "columns by names, as NodeHost:20,StateLong"},
		{Long: "future", Short: 'F', Arity: none, Help: "also nodes that do not exist yet", Harmless: "nodes exist when they have joined"},
		{Long: "help", Arity: none, Help: "this text"},
		{Long: "hide", Arity: none, Help: "leave out hidden partitions", Harmless: "no partition is hidden"},
		{Long: "iterate", Short: 'i', Arity: required, Meta: "SECONDS", Help: "list again and again"},
		{Long: "json", Arity: optional, Meta: "PARSER", Help: "everything, as JSON"},
		{Long: "list-reasons", Short: 'R', Arity: none, Help: "why nodes are down or drained"},
		{Long: "local", Arity: none, Help: "this cluster only", Harmless: oneCluster, Env: "SINFO_LOCAL"},
		{Long: "long", Short: 'l', Arity: none, Help: "more columns"},
		{Long: "noconvert", Arity: none, Help: "sizes in MiB", Harmless: "they always are"},
		{Long: "Node", Short: 'N', Arity: none, Help: "a line for each node"},
		{Long: "nodes", Short: 'n', Arity: required, Meta: "HOSTS", Help: "these nodes"},
		{Long: "noheader", Short: 'h', Arity: none, Help: "no line of headers"},
		{Long: "partition", Short: 'p', Arity: required, Meta: "NAMES", Help: "these partitions", Env: "SINFO_PARTITION"},
		{Long: "reservation", Short: 'T', Arity: none, Help: "reservations: there are none"},
		{Long: "responding", Short: 'r', Arity: none, Help: "nodes that answer"},
		{Long: "sort", Short: 'S', Arity: required, Meta: "LETTERS", Help: "order, as #P,-t", Env: "SINFO_SORT"},
		{Long: "states", Short: 't', Arity: required, Meta: "STATES", Help: "nodes in these states (idle, mix, alloc, drain, down, comp)"},
		{Long: "summarize", Short: 's', Arity: none, Help: "a line for each partition"},
		{Long: "usage", Arity: none, Help: "a short list of options"},
		{Long: "verbose", Short: 'v', Arity: none, Help: "say more", Harmless: "there is nothing more to say"},
		{Long: "version", Short: 'V', Arity: none, Help: "the release of Slurm whose dialect is spoken"},
		{Long: "yaml", Arity: optional, Refused: "use --json"},
	}}
}

// query is what a command line asks for.
type query struct {
	options    *option.Set
	nodes      []string
	partitions []string
	states     [][]string // any of these, each with all of its words
	layout     format.Layout[*group]
	how        grouping
	sort       string
	every      time.Duration
	unknown    []string
}

// Run is the command. It returns 0, or 1 if words cannot be parsed or the cluster cannot be asked.
func Run(ctx context.Context, s *session.Session) int {
	table := Table()
	o, words, err := table.Parse(s.Args)
	if err == nil && len(words) > 0 {
		err = &option.UsageError{Text: fmt.Sprintf("Unrecognized option: %s", words[0])}
	}
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
		fmt.Fprint(s.Stdout, table.Help(s.Program, "", "Lists partitions and nodes."))
		return 0
	case o.Has("usage"):
		fmt.Fprint(s.Stdout, table.Usage(s.Program, ""))
		return 0
	case o.Has("version"):
		s.Version()
		return 0
	case o.Has("reservation"):
		fmt.Fprintln(s.Stdout, "No reservations in the system")
		return 0
	}
	env, err := table.Environment(s.Lookup)
	if err != nil {
		s.Errorf("%v", err)
		return 1
	}
	q := &query{options: o.Over(env)}
	if err := q.parse(); err != nil {
		s.Errorf("%v", err)
		return 1
	}
	for _, name := range q.unknown {
		s.Errorf("Invalid node format specification: %s", name)
	}
	for {
		if code := q.list(ctx, s); code != 0 || q.every == 0 {
			return code
		}
		timer := time.NewTimer(q.every)
		select {
		case <-ctx.Done():
			timer.Stop()
			return 0
		case <-timer.C:
		}
	}
}

func (q *query) parse() error {
	o := q.options
	if v, ok := o.Get("nodes"); ok {
		hosts, err := notation.Expand(v.Text)
		if err != nil {
			return err
		}
		q.nodes = hosts
	}
	if v, ok := o.Get("partition"); ok {
		q.partitions = strings.Split(v.Text, ",")
	}
	if v, ok := o.Get("states"); ok {
		for _, term := range strings.FieldsFunc(strings.ToLower(v.Text), func(c rune) bool { return c == ',' || c == '|' }) {
			words := strings.Split(term, "&")
			for _, word := range words {
				if !knownStates[strings.TrimSuffix(word, "*")] {
					return fmt.Errorf("Bad state string: \"%s\"", word)
				}
			}
			q.states = append(q.states, words)
		}
	}
	if v, ok := o.Get("iterate"); ok {
		n, err := strconv.Atoi(v.Text)
		if err != nil || n <= 0 {
			return fmt.Errorf("Invalid --iterate value %q: a number of seconds above 0 is needed", v.Text)
		}
		q.every = time.Duration(n) * time.Second
	}
	if v, ok := o.Get("json"); ok && v.Given && !document.Speaks(v.Text) {
		return fmt.Errorf("--json=%s: only %s is spoken", v.Text, document.Parser)
	}
	if v, ok := o.Get("Format"); ok {
		q.useNames(v.Text)
	}
	if v, ok := o.Get("sort"); ok {
		if _, err := format.SortKeys(v.Text, func(letter byte) bool { return letters[letter].Value != nil }); err != nil {
			return err
		}
	}
	return nil
}

// knownStates are the words of -t; those that no node of Muster is ever in select nothing.
var knownStates = map[string]bool{
	"all": true, "alloc": true, "allocated": true, "comp": true, "completing": true, "down": true, "drain": true, "drained": true,
	"drng": true, "draining": true, "idle": true, "mix": true, "mixed": true, "no_respond": true, "unk": true, "unknown": true, "fail": true,
	"failing": true, "future": true, "maint": true, "perfctrs": true, "npc": true, "planned": true, "power_down": true, "powering_down": true,
	"powered_down": true, "power_up": true, "powering_up": true, "reboot_issued": true, "reboot_requested": true, "resv": true,
	"reserved": true, "blocked": true, "cloud": true, "inval": true,
}

// inState tells whether a node is in a state by one of its words.
func inState(s record.NodeState, word string) bool {
	if silent := strings.HasSuffix(word, "*"); silent && !s.Silent {
		return false
	}
	switch strings.TrimSuffix(word, "*") {
	case "all":
		return true
	case "alloc", "allocated":
		return s.Base == "ALLOCATED"
	case "mix", "mixed":
		return s.Base == "MIXED"
	case "idle":
		return s.Base == "IDLE" && !s.Drain
	case "down":
		return s.Base == "DOWN"
	case "drain":
		return s.Drain
	case "drained":
		return s.Drain && !s.Busy
	case "drng", "draining":
		return s.Drain && s.Busy
	case "comp", "completing":
		return s.Completing
	case "no_respond":
		return s.Silent
	}
	return false
}

// keep is the filter of nodes; nil asks for a partition without nodes.
func (q *query) keep(n *apiv1.Node, state record.NodeState) bool {
	if n == nil {
		return q.nodes == nil && q.states == nil && !q.options.Has("dead") && !q.options.Has("list-reasons") && !q.options.Has("Node")
	}
	if q.nodes != nil && !slices.Contains(q.nodes, n.GetSpec().GetName()) {
		return false
	}
	switch {
	case q.options.Has("dead") && !state.Silent, q.options.Has("responding") && state.Silent,
		q.options.Has("list-reasons") && n.GetReason() == "":
		return false
	}
	if q.states == nil {
		return true
	}
	return slices.ContainsFunc(q.states, func(words []string) bool {
		return !slices.ContainsFunc(words, func(word string) bool { return !inState(state, word) })
	})
}

// choose picks the layout; widths of partitions and nodes follow their names.
func (q *query) choose(list *fetch.Nodes) {
	o := q.options
	part, node := len("PARTITION"), len("NODELIST")
	for _, p := range list.Partitions {
		part = max(part, len(p.GetName())+1)
	}
	for _, n := range list.Nodes {
		node = max(node, len(n.GetSpec().GetName()))
	}
	P, N := strconv.Itoa(part), strconv.Itoa(node+1)
	text := "%" + P + "P %.5a %.10l %.6D %.6t %N"
	q.sort = "#P,-t"
	switch {
	case o.Has("list-reasons") && o.Has("long"):
		text, q.sort = "%20E %12U %19H %6t %N", "-t"
	case o.Has("list-reasons"):
		text, q.sort = "%20E %9u %19H %N", "-t"
	case o.Has("Node") && o.Has("long"):
		text, q.sort = "%"+N+"N %.6D %."+P+"P %.11T %4c %.8z %.6m %.8d %.6w %.8f %20E", "N"
	case o.Has("Node"):
		text, q.sort = "%"+N+"N %.6D %."+P+"P %6t", "N"
	case o.Has("summarize"):
		text = "%" + P + "P %.5a %.10l %.16F %N"
	case o.Has("long"):
		text = "%" + P + "P %.5a %.10l %.10s %.4r %.8h %.10g %.6D %.11T %N"
	}
	if v, ok := o.Get("sort"); ok {
		q.sort = v.Text
	}
	q.how = grouping{single: o.Has("Node")}
	if v, ok := o.Get("format"); ok {
		text = v.Text
	}
	q.useLetters(text)
}

// useLetters makes the layout of -o and groups by its columns.
func (q *query) useLetters(text string) {
	q.layout = format.Letters(text, letters)
	for letter := range lettersOf(text) {
		q.group(letters[letter], roles[letter])
	}
}

func (q *query) group(f field, r role) {
	switch r {
	case ofPart:
		q.how.parts = true
	case tells:
		q.how.keys = append(q.how.keys, f.Value)
	case measures:
		if q.options.Has("exact") {
			q.how.keys = append(q.how.keys, f.Value)
		}
	case sums:
	}
}

// lettersOf lists the letters of a format.
func lettersOf(text string) map[byte]bool {
	found := map[byte]bool{}
	for _, part := range strings.Split(text, "%")[1:] {
		part = strings.TrimLeft(part, ".0123456789")
		if part != "" {
			if _, ok := letters[part[0]]; ok {
				found[part[0]] = true
			}
		}
	}
	return found
}

// useNames makes the layout of -O and groups by its columns.
func (q *query) useNames(text string) {
	known := map[string]field{}
	for name, f := range ownNames {
		known[name] = f
	}
	for name, letter := range byName {
		known[name] = letters[letter]
	}
	q.layout, q.unknown = format.Names(text, known)
	q.how = grouping{single: q.options.Has("Node")}
	for item := range strings.SplitSeq(text, ",") {
		name, _, _ := strings.Cut(item, ":")
		name = format.Normal(strings.TrimSpace(name))
		if letter, ok := byName[name]; ok {
			q.group(letters[letter], roles[letter])
		} else if f, ok := ownNames[name]; ok {
			q.group(f, tells)
		}
	}
}

// list asks once and prints.
func (q *query) list(ctx context.Context, s *session.Session) int {
	cluster, err := s.Cluster(ctx)
	if err != nil {
		fmt.Fprintln(s.Stderr, fetch.Error("slurm_load_partitions", err))
		return 1
	}
	if name := q.options.Text("clusters"); name != "" && !session.NamesCluster(name, cluster.ClusterName()) {
		s.Errorf("'%s' can't be reached now, or it is an invalid entry for --cluster.\nThis is cluster %s; there is no other here.", name, cluster.ClusterName())
		return 1
	}
	list, err := fetch.ListNodesOrStale(ctx, cluster, nil, s.Stderr)
	if err != nil {
		fmt.Fprintln(s.Stderr, fetch.Error("slurm_load_partitions", err))
		return 1
	}
	q.choose(list)
	if v, ok := q.options.Get("Format"); ok {
		q.useNames(v.Text)
	}
	if q.options.Has("json") {
		q.how = grouping{parts: true, keys: []func(*group) string{stateText(record.NodeState.Long), letters['G'].Value, letters['E'].Value}, single: q.options.Has("Node")}
	}
	groups := q.how.gather(list, cluster.ClusterName(), s.UserName, q.partitions, q.keep)
	order(groups, q.sort)
	if q.options.Has("json") {
		return writeJSON(s, groups, cluster.ClusterName())
	}
	var out []byte
	if len(q.unknown) > 0 && len(q.layout.Columns) == 0 {
		return 0
	}
	if q.every > 0 || q.options.Has("long") {
		out = append(out, list.Now.Format("Mon Jan 02 15:04:05 2006\n")...)
	}
	if q.options.Has("clusters") {
		out = append(out, "CLUSTER: "+cluster.ClusterName()+"\n"...)
	}
	if !q.options.Has("noheader") {
		out = q.layout.AppendHeader(out)
	}
	for _, g := range groups {
		out = q.layout.AppendRow(out, g)
	}
	if _, err := s.Stdout.Write(out); err != nil {
		return 1
	}
	return 0
}
