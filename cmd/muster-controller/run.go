package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"time"

	"github.com/muster-hpc/muster/fsm"
	"github.com/muster-hpc/muster/fsm/replica"
	"github.com/muster-hpc/muster/ops/pki"
	"github.com/muster-hpc/muster/ops/version"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/rpc"
	"github.com/muster-hpc/muster/rpc/client"
	"github.com/muster-hpc/muster/rpc/server"
	"github.com/muster-hpc/muster/sched/control"
)

// Bounds of leaving; rows of docs/limits.md.
const (
	transferTimeout = 2 * time.Second
	shutdownTimeout = 5 * time.Second
)

// controller is everything that runs in the process.
type controller struct {
	options *options
	log     *slog.Logger
	member  *replica.Replica
	control *control.Control
	server  *server.Server
	peers   *client.Client
	http    *http.Server
}

// run runs a controller until ctx ends: open the state, serve, enter the cluster, say that it is ready, and when ctx
// ends hand over and leave.
func run(ctx context.Context, o *options, stdout, stderr io.Writer) error {
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: o.level})).With("controller", o.name)
	identity, err := pki.Load(filepath.Join(o.dir, "tls"))
	if err != nil {
		return err
	}
	if identity.Name() != o.name || identity.Role() != pki.RoleController {
		return fmt.Errorf("the certificate in %s/tls is that of %s %q; this is to be controller %q: give it its own certificate",
			o.dir, identity.Role(), identity.Name(), o.name)
	}
	listener, err := net.Listen("tcp", o.listen)
	if err != nil {
		return fmt.Errorf("listen for the API: %w", err)
	}
	defer listener.Close() // Serve closes it too
	if o.advertise == "" {
		o.advertise = listener.Addr().String()
	}
	member, err := replica.Open(replica.Config{Dir: o.dir, Name: o.name, RaftListen: o.raft, RaftAdvertise: o.raftAdvertise,
		TLS: identity.RaftTLS(), Profile: o.timing, Log: log}, fsm.New())
	if err != nil {
		return err
	}
	c := &controller{options: o, log: log, member: member}
	c.peers = client.OpenDirect(client.Direct{Controllers: o.join, TLS: identity.ClientTLS(pki.RoleController, ""), Log: log})
	peers := server.NewPeers(c.peers, member, o.join)
	c.control = newControl(c, peers)
	c.server = server.New(server.Config{
		Replica:       member,
		Control:       c.control,
		ErrNotLeading: control.ErrNotLeading,
		Self: &apiv1.Member{Name: o.name, RaftAddress: member.Address(), ApiAddress: o.advertise,
			SupportedLevel: fsm.MaxLevel, Version: version.Version},
		Peers:    peers,
		Verifier: rpc.NewVerifier(identity.Roots, nodev1.TokenAudience_TOKEN_AUDIENCE_CONTROLLERS, nil),
		Log:      log,
	})
	c.http = server.NewHTTPServer(c.server.Handler(), log)
	c.http.TLSConfig = identity.ServerTLS()
	return c.serve(ctx, listener, stdout)
}

// serve runs the parts and ends them in order: nobody is left who could use what is closed.
func (c *controller) serve(ctx context.Context, listener net.Listener, stdout io.Writer) error {
	var group sync.WaitGroup
	failed := make(chan error, 3)
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	part := func(what string, f func() error) {
		group.Go(func() {
			if err := f(); err != nil && !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, replica.ErrClosed) {
				failed <- fmt.Errorf("%s: %w", what, err)
			}
		})
	}
	part("serve the API", func() error { return c.http.ServeTLS(listener, "", "") })
	part("answer calls", func() error { return c.server.Run(background) })
	part("lead", func() error { return c.member.Lead(background, c.control.Lead) })
	err := c.enter(ctx)
	if err == nil {
		_, err = fmt.Fprintf(stdout, "ready name=%s id=%s listen=%s raft=%s\n", c.options.name, c.member.ID(),
			c.options.advertise, c.member.Address())
	}
	if err == nil {
		select {
		case <-ctx.Done():
		case err = <-failed:
		}
	}
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		err = nil // it was told to leave before it had entered
	}
	c.leave()
	stop()
	group.Wait()
	c.peers.Close()
	return errors.Join(err, c.member.Close())
}

// enter begins or joins the cluster, if the flags say so and it has not happened before.
func (c *controller) enter(ctx context.Context) error {
	switch {
	case c.options.bootstrap != nil:
		id := make([]byte, 16)
		if _, err := rand.Read(id); err != nil {
			return fmt.Errorf("make the cluster's id: %w", err)
		}
		err := c.member.Bootstrap(&logv1.Bootstrap{Configuration: c.options.bootstrap, Incarnation: 1, ClusterId: hex.EncodeToString(id)})
		if errors.Is(err, replica.ErrBootstrapped) {
			return nil
		}
		return err
	case len(c.options.join) > 0:
		return c.server.JoinCluster(ctx, c.peers)
	}
	return nil
}

// leave ends long polls, hands over leadership, and waits for the calls that are being answered.
func (c *controller) leave() {
	c.log.Info("leaving")
	ctx, cancel := context.WithTimeout(context.Background(), transferTimeout)
	if err := c.server.TransferLeadership(ctx); err != nil {
		c.log.Warn("leadership could not be handed over; the others elect a leader when they notice", "error", err)
	}
	cancel()
	c.server.Drain()
	ctx, cancel = context.WithTimeout(context.Background(), shutdownTimeout)
	defer cancel()
	if err := c.http.Shutdown(ctx); err != nil {
		c.log.Warn("some calls were cut off", "error", err)
		if err := c.http.Close(); err != nil {
			c.log.Warn("closing connections", "error", err)
		}
	}
}
