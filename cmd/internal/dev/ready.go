package dev

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/muster-hpc/muster/ops/pki"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc/client"
)

const (
	// readyTimeout bounds the start of one process: state is restored, or a first election is held.
	readyTimeout = 60 * time.Second
	// askTimeout bounds one question to one controller, which may be stopped.
	askTimeout = time.Second
)

// startAll starts what does not run, and waits until all controllers vote and all nodes are up.
func (c *Cluster) startAll(ctx context.Context, s *state) error {
	boot, err := machineBoot()
	if err != nil {
		return err
	}
	if s.MachineBoot != boot {
		for _, p := range s.Processes { // the machine was restarted: so were its nodes, and pids mean nothing
			p.PowerLost = p.PowerLost || s.MachineBoot != ""
			p.Pid, p.Start = 0, 0
		}
		s.MachineBoot = boot
	}
	if err := c.startControllers(ctx, s); err != nil {
		return err
	}
	c.progress("agents")
	offsets := map[*process]int64{}
	for _, p := range s.agents() {
		if running(p.Pid, p.Start) {
			continue
		}
		if offsets[p], err = c.startProcess(s, p); err != nil {
			return err
		}
	}
	for _, p := range s.agents() {
		if offset, started := offsets[p]; started {
			if err := c.admit(ctx, s, p, offset); err != nil {
				return err
			}
		}
	}
	return c.awaitNodes(ctx, s)
}

// startControllers starts the controllers: at first one by one, because the first makes the cluster and the others ask
// it to let them in; later all at once, because they need each other for a majority.
func (c *Cluster) startControllers(ctx context.Context, s *state) error {
	offsets := map[*process]int64{}
	for _, p := range s.controllers() {
		if running(p.Pid, p.Start) {
			continue
		}
		c.progress("controller " + p.Name)
		offset, err := c.startProcess(s, p)
		if err != nil {
			return err
		}
		if p.Admitted {
			offsets[p] = offset
			continue
		}
		if err := c.admit(ctx, s, p, offset); err != nil {
			return err
		}
	}
	for _, p := range s.controllers() {
		if offset, started := offsets[p]; started {
			if err := c.admit(ctx, s, p, offset); err != nil {
				return err
			}
		}
	}
	c.progress("waiting until all controllers vote")
	return c.awaitVoters(ctx, s)
}

// startProcess starts one process and records it.
func (c *Cluster) startProcess(s *state, p *process) (offset int64, err error) {
	if p.PowerLost {
		p.Boot++
		p.PowerLost = false
	}
	program, args, err := c.command(s, p)
	if err != nil {
		return 0, err
	}
	p.Pid, p.Start, offset, err = launch(program, args, c.logPath(p), c.dir)
	return offset, errors.Join(err, s.save(c.dir))
}

// admit waits until a process that was just started is ready, and records that it has been.
func (c *Cluster) admit(ctx context.Context, s *state, p *process, offset int64) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("not within %v", readyTimeout))
	defer cancel()
	if err := awaitReady(ctx, p, c.logPath(p), offset); err != nil {
		return err
	}
	if p.Admitted {
		return nil
	}
	p.Admitted = true
	return s.save(c.dir)
}

// ask makes a client for the given controllers with the rights of a member.
func (c *Cluster) ask(addresses ...string) (*client.Client, error) {
	identity, err := pki.Load(filepath.Join(c.dir, toolName, "tls"))
	if err != nil {
		return nil, err
	}
	return client.OpenDirect(client.Direct{
		Controllers: addresses, TLS: identity.ClientTLS(pki.RoleController, ""), NodeTLS: identity.ClientTLS(pki.RoleNode, ""),
		Timeout: readyTimeout,
	}), nil
}

// awaitVoters promotes learners until every controller votes and one leads.
func (c *Cluster) awaitVoters(ctx context.Context, s *state) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	api, err := c.ask(s.controllerAddresses()...)
	if err != nil {
		return err
	}
	defer api.Close()
	var names []string
	for _, p := range s.controllers() {
		names = append(names, p.Name)
	}
	var last error
	for {
		done, err := promoteLearners(ctx, api, names)
		if done {
			return nil
		}
		if err != nil {
			last = err
		}
		if err := pause(ctx); err != nil {
			return fmt.Errorf("not all controllers vote within %v: %w", readyTimeout, errors.Join(err, last))
		}
	}
}

// promoteLearners lets every learner vote, and reports whether all the named controllers do and one leads. A member has no
// name until it has announced itself.
func promoteLearners(ctx context.Context, api *client.Client, names []string) (done bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*askTimeout)
	defer cancel()
	answer, err := api.Cluster().GetCluster(ctx, &apiv1.GetClusterRequest{})
	if err != nil {
		return false, fmt.Errorf("ask for the members: %w", err)
	}
	votes, leads := map[string]bool{}, false
	for _, m := range answer.Members {
		leads = leads || m.Leader
		if m.Voter {
			votes[m.Name] = true
			continue
		}
		_, err := api.Cluster().ChangeMember(ctx, &apiv1.ChangeMemberRequest{Change: &apiv1.ChangeMemberRequest_Promote{Promote: m.Id}})
		if err != nil {
			return false, fmt.Errorf("promote %s: %w", m.Name, err)
		}
	}
	for _, name := range names {
		if !votes[name] {
			return false, fmt.Errorf("%s does not vote yet", name)
		}
	}
	return leads, nil
}

// awaitNodes waits until every node is up.
func (c *Cluster) awaitNodes(ctx context.Context, s *state) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	api, err := c.ask(s.controllerAddresses()...)
	if err != nil {
		return err
	}
	defer api.Close()
	want := map[string]bool{}
	for _, p := range s.agents() {
		for _, n := range p.Nodes {
			want[n.Name] = true
		}
	}
	for {
		answer, err := api.Cluster().ListNodes(ctx, &apiv1.ListNodesRequest{})
		up := 0
		if err == nil {
			for _, n := range answer.Nodes {
				if want[n.Spec.GetName()] && n.State == apiv1.NodeState_NODE_STATE_UP {
					up++
				}
			}
			if up == len(want) {
				return nil
			}
		}
		if waitErr := pause(ctx); waitErr != nil {
			return fmt.Errorf("%d of %d nodes are up: %w (see %s)", up, len(want), errors.Join(waitErr, err), filepath.Join(c.dir, "logs"))
		}
	}
}

func pause(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(2 * pollInterval):
		return nil
	}
}
