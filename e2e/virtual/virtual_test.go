package virtual

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// days is how many days a normal run has: what 30 CPU-seconds buy.
const days = 12

// seeds returns the seeds to run: one that was asked for, a campaign, or a few.
func seeds(t *testing.T, few, campaign uint64) (first, n uint64) {
	t.Helper()
	if text := os.Getenv("MUSTER_SEED"); text != "" {
		seed, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			t.Fatalf("MUSTER_SEED: %v", err)
		}
		return seed, 1
	}
	if os.Getenv("MUSTER_CAMPAIGN") != "" {
		return 1, campaign
	}
	if testing.Short() {
		return 1, few / 4
	}
	return 1, few
}

// TestMain lets garbage pile up: a day makes much of it and keeps little, and a quarter of its time went into collecting.
func TestMain(m *testing.M) {
	debug.SetGCPercent(400)
	os.Exit(m.Run())
}

func TestADayKeepsItsPromisesWhateverFails(t *testing.T) {
	first, n := seeds(t, days, 1000)
	var next atomic.Uint64
	next.Store(first)
	var mu sync.Mutex
	var total facts
	var wg sync.WaitGroup
	began := time.Now()
	for range min(n, uint64(runtime.GOMAXPROCS(0))) {
		wg.Go(func() {
			for {
				seed := next.Add(1) - 1
				if seed >= first+n || t.Failed() {
					return
				}
				s := newSim(seed, bugs{})
				s.verbose = n == 1
				err := s.run()
				mu.Lock()
				if err != nil {
					t.Errorf("seed %d, after %v: %v\nreplay: MUSTER_SEED=%d go test -run Day ./e2e/virtual", seed, s.now, err, seed)
				}
				total.starts, total.acks, total.faults = total.starts+s.starts, total.acks+s.acks, total.faults+s.faults
				mu.Unlock()
				if n == 1 {
					fmt.Printf("hash %016x, %d events, %d entries, %d processes, %d acknowledgements, %d faults\n", s.hash, s.count, s.canonAt, s.starts, s.acks, s.faults)
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d days in %v: %d processes, %d acknowledgements, %d faults", n, time.Since(began), total.starts, total.acks, total.faults)
	if days := int(n); total.starts < 200*days || total.acks < 150*days || total.faults < 200*days {
		t.Error("that is too little to mean anything")
	}
}

func TestTheSameSeedGivesTheSameTrace(t *testing.T) {
	run := func(seed uint64) *sim {
		s := newSim(seed, bugs{})
		s.dusk = 4 * time.Hour
		if err := s.run(); err != nil {
			t.Fatal(err)
		}
		return s
	}
	a, b, c := run(7), run(7), run(8)
	if a.hash != b.hash || a.count != b.count {
		t.Errorf("seed 7 gave traces %016x (%d events) and %016x (%d events)", a.hash, a.count, b.hash, b.count)
	}
	if c.hash == a.hash {
		t.Error("seeds 7 and 8 give the same trace")
	}
}
