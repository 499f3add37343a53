package replica

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// Server is a member of the cluster, as the newest configuration known here has it.
type Server struct {
	// ID of its data directory.
	ID string
	// Address of its Raft port.
	Address string
	// Voter: it votes; otherwise it is a learner.
	Voter bool
	// LastIndex is the last log index it has reported, and LastContact how long ago it answered; both only on the leader, and 0
	// and negative if it has not answered.
	LastIndex   uint64
	LastContact time.Duration
}

const (
	bootstrapTimeout = 30 * time.Second
	memberTimeout    = 10 * time.Second
)

// Servers lists the members, this one included.
func (m *Member[V]) Servers() []Server {
	var out []Server
	for _, s := range m.raft.GetConfiguration().Configuration().Servers {
		server := Server{ID: string(s.ID), Address: string(s.Address), Voter: s.Suffrage == raft.Voter, LastContact: -1}
		if server.ID == m.id {
			server.LastIndex, server.LastContact = m.raft.LastIndex(), 0
		} else if n, ok := m.gate.news(s.ID); ok && m.leads() {
			server.LastIndex, server.LastContact = n.lastIndex, time.Since(n.at)
		}
		out = append(out, server)
	}
	return out
}

func (m *Member[V]) server(id string) (Server, error) {
	for _, s := range m.Servers() {
		if s.ID == id {
			return s, nil
		}
	}
	return Server{}, fmt.Errorf("%w: %s", ErrUnknownMember, id)
}

func (m *Member[V]) voters() int {
	n := 0
	for _, s := range m.Servers() {
		if s.Voter {
			n++
		}
	}
	return n
}

// Bootstrap begins a cluster of which this member is the only one; others join as learners. It waits until the command is committed. An
// attempt that was interrupted can be repeated; ErrBootstrapped if the cluster has begun already.
func (m *Member[V]) Bootstrap(b *logv1.Bootstrap) error {
	ctx, cancel := context.WithTimeout(context.Background(), bootstrapTimeout)
	defer cancel()
	if m.View().ClusterID() != "" {
		return ErrBootstrapped
	}
	err := m.await(ctx, func() error {
		self := raft.Server{ID: raft.ServerID(m.id), Address: raft.ServerAddress(m.address), Suffrage: raft.Voter}
		return m.raft.BootstrapCluster(raft.Configuration{Servers: []raft.Server{self}}).Error()
	})
	if errors.Is(err, raft.ErrCantBootstrap) {
		if s := m.Servers(); len(s) != 1 || s[0].ID != m.id {
			return ErrBootstrapped
		}
	} else if err != nil {
		return fmt.Errorf("bootstrap: %w", err)
	}
	for {
		changed := m.LeaderChanged()
		if m.leads() {
			break
		}
		select {
		case <-changed:
		case <-m.stop:
			return ErrClosed
		case <-ctx.Done():
			return fmt.Errorf("bootstrap: this member does not become the leader: %w", ctx.Err())
		}
	}
	if _, err := m.ReadIndex(ctx); err != nil {
		return fmt.Errorf("bootstrap: %w", err)
	}
	if m.View().ClusterID() != "" {
		return ErrBootstrapped
	}
	self := &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_MEMBER, Name: m.cfg.Name}
	r, err := m.Propose(ctx, &logv1.Command{Principal: self, Op: &logv1.Command_Bootstrap{Bootstrap: b}})
	if err != nil {
		return fmt.Errorf("bootstrap: %w", err)
	}
	if d := r.GetRefusal(); d != nil {
		return fmt.Errorf("bootstrap: %s", d.GetSentence())
	}
	return nil
}

// change runs a change of members on the leader and waits for its commit.
func (m *Member[V]) change(ctx context.Context, what string, f func() raft.IndexFuture) error {
	if err := m.Serving(); err != nil {
		return err
	}
	if !m.leads() {
		return m.notLeader()
	}
	if err := m.await(ctx, func() error { return f().Error() }); err != nil {
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("%w: %s: %w", ErrOutcomeUnknown, what, ctx.Err())
		case errors.Is(err, raft.ErrEnqueueTimeout):
			return fmt.Errorf("%w: %s: an earlier change of members is not committed yet", ErrBusy, what)
		}
		return fmt.Errorf("%s: %w", what, m.outcomeOf(err))
	}
	return nil
}

