package bind

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/muster-hpc/muster/proto/notation"
)

// two is a machine of two sockets with four cores of two threads each: threads 0 and 1 are core 0.
var two = Regular(16, 2, 4, 2)

func TestTasksAreBoundAsTheyAsk(t *testing.T) {
	whole := notation.MaskUpTo(16)
	for _, c := range []struct {
		bind, distribution string
		cpus               notation.Mask
		tasks, per         int
		kind, list         string
	}{
		{"", "", whole, 2, 1, "mask_cpu:", "0xff,0xff00"},                                               // as many as sockets
		{"", "", whole, 8, 1, "mask_cpu:", "0x3,0x300,0xc,0xc00,0x30,0x3000,0xc0,0xc000"},               // as many as cores
		{"", "", whole, 4, 4, "mask_cpu:", "0xf,0xf00,0xf0,0xf000"},                                     // as many as threads
		{"", "", whole, 1, 1, "mask_cpu:", "0xffff"},                                                    // a task alone keeps everything
		{"", "", whole, 3, 1, "mask_cpu:", "0xffff,0xffff,0xffff"},                                      //
		{"none", "", whole, 2, 1, "none", ""},                                                           //
		{"threads", "", whole, 3, 1, "mask_cpu:", "0x1,0x100,0x2"},                                      // over the sockets in turn
		{"threads", "block:block", whole, 3, 1, "mask_cpu:", "0x1,0x2,0x4"},                             //
		{"threads", "block:fcyclic", whole, 2, 2, "mask_cpu:", "0x101,0x202"},                           //
		{"cores", "", whole, 3, 1, "mask_cpu:", "0x3,0x300,0xc"},                                        // whole cores
		{"cores", "cyclic:block,pack", whole, 2, 3, "mask_cpu:", "0xf,0xf0"},                            // as many cores as three CPUs need
		{"verbose,sockets", "", whole, 3, 1, "mask_cpu:", "0xff,0xff00,0xff"},                           //
		{"sockets", "", notation.MaskOf(1, 2, 9), 2, 1, "mask_cpu:", "0x6,0x200"},                       // within the step's own
		{"cores", "", notation.MaskOf(0, 1), 3, 1, "mask_cpu:", "0x3,0x3,0x3"},                          // more tasks than cores
		{"cores", "", notation.MaskOf(0, 1), 1, 64, "mask_cpu:", "0x3"},                                 // more than there is
		{"rank", "", notation.MaskOf(4, 6), 3, 1, "rank", ""},                                           //
		{"map_cpu:4,0x1*2,9", "", whole, 5, 1, "map_cpu:", "4,0x1*2,9"},                                 //
		{"q,mask_cpu:0xF0,3", "", notation.MaskOf(0, 4, 5), 3, 1, "mask_cpu:", "0xF0,3"},                //
		{"threads", "", notation.MaskOf(3, 100), 2, 1, "mask_cpu:", "0x8,0x10000000000000000000000000"}, // beyond the topology
	} {
		r := CPURequest{Topology: two, CPUs: c.cpus, Tasks: c.tasks, PerTask: c.per, Bind: c.bind, Distribution: c.distribution}
		b, err := CPUs(r)
		if err != nil {
			t.Errorf("%+v: %v", c, err)
			continue
		}
		if b.Kind != c.kind || b.List != c.list || b.Verbose != strings.HasPrefix(c.bind, "verbose") {
			t.Errorf("%q of %s for %d tasks of %d: %s%s", c.bind, c.cpus, c.tasks, c.per, b.Kind, b.List)
		}
	}
}

func TestListsNameCPUsOfTheNodeAndStayWithinTheStep(t *testing.T) {
	b, err := CPUs(CPURequest{Topology: two, CPUs: notation.MaskOf(0, 4, 5), Tasks: 3, Bind: "mask_cpu:0xf0,0x1,0x2"})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(b.Masks[0], notation.MaskOf(4, 5)) || !slices.Equal(b.Masks[1], notation.MaskOf(0)) || b.Masks[2] != nil {
		t.Errorf("the masks are %v", b.Masks)
	}
	if b.Problems[0] != "" || !strings.Contains(b.Problems[2], "CPUs 1 of the node") {
		t.Errorf("the problems are %q", b.Problems)
	}
	b, err = CPUs(CPURequest{Topology: two, CPUs: notation.MaskOf(4, 6), Tasks: 3, Bind: "rank"})
	if err != nil || fmt.Sprint(b.Masks) != fmt.Sprint([]notation.Mask{notation.MaskOf(4), notation.MaskOf(6), notation.MaskOf(4)}) {
		t.Errorf("by rank they are %v, error %v", b.Masks, err)
	}
}

func TestWhatIsNotABindingIsRefused(t *testing.T) {
	for _, bind := range []string{"everything", "map_cpu:", "map_cpu:x", "map_cpu:3-1", "map_cpu:1*0", "map_cpu:1*99999999", "map_cpu:0-8191,0-8191",
		"mask_cpu:0", "mask_cpu:0xg", "mask_cpu:-1", "mask_cpu:" + strings.Repeat("f", 1<<15)} {
		if b, err := CPUs(CPURequest{Topology: two, CPUs: notation.MaskUpTo(16), Tasks: 1, Bind: bind}); err == nil {
			t.Errorf("%.30q binds to %v", bind, b)
		}
	}
	for _, bind := range []string{"everything", "single", "single:0", "per_task:x", "map_gpu:9", "mask_gpu:0x100"} {
		if each, _, err := GPUs(GPURequest{GPUs: []int{4, 5}, Tasks: 1, Bind: bind}); err == nil {
			t.Errorf("%q gives %v", bind, each)
		}
	}
}

