package submit

import (
	"slices"

	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
)

// Salloc is the table of salloc.
func Salloc() *option.Table {
	const none, required, optional = option.None, option.Required, option.Optional
	rows := slices.DeleteFunc(common("SALLOC_"), func(o option.Option) bool {
		return o.Long == "open-mode" || o.Long == "propagate" // it starts no task and writes no file
	})
	rows = append(rows, []option.Option{
		{Long: "bell", Arity: none, Value: "yes", Help: "ring the terminal's bell when the allocation is there", Env: "SALLOC_BELL"},
		{Long: "no-bell", Same: "bell", Arity: none, Value: "no", Help: "do not ring it", Env: "SALLOC_NO_BELL"},
		{Long: "chdir", Short: 'D', Arity: required, Meta: "DIR", Help: "working directory of the command"},
		{Long: "cpus-per-task", Short: 'c', Arity: required, Meta: "N", Help: "CPUs of each task"},
		{Long: "get-user-env", Arity: optional, Refused: "the command gets the environment of salloc"},
		{Long: "immediate", Short: 'I', Arity: optional, Meta: "SECONDS", Value: "1", Help: "give up if resources are not free within that time (1)", Env: "SALLOC_IMMEDIATE"},
		{Long: "kill-command", Short: 'K', Arity: optional, Meta: "SIGNAL", Help: "send a signal to the command when the job ends (HUP on a terminal, otherwise TERM)", Env: "SALLOC_KILL_CMD"},
		{Long: "no-shell", Arity: none, Help: "start no command; the job stays until its time limit or scancel"},
		{Long: "wait-all-nodes", Arity: required, Meta: "0|1", Help: "return when all nodes are ready", Harmless: "no allocation is granted before every node is ready", Env: "SALLOC_WAIT_ALL_NODES"},
		{Long: "x11", Arity: optional, Refused: "X11 is not forwarded"},
	}...)
	return &option.Table{Options: rows, StopAtOperand: true}
}
