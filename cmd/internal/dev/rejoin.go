package dev

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
)

// others returns the API addresses of the controllers besides p, in order.
func (s *state) others(p *process) []string {
	var addresses []string
	for _, other := range s.controllers() {
		if other != p {
			addresses = append(addresses, other.Listen)
		}
	}
	return addresses
}

// Rejoin sets the state of a controller that does not run aside (it stays beside the new one, for inspection) and starts it
// as a new member, which learns the state from the others and then votes.
func (c *Cluster) Rejoin(ctx context.Context, name string) (a Action, err error) {
	err = c.change(ctx, name, func(s *state, p *process) error {
		switch {
		case p.Role != RoleController:
			return fmt.Errorf("%s is a node: only controllers rejoin; start it with `muster dev start %s`", p.Name, p.Name)
		case running(p.Pid, p.Start):
			return fmt.Errorf("%s runs (process %d): kill it first with `muster dev kill %s`", p.Name, p.Pid, p.Name)
		case len(s.controllers()) == 1:
			return fmt.Errorf("%s is the only controller: nobody could tell it the state", p.Name)
		}
		out, err := exec.CommandContext(ctx, filepath.Join(s.binOf(p), "muster-controller"), "rejoin", "--dir", filepath.Join(c.root(s), p.Name)).CombinedOutput()
		if err != nil {
			return fmt.Errorf("set the state of %s aside: %w: %s", p.Name, err, strings.TrimSpace(string(out)))
		}
		p.Admitted, p.Rejoins = false, true
		offset, err := c.startProcess(s, p)
		if err != nil {
			return err
		}
		a = Action{Name: p.Name, Role: p.Role, Pid: p.Pid}
		return c.admit(ctx, s, p, offset)
	})
	return a, err
}
