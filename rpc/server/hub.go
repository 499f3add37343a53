package server

import (
	"context"
	"sync"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// hub wakes long polls by what has changed: one goroutine follows the publications, so that thousands of held Syncs do
// not look at each of them.
//
// Invariant: a waiter that registers and then looks at the newest view misses nothing: every change after that view is
// in a publication that the hub has yet to see.
type hub struct {
	replica Replica

	mu    sync.Mutex
	nodes map[uint32]map[*waiter]struct{}
	jobs  map[uint32]map[*waiter]struct{}
	last  *apiv1.Revision // up to which everybody concerned was woken
}

// waiter is woken through a channel of capacity one.
type waiter struct{ wake chan struct{} }

func newHub(r Replica) *hub {
	return &hub{replica: r, nodes: map[uint32]map[*waiter]struct{}{}, jobs: map[uint32]map[*waiter]struct{}{}}
}

// node registers for changes of what a node shall do; call the returned function when done.
func (h *hub) node(number uint32) (*waiter, func()) { return h.add(h.nodes, number) }

// job registers for changes of a job, its attempts and steps.
func (h *hub) job(id uint32) (*waiter, func()) { return h.add(h.jobs, id) }

func (h *hub) add(table map[uint32]map[*waiter]struct{}, key uint32) (*waiter, func()) {
	w := &waiter{wake: make(chan struct{}, 1)}
	h.mu.Lock()
	defer h.mu.Unlock()
	if table[key] == nil {
		table[key] = map[*waiter]struct{}{}
	}
	table[key][w] = struct{}{}
	return w, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(table[key], w)
		if len(table[key]) == 0 {
			delete(table, key)
		}
	}
}

func (w *waiter) poke() {
	select {
	case w.wake <- struct{}{}:
	default: // it is awake already
	}
}

func (h *hub) run(ctx context.Context) {
	for {
		changed := h.replica.Changed() // before View, so that no publication is missed
		h.publish(h.replica.View())
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// publish wakes whoever waits for something that changed since the view before.
func (h *hub) publish(view *fsm.View) {
	h.mu.Lock()
	defer h.mu.Unlock()
	last := h.last
	h.last = view.Revision()
	if fsm.CompareRevisions(last, view.Revision()) == 0 {
		return
	}
	changes, known := view.ChangedSince(last)
	if !known { // after a restored snapshot: everybody looks
		wakeAll(h.nodes)
		wakeAll(h.jobs)
		return
	}
	if len(h.nodes) > 0 {
		for number := range view.NodesTouchedSince(last) {
			for w := range h.nodes[number] {
				w.poke()
			}
		}
	}
	if len(h.jobs) > 0 {
		for change := range changes {
			for w := range h.jobs[change.Job] {
				w.poke()
			}
		}
	}
}

func wakeAll(table map[uint32]map[*waiter]struct{}) {
	for _, waiters := range table {
		for w := range waiters {
			w.poke()
		}
	}
}
