package virtual

import (
	"strings"
	"testing"
	"time"

	"github.com/muster-hpc/muster/fsm"
	"github.com/muster-hpc/muster/sched/control"
)

// plantedSeeds is how many days a planted bug may stay unnoticed.
const plantedSeeds = 12

// TestPlantedBugsAreNoticed plants one bug after the other: each must make a day fail, and for the right reason. A bug that stays
// unnoticed shows that the checks prove nothing.
func TestPlantedBugsAreNoticed(t *testing.T) {
	for _, c := range []struct {
		name string
		bugs bugs
		// words, one of which the violation must contain.
		words []string
	}{
		{"skip the request-id check", bugs{fsm: fsm.Faults{SkipRequestIDs: true}}, []string{"G1"}},
		{"ignore the fence", bugs{fsm: fsm.Faults{IgnoreFence: true}}, []string{"G2", "invariants"}},
		{"start before the old attempt is accounted for", bugs{fsm: fsm.Faults{StartUnaccounted: true}, hasty: true}, []string{"G2", "invariants"}},
		{"start before every node is prepared", bugs{control: control.Faults{StartUnprepared: true}}, []string{"G5"}},
		{"grant a lease without a committed entry", bugs{grantUncommitted: true}, []string{"G2", "a lease was granted"}},
		{"answer a Sync below the agent's revision", bugs{answerBelowSeen: true}, []string{"was answered at revision"}},
		{"apply unknown as no-op", bugs{fsm: fsm.Faults{UnknownIsNoOp: true}, unknownAt: 300}, []string{"G8: at index"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for seed := uint64(1); seed <= plantedSeeds; seed++ {
				s := newSim(seed, c.bugs)
				s.dusk = 8 * time.Hour
				err := s.run()
				if err == nil {
					continue
				}
				for _, word := range c.words {
					if strings.Contains(err.Error(), word) {
						t.Logf("seed %d, after %v: %v", seed, s.now, err)
						return
					}
				}
				t.Fatalf("seed %d, after %v: it was noticed for another reason than %q: %v", seed, s.now, c.words, err)
			}
			t.Errorf("%d days did not notice it", plantedSeeds)
		})
	}
}

// TestAnUnknownCommandStopsThoseWhoDoNotKnowIt is what must happen without the planted bug: who does not know a command stops, and
// nobody goes on with another state.
func TestAnUnknownCommandStopsThoseWhoDoNotKnowIt(t *testing.T) {
	s := newSim(1, bugs{unknownAt: 300})
	err := s.run()
	if err == nil || !strings.Contains(err.Error(), "stopped") || !strings.Contains(err.Error(), "does not know") {
		t.Errorf("the day ended with %v", err)
	}
}

// TestAHastyLeaderIsRefused shows that the state machine needs no careful leader: the same decisions as in the planted bug above,
// and nothing happens.
func TestAHastyLeaderIsRefused(t *testing.T) {
	s := newSim(1, bugs{hasty: true})
	s.dusk = 4 * time.Hour
	if err := s.run(); err != nil {
		t.Errorf("after %v: %v", s.now, err)
	}
}
