package replica

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io"
	"math/big"
	"net"
	"testing"
	"time"
)

// authority is a CA for tests.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{cert, key}
}

// config is a TLS configuration with a certificate of that unit.
func (a *authority) config(t *testing.T, unit string) *tls.Config {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "c", OrganizationalUnit: []string{unit}},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(a.cert)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, RootCAs: roots}
}

func TestMembersSpeakOverMutualTLS(t *testing.T) {
	ca := newAuthority(t)
	ms := cluster(t, 3, func(c *Config) { c.TLS = ca.config(t, memberUnit) })
	propose(t, "secret", ms...)
	agree(t, ms...)
}

func TestStrangersAreNotLetIn(t *testing.T) {
	ca := newAuthority(t)
	cfg := testConfig(t, t.TempDir())
	cfg.TLS = ca.config(t, memberUnit)
	m := openTest(t, cfg)
	knock := func(c *tls.Config, id string) error {
		conn, err := net.Dial("tcp", m.Address())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if c != nil {
			conn = tls.Client(conn, memberTLS(c))
		}
		return sayHello(conn, id, 2*time.Second)
	}
	if err := knock(ca.config(t, memberUnit), m.ID()); err != nil {
		t.Errorf("a member: %v", err)
	}
	if err := knock(ca.config(t, memberUnit), "another id"); !errors.Is(err, errWrongMember) {
		t.Errorf("a member that means another one: %v", err)
	}
	if err := knock(ca.config(t, "muster-node"), m.ID()); err == nil {
		t.Error("an agent was let in")
	}
	if err := knock(newAuthority(t).config(t, memberUnit), m.ID()); err == nil {
		t.Error("a member of another cluster was let in")
	}
	if err := knock(nil, m.ID()); err == nil {
		t.Error("somebody without TLS was let in")
	}
	none := ca.config(t, memberUnit)
	none.Certificates = nil
	if err := knock(none, m.ID()); err == nil {
		t.Error("somebody without certificate was let in")
	}
}

func TestASilentCallerHoldsUpNobody(t *testing.T) {
	m := openTest(t, testConfig(t, t.TempDir()))
	var idle []net.Conn
	for range 8 {
		conn, err := net.Dial("tcp", m.Address())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		idle = append(idle, conn)
	}
	conn, err := net.Dial("tcp", m.Address())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := sayHello(conn, m.ID(), time.Second); err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	for _, conn := range append(idle, conn) {
		if err := conn.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
			t.Fatal(err)
		}
		var timeout net.Error
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && (errors.As(err, &timeout) && timeout.Timeout()) {
			t.Error("a connection is open after Close")
		}
	}
}
