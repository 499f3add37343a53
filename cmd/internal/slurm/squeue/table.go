package squeue

import "github.com/muster-hpc/muster/cmd/internal/slurm/option"

const oneCluster = "there is one cluster here, and no federation"

// Table is the option table of squeue.
func Table() *option.Table {
	const none, required, optional = option.None, option.Required, option.Optional
	return &option.Table{Options: []option.Option{
		{Long: "account", Short: 'A', Arity: required, Meta: "NAMES", Help: "jobs of these accounts", Env: "SQUEUE_ACCOUNT"},
		{Long: "all", Short: 'a', Arity: none, Help: "jobs of all partitions", Harmless: "no partition is hidden", Env: "SQUEUE_ALL"},
		{Long: "array", Short: 'r', Arity: none, Help: "a line for each task of an array", Harmless: "there are no arrays yet", Env: "SQUEUE_ARRAY"},
		{Long: "array-unique", Arity: none, Help: "a line for each task of an array, not its state", Harmless: "there are no arrays yet", Env: "SQUEUE_ARRAY_UNIQUE"},
		{Long: "clusters", Short: 'M', Arity: required, Meta: "NAMES", Help: "must name this cluster, or all", Env: "SLURM_CLUSTERS"},
		{Long: "expand-patterns", Arity: none, Help: "expand patterns of file names", Harmless: "they always are", Env: "SQUEUE_EXPAND_PATTERNS"},
		{Long: "federation", Arity: none, Help: "jobs of the federation", Harmless: oneCluster, Env: "SQUEUE_FEDERATION"},
		{Long: "format", Short: 'o', Arity: required, Meta: "FORMAT", Help: "columns by letters, as \"%.18i %j\"", Env: "SQUEUE_FORMAT"},
		{Long: "Format", Short: 'O', Arity: required, Meta: "FIELDS", Help: "columns by names, as JobID:.18,Name", Env: "SQUEUE_FORMAT2"},
		{Long: "help", Arity: none, Help: "this text"},
		{Long: "hide", Arity: none, Help: "leave out hidden partitions", Harmless: "no partition is hidden"},
		{Long: "iterate", Short: 'i', Arity: required, Meta: "SECONDS", Help: "list again and again"},
		{Long: "jobs", Short: 'j', Arity: optional, Meta: "IDS", Help: "these jobs"},
		{Long: "json", Arity: optional, Meta: "PARSER", Help: "everything, as JSON"},
		{Long: "licenses", Short: 'L', Arity: required, Meta: "NAMES", Help: "jobs that use these licenses: none does", Env: "SQUEUE_LICENSES"},
		{Long: "local", Arity: none, Help: "jobs of this cluster only", Harmless: oneCluster, Env: "SQUEUE_LOCAL"},
		{Long: "long", Short: 'l', Arity: none, Help: "more columns"},
		{Long: "me", Arity: none, Help: "jobs of the caller"},
		{Long: "name", Short: 'n', Arity: required, Meta: "NAMES", Help: "jobs of these names", Env: "SQUEUE_NAMES"},
		{Long: "noconvert", Arity: none, Help: "sizes in MiB"},
		{Long: "nodelist", Short: 'w', Arity: required, Meta: "HOSTS", Help: "jobs on these nodes"},
		{Long: "noheader", Short: 'h', Arity: none, Help: "no line of headers"},
		{Long: "notme", Arity: none, Help: "jobs of everybody but the caller"},
		{Long: "only-job-state", Arity: none, Help: "ask for states only", Harmless: "every answer is complete"},
		{Long: "partition", Short: 'p', Arity: required, Meta: "NAMES", Help: "jobs of these partitions", Env: "SQUEUE_PARTITION"},
		{Long: "priority", Short: 'P', Arity: none, Help: "a line for each partition that a waiting job names", Env: "SQUEUE_PRIORITY"},
		{Long: "qos", Short: 'q', Arity: required, Meta: "NAMES", Help: "jobs of these qualities of service", Env: "SQUEUE_QOS"},
		{Long: "reservation", Short: 'R', Arity: required, Meta: "NAME", Help: "jobs in this reservation: none is"},
		{Long: "sibling", Arity: none, Help: "jobs of the federation's clusters", Harmless: oneCluster, Env: "SQUEUE_SIBLING"},
		{Long: "sort", Short: 'S', Arity: required, Meta: "LETTERS", Help: "order, as P,t,-p", Env: "SQUEUE_SORT"},
		{Long: "start", Arity: none, Help: "when waiting jobs are expected to start"},
		{Long: "states", Short: 't', Arity: required, Meta: "STATES", Help: "jobs in these states, or all", Env: "SQUEUE_STATES"},
		{Long: "steps", Short: 's', Arity: optional, Meta: "IDS", Help: "steps instead of jobs"},
		{Long: "usage", Arity: none, Help: "a short list of options"},
		{Long: "user", Short: 'u', Arity: required, Meta: "USERS", Help: "jobs of these users", Env: "SQUEUE_USERS"},
		{Long: "verbose", Short: 'v', Arity: none, Help: "say more", Harmless: "there is nothing more to say"},
		{Long: "version", Short: 'V', Arity: none, Help: "the release of Slurm whose dialect is spoken"},
		{Long: "yaml", Arity: optional, Refused: "use --json"},
	}}
}
