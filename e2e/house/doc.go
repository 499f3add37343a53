// Package house holds the rules of the house as tests: which room may import which, where outside libraries stop, that every package
// says what it is for, and that every bound has its row in docs/limits.md. It has no code of its own.
package house
