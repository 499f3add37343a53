// Package session is what a Slurm-named command has to work with: its words, streams and environment, the user who
// called it, a clock and a way to the cluster. Tests replace each of them.
//
// Invariants: a command touches the outside world only through its session; the cluster is opened at most once and only
// when it is needed, so that a mistake on the command line costs no round trip.
//
// It is called by every command of cmd/internal/slurm. It never parses options.
package session

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"os/user"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	"github.com/muster-hpc/muster/ops/version"
	"github.com/muster-hpc/muster/proto/muster/api/v1/apiv1connect"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
	"github.com/muster-hpc/muster/rpc"
	"github.com/muster-hpc/muster/rpc/client"
)

// Cluster is the part of rpc/client.Client that commands need.
type Cluster interface {
	// Jobs is the job service.
	Jobs() apiv1connect.JobServiceClient
	// Cluster is the cluster service.
	Cluster() apiv1connect.ClusterServiceClient
	// Node reaches the agent at an address.
	Node(address string) nodev1connect.NodeServiceClient
	// ClusterName is the cluster's name.
	ClusterName() string
	// NodeName is the name of the node whose agent vouched.
	NodeName() string
	// Controllers are the API addresses that are known, the presumed leader first.
	Controllers() []string
}

// Session is one call of one command.
type Session struct {
	// Program is the name in front of messages ("sbatch").
	Program string
	// Args are the words after the program's name.
	Args []string
	// Stdin, Stdout and Stderr are the streams. Stdout is not buffered.
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	// Environ is the environment as "NAME=value".
	Environ []string
	// Dir is the working directory, absolute.
	Dir string
	// Host is the name of the host.
	Host string
	// Umask is the file mode creation mask.
	Umask uint32
	// UID and GID are who called.
	UID, GID uint32
	// Now is the clock.
	Now func() time.Time
	// Dial opens the cluster.
	Dial func(ctx context.Context) (Cluster, error)
	// RequestID mints an idempotency key.
	RequestID func() string
	// Signals delivers signals of the process until stop is called; nil delivers none.
	Signals func(which ...os.Signal) (signals <-chan os.Signal, stop func())

	once    sync.Once
	cluster Cluster
	err     error
	names   sync.Map // uid → user name, gid → group name
}

// patient are the programs that bring something to its end: scripts and people that called one of them are better served by its
// waiting for a controller. Others show a picture, and say soon that there is none.
var patient = map[string]bool{"srun": true, "sbatch": true, "salloc": true, "sattach": true, "sbcast": true, "scancel": true}

// Real is the session of this process.
func Real(program string, args []string) *Session {
	dir, err := os.Getwd()
	if err != nil {
		dir = "/"
	}
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	return &Session{
		Program: program, Args: args, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Environ: os.Environ(),
		Dir: dir, Host: host, Umask: umask(), UID: uint32(os.Getuid()), GID: uint32(os.Getgid()),
		Now: time.Now, RequestID: client.NewRequestID, Signals: signals,
		Dial: func(ctx context.Context) (Cluster, error) {
			c, err := client.Open(ctx, client.Config{Patient: patient[program]})
			if err != nil {
				return nil, err
			}
			return c, nil
		},
	}
}

// Cluster opens the cluster once and returns it.
func (s *Session) Cluster(ctx context.Context) (Cluster, error) {
	s.once.Do(func() { s.cluster, s.err = s.Dial(ctx) })
	return s.cluster, s.err
}

// Lookup is os.LookupEnv over the session's environment; of a repeated name the first counts.
func (s *Session) Lookup(name string) (string, bool) {
	for _, pair := range s.Environ {
		if len(pair) > len(name) && pair[len(name)] == '=' && pair[:len(name)] == name {
			return pair[len(name)+1:], true
		}
	}
	return "", false
}

// Get is os.Getenv over the session's environment.
func (s *Session) Get(name string) string {
	value, _ := s.Lookup(name)
	return value
}

// Errorf prints "PROGRAM: error: …" to Stderr.
func (s *Session) Errorf(format string, args ...any) {
	s.Line("error: "+format, args...)
}

// Line prints "PROGRAM: …" to Stderr; every further line of the message gets the program's name as well, and other control
// characters are escaped.
func (s *Session) Line(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	prefix := s.Program + ": "
	if rest, ok := strings.CutPrefix(text, "error: "); ok {
		text, prefix = rest, prefix+"error: "
	}
	for line := range strings.SplitSeq(text, "\n") {
		fmt.Fprintf(s.Stderr, "%s%s\n", prefix, value.Safe(line))
	}
}

// Usage prints getopt's message and where help is.
func (s *Session) Usage(err error) {
	fmt.Fprintf(s.Stderr, "%s: %v\n", s.Program, err)
	fmt.Fprintf(s.Stderr, "Try \"%s --help\" for more information\n", s.Program)
}

// Version prints the release whose dialect is spoken, as -V does.
func (s *Session) Version() {
	fmt.Fprintf(s.Stdout, "slurm %s\n", version.Slurm)
}

// Sentence is what a person should read of an error of the cluster.
func (s *Session) Sentence(err error) string { return rpc.Sentence(err) }

// UserName returns the name of a user id, or its number.
func (s *Session) UserName(uid uint32) string {
	key := "u" + strconv.FormatUint(uint64(uid), 10)
	if name, ok := s.names.Load(key); ok {
		return name.(string)
	}
	name := key[1:]
	if u, err := user.LookupId(name); err == nil {
		name = u.Username
	}
	s.names.Store(key, name)
	return name
}

// GroupName returns the name of a group id, or its number.
func (s *Session) GroupName(gid uint32) string {
	key := "g" + strconv.FormatUint(uint64(gid), 10)
	if name, ok := s.names.Load(key); ok {
		return name.(string)
	}
	name := key[1:]
	if g, err := user.LookupGroupId(name); err == nil {
		name = g.Name
	}
	s.names.Store(key, name)
	return name
}

// UserID returns the id of a user given by name or number.
func (s *Session) UserID(name string) (uint32, error) {
	if u, err := user.Lookup(name); err == nil {
		id, err := strconv.ParseUint(u.Uid, 10, 32)
		return uint32(id), err
	}
	if id, err := strconv.ParseUint(name, 10, 32); err == nil {
		return uint32(id), nil
	}
	return 0, fmt.Errorf("Invalid user: %s", name)
}

// UserIDs returns the ids of a list of users.
func (s *Session) UserIDs(list string) ([]uint32, error) {
	var ids []uint32
	for name := range strings.SplitSeq(list, ",") {
		id, err := s.UserID(strings.TrimSpace(name))
		if err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, nil
}

// NamesCluster tells whether a --clusters list asks for this cluster (by name, or "all").
func NamesCluster(list, name string) bool {
	for word := range strings.SplitSeq(list, ",") {
		if word != name && !strings.EqualFold(word, "all") {
			return false
		}
	}
	return true
}

// signals is Session.Signals of a real process.
func signals(which ...os.Signal) (<-chan os.Signal, func()) {
	c := make(chan os.Signal, 16) // what comes faster than it is handled is dropped, as signals are
	signal.Notify(c, which...)
	return c, func() { signal.Stop(c) }
}