// AddLearner adds a member that gets everything but does not vote. If the address belongs to another id, that member was wiped or set
// aside and has come back under the new id: the old one is removed first. Leader only.
func (m *Member[V]) AddLearner(ctx context.Context, id, address string) error {
	for _, s := range m.Servers() {
		if s.Address != address || s.ID == id {
			continue
		}
		if s.ID == m.id {
			return fmt.Errorf("add learner %s: the address %s is that of the leader", id, address)
		}
		m.log.Warn("a member has come back under a new id; the old one is removed", "old", s.ID, "new", id, "address", address)
		if err := m.Remove(ctx, s.ID); err != nil {
			return fmt.Errorf("add learner %s: %w", id, err)
		}
	}
	return m.change(ctx, "add learner "+id, func() raft.IndexFuture {
		return m.raft.AddNonvoter(raft.ServerID(id), raft.ServerAddress(address), 0, memberTimeout)
	})
}

// Promote lets a learner vote. ErrNotCaughtUp if it lacks more than 1,024 entries or has not answered within two election timeouts:
// a voter that lags counts for the quorum without being of use. Leader only.
func (m *Member[V]) Promote(ctx context.Context, id string) error {
	if !m.leads() {
		return m.notLeader()
	}
	s, err := m.server(id)
	if err != nil {
		return fmt.Errorf("promote: %w", err)
	}
	if s.Voter {
		return nil
	}
	if limit := 2 * m.cfg.Profile.Election; s.LastContact < 0 || s.LastContact > limit {
		return fmt.Errorf("%w: member %s at %s has not answered within %v", ErrNotCaughtUp, id, s.Address, limit)
	}
	if last := m.raft.LastIndex(); s.LastIndex+promoteLag < last {
		return fmt.Errorf("%w: member %s has entry %d of %d; wait until it lacks at most %d", ErrNotCaughtUp, id, s.LastIndex, last, promoteLag)
	}
	return m.change(ctx, "promote "+id, func() raft.IndexFuture {
		return m.raft.AddVoter(raft.ServerID(id), raft.ServerAddress(s.Address), 0, memberTimeout)
	})
}

// Remove removes a member. Leader only; a leader may remove itself, and another one is elected.
func (m *Member[V]) Remove(ctx context.Context, id string) error {
	if !m.leads() {
		return m.notLeader()
	}
	if _, err := m.server(id); err != nil {
		return fmt.Errorf("remove: %w", err)
	}
	return m.change(ctx, "remove "+id, func() raft.IndexFuture {
		return m.raft.RemoveServer(raft.ServerID(id), 0, memberTimeout)
	})
}

// Transfer makes another voter the leader: the one with that id, or, if id is empty or "-", the one that has most entries. The
// duties given to Lead have ended before. Leader only.
func (m *Member[V]) Transfer(ctx context.Context, id string) error {
	if err := m.Serving(); err != nil {
		return err
	}
	if !m.leads() {
		return m.notLeader()
	}
	target, err := m.successor()
	if id != "" && id != "-" {
		target, err = m.server(id)
	}
	if err != nil {
		return fmt.Errorf("transfer leadership: %w", err)
	}
	if target.ID == m.id || !target.Voter {
		return fmt.Errorf("transfer leadership: member %s can't take it: it leads already or does not vote", target.ID)
	}
	if err := m.handOver(ctx, target); err != nil {
		return fmt.Errorf("transfer leadership to %s: %w", target.ID, err)
	}
	return nil
}

// successor is the other voter that has answered lately and has most entries; the one to which this member handed over last, because it
// could not lead itself, only if there is no other.
func (m *Member[V]) successor() (Server, error) {
	var best, last Server
	handed, _ := m.handed.Load().(string)
	others := 0
	for _, s := range m.Servers() {
		if s.ID == m.id || !s.Voter {
			continue
		}
		others++
		if s.LastContact < 0 || s.LastContact > m.cfg.Profile.Lease {
			continue
		}
		if s.ID == handed {
			last = s
		} else if best.ID == "" || s.LastIndex > best.LastIndex {
			best = s
		}
	}
	if best.ID == "" {
		best = last
	}
	if best.ID == "" {
		return best, errNoSuccessor(others)
	}
	return best, nil
}

func (m *Member[V]) handOver(ctx context.Context, to Server) error {
	resume, err := m.yield(ctx)
	if err != nil {
		return err
	}
	defer resume()
	err = m.await(ctx, func() error {
		return m.raft.LeadershipTransferToServer(raft.ServerID(to.ID), raft.ServerAddress(to.Address)).Error()
	})
	if err != nil && ctx.Err() == nil && m.leads() {
		return m.outcomeOfTransfer(err)
	}
	return ctx.Err()
}

func (m *Member[V]) outcomeOfTransfer(err error) error {
	if errors.Is(err, raft.ErrNotLeader) {
		return nil // it has gone already
	}
	return fmt.Errorf("the other member did not take over: %w", err)
}
