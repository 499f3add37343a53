package node

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"strings"
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
	k, ok := c.known[owner.GetUid()]
	c.mu.Unlock()
	if ok && age(k.at) < accountTTL {
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
	} else if elsewhere(nameServices) {
		// Not in the files, but a directory may know him; if none does, he has no groups but the one of the submission.
		if ids, err := askedGroups(strconv.FormatUint(uint64(owner.GetUid()), 10)); err == nil {
			found.groups = numbers(ids)
		}
	}
	c.mu.Lock() // not while others are asked, which may take long
	defer c.mu.Unlock()
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
	if elsewhere(nameServices) {
		if ids, err = askedGroups(u.Username); err != nil {
			return nil, err
		}
	}
	return numbers(ids), nil
}

// nameServices says where the machine's C library looks for users and groups.
const nameServices = "/etc/nsswitch.conf"

func numbers(ids []string) []uint32 {
	var groups []uint32
	for _, id := range ids {
		if n, err := strconv.ParseUint(id, 10, 32); err == nil {
			groups = append(groups, uint32(n))
		}
	}
	return groups
}

// elsewhere reports whether the machine's groups are not all in its own files: then only its C library can find them, which this program
// is built without.
func elsewhere(path string) bool {
	data, err := os.ReadFile(path)
	if err != nil {
		return false // then it is files
	}
	for line := range strings.Lines(string(data)) {
		line, _, _ = strings.Cut(line, "#")
		name, sources, ok := strings.Cut(strings.TrimSpace(line), ":")
		if !ok || name != "group" && name != "initgroups" {
			continue
		}
		for source := range strings.FieldsSeq(sources) {
			if source != "files" && source != "compat" && source != "systemd" && !strings.ContainsAny(source, "[]=") {
				return true
			}
		}
	}
	return false
}

// askedGroups are a user's groups as the C library finds them, which the program id asks.
func askedGroups(name string) ([]string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), groupsTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, "id", "-G", "--", name).Output()
	if err != nil {
		return nil, fmt.Errorf("ask id for the groups of %s: %w", name, err)
	}
	return strings.Fields(string(out)), nil
}
