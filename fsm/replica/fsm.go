package replica

import "github.com/muster-hpc/muster/fsm"

// Machine is the state machine of a controller; fsm.New makes one.
type Machine = StateMachine[*fsm.View]

// Replica is a controller's member.
type Replica = Member[*fsm.View]

// Open opens the member of a controller in cfg.Dir; see OpenMember.
func Open(cfg Config, sm Machine) (*Replica, error) {
	cfg.LevelOf = fsm.LevelOf
	return OpenMember(cfg, sm)
}
