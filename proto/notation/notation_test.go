package notation

import (
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestExpandGivesWhatSlurmGives(t *testing.T) {
	for list, want := range map[string]string{
		"node[001-003,7]":      "node001 node002 node003 node7",
		"b04-[09-10]":          "b04-09 b04-10",
		"a[1-2]b[3-4]":         "a1b3 a1b4 a2b3 a2b4",
		"n1,n2,n3":             "n1 n2 n3",
		"n[1,1,2]":             "n1 n1 n2",
		"n[01-3]":              "n01 n02 n03",
		" n1 , n2 ":            "n1 n2",
		"x[0-0]":               "x0",
		"c[156,157,160-162]":   "c156 c157 c160 c161 c162",
		"":                     "",
		"listserv01,listserv3": "listserv01 listserv3",
		"gpu-a-2.local":        "gpu-a-2.local",
	} {
		got, err := Expand(list)
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("Expand(%q) = %q, %v; want %q", list, got, err, want)
		}
	}
}

func TestExpandRefusesWithTheFault(t *testing.T) {
	for list, part := range map[string]string{
		"gpu-a100-[01-02].cluster.local": "text after a bracket",
		"n[1":                            "not closed",
		"n1]":                            "without an opening",
		"n[1-2,a]":                       `"a"`,
		"n[3-1]":                         "backwards",
		"n[0-99999999999]":               "more than",
		"n[0-1023]m[0-2047]":             "more than",
		"n[[1]]":                         "within a bracket",
	} {
		if got, err := Expand(list); err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("Expand(%q) = %d names, %v; want an error with %q", list, len(got), err, part)
		}
	}
}

func TestFoldKeepsOrderAndZeros(t *testing.T) {
	for names, want := range map[string]string{
		"n03 n01 n02":           "n[03,01-02]",
		"listserv01 listserv3":  "listserv[01,3]",
		"b04-09 b04-10":         "b04-[09-10]",
		"n1 n1":                 "n[1,1]",
		"n9 n10 n11":            "n[9-11]",
		"gpu-a-1 gpu-a-2.local": "gpu-a-1,gpu-a-2.local",
		"n1":                    "n1",
		"login n1 n2 m7":        "login,n[1-2],m7",
		"n99 n100 n0101":        "n[99-100,0101]",
		"n09 n010":              "n[09,010]",
	} {
		if got := Fold(strings.Fields(names)); got != want {
			t.Errorf("Fold(%s) = %s; want %s", names, got, want)
		}
	}
}

func TestSortIsNatural(t *testing.T) {
	names := strings.Fields("listserv01 listserv3 n10 n9 n03 n01")
	Sort(names)
	if got := strings.Join(names, " "); got != "listserv3 listserv01 n9 n01 n03 n10" {
		t.Error(got)
	}
}

func FuzzExpandInvertsFold(f *testing.F) {
	f.Add("n1 n2 n010 x")
	f.Fuzz(func(t *testing.T, text string) {
		names := strings.Fields(text)
		if slices.ContainsFunc(names, func(s string) bool { return strings.ContainsAny(s, "[],") }) {
			return
		}
		got, err := Expand(Fold(names))
		if err != nil || !slices.Equal(got, names) {
			t.Errorf("%q folds to %q, which expands to %q, %v", names, Fold(names), got, err)
		}
	})
}

func FuzzExpandNeverFails(f *testing.F) {
	f.Add("n[1-3,7],m[001-002]k[1]")
	f.Fuzz(func(t *testing.T, list string) {
		names, err := Expand(list)
		if err == nil && len(names) > MaxNames {
			t.Error("too many names")
		}
	})
}

func TestCountsRoundTrip(t *testing.T) {
	for s, want := range map[string][]uint32{"2(x2),1": {2, 2, 1}, "64": {64}, "40,8": {40, 8}, "": nil} {
		got, err := ExpandCounts(s)
		if err != nil || !reflect.DeepEqual(got, want) || FoldCounts(got) != s {
			t.Errorf("%q gives %v, %v and back %q", s, got, err, FoldCounts(got))
		}
	}
	for _, s := range []string{"x", "2(x0)", "2(x2", "2(x99999999)", "-1", "1,,2"} {
		if got, err := ExpandCounts(s); err == nil {
			t.Errorf("ExpandCounts(%q) = %v; want an error", s, got)
		}
	}
}

func TestMasks(t *testing.T) {
	m := MaskOf(0, 1, 2, 16, 65)
	if m.String() != "0-2,16,65" || m.Count() != 5 || !m.Has(65) || m.Has(64) || m.Has(900) {
		t.Error(m.String(), m.Count())
	}
	if MaskUpTo(64).Count() != 64 || MaskUpTo(65).Count() != 65 || len(MaskUpTo(0)) != 0 {
		t.Error("MaskUpTo")
	}
}

func TestPrintableTextObeysNobody(t *testing.T) {
	for given, want := range map[string]string{
		"plain":               "plain",
		"日本語-é a|b":           "日本語-é a|b",
		"a\nb\tc\rd":          `a\nb\tc\rd`,
		"\x1b[2J":             `\x1b[2J`,
		"\u009b1m":            `\x9b1m`, // a control character beyond ASCII
		"bad\xffend\xe6\x97x": `bad\xffend\xe6\x97x`,
		"":                    "",
	} {
		if got := Printable(given); got != want {
			t.Errorf("%q: %q, not %q", given, got, want)
		}
	}
}

func TestIndexesReadBack(t *testing.T) {
	for _, list := range []string{"", "0", "0-7,16", "3,5,9-10", "0-1048575"} {
		indexes, err := ExpandIndexes(list)
		if err != nil || FoldIndexes(indexes) != list {
			t.Errorf("%q: %v", list, err)
		}
	}
	for _, list := range []string{"a", "1-", "2-1", "1,1", "3,2", "-1", "0-1048576", "1,,2", "0-4294967295"} {
		if indexes, err := ExpandIndexes(list); err == nil {
			t.Errorf("%q is read as %d indexes", list, len(indexes))
		}
	}
}
