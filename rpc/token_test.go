package rpc_test

import (
	"crypto"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/ops/pki"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/rpc"
)

func newCA(t *testing.T) *pki.CA {
	t.Helper()
	ca, err := pki.NewCA("test")
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

func issue(t *testing.T, ca *pki.CA, name string, role pki.Role) *pki.Identity {
	t.Helper()
	identity, err := ca.Issue(name, role)
	if err != nil {
		t.Fatal(err)
	}
	return identity
}

const (
	controllers = nodev1.TokenAudience_TOKEN_AUDIENCE_CONTROLLERS
	agents      = nodev1.TokenAudience_TOKEN_AUDIENCE_AGENTS
)

func aliceAt(node string, now time.Time) *nodev1.UserToken {
	return &nodev1.UserToken{Uid: 1000, Gid: 100, User: "alice", Node: node, Audience: controllers,
		Issued: timestamppb.New(now), Expires: timestamppb.New(now.Add(rpc.TokenLifetime))}
}

func sign(t *testing.T, token *nodev1.UserToken, certificate tls.Certificate) string {
	t.Helper()
	text, err := rpc.SignToken(token, certificate)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// resign replaces parts of a token without the care that SignToken takes.
func resign(t *testing.T, text string, change func(*nodev1.SignedToken)) string {
	t.Helper()
	data, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	signed := &nodev1.SignedToken{}
	if err := proto.Unmarshal(data, signed); err != nil {
		t.Fatal(err)
	}
	change(signed)
	if data, err = proto.Marshal(signed); err != nil {
		t.Fatal(err)
	}
	return base64.RawURLEncoding.EncodeToString(data)
}

func TestTokenOfANodeIsAccepted(t *testing.T) {
	now := time.Now()
	ca := newCA(t)
	n1 := issue(t, ca, "n1", pki.RoleNode)
	got, err := rpc.VerifyToken(sign(t, aliceAt("n1", now), n1.Certificate), n1.Roots, controllers, now)
	if err != nil {
		t.Fatal(err)
	}
	if got.Uid != 1000 || got.Gid != 100 || got.User != "alice" || got.Node != "n1" {
		t.Fatalf("got %v", got)
	}
}

func TestForgedTokensAreRefused(t *testing.T) {
	now := time.Now()
	ca := newCA(t)
	n1, n2 := issue(t, ca, "n1", pki.RoleNode), issue(t, ca, "n2", pki.RoleNode)
	c1 := issue(t, ca, "c1", pki.RoleController)
	stranger := issue(t, newCA(t), "n1", pki.RoleNode)
	good := sign(t, aliceAt("n1", now), n1.Certificate)
	root := aliceAt("n1", now)
	root.Uid = 0
	rootBytes, err := proto.Marshal(root)
	if err != nil {
		t.Fatal(err)
	}
	asNode2, err := proto.Marshal(aliceAt("n2", now))
	if err != nil {
		t.Fatal(err)
	}
	long := aliceAt("n1", now)
	long.Expires = timestamppb.New(now.Add(365 * 24 * time.Hour))
	painted, endless := aliceAt("n1", now), aliceAt("n1", now)
	painted.User, endless.User = "al\x1b[31mice", strings.Repeat("a", 257)
	untimed := aliceAt("n1", now)
	untimed.Expires = nil
	for name, text := range map[string]string{
		"empty":                       "",
		"not base64":                  "!!!",
		"garbage":                     base64.RawURLEncoding.EncodeToString([]byte("hello")),
		"too long":                    strings.Repeat("A", 1<<20),
		"signed under another CA":     sign(t, aliceAt("n1", now), stranger.Certificate),
		"content exchanged":           resign(t, good, func(s *nodev1.SignedToken) { s.Token = rootBytes }),
		"speaks for another node":     resign(t, good, func(s *nodev1.SignedToken) { s.Token = asNode2 }),
		"certificate exchanged":       resign(t, good, func(s *nodev1.SignedToken) { s.Certificate = n2.Certificate.Leaf.Raw }),
		"certificate of a controller": resign(t, good, func(s *nodev1.SignedToken) { s.Certificate = c1.Certificate.Leaf.Raw }),
		"no certificate":              resign(t, good, func(s *nodev1.SignedToken) { s.Certificate = nil }),
		"no signature":                resign(t, good, func(s *nodev1.SignedToken) { s.Signature = nil }),
		"a bit flipped":               resign(t, good, func(s *nodev1.SignedToken) { s.Signature[9] ^= 1 }),
		"the CA's own certificate":    resign(t, good, func(s *nodev1.SignedToken) { s.Certificate = ca.PEM() }),
		"too long a life":             sign(t, long, n1.Certificate),
		"a name with escapes":         sign(t, painted, n1.Certificate),
		"an endless name":             sign(t, endless, n1.Certificate),
		"no expiry":                   sign(t, untimed, n1.Certificate),
	} {
		if token, err := rpc.VerifyToken(text, n1.Roots, controllers, now); err == nil {
			t.Errorf("%s: accepted as %v", name, token)
		}
		if _, err := rpc.NewVerifier(n1.Roots, controllers, func() time.Time { return now }).Verify(text); err == nil {
			t.Errorf("%s: accepted by the Verifier", name)
		}
	}
}

// A node that was taken over sees the tokens of users who read output there.
func TestTokenIsGoodForItsAudienceOnly(t *testing.T) {
	now := time.Now()
	n1 := issue(t, newCA(t), "n1", pki.RoleNode)
	unspecified := aliceAt("n1", now)
	unspecified.Audience = nodev1.TokenAudience_TOKEN_AUDIENCE_UNSPECIFIED
	if _, err := rpc.SignToken(unspecified, n1.Certificate); err == nil {
		t.Error("a token for nobody in particular was signed")
	}
	for _, audience := range []nodev1.TokenAudience{unspecified.Audience, controllers, agents, 99} {
		token := aliceAt("n1", now)
		token.Audience = audience
		text := signAnything(t, token, n1.Certificate)
		for _, at := range []nodev1.TokenAudience{unspecified.Audience, controllers, agents, 99} {
			want := audience == at && (at == controllers || at == agents)
			if _, err := rpc.VerifyToken(text, n1.Roots, at, now); (err == nil) != want {
				t.Errorf("a token for %v shown to %v: %v", audience, at, err)
			}
			verifier := rpc.NewVerifier(n1.Roots, at, nil)
			for range 2 { // also when it was seen before
				if _, err := verifier.Verify(text); (err == nil) != want {
					t.Errorf("a token for %v shown to the Verifier of %v: %v", audience, at, err)
				}
			}
		}
	}
}

// signAnything signs what SignToken would not, as a node that was taken over could.
func signAnything(t *testing.T, token *nodev1.UserToken, certificate tls.Certificate) string {
	t.Helper()
	content, err := proto.Marshal(token)
	if err != nil {
		t.Fatal(err)
	}
	digest := sha256.Sum256(append([]byte("muster user token v1\x00"), content...))
	signature, err := certificate.PrivateKey.(crypto.Signer).Sign(rand.Reader, digest[:], crypto.SHA256)
	if err != nil {
		t.Fatal(err)
	}
	data, err := proto.Marshal(&nodev1.SignedToken{Token: content, Certificate: certificate.Leaf.Raw, Signature: signature})
	if err != nil {
		t.Fatal(err)
	}
	return base64.RawURLEncoding.EncodeToString(data)
}

func TestOnlyANodeSignsAndOnlyForItself(t *testing.T) {
	now := time.Now()
	ca := newCA(t)
	if _, err := rpc.SignToken(aliceAt("c1", now), issue(t, ca, "c1", pki.RoleController).Certificate); err == nil {
		t.Error("a controller signed a token")
	}
	if _, err := rpc.SignToken(aliceAt("n2", now), issue(t, ca, "n1", pki.RoleNode).Certificate); err == nil {
		t.Error("n1 signed for n2")
	}
}

func TestTokenExpiresWithLeewayAlsoWhenRemembered(t *testing.T) {
	now := time.Now()
	n1 := issue(t, newCA(t), "n1", pki.RoleNode)
	text := sign(t, aliceAt("n1", now), n1.Certificate)
	clock := now
	verifier := rpc.NewVerifier(n1.Roots, controllers, func() time.Time { return clock })
	for _, c := range []struct {
		at      time.Duration
		ok      bool
		expired bool
	}{
		{-31 * time.Second, false, false},
		{-29 * time.Second, true, false},
		{0, true, false},
		{rpc.TokenLifetime + 29*time.Second, true, false},
		{rpc.TokenLifetime + 31*time.Second, false, true},
		{0, true, false},
	} {
		clock = now.Add(c.at)
		_, err := verifier.Verify(text)
		if (err == nil) != c.ok || errors.Is(err, rpc.ErrTokenExpired) != c.expired {
			t.Errorf("%s after the issue: %v", c.at, err)
		}
	}
}

func TestRememberedTokenCostsNoSignatureCheck(t *testing.T) {
	n1 := issue(t, newCA(t), "n1", pki.RoleNode)
	verifier := rpc.NewVerifier(n1.Roots, controllers, nil)
	text := sign(t, aliceAt("n1", time.Now()), n1.Certificate)
	first, err := verifier.Verify(text)
	if err != nil {
		t.Fatal(err)
	}
	second, err := verifier.Verify(text)
	if err != nil {
		t.Fatal(err)
	}
	if first != second {
		t.Error("the second verification did not come from memory")
	}
}

func BenchmarkVerifyRemembered(b *testing.B) {
	ca, err := pki.NewCA("bench")
	if err != nil {
		b.Fatal(err)
	}
	n1, err := ca.Issue("n1", pki.RoleNode)
	if err != nil {
		b.Fatal(err)
	}
	text, err := rpc.SignToken(aliceAt("n1", time.Now()), n1.Certificate)
	if err != nil {
		b.Fatal(err)
	}
	verifier := rpc.NewVerifier(n1.Roots, controllers, nil)
	for b.Loop() {
		if _, err := verifier.Verify(text); err != nil {
			b.Fatal(err)
		}
	}
}
