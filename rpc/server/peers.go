package server

import (
	"context"
	"fmt"
	"sync"

	"github.com/muster-hpc/muster/fsm/replica"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
	"github.com/muster-hpc/muster/proto/muster/peer/v1/peerv1connect"
	"github.com/muster-hpc/muster/rpc/client"
)

// Peers finds the other controllers. Addresses come from the state; while the state does not name a member yet, the
// seeds are asked who they are.
type Peers struct {
	client  *client.Client
	replica Replica
	seeds   []string

	mu      sync.Mutex
	clients map[string]peerv1connect.PeerServiceClient // by address
	found   map[string]string                          // address by id, from seeds
}

// NewPeers makes the connections to the other controllers of a member. The client has this controller's certificate; seeds
// are API addresses to ask while the state names nobody.
func NewPeers(c *client.Client, r Replica, seeds []string) *Peers {
	return &Peers{client: c, replica: r, seeds: seeds,
		clients: map[string]peerv1connect.PeerServiceClient{}, found: map[string]string{}}
}

// at returns the service of the controller at an address.
func (p *Peers) at(address string) peerv1connect.PeerServiceClient {
	p.mu.Lock()
	defer p.mu.Unlock()
	c, ok := p.clients[address]
	if !ok {
		c = peerv1connect.NewPeerServiceClient(p.client.Peer(address))
		p.clients[address] = c
	}
	return c
}

// announced returns the API address of a member from the state here, or "".
func (p *Peers) announced(id string) string {
	if id == "" {
		return ""
	}
	for member := range p.replica.View().Members() {
		if member.Id == id {
			return member.ApiAddress
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.found[id]
}

// of returns the service of the member with an id, asking the seeds if the state does not name it; nil if nobody knows
// its address.
func (p *Peers) of(ctx context.Context, id string) peerv1connect.PeerServiceClient {
	if address := p.announced(id); address != "" {
		return p.at(address)
	}
	for _, seed := range p.seeds {
		ctx, cancel := context.WithTimeout(ctx, statusTimeout)
		status, err := p.at(seed).Status(ctx, &peerv1.StatusRequest{})
		cancel()
		if err != nil || status.Member == nil {
			continue
		}
		p.mu.Lock()
		p.found[status.Member.Id] = seed
		p.mu.Unlock()
		if status.Member.Id == id {
			return p.at(seed)
		}
	}
	return nil
}

// leader returns the leader and, if it is another controller whose address is known, its service.
func (p *Peers) leader(ctx context.Context) (replica.Leader, peerv1connect.PeerServiceClient) {
	leader := p.replica.Leader()
	if leader.IsSelf || leader.ID == "" {
		return leader, nil
	}
	return leader, p.of(ctx, leader.ID)
}

// Digest asks a member for its digest at a marked entry.
func (p *Peers) Digest(ctx context.Context, member string, index uint64) (*peerv1.DigestResponse, error) {
	service, err := p.need(ctx, member)
	if err != nil {
		return nil, err
	}
	return service.Digest(ctx, &peerv1.DigestRequest{Index: index})
}

// Quarantine tells a member that its state differs from the majority's.
func (p *Peers) Quarantine(ctx context.Context, member string, request *peerv1.QuarantineRequest) error {
	service, err := p.need(ctx, member)
	if err != nil {
		return err
	}
	_, err = service.Quarantine(ctx, request)
	return err
}

func (p *Peers) need(ctx context.Context, member string) (peerv1connect.PeerServiceClient, error) {
	if service := p.of(ctx, member); service != nil {
		return service, nil
	}
	return nil, fmt.Errorf("the address of member %s is not known: it has not announced itself yet", member)
}
