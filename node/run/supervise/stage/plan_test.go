package stage_test

import (
	"bytes"
	"math"
	"reflect"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/muster-hpc/muster/node/run/supervise/stage"
)

func full() *stage.Plan {
	return &stage.Plan{
		Parent: 4711, Groups: []string{"/sys/a", "/sys/b"}, Namespace: true, CPUs: []uint64{1, math.MaxUint64}, SetNice: true, Nice: -5,
		SetUser: true, UID: math.MaxUint32, GID: 7, Supplement: []uint32{7, math.MaxUint32},
		Limits: []stage.Limit{{Resource: 7, Soft: math.MaxUint64}, {Resource: 3, Soft: 8 << 20}},
		Dir:    "/home/x", Program: "/bin/\xff", Args: []string{"a", "", "b c"}, Env: []string{"X=\xfe\n", "Y="},
		Prints: []string{"p"}, Lines: []string{"%p", ""},
	}
}

func TestPlanIsReadAsItWasWritten(t *testing.T) {
	for _, p := range []*stage.Plan{full(), {Args: []string{}, Env: []string{}, Groups: []string{}, Prints: []string{}, Lines: []string{}}} {
		got, err := stage.Decode(p.Encode())
		if err != nil || !reflect.DeepEqual(got, p) {
			t.Errorf("%+v became %+v, error %v", p, got, err)
		}
	}
}

func TestDamagedPlanIsRefused(t *testing.T) {
	b := full().Encode()
	for n := range b {
		if p, err := stage.Decode(b[:n]); err == nil {
			t.Errorf("the first %d bytes became %+v", n, p)
		}
	}
	if p, err := stage.Decode(append(b, 0)); err == nil {
		t.Errorf("with a byte more it became %+v", p)
	}
}

func TestStatusTellsHowFarAStageCame(t *testing.T) {
	failure := &stage.Failure{Call: "execve", Errno: uint32(unix.ENOENT)}
	for name, c := range map[string]struct {
		b       []byte
		started bool
		failure *stage.Failure
		bad     bool
	}{
		"died":     {b: nil},
		"executed": {b: []byte{stage.Started}, started: true},
		"early":    {b: failure.Encode(), failure: failure},
		"late":     {b: append([]byte{stage.Started}, failure.Encode()...), started: true, failure: failure},
		"torn":     {b: failure.Encode()[:3], bad: true},
		"nonsense": {b: []byte("nonsense"), bad: true},
	} {
		started, got, err := stage.DecodeStatus(c.b)
		if started != c.started || !reflect.DeepEqual(got, c.failure) || (err != nil) != c.bad {
			t.Errorf("%s: started %v, failure %+v, error %v", name, started, got, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(full().Encode())
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := stage.Decode(b)
		if err != nil {
			return
		}
		again, err := stage.Decode(p.Encode())
		if err != nil || !bytes.Equal(again.Encode(), p.Encode()) {
			t.Errorf("%+v became %+v, error %v", p, again, err)
		}
	})
}
