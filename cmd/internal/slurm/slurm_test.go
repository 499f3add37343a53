package slurm

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/sacct"
	"github.com/muster-hpc/muster/cmd/internal/slurm/scancel"
	"github.com/muster-hpc/muster/cmd/internal/slurm/scontrol"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/sinfo"
	"github.com/muster-hpc/muster/cmd/internal/slurm/squeue"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
)

var tables = map[string]*option.Table{
	"sacct": sacct.Table(), "sbatch": submit.Sbatch(), "scancel": scancel.Table(), "scontrol": scontrol.Table(), "sinfo": sinfo.Table(),
	"squeue": squeue.Table(), "srun": submit.Srun(),
}

// has tells whether a table knows "--name" or "-n" as it stands.
func has(table *option.Table, word string) bool {
	return slices.ContainsFunc(table.Options, func(o option.Option) bool {
		return word == "--"+o.Long || len(word) == 2 && o.Short == word[1]
	})
}

func TestEveryOptionOfTheRealCommandsIsInTheTables(t *testing.T) {
	for command, table := range tables {
		data, err := os.ReadFile("testdata/options-" + command + ".txt")
		if err != nil {
			t.Fatal(err)
		}
		words := strings.Fields(string(data))
		if len(words) < 15 {
			t.Errorf("%s: only %d options in the list", command, len(words))
		}
		for _, word := range words {
			if !has(table, word) {
				t.Errorf("%s: %s is neither supported nor refused", command, word)
			}
		}
	}
}

func TestRowsOfTablesAreComplete(t *testing.T) {
	for command, table := range tables {
		seen := map[string]bool{}
		for _, o := range table.Options {
			for _, name := range []string{"--" + o.Long, "-" + string(o.Short)} {
				if name == "-\x00" || name == "--" {
					continue
				}
				if seen[name] {
					t.Errorf("%s: %s is twice in the table", command, name)
				}
				seen[name] = true
			}
			switch {
			case o.Same != "" && !slices.ContainsFunc(table.Options, func(p option.Option) bool { return p.Long == o.Same }):
				t.Errorf("%s: %s is the same as --%s, which does not exist", command, o.Spelled(), o.Same)
			case o.Refused == "" && o.Help == "" && o.Same == "":
				t.Errorf("%s: %s has no help", command, o.Spelled())
			case o.Refused != "" && o.Harmless != "":
				t.Errorf("%s: %s is refused and harmless", command, o.Spelled())
			case o.Refused == "" && o.Arity == option.Required && o.Meta == "":
				t.Errorf("%s: %s has no name for its value", command, o.Spelled())
			}
		}
		help := table.Help(command, "", "")
		for word := range seen {
			if o := strings.TrimLeft(word, "-"); len(o) > 1 && !strings.Contains(help, "--"+o) && !isSame(table, o) {
				t.Errorf("%s: the help does not mention %s", command, word)
			}
		}
	}
}

func isSame(table *option.Table, long string) bool {
	return slices.ContainsFunc(table.Options, func(o option.Option) bool { return o.Long == long && o.Same != "" })
}

// TestNoSourceIgnoresAnOption looks for the name of each supported option in the code of its command: an option that no
// code reads is ignored silently.
func TestNoSourceIgnoresAnOption(t *testing.T) {
	rooms := map[string][]string{
		"sbatch": {"sbatch", "submit"}, "srun": {"srun", "submit"}, "squeue": {"squeue"}, "scancel": {"scancel"}, "sinfo": {"sinfo"},
		"scontrol": {"scontrol"}, "sacct": {"sacct"},
	}
	tableFiles := []string{"submit/table.go", "submit/srun.go", "squeue/table.go"}
	for command, table := range tables {
		code := ""
		for _, room := range rooms[command] {
			entries, err := os.ReadDir(room)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range entries {
				name := room + "/" + e.Name()
				if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") || slices.Contains(tableFiles, name) {
					continue
				}
				text, err := os.ReadFile(name)
				if err != nil {
					t.Fatal(err)
				}
				for line := range strings.Lines(string(text)) {
					if !strings.Contains(line, "{Long: ") {
						code += line
					}
				}
			}
		}
		for _, o := range table.Options {
			if o.Refused != "" || o.Harmless != "" || o.Same != "" {
				continue
			}
			if !strings.Contains(code, `"`+o.Long+`"`) {
				t.Errorf("%s: nothing reads --%s", command, o.Long)
			}
		}
	}
}

func TestVersionsAndHelpNeedNoCluster(t *testing.T) {
	for name, run := range commands {
		for _, word := range []string{"--version", "--help"} {
			out := &strings.Builder{}
			s := &session.Session{Program: name, Args: []string{word}, Stdout: out, Stderr: out}
			if code := run(t.Context(), s); code != 0 || word == "--version" && out.String() != "slurm 24.11.0\n" || out.Len() < 10 {
				t.Errorf("%s %s: code %d, %q", name, word, code, out.String())
			}
		}
	}
}

func TestItLinksNoHeavyLibraries(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Skip("no go command: ", err)
	}
	for _, heavy := range []string{"spf13/cobra", "go.opentelemetry.io", "hashicorp/raft", "muster/fsm", "muster/sched", "muster/node/run"} {
		if strings.Contains(string(out), heavy) {
			t.Errorf("it links %s", heavy)
		}
	}
}
