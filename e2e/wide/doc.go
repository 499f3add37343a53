// Package wide tests launches over many declared nodes on a real local cluster.
package wide
