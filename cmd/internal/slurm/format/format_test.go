package format

import (
	"testing"
	"unicode/utf8"
)

var fields = map[byte]Field[string]{'j': {Header: "NAME", Value: func(s string) string { return s }}, 'T': {Header: "STATE", Value: func(string) string { return "COMPLETING" }}}

func render(text, row string) string {
	l := Letters(text, fields)
	return string(l.AppendRow(l.AppendHeader(nil), row))
}

func TestLetters(t *testing.T) {
	for _, test := range []struct{ format, row, want string }{
		{"%j|%T", "a", "NAME|STATE\na|COMPLETING\n"},
		{"%.6j %.2T", "abcdefgh", "  NAME ST\nabcdef CO\n"},
		{"%6j<", "é", "NAME  <\né     <\n"},
		{"{\"a\": \"%j\"}", "x", "{\"a\": \"NAME\"}\n{\"a\": \"x\"}\n"},
		{"%?%j%", "x", "NAME\nx\n"},
		{"%.3j", "日本語-é", "NAM\n日本語\n"},
		{"", "x", "\n\n"},
	} {
		if got := render(test.format, test.row); got != test.want {
			t.Errorf("%q: %q, want %q", test.format, got, test.want)
		}
	}
}

func TestNames(t *testing.T) {
	known := map[string]Field[string]{"name": fields['j'], "timeleft": fields['T']}
	for _, test := range []struct{ format, want string }{
		{"Name", "NAME                \nabc                 \n"},
		{"name:.6,TIME_LEFT:4", "  NAMESTAT\n   abcCOMP\n"},
		{"Name:\x1f,time-left:\x1f", "NAME\x1fSTATE\x1f\nabc\x1fCOMPLETING\x1f\n"},
		{"Name:5|", "NAME |\nabc  |\n"},
	} {
		l, unknown := Names(test.format, known)
		if got := string(l.AppendRow(l.AppendHeader(nil), "abc")); got != test.want || unknown != nil {
			t.Errorf("%q: %q %v, want %q", test.format, got, unknown, test.want)
		}
	}
	if _, unknown := Names("name,bad", known); len(unknown) != 1 || unknown[0] != "bad" {
		t.Errorf("unknown %v", unknown)
	}
}

func FuzzAFieldIsNeverWiderThanAsked(f *testing.F) {
	f.Add("日本", 3, true)
	f.Fuzz(func(t *testing.T, text string, width int, right bool) {
		if width < 1 || width > 1000 || !utf8.ValidString(text) {
			return
		}
		if got := Pad(nil, text, width, right); utf8.RuneCount(got) != width || !utf8.Valid(got) {
			t.Errorf("Pad(%q, %d) = %q", text, width, got)
		}
	})
}
