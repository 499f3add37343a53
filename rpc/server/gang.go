package server

import (
	"sync"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// mostGangs bounds the gangs that are remembered: those that are being launched or ended at a time.
const mostGangs = 64

// gangFacts are what the orders of all nodes of a placement have in common.
type gangFacts struct {
	nodeList, cpusPerNode, tasksPerNode string // in Slurm's notation, in rank order
	tasks                               uint32 // of all nodes
}

func newGang(view desiredView, placement *apiv1.Placement) *gangFacts {
	cpus, tasks, total := counts(placement)
	return &gangFacts{
		nodeList: notation.Fold(names(view, placement)), cpusPerNode: notation.FoldCounts(cpus),
		tasksPerNode: notation.FoldCounts(tasks), tasks: total,
	}
}

// gangs remembers gangs, because each node of one asks for its own order: without it, the answers to a gang of n nodes fold a list of n
// names n times. It is safe for concurrent use; nil remembers nothing.
//
// Invariant: a placement is never changed once it is in a view, and a node's number keeps its name, so what is remembered of it
// stays true.
type gangs struct {
	mu    sync.Mutex
	known map[*apiv1.Placement]*gangFacts
}

func newGangs() *gangs { return &gangs{known: map[*apiv1.Placement]*gangFacts{}} }

// of returns the gang of a placement of the view.
func (g *gangs) of(view desiredView, placement *apiv1.Placement) *gangFacts {
	if g == nil {
		return newGang(view, placement)
	}
	g.mu.Lock()
	defer g.mu.Unlock() // also while it is made: the others that ask would make the same
	if found := g.known[placement]; found != nil {
		return found
	}
	if len(g.known) >= mostGangs {
		clear(g.known)
	}
	made := newGang(view, placement)
	g.known[placement] = made
	return made
}