func TestAcceleratorsAreBoundAsTasksAsk(t *testing.T) {
	near := map[int]notation.Mask{4: notation.MaskOf(0, 1), 5: notation.MaskOf(0, 1), 6: notation.MaskOf(8, 9), 7: notation.MaskOf(8, 9)}
	cpus := []notation.Mask{notation.MaskOf(0), notation.MaskOf(8), nil, notation.MaskOf(3)}
	for _, c := range []struct {
		bind     string
		per      int
		relative bool
		want     string
	}{
		{"", 0, false, "[[4 5 6 7] [4 5 6 7] [4 5 6 7] [4 5 6 7]]"},
		{"", 1, false, "[[4] [5] [6] [7]]"},
		{"", 3, false, "[[4 5 6] [4 5 7] [4 6 7] [5 6 7]]"}, // as in turn, and again from the beginning
		{"none", 1, false, "[[4 5 6 7] [4 5 6 7] [4 5 6 7] [4 5 6 7]]"},
		{"closest", 0, false, "[[4 5] [6 7] [4 5 6 7] [4 5 6 7]]"},
		{"single:1", 0, false, "[[4] [6] [5] [7]]"},
		{"single:2", 0, false, "[[4] [6] [5] [7]]"},
		{"verbose,per_task:2", 0, false, "[[4 5] [6 7] [4 5] [6 7]]"},
		{"map_gpu:7,4*2", 0, false, "[[7] [4] [4] [7]]"},
		{"map_gpu:3,0", 0, true, "[[7] [4] [7] [4]]"},
		{"mask_gpu:0x3,0xc", 0, true, "[[4 5] [6 7] [4 5] [6 7]]"},
	} {
		each, verbose, err := GPUs(GPURequest{Bind: c.bind, GPUs: []int{4, 5, 6, 7}, Tasks: 4, PerTask: c.per, Relative: c.relative, Near: near, CPUs: cpus})
		if err != nil || fmt.Sprint(each) != c.want || verbose != strings.HasPrefix(c.bind, "verbose") {
			t.Errorf("%q: %v, verbose %v, error %v; want %s", c.bind, each, verbose, err, c.want)
		}
	}
	if each, _, err := GPUs(GPURequest{Bind: "single:1", GPUs: []int{2}, Tasks: 3}); err != nil || fmt.Sprint(each) != "[[2] [2] [2]]" {
		t.Errorf("more tasks than accelerators: %v, %v", each, err)
	}
	if each, _, err := GPUs(GPURequest{Bind: "closest", Tasks: 2}); err != nil || each[0] != nil {
		t.Errorf("without accelerators: %v, %v", each, err)
	}
}

// Whatever is asked of whatever machine: nothing beyond the step's own, nobody without, and the same again.
func TestBindingsStayWithinTheStep(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	binds := []string{"", "threads", "cores", "sockets", "rank", "map_cpu:0-3,7*2", "mask_cpu:0xff,0x1*3"}
	inner := []string{"", "block", "block:block", "cyclic:cyclic", "block:fcyclic"}
	for range 3000 {
		topology := Regular(uint32(rng.IntN(40)), uint32(rng.IntN(4)), uint32(rng.IntN(5)), uint32(rng.IntN(3)))
		cpus := notation.MaskOf(rng.IntN(8))
		for range rng.IntN(40) {
			cpus = notation.MaskOf(append(cpus.Devices(), rng.IntN(48))...)
		}
		r := CPURequest{Topology: topology, CPUs: cpus, Tasks: 1 + rng.IntN(12), PerTask: rng.IntN(6), Bind: binds[rng.IntN(len(binds))],
			Distribution: inner[rng.IntN(len(inner))]}
		b, err := CPUs(r)
		if err != nil || len(b.Masks) != r.Tasks {
			t.Fatalf("%+v: %v, error %v", r, b, err)
		}
		if again, _ := CPUs(r); !reflect.DeepEqual(b, again) {
			t.Fatalf("%+v: first %v, then %v", r, b, again)
		}
		for i, m := range b.Masks {
			if m == nil {
				continue
			}
			if m.Count() == 0 || slices.ContainsFunc(m.Devices(), func(cpu int) bool { return !cpus.Has(cpu) }) {
				t.Fatalf("%+v: task %d may use %s of %s", r, i, m, cpus)
			}
		}
		if r.Bind == "threads" && r.Tasks*max(r.PerTask, 1) <= cpus.Count() {
			sum := 0
			for _, m := range b.Masks {
				sum += m.Count()
			}
			if all := notation.MaskOf(slices.Concat(devices(b.Masks)...)...); sum != all.Count() || sum != r.Tasks*max(r.PerTask, 1) {
				t.Fatalf("%+v: there are enough threads for all, and they are %v", r, b.Masks)
			}
		}
	}
}

func devices(masks []notation.Mask) [][]int {
	var all [][]int
	for _, m := range masks {
		all = append(all, m.Devices())
	}
	return all
}

func FuzzBindingsAreReadOrRefused(f *testing.F) {
	f.Add("verbose,map_cpu:0-3,5*2", true)
	f.Add("mask_gpu:0xff*3", false)
	f.Fuzz(func(t *testing.T, bind string, cpu bool) {
		if cpu {
			_, _ = CPUs(CPURequest{Topology: two, CPUs: notation.MaskUpTo(16), Tasks: 3, Bind: bind})
			return
		}
		_, _, _ = GPUs(GPURequest{GPUs: []int{0, 1}, Tasks: 3, Bind: bind})
	})
}
