package bench

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
)

// labelled is what srun --label prints of ranks that write so many lines each, one line of each in turn.
func labelled(ranks, lines int) string {
	var b strings.Builder
	for n := range lines {
		for rank := range ranks {
			fmt.Fprintf(&b, "%2d: %s", rank, line(nil, rank, n))
		}
	}
	return b.String()
}

func TestWhatRanksWriteIsRecognised(t *testing.T) {
	var out bytes.Buffer
	const lines = 100
	if err := Emit(&out, 3, lines*lineLength+7); err != nil || out.Len() != lines*lineLength || !bytes.HasSuffix(out.Bytes(), line(nil, 3, lines-1)) {
		t.Fatalf("wrote %d bytes, %v", out.Len(), err)
	}
	c := &checker{next: make([]int, 11)}
	if err := errors.Join(c.read(strings.NewReader(labelled(11, 4))), c.check(4)); err != nil {
		t.Error(err)
	}
}

func TestAnyOtherByteOfTheOutputIsNoticed(t *testing.T) {
	good := labelled(3, 2)
	for name, text := range map[string]string{
		"a byte":            strings.Replace(good, "0123", "0124", 1),
		"a line is missing": good[:len(good)/6] + good[len(good)/3:],
		"the last is torn":  good[:len(good)-1],
		"the last is gone":  good[:len(good)*5/6],
		"a line twice":      good + good[len(good)*5/6:],
		"a label":           strings.Replace(good, " 1: ", " 2: ", 1),
		"no label":          strings.Replace(good, " 1: ", "", 1),
		"an unknown rank":   strings.Replace(good, " 1: ", " 7: ", 1),
	} {
		c := &checker{next: make([]int, 3)}
		if err := errors.Join(c.read(strings.NewReader(text)), c.check(2)); err == nil {
			t.Errorf("%s was not noticed", name)
		}
	}
}

func TestStagesOfATraceNameTheFirstAndTheLastNode(t *testing.T) {
	got := stagesOf("srun: trace: began 1\nother\nsrun: trace: 1 ms  + 1  submitted\nsrun: trace: 2 ms  started on n2\nsrun: trace: 3 ms  started on n1\n" +
		"srun: trace: 4 ms  ended on n1\nsrun: trace: 5 ms  started on n3\n")
	want := []string{"srun: trace: began 1", "srun: trace: 1 ms  + 1  submitted", "srun: trace: 2 ms  started on n2", "srun: trace: 4 ms  ended on n1",
		"srun: trace: 5 ms  started on n3 (the last)", "srun: trace: 4 ms  ended on n1 (the last)"}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s", strings.Join(got, "\n"))
	}
}
