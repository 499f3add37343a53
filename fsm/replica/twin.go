package replica

import (
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"
)

// ErrCopied means that another process takes part in the cluster under this member's id.
var ErrCopied = errors.New("the data directory is a copy of a live member's")

// twinTimeout is how long the address at which the cluster has this member may take to say who is there.
const twinTimeout = 500 * time.Millisecond

// checkTwin refuses to take part if a member with this id answers at the address that the cluster has for it, and that address is not this
// member's: then this directory was copied from a live one, and two members with one id would undo each other's votes. A member that has
// moved to another address passes, because nobody with its id answers at the old one.
func (m *Member[V]) checkTwin(s *streams) error {
	for _, server := range m.Servers() {
		if server.ID != m.id || server.Address == m.address {
			continue
		}
		conn, err := s.Dial(addressFor(raft.ServerID(m.id), raft.ServerAddress(server.Address)), twinTimeout)
		if err != nil {
			m.log.Info("this member has moved to another address", "from", server.Address, "to", m.address, "old", err)
			return nil
		}
		return errors.Join(fmt.Errorf("%w: a member with the id %s answers at %s, while this one is at %s. Each member needs a directory of its "+
			"own: start this one with an empty directory and let it join, or stop the other one first", ErrCopied, m.id, server.Address, m.address),
			conn.Close())
	}
	return nil
}
