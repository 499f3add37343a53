package notation

import (
	"fmt"
	"testing"
)

func FuzzCountCountsWhatExpandGives(f *testing.F) {
	for _, list := range []string{"", "n[1-3,7],m[001-002]k[1-4]", "a, b,,c[5]", "a[1]b", "a[3-1]", "a[1-2", "a[0-9999999]", "a[x]", "a[]", "[1-2]",
		"a[1-1048576],b", "a[1-1024]b[1-1024]", "a[1-1025]b[1-1024]"} {
		f.Add(list)
	}
	f.Fuzz(func(t *testing.T, list string) {
		names, err := Expand(list)
		n, countErr := Count(list)
		if (err == nil) != (countErr == nil) || err == nil && n != len(names) {
			t.Errorf("%q names %d (%v); counted %d (%v)", list, len(names), err, n, countErr)
		}
	})
}

func TestCountOfALongListCostsLittle(t *testing.T) {
	if n := testing.AllocsPerRun(10, func() {
		if n, err := Count("n[1-100000],m[000001-100000]"); err != nil || n != 200_000 {
			panic(fmt.Sprint(n, err))
		}
	}); n > 10 {
		t.Errorf("counting took %v allocations", n)
	}
}
