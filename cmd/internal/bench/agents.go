package bench

import (
	"context"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/dev"
	"github.com/muster-hpc/muster/ops/pki"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/rpc/client"
)

const (
	// agentsWatched is how long the load of the virtual agents is measured.
	agentsWatched = time.Minute
	// joinsAtOnce bounds the virtual agents that join at a time.
	joinsAtOnce = 64
	// joinTries bounds the tries of one of them, joinPause apart.
	joinTries = 60
	joinPause = 500 * time.Millisecond
	// syncSlack is how long beyond the hold an answer may take, as for real agents.
	syncSlack = time.Second
)

// agentsCluster has three controllers with the default lease and the calmer timeouts, and one real node.
func agentsCluster(Options) dev.Options { return dev.Options{Nodes: 1, Timing: "production"} }

// agents measures what idle nodes cost the controllers: virtual agents of this process join and Sync as real ones do, each
// with a certificate and a connection of its own.
func agents(ctx context.Context, r *run) error {
	status, err := r.cluster.Status(ctx)
	if err != nil {
		return err
	}
	var controllers []string
	for _, p := range status.Processes {
		if p.Role == dev.RoleController {
			controllers = append(controllers, p.Address)
		}
	}
	ca, err := pki.LoadCA(filepath.Join(r.cluster.Dir(), "ca"))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	fleet := &fleet{controllers: controllers}
	defer func() {
		cancel()
		fleet.group.Wait()
		fleet.close()
	}()
	begin := time.Now()
	if _, err := parallel(ctx, joinsAtOnce, func(ctx context.Context, caller int) (int, error) {
		for i := caller; i < r.Agents; i += joinsAtOnce {
			if err := fleet.add(ctx, ca, fmt.Sprintf("v%d", i+1)); err != nil {
				return 0, err
			}
			if i%1000 == 999 {
				r.say("%d virtual agents have joined after %.0f s", i+1, time.Since(begin).Seconds())
			}
		}
		return 0, nil
	}); err != nil {
		return err
	}
	r.tell("joining", "s", time.Since(begin).Seconds())
	return r.watch(ctx, fleet)
}

// watch measures for agentsWatched after every agent has a lease.
func (r *run) watch(ctx context.Context, fleet *fleet) error {
	for fleet.leased.Load() < int64(r.Agents) {
		if err := rest(ctx, 100*time.Millisecond); err != nil {
			return fmt.Errorf("%d of %d virtual agents have a lease: %w", fleet.leased.Load(), r.Agents, err)
		}
	}
	r.say("%d virtual agents have a lease; measuring for %v", r.Agents, agentsWatched)
	if err := rest(ctx, 10*time.Second); err != nil { // what the joins left to do
		return err
	}
	before, err := r.usages(ctx)
	if err != nil {
		return err
	}
	own, err := usageOf(os.Getpid())
	if err != nil {
		return err
	}
	from, err := r.index(ctx)
	if err != nil {
		return err
	}
	syncs, failures, lost := fleet.syncs.Load(), fleet.failures.Load(), fleet.lost.Load()
	begin := time.Now()
	if err := rest(ctx, agentsWatched); err != nil {
		return err
	}
	span := time.Since(begin)
	to, err := r.index(ctx)
	if err != nil {
		return err
	}
	after, err := r.usages(ctx)
	if err != nil {
		return err
	}
	mine, err := usageOf(os.Getpid())
	if err != nil {
		return err
	}
	leader, _ := spent(before, after, isLeader)
	followers, _ := spent(before, after, isFollower)
	minutes := float64(r.Agents) * span.Minutes()
	r.tell("leader_per_agent_minute", "CPU ms", 1000*leader/minutes)
	r.tell("followers_per_agent_minute", "CPU ms", 1000*followers/minutes)
	r.tell("agents_per_agent_minute", "CPU ms", 1000*(mine.cpu-own.cpu)/minutes)
	r.tell("cores_of_controllers", "", (leader+followers)/span.Seconds())
	r.tell("memory_of_leader", "MB", peak(after, isLeader))
	r.tell("memory_of_followers", "MB", peak(after, isFollower))
	r.tell("memory_of_agents", "MB", mine.presentMB)
	r.tell("log_entries", "1/s", float64(to-from)/span.Seconds())
	r.tell("syncs", "1/s", float64(fleet.syncs.Load()-syncs)/span.Seconds())
	r.tell("syncs_failed", "1/s", float64(fleet.failures.Load()-failures)/span.Seconds())
	r.add("leases_lost", "", 0, false, []float64{float64(fleet.lost.Load() - lost)})
	return nil
}

// index is the Raft index of the newest state that a controller answers with.
func (r *run) index(ctx context.Context) (uint64, error) {
	status, err := r.cluster.Status(ctx)
	newest := uint64(0)
	for _, p := range status.Processes {
		newest = max(newest, p.Index)
	}
	return newest, err
}

