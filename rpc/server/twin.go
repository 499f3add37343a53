package server

import (
	"context"
	"sync"

	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
)

// twin returns an address other than this controller's own at which a controller answers with the same id, or "":
// its data directory or this one is a copy.
func (s *Server) twin(ctx context.Context, addresses []string) string {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	var mu sync.Mutex
	found := ""
	var group sync.WaitGroup
	asked := map[string]bool{"": true, s.self.GetApiAddress(): true}
	for _, address := range addresses {
		if asked[address] {
			continue
		}
		asked[address] = true
		group.Go(func() {
			status, err := s.peers.at(address).Status(ctx, &peerv1.StatusRequest{})
			// The same process may be reachable at two addresses; then it says its own.
			if err != nil || status.GetMember().GetId() != s.replica.ID() || status.Member.ApiAddress == s.self.GetApiAddress() {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			found = address
		})
	}
	group.Wait()
	return found
}
