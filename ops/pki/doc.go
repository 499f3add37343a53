// Package pki makes and checks the cluster's certificates.
//
// A cluster has one certificate authority (CA). Every controller and every node has a certificate from it whose common
// name is the controller's or node's name and whose organisational unit is its Role. That pair is the identity: host
// names and addresses are not, because agents listen on addresses that change and may be reached through several
// networks. So every side checks two things of the other: the chain to the cluster's CA, and the role (and, where the
// caller knows it, the name).
//
// Invariants:
//   - Keys are ECDSA P-256: a handshake costs tens of microseconds, so that a command that makes one call stays cheap.
//   - TLS 1.3 only.
//   - Private keys are written with mode 0600, through a temporary file that is synced and renamed.
//   - Users have no certificate; see package rpc for their tokens, which are signed with a node's key.
//
// It is called by the controller, the agent, the local cluster and the clients. It never opens a connection, never
// logs, and never reads a clock other than to date a certificate.
package pki