// rest waits.
func rest(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// fleet is many virtual agents.
type fleet struct {
	controllers []string
	group       sync.WaitGroup
	// leased counts agents that had a lease once; syncs, failures and lost count over all of them.
	leased, syncs, failures, lost atomic.Int64

	mu      sync.Mutex
	clients []*client.Client
}

// virtual is one virtual agent: it has no work, and holds what a Sync carries.
type virtual struct {
	fleet    *fleet
	name     string
	calls    *client.Client
	instance *apiv1.Instance
	at       int // of fleet.controllers
	number   uint32
	epoch    uint32
	lease    time.Duration
	sequence uint64
	granted  uint64
	sent     map[uint64]time.Time
	until    time.Time // the end of the lease
	seen     *apiv1.Revision
	holds    *apiv1.Revision
}

// add lets one more agent join and begin to Sync.
func (f *fleet) add(ctx context.Context, ca *pki.CA, name string) error {
	identity, err := ca.Issue(name, pki.RoleNode)
	if err != nil {
		return err
	}
	toControllers, toNodes := identity.ClientTLS(pki.RoleController, ""), identity.ClientTLS(pki.RoleNode, "")
	calls := client.OpenDirect(client.Direct{Controllers: f.controllers, TLS: toControllers, NodeTLS: toNodes, NodeName: name})
	f.mu.Lock()
	f.clients = append(f.clients, calls)
	f.mu.Unlock()
	h := fnv.New32a()
	_, _ = h.Write([]byte(name)) // never fails
	v := &virtual{fleet: f, calls: calls, at: int(h.Sum32() % uint32(len(f.controllers))), sent: map[uint64]time.Time{},
		instance: &apiv1.Instance{BootId: "virtual", Nonce: name}}
	v.name = name
	if err := v.join(ctx); err != nil {
		return fmt.Errorf("the join of %s: %w", name, err)
	}
	f.group.Go(func() { v.run(ctx) })
	return nil
}

func (f *fleet) close() {
	for _, c := range f.clients {
		c.Close()
	}
}

func (v *virtual) address() string { return v.fleet.controllers[v.at] }
func (v *virtual) turn()           { v.at = (v.at + 1) % len(v.fleet.controllers) }

// join introduces the agent; on a busy machine that may take several tries.
func (v *virtual) join(ctx context.Context) error {
	spec := &apiv1.NodeSpec{Name: v.name, Cpus: 64, MemoryMb: 512 << 10, Declared: true, Sockets: 1, CoresPerSocket: 64, ThreadsPerCore: 1,
		AgentAddress: "127.0.0.1:1", TaskAddress: "127.0.0.1", AgentVersion: "virtual"}
	for try := 1; ; try++ {
		callCtx, cancel := context.WithTimeout(ctx, 5*time.Second)
		answer, err := v.calls.Agents(v.address()).Join(callCtx, &nodev1.JoinRequest{Spec: spec, Instance: v.instance})
		cancel()
		if err == nil {
			v.number, v.epoch, v.seen = answer.Number, answer.Epoch, answer.Revision
			v.lease = time.Duration(answer.Settings.GetLeaseMs()) * time.Millisecond
			return nil
		}
		if try == joinTries || ctx.Err() != nil {
			return err
		}
		v.turn()
		if err := rest(ctx, joinPause); err != nil {
			return err
		}
	}
}

// run syncs until ctx ends.
func (v *virtual) run(ctx context.Context) {
	for ctx.Err() == nil {
		v.fleet.syncs.Add(1)
		if v.sync(ctx) == nil {
			continue
		}
		if ctx.Err() != nil {
			return
		}
		v.fleet.failures.Add(1)
		v.turn()
		if rest(ctx, 50*time.Millisecond+rand.N(50*time.Millisecond)) != nil {
			return
		}
	}
}

// sync is one Sync: the first one asks for everything, as an agent does that begins.
func (v *virtual) sync(ctx context.Context) error {
	v.sequence++
	hold := v.lease / 3
	now := time.Now()
	v.sent[v.sequence] = now
	callCtx, cancel := context.WithTimeout(ctx, hold+syncSlack)
	defer cancel()
	answer, err := v.calls.Agents(v.address()).Sync(callCtx, &nodev1.SyncRequest{
		Node: v.number, Instance: v.instance, Epoch: v.epoch, Sequence: v.sequence, Seen: v.seen, Holds: v.holds,
		LastGrant: v.granted, HoldMs: uint32(hold.Milliseconds()),
	})
	if err != nil {
		return err
	}
	if answer.Rejoin {
		v.holds = nil
		return v.join(ctx) // it was taken for lost
	}
	v.seen = answer.Revision
	if !answer.Unchanged {
		v.holds = answer.Revision
	}
	if grant := answer.Grant; grant != nil && grant.Sequence > v.granted {
		if v.granted == 0 {
			v.fleet.leased.Add(1)
		} else if time.Now().After(v.until) {
			v.fleet.lost.Add(1)
		}
		v.until = v.sent[grant.Sequence].Add(time.Duration(grant.LeaseMs) * time.Millisecond)
		v.granted = grant.Sequence
		for sequence := range v.sent {
			if sequence <= v.granted {
				delete(v.sent, sequence)
			}
		}
	}
	return nil
}
