package pki

import (
	"crypto/tls"

	"github.com/muster-hpc/muster/rpc"
)

// ServerTLS is for the API ports of controllers and agents: clients may show a certificate of the cluster's CA (nodes
// and controllers do) or none (users, who show a token). Connect, gRPC and HTTP/1.1 are negotiated on the same port.
func (i *Identity) ServerTLS() *tls.Config {
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{i.Certificate},
		ClientAuth:   tls.VerifyClientCertIfGiven,
		ClientCAs:    i.Roots,
		NextProtos:   []string{"h2", "http/1.1"},
	}
}

// ClientTLS is for calls to a server of the given role: it shows this identity and checks chain and role of the other.
// If name is not empty the other must have that name as well.
func (i *Identity) ClientTLS(role Role, name string) *tls.Config {
	config := rpc.CheckingTLS(i.Roots, role, name)
	config.Certificates = []tls.Certificate{i.Certificate}
	return config
}

// RaftTLS is for both ends of the connections of the Raft port: both must be controllers of this cluster.
func (i *Identity) RaftTLS() *tls.Config {
	config := i.ClientTLS(RoleController, "")
	config.ClientAuth = tls.RequireAndVerifyClientCert
	config.ClientCAs = i.Roots
	return config
}
