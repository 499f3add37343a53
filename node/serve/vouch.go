package serve

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/user"
	"strconv"
	"sync"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
	"github.com/muster-hpc/muster/rpc"
)

// maxSocketPath is the longest path that a Unix socket's address can hold.
const maxSocketPath = 107

// nameTTL is how long a user's login name is remembered.
const nameTTL = time.Minute

// ListenLocal makes the socket at path, which every user of the node may connect to. A socket that an earlier agent
// left is replaced: the caller holds the lock of the agent's directory.
func ListenLocal(path string) (net.Listener, error) {
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("the socket's path %s has %d bytes; the limit is %d: choose a shorter --dir", path, len(path), maxSocketPath)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("replace the agent's socket: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on the agent's socket: %w", err)
	}
	l.SetUnlinkOnClose(false) // a successor may have put its own socket there
	if err := os.Chmod(path, 0o666); err != nil {
		return nil, errors.Join(fmt.Errorf("open the agent's socket to all users: %w", err), l.Close())
	}
	return l, nil
}

type credentialsKey struct{}

// KeepCredentials is the ConnContext of the HTTP server on the local socket: it asks the kernel who connected.
func KeepCredentials(ctx context.Context, conn net.Conn) context.Context {
	c, ok := conn.(*net.UnixConn)
	if !ok {
		return ctx
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return ctx
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || credErr != nil {
		return ctx
	}
	return context.WithValue(ctx, credentialsKey{}, cred)
}

// LocalHandler answers on the local socket: the VouchService. The certificate is the node's, with its key. It must be
// served with KeepCredentials.
func LocalHandler(host Host, node string, certificate tls.Certificate, caPEM []byte, log *slog.Logger) http.Handler {
	server := connect.NewServer()
	nodev1connect.RegisterVouchServiceHandler(server, &vouchService{
		host: host, node: node, certificate: certificate, caPEM: caPEM, log: log, names: make(map[uint32]knownName),
	})
	mux := http.NewServeMux()
	connecthttp.Mount(mux, server, connecthttp.WithReadMaxBytes(maxPiece))
	return mux
}

type vouchService struct {
	host        Host
	node        string
	certificate tls.Certificate
	caPEM       []byte
	log         *slog.Logger

	mu    sync.Mutex
	names map[uint32]knownName
}

type knownName struct {
	name string
	at   time.Time
}

// Vouch returns tokens for the user who owns the calling process: one for controllers, one for agents.
func (v *vouchService) Vouch(ctx context.Context, _ *nodev1.VouchRequest) (*nodev1.VouchResponse, error) {
	cred, ok := ctx.Value(credentialsKey{}).(*unix.Ucred)
	if !ok {
		return nil, rpc.Refuse(connect.CodeUnauthenticated, rpc.ReasonUnauthenticated, "", "the kernel did not say who is calling")
	}
	now := time.Now()
	expires := timestamppb.New(now.Add(rpc.TokenLifetime))
	claim := &nodev1.UserToken{
		Uid: cred.Uid, Gid: cred.Gid, User: v.name(cred.Uid), Node: v.node, Issued: timestamppb.New(now), Expires: expires,
	}
	cluster, controllers := v.host.Cluster()
	answer := &nodev1.VouchResponse{Expires: expires, Controllers: controllers, CaPem: v.caPEM, ClusterName: cluster, Node: v.node}
	for audience, token := range map[nodev1.TokenAudience]*string{
		nodev1.TokenAudience_TOKEN_AUDIENCE_CONTROLLERS: &answer.Token,
		nodev1.TokenAudience_TOKEN_AUDIENCE_AGENTS:      &answer.AgentToken,
	} {
		claim.Audience = audience
		var err error
		if *token, err = rpc.SignToken(claim, v.certificate); err != nil {
			v.log.Error("a token could not be signed", "uid", cred.Uid, "err", err)
			return nil, rpc.Refuse(connect.CodeInternal, rpc.ReasonInternal, "", "the agent could not sign a token: "+err.Error())
		}
	}
	return answer, nil
}

// name returns the login name, or the number of a user whom the node does not know.
func (v *vouchService) name(uid uint32) string {
	v.mu.Lock()
	defer v.mu.Unlock()
	if known, ok := v.names[uid]; ok && time.Since(known.at) < nameTTL {
		return known.name
	}
	name := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(name); err == nil {
		name = u.Username
	}
	if len(v.names) >= 4096 {
		clear(v.names)
	}
	v.names[uid] = knownName{name, time.Now()}
	return name
}
