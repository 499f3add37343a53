package control

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-hpc/muster/fsm/replica"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
)

// timePeers have the leader's digests and clocks of their own.
type timePeers struct {
	log *fakeLog
	mu  sync.Mutex
	// off is how far a member's clock is ahead; there and back are how long messages are on their way. A member that is absent is silent.
	off         map[string]time.Duration
	there, back time.Duration
}

func (p *timePeers) Digest(ctx context.Context, id string, index uint64) (*peerv1.DigestResponse, error) {
	p.mu.Lock()
	off, ok := p.off[id]
	there, back := p.there, p.back
	p.mu.Unlock()
	if !ok || !pause(ctx, there) {
		return nil, context.DeadlineExceeded
	}
	clock := time.Now().Add(off).UnixNano()
	if !pause(ctx, back) {
		return nil, context.DeadlineExceeded
	}
	response := &peerv1.DigestResponse{ClockNs: clock}
	if d, ok := p.log.DigestAt(index); ok {
		response.Digest = &d
	}
	return response, nil
}

func (p *timePeers) Quarantine(context.Context, string, *peerv1.QuarantineRequest) error { return nil }

func TestALeaderWhoseClockIsWrongHandsOverToOneWhoseClockIsRight(t *testing.T) {
	ms := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
	for _, c := range []struct {
		name        string
		off         map[string]time.Duration
		there, back time.Duration
		to          string
	}{
		{"all agree", map[string]time.Duration{"c2": 0, "c3": ms(5)}, ms(1), ms(1), ""},
		{"just within the limit", map[string]time.Duration{"c2": ms(1990), "c3": ms(1999)}, 0, 0, ""},
		{"this one is behind", map[string]time.Duration{"c2": ms(2500), "c3": ms(2400)}, ms(1), ms(1), "c3"},
		{"this one is ahead", map[string]time.Duration{"c2": ms(-3000), "c3": ms(-5000)}, ms(1), ms(1), "c2"},
		{"another one is wrong", map[string]time.Duration{"c2": time.Hour, "c3": ms(3)}, ms(1), ms(1), ""},
		{"of two that disagree nobody knows who is right", map[string]time.Duration{"c2": time.Minute}, ms(1), ms(1), ""},
		{"nobody answers", nil, 0, 0, ""},
		{"answers are slow", map[string]time.Duration{"c2": 0, "c3": 0}, ms(10), ms(1900), ""},
		{"questions are slow", map[string]time.Duration{"c2": 0, "c3": 0}, ms(1900), ms(10), ""},
		{"slow answers don't hide a wrong clock", map[string]time.Duration{"c2": ms(10_000), "c3": ms(10_000)}, ms(900), ms(900), "c2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, nil, Faults{})
				defer r.end()
				r.depose()
				// Those that don't vote have no say, wherever their clocks are.
				r.log.servers = []replica.Server{{ID: "c1", Voter: true}, {ID: "c2", Voter: true}, {ID: "c3", Voter: true}, {ID: "l1"}, {ID: "l2"}}
				if c.off != nil {
					c.off["l1"], c.off["l2"] = -time.Hour, -time.Hour
				}
				peers := &timePeers{log: r.log, off: c.off, there: c.there, back: c.back}
				r.control.cfg.Peers = peers
				r.lead()
				time.Sleep(40 * time.Second)
				got, alarms := r.log.handovers(), r.control.Status().Alarms
				if c.to == "" {
					if len(got) > 0 || len(alarms) > 0 {
						t.Fatalf("handed over to %v, alarms %q", got, alarms)
					}
					return
				}
				if len(got) == 0 || got[0] != c.to || len(got) > 4 || len(alarms) != 1 || !strings.Contains(alarms[0], "it hands over; set its clock") {
					t.Fatalf("handed over to %v, alarms %q", got, alarms)
				}
				peers.mu.Lock()
				peers.off = map[string]time.Duration{"c2": 0, "c3": 0}
				peers.mu.Unlock()
				r.eventually(30*time.Second, "the alarm ends when the clock is set", func() bool { return len(r.control.Status().Alarms) == 0 })
			})
		})
	}
}
