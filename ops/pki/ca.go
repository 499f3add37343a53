package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/muster-hpc/muster/rpc"
)

// Role is what the holder of a certificate is; it is the certificate's organisational unit.
type Role = rpc.Role

// The roles, as in package rpc.
const (
	RoleController = rpc.RoleController
	RoleNode       = rpc.RoleNode
)

// Lifetimes of certificates, and how far they are dated back against clocks that disagree.
const (
	CALifetime          = 20 * 365 * 24 * time.Hour
	CertificateLifetime = 5 * 365 * 24 * time.Hour
	backdate            = 5 * time.Minute
)

// File names in a tls directory.
const (
	caFile    = "ca.pem"
	caKeyFile = "ca-key.pem"
	certFile  = "cert.pem"
	keyFile   = "key.pem"
)

// ErrNoCA is returned by LoadCA for a directory that holds no certificate authority.
var ErrNoCA = errors.New("there is no certificate authority here")

// CA is a certificate authority: its certificate and its private key.
type CA struct {
	cert    *x509.Certificate
	key     *ecdsa.PrivateKey
	certPEM []byte
}

// NewCA makes a certificate authority for the named cluster.
func NewCA(cluster string) (*CA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make the CA's key: %w", err)
	}
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: "Muster CA of " + cluster},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(CALifetime),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, fmt.Errorf("sign the CA's certificate: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("read back the CA's certificate: %w", err)
	}
	return &CA{cert: cert, key: key, certPEM: encodeCert(der)}, nil
}

// LoadCA reads the authority that Save wrote to dir. The error wraps ErrNoCA if there is none.
func LoadCA(dir string) (*CA, error) {
	certPEM, err := os.ReadFile(filepath.Join(dir, caFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the CA in %s: %w", dir, ErrNoCA)
	} else if err != nil {
		return nil, fmt.Errorf("read the CA's certificate: %w", err)
	}
	keyPEM, err := os.ReadFile(filepath.Join(dir, caKeyFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the CA's key in %s: %w", dir, ErrNoCA)
	} else if err != nil {
		return nil, fmt.Errorf("read the CA's key: %w", err)
	}
	cert, err := parseCert(certPEM)
	if err != nil {
		return nil, fmt.Errorf("the CA's certificate in %s: %w", dir, err)
	}
	key, err := parseKey(keyPEM)
	if err != nil {
		return nil, fmt.Errorf("the CA's key in %s: %w", dir, err)
	}
	if !key.PublicKey.Equal(cert.PublicKey) {
		return nil, fmt.Errorf("the CA's certificate and key in %s do not belong together", dir)
	}
	return &CA{cert: cert, key: key, certPEM: certPEM}, nil
}

// Save writes ca.pem and ca-key.pem (mode 0600) to dir, which is made if need be.
func (c *CA) Save(dir string) error {
	keyPEM, err := encodeKey(c.key)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make the CA's directory: %w", err)
	}
	if err := writeFile(dir, caKeyFile, keyPEM, 0o600); err != nil {
		return err
	}
	return writeFile(dir, caFile, c.certPEM, 0o644)
}

// PEM returns the authority's certificate.
func (c *CA) PEM() []byte { return c.certPEM }

// Issue makes an identity for a controller or node. Hosts are DNS names or IP addresses that tools other than Muster's
// may check; Muster itself checks name and role.
func (c *CA) Issue(name string, role Role, hosts ...string) (*Identity, error) {
	if name == "" {
		return nil, errors.New("issue a certificate: the name is empty")
	}
	if role != RoleController && role != RoleNode {
		return nil, fmt.Errorf("issue a certificate for %s: unknown role %q", name, role)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key for %s: %w", name, err)
	}
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: name, OrganizationalUnit: []string{string(role)}},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(CertificateLifetime),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
		DNSNames:              []string{name},
	}
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else if host != "" && host != name {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, c.cert, &key.PublicKey, c.key)
	if err != nil {
		return nil, fmt.Errorf("sign the certificate of %s: %w", name, err)
	}
	keyPEM, err := encodeKey(key)
	if err != nil {
		return nil, err
	}
	return newIdentity(c.certPEM, encodeCert(der), keyPEM)
}

