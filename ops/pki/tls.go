package pki

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
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
	config := checkServer(i.Roots, role, name)
	config.Certificates = []tls.Certificate{i.Certificate}
	return config
}

// UserTLS is for users, who have no certificate: it checks chain and role of the server.
func UserTLS(caPEM []byte, role Role) (*tls.Config, error) {
	roots, err := Roots(caPEM)
	if err != nil {
		return nil, err
	}
	return checkServer(roots, role, ""), nil
}

// RaftTLS is for both ends of the connections of the Raft port: both must be controllers of this cluster.
func (i *Identity) RaftTLS() *tls.Config {
	config := checkServer(i.Roots, RoleController, "")
	config.Certificates = []tls.Certificate{i.Certificate}
	config.ClientAuth = tls.RequireAndVerifyClientCert
	config.ClientCAs = i.Roots
	return config
}

// checkServer replaces the check of host names by one of chain, role and name. VerifyConnection runs on every
// handshake, resumed ones too.
func checkServer(roots *x509.CertPool, role Role, name string) *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		RootCAs:            roots,
		InsecureSkipVerify: true, // VerifyConnection checks the chain; only the host name is not checked
		VerifyConnection: func(state tls.ConnectionState) error {
			return verify(state.PeerCertificates, roots, role, name)
		},
	}
}

func verify(chain []*x509.Certificate, roots *x509.CertPool, role Role, name string) error {
	if len(chain) == 0 {
		return errors.New("the other side showed no certificate")
	}
	if _, err := chain[0].Verify(x509.VerifyOptions{
		Roots:     roots,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}); err != nil {
		return fmt.Errorf("the certificate is not from this cluster's CA: %w", err)
	}
	gotName, gotRole, err := Peer(chain[0])
	if err != nil {
		return err
	}
	if gotRole != role {
		return fmt.Errorf("%q is a %s, but a %s was expected at this address", gotName, gotRole, role)
	}
	if name != "" && gotName != name {
		return fmt.Errorf("%q answers at this address, but %q was expected", gotName, name)
	}
	return nil
}

// PeerOfConnection returns name and role of the client of a TLS connection. ok is false if it showed no certificate.
// The chain was verified by the handshake (see ServerTLS). An error means that the certificate is none of Muster's.
func PeerOfConnection(state *tls.ConnectionState) (name string, role Role, ok bool, err error) {
	if state == nil || len(state.VerifiedChains) == 0 {
		return "", "", false, nil
	}
	name, role, err = Peer(state.PeerCertificates[0])
	return name, role, err == nil, err
}
