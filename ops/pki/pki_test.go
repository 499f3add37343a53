package pki

import (
	"crypto/tls"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/muster-hpc/muster/rpc"
)

func ca(t *testing.T) *CA {
	t.Helper()
	c, err := NewCA("test")
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func issue(t *testing.T, c *CA, name string, role Role) *Identity {
	t.Helper()
	i, err := c.Issue(name, role, "127.0.0.1", "localhost")
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// handshake returns the errors of both sides, and whom the server saw.
func handshake(t *testing.T, server, client *tls.Config) (name string, role Role, serverErr, clientErr error) {
	t.Helper()
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		s := tls.Server(a, server)
		if serverErr = s.Handshake(); serverErr == nil {
			state := s.ConnectionState()
			name, role, _, serverErr = rpc.PeerOfConnection(&state)
			_, _ = s.Write([]byte("x")) // TLS 1.3: the client learns here that it was refused
		}
		a.Close()
	}()
	c := tls.Client(b, client)
	if clientErr = c.Handshake(); clientErr == nil {
		_, clientErr = c.Read(make([]byte, 1))
	}
	b.Close()
	<-done
	return name, role, serverErr, clientErr
}

func TestNamesAndRolesAreProvedByHandshake(t *testing.T) {
	c := ca(t)
	c1, n1 := issue(t, c, "c1", RoleController), issue(t, c, "n1", RoleNode)
	name, role, err, clientErr := handshake(t, c1.ServerTLS(), n1.ClientTLS(RoleController, ""))
	if err != nil || clientErr != nil || name != "n1" || role != RoleNode {
		t.Fatalf("node to controller: %q %q, %v, %v", name, role, err, clientErr)
	}
	name, _, err, clientErr = handshake(t, c1.ServerTLS(), rpc.CheckingTLS(n1.Roots, RoleController, ""))
	if err != nil || clientErr != nil || name != "" {
		t.Fatalf("user to controller: %q, %v, %v", name, err, clientErr)
	}
}

func TestWrongPeersAreRefused(t *testing.T) {
	c, other := ca(t), ca(t)
	c1, c2, n1 := issue(t, c, "c1", RoleController), issue(t, c, "c2", RoleController), issue(t, c, "n1", RoleNode)
	x1 := issue(t, other, "c1", RoleController)
	for name, config := range map[string][2]*tls.Config{
		"a node answers as a controller":        {n1.ServerTLS(), c1.ClientTLS(RoleController, "")},
		"another controller than expected":      {c2.ServerTLS(), n1.ClientTLS(RoleController, "c1")},
		"a server of another cluster":           {x1.ServerTLS(), n1.ClientTLS(RoleController, "")},
		"a user meets another cluster":          {x1.ServerTLS(), rpc.CheckingTLS(c1.Roots, RoleController, "")},
		"a Raft port that is a node":            {n1.RaftTLS(), c1.RaftTLS()},
		"a Raft port that is another cluster's": {x1.RaftTLS(), c1.RaftTLS()},
	} {
		if _, _, _, err := handshake(t, config[0], config[1]); !errors.Is(err, rpc.ErrWrongPeer) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, config := range map[string][2]*tls.Config{
		"a client of another cluster":      {c1.ServerTLS(), withoutCheck(x1)},
		"a node at the Raft port":          {c1.RaftTLS(), withoutCheck(n1)},
		"nobody at the Raft port":          {c1.RaftTLS(), {InsecureSkipVerify: true}},
		"another cluster at the Raft port": {c1.RaftTLS(), withoutCheck(x1)},
	} {
		if _, _, err, _ := handshake(t, config[0], config[1]); err == nil {
			t.Errorf("%s: the server took it", name)
		}
	}
	if _, _, err, clientErr := handshake(t, c1.RaftTLS(), c2.RaftTLS()); err != nil || clientErr != nil {
		t.Errorf("two controllers: %v, %v", err, clientErr)
	}
}

func withoutCheck(i *Identity) *tls.Config {
	return &tls.Config{Certificates: []tls.Certificate{i.Certificate}, InsecureSkipVerify: true}
}

func TestFilesSurviveAndKeysArePrivate(t *testing.T) {
	dir := t.TempDir()
	c := ca(t)
	if _, err := LoadCA(dir); !errors.Is(err, ErrNoCA) {
		t.Fatalf("an empty directory: %v", err)
	}
	if err := c.Save(dir); err != nil {
		t.Fatal(err)
	}
	loaded, err := LoadCA(dir)
	if err != nil {
		t.Fatal(err)
	}
	n1 := issue(t, loaded, "n1", RoleNode)
	tlsDir := filepath.Join(dir, "tls")
	if err := n1.Save(tlsDir); err != nil {
		t.Fatal(err)
	}
	again, err := Load(tlsDir)
	if err != nil {
		t.Fatal(err)
	}
	if again.Name() != "n1" || again.Role() != RoleNode {
		t.Fatalf("loaded %q, %q", again.Name(), again.Role())
	}
	for _, path := range []string{filepath.Join(dir, "ca-key.pem"), filepath.Join(tlsDir, "key.pem")} {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %o", path, info.Mode().Perm())
		}
	}
}

func TestDamagedFilesAreRefusedWithASentence(t *testing.T) {
	c := ca(t)
	dir := t.TempDir()
	if err := issue(t, c, "n1", RoleNode).Save(dir); err != nil {
		t.Fatal(err)
	}
	other := issue(t, c, "n2", RoleNode)
	if err := os.WriteFile(filepath.Join(dir, "key.pem"), other.KeyPEM, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(dir); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("key of another: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "cert.pem"), []byte("no"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(dir); err == nil {
		t.Error("a certificate that is none was loaded")
	}
}