// Identity is what a controller or agent proves itself with: its certificate and key, and the CA that it trusts.
type Identity struct {
	// CAPEM, CertPEM and KeyPEM are the three files.
	CAPEM, CertPEM, KeyPEM []byte
	// Certificate is the certificate with its private key; Leaf is set.
	Certificate tls.Certificate
	// Roots holds the CA.
	Roots *x509.CertPool
}

func newIdentity(caPEM, certPEM, keyPEM []byte) (*Identity, error) {
	certificate, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return nil, fmt.Errorf("certificate and key: %w", err)
	}
	if certificate.Leaf == nil {
		if certificate.Leaf, err = x509.ParseCertificate(certificate.Certificate[0]); err != nil {
			return nil, fmt.Errorf("certificate: %w", err)
		}
	}
	roots, err := rpc.Roots(caPEM)
	if err != nil {
		return nil, err
	}
	if _, _, err := rpc.PeerOfCertificate(certificate.Leaf); err != nil {
		return nil, err
	}
	return &Identity{CAPEM: caPEM, CertPEM: certPEM, KeyPEM: keyPEM, Certificate: certificate, Roots: roots}, nil
}

// Load reads ca.pem, cert.pem and key.pem from dir.
func Load(dir string) (*Identity, error) {
	var parts [3][]byte
	for i, name := range []string{caFile, certFile, keyFile} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return nil, fmt.Errorf("read the certificates in %s: %w", dir, err)
		}
		parts[i] = data
	}
	identity, err := newIdentity(parts[0], parts[1], parts[2])
	if err != nil {
		return nil, fmt.Errorf("the certificates in %s: %w", dir, err)
	}
	return identity, nil
}

// Save writes ca.pem, cert.pem and key.pem (mode 0600) to dir, which is made if need be.
func (i *Identity) Save(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make the directory of the certificates: %w", err)
	}
	if err := writeFile(dir, keyFile, i.KeyPEM, 0o600); err != nil {
		return err
	}
	if err := writeFile(dir, certFile, i.CertPEM, 0o644); err != nil {
		return err
	}
	return writeFile(dir, caFile, i.CAPEM, 0o644)
}

// Name returns the common name of the certificate.
func (i *Identity) Name() string { return i.Certificate.Leaf.Subject.CommonName }

// Role returns the role of the certificate.
func (i *Identity) Role() Role {
	_, role, err := rpc.PeerOfCertificate(i.Certificate.Leaf)
	if err != nil { // newIdentity checked it
		return ""
	}
	return role
}

func newSerial() (*big.Int, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 126))
	if err != nil {
		return nil, fmt.Errorf("make a serial number: %w", err)
	}
	return serial.Add(serial, big.NewInt(1)), nil
}

func encodeCert(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode a private key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

func parseCert(data []byte) (*x509.Certificate, error) {
	block, _ := pem.Decode(data)
	if block == nil || block.Type != "CERTIFICATE" {
		return nil, errors.New("not a certificate in PEM")
	}
	return x509.ParseCertificate(block.Bytes)
}

func parseKey(data []byte) (*ecdsa.PrivateKey, error) {
	block, _ := pem.Decode(data)
	if block == nil || block.Type != "PRIVATE KEY" {
		return nil, errors.New("not a private key in PEM")
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, err
	}
	ecKey, ok := key.(*ecdsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("the key is a %T; an ECDSA key is needed", key)
	}
	return ecKey, nil
}

// writeFile replaces a file so that a crash leaves either the old or the new one.
func writeFile(dir, name string, data []byte, mode os.FileMode) error {
	path := filepath.Join(dir, name)
	f, err := os.CreateTemp(dir, "."+name+".*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer os.Remove(f.Name()) // fails once it is renamed
	if _, err := f.Write(data); err != nil {
		f.Close()
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := errors.Join(f.Chmod(mode), f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync %s: %w", dir, err)
	}
	return errors.Join(d.Sync(), d.Close())
}
