package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"

	"github.com/muster-hpc/muster/node"
	"github.com/muster-hpc/muster/node/gpu"
	"github.com/muster-hpc/muster/node/run"
	"github.com/muster-hpc/muster/node/serve"
	"github.com/muster-hpc/muster/ops/pki"
	"github.com/muster-hpc/muster/rpc"
	"github.com/muster-hpc/muster/rpc/client"
)

// Bounds of the agent's listeners; rows of docs/limits.md.
const (
	headerTimeout = 10 * time.Second
	idleTimeout   = 2 * time.Minute
)

// serveNode runs one node until ctx ends (nil) or it fails.
func serveNode(ctx context.Context, d declared, supervisors *run.Pool, blobs *node.BlobCache, out *lines, log *slog.Logger) error {
	dir, err := d.absDir()
	if err != nil {
		return err
	}
	identity, err := pki.Load(filepath.Join(dir, "tls"))
	if err != nil {
		return err
	}
	if identity.Role() != pki.RoleNode || identity.Name() != d.Name {
		return fmt.Errorf("the certificate in %s is that of %s %q, not of %s %q", filepath.Join(dir, "tls"),
			identity.Role(), identity.Name(), pki.RoleNode, d.Name)
	}
	monitor, stop := d.watchGPUs(ctx, dir, log)
	defer stop()
	var once sync.Once
	ready := func(address string) { once.Do(func() { out.print("ready %s %s", d.Name, address) }) }
	for ctx.Err() == nil {
		err = serveLife(ctx, &d, dir, identity, monitor, supervisors, blobs, ready, log)
		if !errors.Is(err, node.ErrInventoryChanged) {
			return err
		}
		log.Info("the node joins again with the accelerators that it has now", "node", d.Name)
	}
	return nil
}

// serveLife runs a node as long as it has the devices that it said.
func serveLife(ctx context.Context, d *declared, dir string, identity *pki.Identity, monitor *gpu.Monitor, supervisors *run.Pool,
	blobs *node.BlobCache, ready func(address string), log *slog.Logger) error {
	listener, err := net.Listen("tcp", d.Listen)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", d.Listen, err)
	}
	defer listener.Close()
	d.Listen = listener.Addr().String() // port 0 chooses once
	spec, bind, err := d.spec(d.Listen)
	if err != nil {
		return err
	}
	if err := d.devices(spec, monitor); err != nil {
		return err
	}
	var watched node.Accelerators
	if monitor != nil {
		watched = monitor
	}
	groups, store := d.confinement(dir, spec)
	for _, sentence := range spec.GetLimitations() {
		log.Info("what this node cannot offer", "node", d.Name, "limitation", sentence)
	}
	calls := client.OpenDirect(client.Direct{
		Controllers: d.Controllers, TLS: identity.ClientTLS(pki.RoleController, ""), NodeTLS: identity.ClientTLS(pki.RoleNode, ""),
		NodeName: d.Name, Log: log,
	})
	defer calls.Close()
	agent, err := node.Open(node.Config{
		Dir: dir, Spec: spec, BootID: d.BootID, Addresses: d.Controllers, Controllers: controllers{calls}, Refusal: rpc.Detail,
		Supervisors: supervisors, Commands: commands(), BindCPUs: bind, Groups: groups, Private: store, Blobs: blobs, Log: log,
		Accelerators: watched, Joined: func(*nodev1.JoinResponse) { ready(spec.AgentAddress) },
	})
	if err != nil {
		return err
	}
	err = answer(ctx, agent, identity, listener, d.Name, log)
	return errors.Join(err, agent.Close())
}

// commands returns the directory with the commands that have Slurm's names, beside this program; empty if there is none.
func commands() string {
	self, err := os.Executable()
	if err != nil {
		return ""
	}
	dir := filepath.Join(filepath.Dir(self), "slurm")
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return ""
	}
	return dir
}

