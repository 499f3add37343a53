package main

import (
	"bytes"
	"strings"
	"testing"
)

func TestWhatUsersNamedCannotCommandATerminal(t *testing.T) {
	var out bytes.Buffer
	rows := table{header: []string{"NAME", "END"}}
	rows.add("a\x1b[2Jb", "x\ny")
	rows.write(&out, false)
	var f fields
	f.add("Job", "%d %s", 1, "n\x1b]0;title\x07\r")
	f.write(&out)
	if got := out.String(); strings.ContainsAny(got, "\x1b\x07\r") || strings.Count(got, "\n") != 3 || !strings.Contains(got, `a\x1b[2Jb`) {
		t.Errorf("%q", got)
	}
}
