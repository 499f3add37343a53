package server

import (
	"sync"
	"time"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// sessions remembers, for each node, the life of its agent that syncs here. It is lost with the process, and nothing
// depends on it but promptness.
type sessions struct {
	mu   sync.Mutex
	byNo map[uint32]*session
}

// session is one life of one agent at this controller.
type session struct {
	bootID, nonce string
	epoch         uint32

	mu          sync.Mutex
	sequence    uint64        // highest Sync that began
	superseded  chan struct{} // closed when a newer Sync begins
	granted     uint64        // highest sequence whose beat the leader has acknowledged, with the entry applied here
	delivered   uint64        // highest sequence whose grant was answered
	deliveredAt time.Time
	members     string // controllers as they were told last
	refused     string // what checks found, as it was refused last
	wake        chan struct{}
}

func newSessions() *sessions { return &sessions{byNo: map[uint32]*session{}} }

// of returns the session of a Sync; another instance or epoch begins a new one.
func (t *sessions) of(request *nodev1.SyncRequest) *session {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.byNo[request.Node]
	if s == nil || s.bootID != request.Instance.GetBootId() || s.nonce != request.Instance.GetNonce() || s.epoch != request.Epoch {
		s = &session{bootID: request.Instance.GetBootId(), nonce: request.Instance.GetNonce(), epoch: request.Epoch,
			wake: make(chan struct{}, 1)}
		t.byNo[request.Node] = s
	}
	return s
}

// count is how many agents have synced here.
func (t *sessions) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.byNo)
}

// begin starts a Sync and ends the hold of the one before. It returns false for one that is not newer.
func (s *session) begin(sequence uint64) (superseded <-chan struct{}, newer bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sequence <= s.sequence {
		return nil, false
	}
	s.sequence = sequence
	if s.superseded != nil {
		close(s.superseded)
	}
	s.superseded = make(chan struct{})
	return s.superseded, true
}

// grant notes that the beat with a sequence counts.
func (s *session) grant(sequence uint64) {
	s.mu.Lock()
	s.granted = max(s.granted, sequence)
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// undelivered returns the sequence of a grant that was not answered yet, or 0, and how long ago one was answered.
func (s *session) undelivered(now time.Time) (sequence uint64, since time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.granted > s.delivered {
		sequence = s.granted
	}
	return sequence, now.Sub(s.deliveredAt)
}

// deliver takes the newest grant for an answer; 0 if there is none that was not answered before.
func (s *session) deliver(now time.Time) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.granted <= s.delivered {
		return 0
	}
	s.delivered, s.deliveredAt = s.granted, now
	return s.granted
}

// tell reports whether the controllers are to be told: they are not what they were when they were told last.
func (s *session) tell(members string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	changed := s.members != members
	s.members = members
	return changed
}

// mayReport reports whether what checks found is not what was refused last.
func (s *session) mayReport(findings string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return findings != s.refused
}

// refusedReport notes that what checks found was refused.
func (s *session) refusedReport(findings string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refused = findings
}
