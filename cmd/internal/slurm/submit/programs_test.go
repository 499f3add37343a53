package submit

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func config(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "multi.conf")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestAFileSaysWhatEachRankRuns(t *testing.T) {
	for text, want := range map[string]string{
		"4-6 hostname\n1,7 echo task:%t\n0,2-3 echo offset:%o\n": "4-6=hostname 1,7=echo|task:%t 0,2-3=echo|offset:%o",
		"# comment\n\n* hostname\n":                              "0-7=hostname",
		"3\tprog  'a b' \"c \\\" d\" e\\ f ''\n* x\n":            `3=prog|a b|c " d|e f| 0-2,4-7=x`,
		"0 a \\\n  b \\\n c\r\n*  d\n":                           "0=a|b|c 1-7=d",
		"0-7 a\n* never\n":                                       "0-7=a",
		"0-7 echo # kept":                                        "0-7=echo|#|kept",
	} {
		list, err := Programs(config(t, text), 8)
		var got []string
		for _, p := range list {
			got = append(got, p.GetRanks()+"="+strings.Join(p.GetArgs(), "|"))
		}
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("%q: %q, %v", text, strings.Join(got, " "), err)
		}
	}
}

func TestMistakesInSuchAFileAreSaidWithTheirLine(t *testing.T) {
	for text, want := range map[string]string{
		"0-3 a\n3-7 b\n":       "Line 2 of configuration file %s invalid: rank 3 has a program already",
		"# one\n\n0-8 a\n":     "Line 3 of configuration file %s invalid: there is no rank 8: the step has 8 tasks, from 0",
		"0-7 a\n\n1\n":         "Line 3 of configuration file %s invalid: there is no program for the ranks 1",
		"7-4 a\n":              `Line 1 of configuration file %s invalid: "7-4" is not a list of ranks, as 0-3,7 is`,
		"a b\n":                `Line 1 of configuration file %s invalid: "a" is not a list of ranks, as 0-3,7 is`,
		"* a\n* b\n":           `Line 2 of configuration file %s invalid: "*" is there a second time`,
		"0 a \\\n b \"c\n":     "Line 1 of configuration file %s invalid: the quote \" is not closed",
		"0-4 a\n":              "No executable program specified for this task: rank 5 is not in configuration file %s, and there is no line for \"*\"",
		"":                     "No executable program specified for this task: rank 0 is not in configuration file %s, and there is no line for \"*\"",
		"0-4294967295 a\n":     "Line 1 of configuration file %s invalid: there is no rank 4294967295: the step has 8 tasks, from 0",
		"0-99999999999999 a\n": `Line 1 of configuration file %s invalid: "0-99999999999999" is not a list of ranks, as 0-3,7 is`,
	} {
		path := config(t, text)
		list, err := Programs(path, 8)
		if err == nil || err.Error() != fmt.Sprintf(want, path) {
			t.Errorf("%q: %v, %v", text, list, err)
		}
	}
	if _, err := Programs("/no/such/file", 1); err == nil || !strings.HasPrefix(err.Error(), "Unable to open configuration file /no/such/file: ") {
		t.Error(err)
	}
	if _, err := Programs(config(t, strings.Repeat("#", maxProgramsBytes+1)), 1); err == nil || !strings.Contains(err.Error(), "at most 1048576 are read") {
		t.Error(err)
	}
}

func FuzzPrograms(f *testing.F) {
	f.Add("0-3 a\n* b 'c' \\\n d")
	f.Fuzz(func(t *testing.T, text string) {
		p := programs{owner: make([]int, 5)}
		if p.read(text) != nil {
			return
		}
		list, err := p.list("f")
		if err != nil {
			return
		}
		for _, program := range list {
			if program.GetRanks() == "" || len(program.GetArgs()) == 0 {
				t.Errorf("%q: %v", text, program)
			}
		}
	})
}

func TestFilenamePatterns(t *testing.T) {
	names := FileNames{Job: 12, Step: 3, Name: "name", User: "me", Restarts: 2}
	array := FileNames{Job: 12, Step: 3, ArrayJob: 10, ArrayTask: "7"}
	for pattern, want := range map[string][2]string{
		"%j-%A-%a":    {"12-12-4294967294", "12-10-7"},
		"%J %s %4s":   {"12.3 3 0003", "12.3 3 0003"},
		"%x_%u_%r_%%": {"name_me_2_%", "__0_%"},
		"%04j%99j":    {"00120000000012", "00120000000012"},
		`a\%j`:        {"a%j", "a%j"},
		"%t%N%q%5":    {"%t%N%q%5", "%t%N%q%5"},
		"%":           {"%", "%"},
	} {
		if got, inArray := names.Expand(pattern), array.Expand(pattern); got != want[0] || inArray != want[1] {
			t.Errorf("%q: %q, %q", pattern, got, inArray)
		}
	}
	for pattern, want := range map[string]bool{"%t": true, "a.%4t": true, "%N": true, "%n.x": true, "%j_%s": false, "%%t": false, `\%t`: false, "t": false, "": false} {
		if OfTasks(pattern) != want {
			t.Errorf("%q: %v", pattern, !want)
		}
	}
}
