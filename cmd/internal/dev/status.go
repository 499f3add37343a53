package dev

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/muster-hpc/muster/rpc/client"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// Status is what `muster dev status --json` prints.
type Status struct {
	// Leader is the name of the leading controller; empty if none leads.
	Leader string `json:"leader"`
	// Term is the highest Raft term that a controller knows; 0 if none answers.
	Term uint64 `json:"term"`
	// Cluster is the cluster's name.
	Cluster string `json:"cluster"`
	// Dir is the cluster's directory.
	Dir string `json:"dir"`
	// Processes are all processes, controllers first.
	Processes []ProcessStatus `json:"processes"`
}

// ProcessStatus is one process in Status.
type ProcessStatus struct {
	Name string `json:"name"`
	Role string `json:"role"` // "controller" or "node"
	Pid  int    `json:"pid"`  // 0 if it does not run
	// Alive: the process is there (also while it is stopped).
	Alive bool `json:"alive"`
	// Address is that of its API.
	Address string `json:"address"`
	// Paused: it is stopped by SIGSTOP.
	Paused bool `json:"paused"`
	// Raft is a controller's Raft address.
	Raft string `json:"raft,omitempty"`
	// Answers: a controller answered within a second.
	Answers bool `json:"answers,omitempty"`
	// Voter: a controller that votes, by its own word.
	Voter bool `json:"voter,omitempty"`
	// Revision is the Raft index of the state with which a controller answered.
	Index uint64 `json:"index,omitempty"`
	// Nodes are the names of the nodes that an agent process carries.
	Nodes []string `json:"nodes,omitempty"`
	// Sockets are the local sockets of those nodes.
	Sockets []string `json:"sockets,omitempty"`
	// BootID is the declared boot id.
	BootID string `json:"boot_id,omitempty"`
	// Log is the file with the process's output.
	Log string `json:"log"`
}

// Status looks at all processes and asks all controllers.
func (c *Cluster) Status(ctx context.Context) (*Status, error) {
	s, err := loadState(c.dir)
	if err != nil {
		return nil, err
	}
	status := &Status{Cluster: s.Cluster, Dir: c.dir}
	for _, p := range s.Processes {
		one := ProcessStatus{Name: p.Name, Role: p.Role, Address: p.Listen, Raft: p.Raft, Log: c.logPath(p)}
		if running(p.Pid, p.Start) {
			one.Pid, one.Alive = p.Pid, true
			now, err := statOf(p.Pid)
			one.Paused = err == nil && now.state == 'T'
		}
		for _, n := range p.Nodes {
			one.Nodes = append(one.Nodes, n.Name)
			one.Sockets = append(one.Sockets, c.socket(s, n.Name))
		}
		if p.Role == RoleNode {
			one.BootID = bootID(p)
		}
		status.Processes = append(status.Processes, one)
	}
	return status, c.askControllers(ctx, status)
}

// askControllers fills in what the controllers say. One that does not answer is no error: it may be dead or stopped.
func (c *Cluster) askControllers(ctx context.Context, status *Status) error {
	answers := make([]*apiv1.GetClusterResponse, len(status.Processes))
	var group sync.WaitGroup
	var failure error
	for i, p := range status.Processes {
		if p.Role != RoleController || !p.Alive || p.Paused {
			continue
		}
		api, err := c.ask(p.Address)
		if err != nil {
			failure = errors.Join(failure, err)
			continue
		}
		group.Go(func() {
			defer api.Close()
			answers[i] = stale(ctx, api)
		})
	}
	group.Wait()
	for i, answer := range answers {
		if answer == nil {
			continue
		}
		p := &status.Processes[i]
		p.Answers, p.Index = true, answer.Info.GetRevision().GetIndex()
		for _, m := range answer.Members {
			if m.Name == p.Name {
				p.Voter = m.Voter
			}
			if m.Leader && answer.Term >= status.Term {
				status.Leader, status.Term = m.Name, answer.Term
			}
		}
		if answer.Term > status.Term { // it knows of a newer term, whose leader it does not know
			status.Leader, status.Term = "", answer.Term
		}
	}
	for _, p := range status.Processes {
		if p.Name == status.Leader && (!p.Alive || p.Paused) {
			status.Leader = "" // the others have not noticed yet
		}
	}
	return failure
}

// stale returns what one controller knows by itself, nil if it does not say within askTimeout.
func stale(ctx context.Context, api *client.Client) *apiv1.GetClusterResponse {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	answer, err := api.Cluster().GetCluster(ctx, &apiv1.GetClusterRequest{
		Read: &apiv1.ReadOptions{Consistency: apiv1.ReadConsistency_READ_CONSISTENCY_STALE},
	})
	if err != nil {
		return nil
	}
	return answer
}

// leaderWait bounds the search for a leader: an election takes a second or two.
const leaderWait = 15 * time.Second

// Leader returns the name of the leading controller; it waits through an election.
func (c *Cluster) Leader(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, leaderWait)
	defer cancel()
	for {
		status, err := c.Status(ctx)
		if err != nil {
			return "", err
		}
		if status.Leader != "" {
			return status.Leader, nil
		}
		if err := pause(ctx); err != nil {
			var dead []string
			for _, p := range status.Processes {
				if p.Role == RoleController && !p.Answers {
					dead = append(dead, p.Name)
				}
			}
			return "", fmt.Errorf("no controller leads; no answer from %s: start what is down with `muster dev start --dir %s NAME`",
				strings.Join(dead, ", "), c.dir)
		}
	}
}

// Variable is one variable of the environment for users of the cluster.
type Variable struct{ Name, Value string }

// Env returns the variables with which commands find this cluster as users of the given node; an empty name means the
// first. PATH is to be put before the present one.
func (c *Cluster) Env(nodeName string) ([]Variable, error) {
	s, err := loadState(c.dir)
	if err != nil {
		return nil, err
	}
	if nodeName == "" {
		nodeName = s.agents()[0].Nodes[0].Name
	}
	p, err := s.find(nodeName)
	if err != nil {
		return nil, err
	}
	if p.Role != RoleNode {
		return nil, fmt.Errorf("%s is a controller: users are vouched for by nodes", nodeName)
	}
	return []Variable{
		{"PATH", filepath.Join(s.Bin, "slurm") + ":" + s.Bin},
		{"MUSTER_DEV_DIR", c.dir},
		{"MUSTER_CONTROLLERS", strings.Join(s.controllerAddresses(), ",")},
		{"MUSTER_AGENT_SOCKET", c.socket(s, nodeName)},
	}, nil
}

// Dir is the cluster's directory.
func (c *Cluster) Dir() string { return c.dir }

// Log returns the path of a process's log.
func (c *Cluster) Log(name string) (string, error) {
	s, err := loadState(c.dir)
	if err != nil {
		return "", err
	}
	p, err := s.find(name)
	if err != nil {
		return "", err
	}
	return c.logPath(p), nil
}
