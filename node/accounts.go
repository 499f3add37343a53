package node

import (
	"fmt"
	"os"
	"os/user"
	"strconv"
	"sync"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// account is as whom a step's tasks run.
type account struct {
	uid, gid uint32
	groups   []uint32
	home     string
}

// accounts looks users up and remembers them for a minute, because a launch storm of one user would read the group file
// again and again.
type accounts struct {
	mu    sync.Mutex
	known map[uint32]knownAccount
}

type knownAccount struct {
	account
	at time.Time
}

func newAccounts() *accounts { return &accounts{known: make(map[uint32]knownAccount)} }

// find returns the account of a job's owner. A user that the node does not know runs by number, in the group that the
// submission named and without others.
func (c *accounts) find(owner *apiv1.JobOwner) (account, error) {
	if me := os.Geteuid(); me != 0 && uint32(me) != owner.GetUid() {
		return account{}, &prepareError{usersFault: true, sentence: fmt.Sprintf(
			"the agent runs as user %d without root and cannot run work of user %d (%s)", me, owner.GetUid(), owner.GetUser())}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if k, ok := c.known[owner.GetUid()]; ok && age(k.at) < accountTTL {
		k.gid = owner.GetGid()
		return k.account, nil
	}
	found := account{uid: owner.GetUid(), gid: owner.GetGid(), home: "/"}
	u, err := user.LookupId(strconv.FormatUint(uint64(owner.GetUid()), 10))
	if err == nil {
		found.home = u.HomeDir
		if found.groups, err = groupsOf(u); err != nil {
			return account{}, fmt.Errorf("look up the groups of user %s: %w", u.Username, err)
		}
	} else if _, unknown := err.(user.UnknownUserIdError); !unknown {
		return account{}, fmt.Errorf("look up user %d: %w", owner.GetUid(), err)
	}
	if len(c.known) >= 1024 {
		clear(c.known)
	}
	c.known[owner.GetUid()] = knownAccount{found, time.Now()}
	return found, nil
}

func groupsOf(u *user.User) ([]uint32, error) {
	ids, err := u.GroupIds()
	if err != nil {
		return nil, err
	}
	var groups []uint32
	for _, id := range ids {
		if n, err := strconv.ParseUint(id, 10, 32); err == nil {
			groups = append(groups, uint32(n))
		}
	}
	return groups, nil
}
