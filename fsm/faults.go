package fsm

// Faults are bugs planted on purpose, one for each guarantee that tests must be able to see broken: a test of a guarantee
// counts only if it fails when the bug is there. They are for tests of the tests; no program sets any.
type Faults struct {
	// SkipRequestIDs executes a request again when its id comes again (breaks G1).
	SkipRequestIDs bool
	// IgnoreFence takes reports and orders of old placements and attempts for current ones (breaks G2).
	IgnoreFence bool
	// StartUnaccounted places and starts the next attempt while an earlier one is not accounted for (breaks G2).
	StartUnaccounted bool
	// EndOnSilence ends everything on a node that is not heard of (breaks G3).
	EndOnSilence bool
	// UnknownIsNoOp applies what it does not know as if nothing had been asked (breaks G8).
	UnknownIsNoOp bool
	// StepsShareDevices gives a step devices that another step has for itself.
	StepsShareDevices bool
	// PlaceUnusable places work on devices that are out of use because of a condition.
	PlaceUnusable bool
	// DrainWithoutLimit lets checks drain as many nodes as they like.
	DrainWithoutLimit bool
}

// WithFaults plants bugs in a new machine. Only tests use it.
func WithFaults(f Faults) Option { return func(m *Machine) { m.faults = f } }
