package rpc

import (
	"crypto"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"sync"
	"time"
	"unicode"

	"crypto/ecdsa"

	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// Bounds of tokens; rows of docs/limits.md.
const (
	// TokenLifetime is how long an agent vouches for a user at a time.
	TokenLifetime = time.Hour
	// TokenLeeway is by how much clocks may differ.
	TokenLeeway = 30 * time.Second
	// MaxTokenLifetime is the longest lifetime that is accepted, whatever a node signs.
	MaxTokenLifetime = 24 * time.Hour
	// maxTokenBytes bounds what is decoded at all; a token is about 900 bytes.
	maxTokenBytes = 8 << 10
	// maxUserName bounds a login name; Linux allows 256 bytes.
	maxUserName = 256
	// tokenCacheSize bounds the tokens whose signatures are remembered.
	tokenCacheSize = 4096
)

// tokenContext is signed in front of the token, so that a signature made for something else is never one of a token.
const tokenContext = "muster user token v1\x00"

// ErrTokenExpired is wrapped by errors about tokens that were good once: get a new one from the agent.
var ErrTokenExpired = errors.New("the token has expired")

// SignToken makes the bearer token with which the user that it names is known to the cluster. The certificate must be
// a node's, with its private key, token.node must be the name in it, and token.audience must be given.
func SignToken(token *nodev1.UserToken, certificate tls.Certificate) (string, error) {
	leaf := certificate.Leaf
	if leaf == nil {
		return "", errors.New("sign a token: the certificate was not parsed")
	}
	if _, err := audienceName(token.GetAudience()); err != nil {
		return "", fmt.Errorf("sign a token: %w", err)
	}
	name, role, err := PeerOfCertificate(leaf)
	if err != nil {
		return "", fmt.Errorf("sign a token: %w", err)
	}
	if role != RoleNode || name != token.GetNode() {
		return "", fmt.Errorf("sign a token for node %q: the certificate is that of %s %q", token.GetNode(), role, name)
	}
	key, ok := certificate.PrivateKey.(crypto.Signer)
	if !ok {
		return "", fmt.Errorf("sign a token: a %T cannot sign", certificate.PrivateKey)
	}
	content, err := proto.Marshal(token)
	if err != nil {
		return "", fmt.Errorf("encode a token: %w", err)
	}
	digest := tokenDigest(content)
	signature, err := key.Sign(rand.Reader, digest[:], crypto.SHA256)
	if err != nil {
		return "", fmt.Errorf("sign a token: %w", err)
	}
	signed, err := proto.Marshal(&nodev1.SignedToken{Token: content, Certificate: leaf.Raw, Signature: signature})
	if err != nil {
		return "", fmt.Errorf("encode a token: %w", err)
	}
	return base64.RawURLEncoding.EncodeToString(signed), nil
}

// VerifyToken checks a bearer token against the cluster's CA: the certificate in it is a node's and valid at now, the
// signature is made with its key, the token names that node, it is meant for the given audience, and now lies between
// issue and expiry, with TokenLeeway on both sides. Errors about expiry wrap ErrTokenExpired. Use a Verifier where many
// calls come with the same token.
func VerifyToken(encoded string, roots *x509.CertPool, audience nodev1.TokenAudience, now time.Time) (*nodev1.UserToken, error) {
	token, err := verifySignature(encoded, roots, now)
	if err != nil {
		return nil, err
	}
	if err := checkAudience(token, audience); err != nil {
		return nil, err
	}
	if err := checkTimes(token, now); err != nil {
		return nil, err
	}
	return token, nil
}

func verifySignature(encoded string, roots *x509.CertPool, now time.Time) (*nodev1.UserToken, error) {
	if len(encoded) > maxTokenBytes {
		return nil, fmt.Errorf("the token has %d bytes; the limit is %d", len(encoded), maxTokenBytes)
	}
	data, err := base64.RawURLEncoding.DecodeString(encoded)
	if err != nil {
		return nil, errors.New("the token is not base64url")
	}
	signed := new(nodev1.SignedToken)
	if err := proto.Unmarshal(data, signed); err != nil {
		return nil, errors.New("the token cannot be decoded")
	}
	cert, err := x509.ParseCertificate(signed.Certificate)
	if err != nil {
		return nil, errors.New("the token's certificate cannot be decoded")
	}
	if _, err := cert.Verify(x509.VerifyOptions{
		Roots:       roots,
		CurrentTime: now,
		KeyUsages:   []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}); err != nil {
		return nil, fmt.Errorf("the token's certificate is not from this cluster's CA: %w", err)
	}
	name, role, err := PeerOfCertificate(cert)
	if err != nil {
		return nil, err
	}
	if role != RoleNode {
		return nil, fmt.Errorf("the token is signed by %s %q; only nodes vouch for users", role, name)
	}
	key, ok := cert.PublicKey.(*ecdsa.PublicKey)
	if !ok {
		return nil, fmt.Errorf("the token's certificate has a %T; an ECDSA key is needed", cert.PublicKey)
	}
	digest := tokenDigest(signed.Token)
	if !ecdsa.VerifyASN1(key, digest[:], signed.Signature) {
		return nil, errors.New("the token's signature is wrong")
	}
	token := new(nodev1.UserToken)
	if err := proto.Unmarshal(signed.Token, token); err != nil {
		return nil, errors.New("the token's content cannot be decoded")
	}
	if token.Node != name {
		return nil, fmt.Errorf("the token is signed by node %q but speaks for node %q", name, token.Node)
	}
	if err := checkUser(token.User); err != nil {
		return nil, err
	}
	return token, nil
}

// checkUser refuses login names that would write over other columns, or control the terminal, where they are shown.
func checkUser(name string) error {
	if len(name) > maxUserName {
		return fmt.Errorf("the token's login name has %d bytes; the limit is %d", len(name), maxUserName)
	}
	for _, r := range name {
		if !unicode.IsPrint(r) || r == ' ' {
			return fmt.Errorf("the token's login name %q contains a blank or a character that cannot be printed", name)
		}
	}
	return nil
}

// audienceName is for people. An error means that nobody may accept such a token.
func audienceName(audience nodev1.TokenAudience) (string, error) {
	switch audience {
	case nodev1.TokenAudience_TOKEN_AUDIENCE_CONTROLLERS:
		return "controllers", nil
	case nodev1.TokenAudience_TOKEN_AUDIENCE_AGENTS:
		return "agents", nil
	case nodev1.TokenAudience_TOKEN_AUDIENCE_UNSPECIFIED:
		return "", errors.New("the token does not say for whom it is")
	}
	return "", fmt.Errorf("the token is for an audience of kind %d, which is not known here", audience)
}

// checkAudience keeps a token that was shown to the one from being good at the other: an agent that was taken over sees
// the tokens of the users who read output there.
func checkAudience(token *nodev1.UserToken, wanted nodev1.TokenAudience) error {
	meant, err := audienceName(token.GetAudience())
	if err != nil {
		return err
	}
	here, err := audienceName(wanted)
	if err != nil {
		return fmt.Errorf("check for whom a token is: %w", err)
	}
	if token.GetAudience() != wanted {
		return fmt.Errorf("the token is for %s; this call needs one for %s", meant, here)
	}
	return nil
}

func checkTimes(token *nodev1.UserToken, now time.Time) error {
	if token.Issued == nil || token.Expires == nil {
		return errors.New("the token has no time of issue or expiry")
	}
	issued, expires := token.Issued.AsTime(), token.Expires.AsTime()
	if expires.Sub(issued) > MaxTokenLifetime {
		return fmt.Errorf("the token claims a lifetime of %s; the limit is %s", expires.Sub(issued), MaxTokenLifetime)
	}
	if now.Before(issued.Add(-TokenLeeway)) {
		return fmt.Errorf("the token was issued %s in the future: the clock of node %s is wrong",
			issued.Sub(now).Round(time.Second), token.Node)
	}
	if now.After(expires.Add(TokenLeeway)) {
		return fmt.Errorf("%w: %s ago, by the clock here", ErrTokenExpired, now.Sub(expires).Round(time.Second))
	}
	return nil
}

func tokenDigest(content []byte) [sha256.Size]byte {
	h := sha256.New()
	h.Write([]byte(tokenContext))
	h.Write(content)
	var digest [sha256.Size]byte
	h.Sum(digest[:0])
	return digest
}

// Principal returns the principal for a verified token.
func Principal(token *nodev1.UserToken) *apiv1.Principal {
	return &apiv1.Principal{
		Kind:      apiv1.PrincipalKind_PRINCIPAL_KIND_USER,
		Uid:       token.Uid,
		Gid:       token.Gid,
		Name:      token.User,
		VouchedBy: token.Node,
	}
}

// Verifier verifies tokens and remembers, by hash, those whose signature was good, because the two signature checks
// cost more than the rest of a small call. Times are checked on every call. Safe for concurrent use.
type Verifier struct {
	roots    *x509.CertPool
	audience nodev1.TokenAudience
	now      func() time.Time

	mu    sync.Mutex
	known map[[sha256.Size]byte]knownToken
}

type knownToken struct {
	token     *nodev1.UserToken
	principal *apiv1.Principal
}

// NewVerifier returns a Verifier against the given CA of tokens for one audience. A nil now means time.Now.
func NewVerifier(roots *x509.CertPool, audience nodev1.TokenAudience, now func() time.Time) *Verifier {
	if now == nil {
		now = time.Now
	}
	return &Verifier{roots: roots, audience: audience, now: now, known: make(map[[sha256.Size]byte]knownToken)}
}

// Verify returns the principal of a bearer token; see VerifyToken for the rules.
func (v *Verifier) Verify(encoded string) (*apiv1.Principal, error) {
	now := v.now()
	hash := sha256.Sum256([]byte(encoded))
	v.mu.Lock()
	entry, ok := v.known[hash]
	v.mu.Unlock()
	if !ok {
		token, err := verifySignature(encoded, v.roots, now)
		if err != nil {
			return nil, err
		}
		if err := checkAudience(token, v.audience); err != nil {
			return nil, err
		}
		entry = knownToken{token: token, principal: Principal(token)}
	}
	if err := checkTimes(entry.token, now); err != nil {
		return nil, err
	}
	if !ok {
		v.remember(hash, entry)
	}
	return entry.principal, nil
}

// remember keeps the map within its bound by dropping an arbitrary half when it is full: a token that was dropped
// costs one more verification.
func (v *Verifier) remember(hash [sha256.Size]byte, entry knownToken) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.known) >= tokenCacheSize {
		drop := tokenCacheSize / 2
		for h := range v.known {
			if drop == 0 {
				break
			}
			delete(v.known, h)
			drop--
		}
	}
	v.known[hash] = entry
}
