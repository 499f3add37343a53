// Package api tests the programs' way into a real local cluster: every protocol of the one listener, what a request id is worth, typed
// details of errors, health, streams that are resumed on another controller, the site's submission program, and for every procedure
// who may call it. Callers have the credentials that clients get: a user's token made by an agent's key, or a certificate of the cluster.
package api
