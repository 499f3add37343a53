package dev

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"
)

// stopWait bounds how long a controller may take to end by itself when the cluster goes down.
const stopWait = 5 * time.Second

// Action is what was done to a process.
type Action struct {
	Name string `json:"name"`
	Role string `json:"role"`
	// Pid of the process itself; 0 if it did not run.
	Pid int `json:"pid"`
	// Others is how many further processes (supervisors, tasks) were signalled.
	Others int `json:"others"`
	// At is the moment just before it was done to the process itself.
	At time.Time `json:"at"`
}

// change resolves a name ("leader" too) and calls f with the lock held.
func (c *Cluster) change(ctx context.Context, name string, f func(*state, *process) error) error {
	if name == "leader" { // before the lock: a search for the leader may take seconds
		leader, err := c.Leader(ctx)
		if err != nil {
			return err
		}
		name = leader
	}
	unlock, err := lock(c.dir)
	if err != nil {
		return err
	}
	defer unlock()
	s, err := loadState(c.dir)
	if err != nil {
		return err
	}
	p, err := s.find(name)
	if err != nil {
		return err
	}
	return f(s, p)
}

// Kill sends SIGKILL to a process and waits until it is gone. For a node everything of it dies, as in a power loss,
// and its next start is a new boot; with agentOnly just the agent. A process that does not run is an error.
func (c *Cluster) Kill(ctx context.Context, name string, agentOnly bool) (a Action, err error) {
	err = c.change(ctx, name, func(s *state, p *process) error {
		if agentOnly && p.Role != RoleNode {
			return fmt.Errorf("%s is a controller: --agent-only is for nodes", p.Name)
		}
		a = Action{Name: p.Name, Role: p.Role, Pid: p.Pid}
		if !running(p.Pid, p.Start) {
			if p.Role == RoleController || agentOnly {
				return fmt.Errorf("%s does not run", p.Name)
			}
			a.Pid = 0 // its jobs may still be there
		}
		if p.Role == RoleNode && !agentOnly {
			p.PowerLost = true
			if err := s.save(c.dir); err != nil {
				return err
			}
		}
		a.At = time.Now()
		if _, err := send(p.Pid, p.Start, syscall.SIGKILL); err != nil {
			return err
		}
		if p.Role == RoleNode && !agentOnly {
			if a.Others, err = killTree(c.places(s, p)); err != nil {
				return fmt.Errorf("kill %s: %w", p.Name, err)
			}
		}
		return awaitEnd(p.Pid, p.Start, killWait)
	})
	return a, err
}

// Pause sends SIGSTOP to a process and waits until it stands still; for a node to its agent, and with whole to its supervisors and tasks too.
func (c *Cluster) Pause(ctx context.Context, name string, whole bool) (Action, error) {
	return c.signal(ctx, name, whole, syscall.SIGSTOP)
}

// Resume sends SIGCONT to what Pause stopped.
func (c *Cluster) Resume(ctx context.Context, name string, whole bool) (Action, error) {
	return c.signal(ctx, name, whole, syscall.SIGCONT)
}

func (c *Cluster) signal(ctx context.Context, name string, whole bool, signal syscall.Signal) (a Action, err error) {
	err = c.change(ctx, name, func(s *state, p *process) error {
		if whole && p.Role != RoleNode {
			return fmt.Errorf("%s is a controller: --tree is for nodes", p.Name)
		}
		a = Action{Name: p.Name, Role: p.Role, Pid: p.Pid, At: time.Now()}
		hit, err := send(p.Pid, p.Start, signal)
		if err != nil {
			return err
		}
		if !hit {
			return fmt.Errorf("%s does not run: start it with `muster dev start --dir %s %s`", p.Name, c.dir, p.Name)
		}
		if signal == syscall.SIGSTOP {
			if err := awaitStop(p.Pid, p.Start); err != nil {
				return err
			}
		}
		if whole {
			if a.Others, err = signalTree(c.places(s, p), signal); err != nil {
				return fmt.Errorf("signal the tree of %s: %w", p.Name, err)
			}
		}
		return nil
	})
	return a, err
}

// Stop asks a process to end (SIGTERM) and waits until it has: a controller hands leadership over, an agent leaves its work
// running.
func (c *Cluster) Stop(ctx context.Context, name string) (a Action, err error) {
	err = c.change(ctx, name, func(_ *state, p *process) error {
		a = Action{Name: p.Name, Role: p.Role, Pid: p.Pid}
		hit, err := send(p.Pid, p.Start, syscall.SIGTERM)
		if err != nil {
			return err
		}
		if !hit {
			return fmt.Errorf("%s does not run", p.Name)
		}
		return awaitEnd(p.Pid, p.Start, stopWait)
	})
	return a, err
}

// Start starts a process that does not run, and returns when it is ready: a controller serves, an agent has joined. With bin, the
// process has the programs in that directory from now on: that is how one process after the other is upgraded.
func (c *Cluster) Start(ctx context.Context, name, bin string) (a Action, err error) {
	err = c.change(ctx, name, func(s *state, p *process) error {
		if running(p.Pid, p.Start) {
			return fmt.Errorf("%s runs already (process %d)", p.Name, p.Pid)
		}
		if bin != "" {
			p.Bin = bin
		}
		a.At = time.Now()
		offset, err := c.startProcess(s, p)
		if err != nil {
			return err
		}
		a.Name, a.Role, a.Pid = p.Name, p.Role, p.Pid
		return c.admit(ctx, s, p, offset)
	})
	return a, err
}

// Down ends everything: agents and all that belongs to jobs at once, as in a power loss, controllers in order. It may be
// called again, and for a cluster whose up failed. The data stay: Up goes on with them.
func (c *Cluster) Down() error {
	unlock, err := lock(c.dir)
	if err != nil {
		return err
	}
	defer unlock()
	s, err := loadState(c.dir)
	if err != nil {
		return err
	}
	for _, p := range s.agents() {
		p.PowerLost = true
	}
	if err := s.save(c.dir); err != nil {
		return err
	}
	var failures []error
	var places []place
	for _, p := range s.agents() {
		_, err := send(p.Pid, p.Start, syscall.SIGKILL)
		failures = append(failures, err)
		places = append(places, c.places(s, p)...)
	}
	_, err = killTree(places)
	failures = append(failures, err)
	for _, p := range s.controllers() {
		_, err := send(p.Pid, p.Start, syscall.SIGTERM)
		failures = append(failures, err)
		_, err = send(p.Pid, p.Start, syscall.SIGCONT) // a stopped one must hear it
		failures = append(failures, err)
	}
	deadline := time.Now().Add(stopWait)
	for _, p := range s.Processes {
		if awaitEnd(p.Pid, p.Start, time.Until(deadline)) == nil {
			continue
		}
		_, err := send(p.Pid, p.Start, syscall.SIGKILL)
		failures = append(failures, err, awaitEnd(p.Pid, p.Start, killWait))
	}
	return errors.Join(append(failures, removeLink(s.Link, c.dir))...)
}
