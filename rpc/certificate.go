package rpc

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
)

// Role is what the holder of a certificate is; it is the certificate's organisational unit.
type Role string

const (
	// RoleController is a member of the control plane.
	RoleController Role = "muster-controller"
	// RoleNode is an agent.
	RoleNode Role = "muster-node"
)

// PeerOfCertificate returns name (common name) and role in a certificate. It does not check who signed it. An error
// means that the certificate is none of Muster's.
func PeerOfCertificate(cert *x509.Certificate) (name string, role Role, err error) {
	name = cert.Subject.CommonName
	if name == "" {
		return "", "", errors.New("the certificate has no common name")
	}
	if len(cert.Subject.OrganizationalUnit) != 1 {
		return "", "", fmt.Errorf("the certificate of %q has %d organisational units instead of one", name,
			len(cert.Subject.OrganizationalUnit))
	}
	role = Role(cert.Subject.OrganizationalUnit[0])
	if role != RoleController && role != RoleNode {
		return "", "", fmt.Errorf("the certificate of %q has the unknown role %q", name, role)
	}
	return name, role, nil
}

// PeerOfConnection returns name and role of the client of a TLS connection whose chain the handshake has verified. ok
// is false if it showed no certificate. An error means that the certificate is none of Muster's.
func PeerOfConnection(state *tls.ConnectionState) (name string, role Role, ok bool, err error) {
	if state == nil || len(state.VerifiedChains) == 0 {
		return "", "", false, nil
	}
	name, role, err = PeerOfCertificate(state.PeerCertificates[0])
	return name, role, err == nil, err
}

// Roots returns a pool with the CA certificates in caPEM.
func Roots(caPEM []byte) (*x509.CertPool, error) {
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(caPEM) {
		return nil, errors.New("the CA's PEM contains no certificate")
	}
	return pool, nil
}

// CheckingTLS is the part of a TLS configuration that checks the other side: chain to roots, role, and name unless it
// is empty. It replaces the check of host names, which are no identities here. The check runs on every handshake,
// resumed ones too, and on servers as well if they demand a certificate. A user's connections need nothing else.
func CheckingTLS(roots *x509.CertPool, role Role, name string) *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		RootCAs:            roots,
		InsecureSkipVerify: true, // VerifyConnection checks the chain; only the host name is not checked
		VerifyConnection: func(state tls.ConnectionState) error {
			return checkPeer(state.PeerCertificates, roots, role, name)
		},
	}
}

// ErrWrongPeer is wrapped by the errors of CheckingTLS: another try at the same address will not help.
var ErrWrongPeer = errors.New("the other side is not who it should be")

func checkPeer(chain []*x509.Certificate, roots *x509.CertPool, role Role, name string) error {
	if len(chain) == 0 {
		return fmt.Errorf("%w: it showed no certificate", ErrWrongPeer)
	}
	if _, err := chain[0].Verify(x509.VerifyOptions{
		Roots:     roots,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}); err != nil {
		return fmt.Errorf("%w: its certificate is not from this cluster's CA: %w", ErrWrongPeer, err)
	}
	gotName, gotRole, err := PeerOfCertificate(chain[0])
	if err != nil {
		return fmt.Errorf("%w: %w", ErrWrongPeer, err)
	}
	if gotRole != role {
		return fmt.Errorf("%w: %q is a %s, but a %s was expected at this address", ErrWrongPeer, gotName, gotRole, role)
	}
	if name != "" && gotName != name {
		return fmt.Errorf("%w: %q answers at this address, but %q was expected", ErrWrongPeer, gotName, name)
	}
	return nil
}
