package directive

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

func TestWordsOfDirectives(t *testing.T) {
	for _, test := range []struct {
		script string
		want   []string
	}{
		{"#!/bin/sh\n#SBATCH -J a -t 5\n", []string{"-J", "a", "-t", "5"}},
		{"#!/bin/sh\n#SBATCH--job-name=x\n", []string{"--job-name=x"}},
		{"#!/bin/sh\n ##SBATCH -J a\n##SBATCH -J b\n #SBATCH -J c\n#sbatch -J d\n# #SBATCH -J e\n", nil},
		{"#!/bin/sh\n\n# text\n#SBATCH -J a\n", []string{"-J", "a"}},
		{"#!/bin/sh\necho\n#SBATCH -J a\n", nil},
		{"#!/bin/sh\nSTAGE=$1\n#SBATCH -J a\n", nil},
		{`#!/bin/sh` + "\n" + `#SBATCH -J "a b" '--x=c "d' e\ f # -z`, []string{"-J", "a b", `--x=c "d`, `e\`, "f"}},
		{"#!/bin/sh\n#SBATCH --name=a1#b\n", []string{"--name=a1"}},
		{"#!/bin/sh\n#SBATCH --name=\"a #b\"   \t\n", []string{"--name=a #b"}},
		{"#!/bin/sh\n#SBATCH  --x=\n#SBATCH\n", []string{"--x="}},
		{"#!/bin/sh\n#PBS -N x -l walltime=1:00:00,mem=4gb -q p -V -r n -j oe\n", []string{"--job-name=x", "--time=1:00:00", "--mem=4gb", "--partition=p", "--export=ALL", "--no-requeue"}},
	} {
		got, err := Parse("stdin", []byte(test.script), false)
		if err != nil || !slices.Equal(got.Words, test.want) {
			t.Errorf("%q: %q, %v, want %q", test.script, got.Words, err, test.want)
		}
	}
	if got, err := Parse("stdin", []byte("#!/bin/sh\n#PBS -N x\n"), true); err != nil || got.Words != nil {
		t.Errorf("--ignore-pbs: %v, %v", got, err)
	}
}

func TestScriptsThatAreRefused(t *testing.T) {
	for script, want := range map[string]string{
		"":                                "Batch script is empty!",
		" \n":                             "only whitespace",
		"echo\n":                          "This does not look like a batch script",
		"#!/bin/sh\necho \x00\n":          "NUL byte in line 2",
		"#!/bin/sh\r\n":                   "DOS line breaks",
		"#!/bin/sh\necho a\rb\n":          "DOS line breaks",
		"#!" + strings.Repeat("x", 5<<20): "parameter too long",
	} {
		if err := Check([]byte(script)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.20q: %v, want %q", script, err, want)
		}
	}
	if err := Check([]byte("#!/bin/sh\n" + strings.Repeat("# x\n", 975_000))); err != nil {
		t.Errorf("a script of 3.9 MB: %v", err)
	}
	var e *Error
	if _, err := Parse("f", []byte("#!/bin/sh\n#SBATCH -J 'a\n"), false); !errors.As(err, &e) || !e.Fatal || e.Lines[0] != "f: line 2: Unmatched `'` in ['a]" {
		t.Errorf("%v", err)
	}
	for _, line := range []string{"#SBATCH hetjob", "#SBATCH packjob", "#PBS -M me", "#PBS -l nodes=2:ppn=4", "#PBS x"} {
		if _, err := Parse("f", []byte("#!/bin/sh\n"+line+"\n"), false); err == nil {
			t.Errorf("%s is accepted", line)
		}
	}
}

func FuzzTheBodyOfAScriptIsNeverRead(f *testing.F) {
	f.Add("#SBATCH -J a\necho\n#SBATCH -J b\n")
	f.Add("#SBATCH \"")
	f.Add("#PBS -l walltime=1,=,")
	f.Fuzz(func(t *testing.T, head string) {
		script := "#!/bin/sh\n" + head + "\ncommand\n"
		with, err1 := Parse("f", []byte(script+"#SBATCH --later \"\n"), false)
		without, err2 := Parse("f", []byte(script), false)
		if (err1 == nil) != (err2 == nil) || !slices.Equal(with.Words, without.Words) {
			t.Errorf("%q: %q %v, then %q %v", head, with.Words, err1, without.Words, err2)
		}
	})
}
