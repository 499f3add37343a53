package cluster

import (
	"context"
	"net"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
	"github.com/muster-hpc/muster/rpc"
	"github.com/muster-hpc/muster/rpc/client"
)

// Socket returns the local socket of node n1's agent.
func (c *Cluster) Socket() string {
	for _, v := range c.Env {
		if s, ok := strings.CutPrefix(v, client.SocketVariable+"="); ok {
			return s
		}
	}
	c.t.Fatal("muster dev env sets no " + client.SocketVariable)
	return ""
}

// Direct opens a client of one controller only, as the user who runs the test.
func (c *Cluster) Direct(address string) *client.Client {
	c.t.Helper()
	answer := c.Vouch()
	roots, err := rpc.Roots(answer.CaPem)
	if err != nil {
		c.t.Fatal(err)
	}
	api := client.OpenDirect(client.Direct{
		Controllers: []string{address},
		TLS:         rpc.CheckingTLS(roots, rpc.RoleController, ""),
		NodeTLS:     rpc.CheckingTLS(roots, rpc.RoleNode, ""),
		Token:       answer.Token,
		AgentToken:  answer.AgentToken,
	})
	c.t.Cleanup(api.Close)
	return api
}

// Vouch asks the agent of node n1 for tokens.
func (c *Cluster) Vouch() *nodev1.VouchResponse {
	c.t.Helper()
	socket := c.Socket()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}
	defer transport.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	service := nodev1connect.NewVouchServiceClient(connect.NewClient(
		connecthttp.NewTransport(&http.Client{Transport: transport}, "http://agent")))
	answer, err := service.Vouch(ctx, &nodev1.VouchRequest{})
	if err != nil {
		c.t.Fatalf("vouch at %s: %v", socket, err)
	}
	return answer
}