// answer runs the agent and what it answers; it ends when the agent does.
func answer(ctx context.Context, agent *node.Agent, identity *pki.Identity, listener net.Listener, name string, log *slog.Logger) error {
	local, err := serve.ListenLocal(agent.SocketPath())
	if err != nil {
		return err
	}
	h := host{agent}
	guard := &rpc.Guard{Verifier: rpc.NewVerifier(identity.Roots, nodev1.TokenAudience_TOKEN_AUDIENCE_AGENTS, nil), Settings: agent.Settings, Log: log}
	clients := &http.Server{
		Handler: serve.Handler(h, guard, log), TLSConfig: identity.ServerTLS(), ReadHeaderTimeout: headerTimeout,
		IdleTimeout: idleTimeout, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	users := &http.Server{
		Handler:           serve.LocalHandler(h, name, identity.Certificate, identity.CAPEM, log),
		ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, ConnContext: serve.KeepCredentials, Protocols: plain(),
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	wg.Go(func() { cancel(listening(clients.ServeTLS(listener, "", ""))) })
	wg.Go(func() { cancel(listening(users.Serve(local))) })
	err = agent.Run(ctx)
	if cause := context.Cause(ctx); err == nil && cause != nil && !errors.Is(cause, context.Canceled) {
		err = cause
	}
	// Readers that follow output begin again at their offsets, with the next agent.
	_, _ = clients.Close(), users.Close()
	wg.Wait()
	return err
}

// listening is why a server stopped; nil if it was closed.
func listening(err error) error {
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("answer calls: %w", err)
}

// plain serves HTTP/1 and HTTP/2 without encryption: on the local socket, the kernel says who calls.
func plain() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	return p
}

// controllers calls controllers with the node's certificate.
type controllers struct{ *client.Client }

func (c controllers) Join(ctx context.Context, address string, req *nodev1.JoinRequest) (*nodev1.JoinResponse, error) {
	return c.Agents(address).Join(ctx, req)
}

func (c controllers) Sync(ctx context.Context, address string, req *nodev1.SyncRequest) (*nodev1.SyncResponse, error) {
	return c.Agents(address).Sync(ctx, req)
}

func (c controllers) GetBlob(ctx context.Context, req *apiv1.GetBlobRequest) (*apiv1.GetBlobResponse, error) {
	return c.Cluster().GetBlob(ctx, req)
}

// host is the agent as package serve needs it.
type host struct{ *node.Agent }

func (h host) Step(job, attempt, step uint32) (serve.Step, bool) {
	v, ok := h.Agent.Step(job, attempt, step)
	if !ok {
		return serve.Step{}, false
	}
	s := serve.Step{Attempt: v.Attempt, Owner: v.Owner, Started: v.Started, Over: v.Over, Exits: v.Exits, Ended: v.Ended}
	for _, t := range v.Tasks {
		s.Tasks = append(s.Tasks, serve.Task{Rank: t.Rank, Stdout: serve.Stream(t.Stdout), Stderr: serve.Stream(t.Stderr)})
	}
	return s, true
}

func (h host) Input(ctx context.Context, job, attempt, step uint32, offset uint64, data []byte, end bool) (uint64, error) {
	taken, err := h.Agent.Input(ctx, job, attempt, step, offset, data, end)
	switch {
	case errors.Is(err, node.ErrNoStep):
		err = serve.ErrNoStep
	case errors.Is(err, node.ErrStepOver):
		err = serve.ErrStepOver
	}
	return taken, err
}

func (h host) ResizeTerminal(ctx context.Context, job, attempt, step, rows, columns uint32) error {
	err := h.Agent.ResizeTerminal(ctx, job, attempt, step, rows, columns)
	switch {
	case errors.Is(err, node.ErrNoStep):
		err = serve.ErrNoStep
	case errors.Is(err, node.ErrStepOver):
		err = serve.ErrStepOver
	case errors.Is(err, node.ErrNoTerminal):
		err = serve.ErrNoTerminal
	}
	return err
}

func (h host) Place(job, attempt uint32) (serve.Place, bool, error) {
	p, ok, err := h.Agent.Place(job, attempt)
	return serve.Place(p), ok, err
}

var _ serve.Host = host{}
var _ node.Controllers = controllers{}
