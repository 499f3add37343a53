package squeue

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/muster-hpc/muster/cmd/internal/slurm/slurmtest"
)

// ours are the jobs of the recordings that Muster can have: no arrays, no dependencies.
var ours = []string{"1", "2", "6", "7", "8", "9", "10", "11", "12", "13", "17", "19", "20"}

// recorded reads a listing of the real command and keeps its headers and the lines of our jobs. id finds the job.
func recorded(t *testing.T, name string, id *regexp.Regexp, translate ...string) string {
	t.Helper()
	data, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	text := strings.NewReplacer(translate...).Replace(string(data))
	var out []string
	for line := range strings.Lines(text) {
		if m := id.FindStringSubmatch(line); m != nil && !slices.Contains(ours, m[1]) {
			continue
		}
		out = append(out, line)
	}
	return strings.Join(out, "")
}

var (
	byColumn = regexp.MustCompile(`^ *(\d[^ ]*) `)
	byField9 = regexp.MustCompile(`^\(null\)\|(?:[^|]*\|){7}([^|]*)\|`)
	byStep   = regexp.MustCompile(`^ *(\d+(?:_\d+)?)\.batch`)
)

func TestListingsEqualTheRecordedOnes(t *testing.T) {
	all := "%a|%b|%c|%d|%e|%f|%g|%h|%i|%j|%k|%l|%m|%n|%o|%p|%q|%r|%s|%t|%u|%v|%w|%x|%y|%z|%A|%B|%C|%D|%E|%F|%G|%H|%I|%J|%K|%L|%M|%N|%O|%P|%Q|%R|%S|%T|%U|%V|%W|%X|%Y|%Z"
	for _, c := range []struct {
		file  string
		id    *regexp.Regexp
		words []string
		// translate is where 24.11 differs from the recorded 22.05.
		translate []string
	}{
		{"squeue-default.txt", byColumn, nil, nil},
		{"squeue-long.txt", byColumn, []string{"-l"}, nil},
		{"squeue-all-states.txt", byColumn, []string{"-t", "all"}, nil},
		{"squeue-start.txt", byColumn, []string{"--start"}, nil},
		{"squeue-steps.txt", byStep, []string{"-s"}, nil},
		{"squeue-o-all.txt", byField9, []string{"-o", all}, []string{"gres:gpu:2", "gres/gpu:2"}},
	} {
		t.Run(c.file, func(t *testing.T) {
			cluster := slurmtest.Recorded(t)
			cluster.PageSize = 4 // several pages
			got := cluster.Run(t, Run, append([]string{"squeue"}, c.words...)...)
			if want := recorded(t, c.file, c.id, c.translate...); got.Stdout != want || got.Code != 0 {
				t.Errorf("code %d, stderr %q\ngot:\n%s\nwant:\n%s", got.Code, got.Stderr, got.Stdout, want)
			}
		})
	}
}
