package sbcast

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/cmd/internal/slurm/fetch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

const operands = "SOURCE DEST"

// Bounds; rows of docs/limits.md.
const (
	// maxPiece is the largest piece that agents take.
	maxPiece = 256 << 10
	// usualFanout is how many nodes are sent to at the same time.
	usualFanout = 8
	// usualTimeout is how long a node may make no progress.
	usualTimeout = time.Minute
)

// Table is the table of sbcast.
func Table() *option.Table {
	const none, required, optional = option.None, option.Required, option.Optional
	const noLibs = "copy the libraries to the nodes by themselves, or use a file system that all nodes have"
	return &option.Table{Options: []option.Option{
		{Long: "compress", Short: 'C', Arity: optional, Meta: "LIBRARY", Help: "compress what is sent", Harmless: "the file that arrives is the same", Env: "SBCAST_COMPRESS"},
		{Long: "exclude", Arity: required, Refused: "it belongs to --send-libs", Env: "SBCAST_EXCLUDE"},
		{Long: "fanout", Short: 'F', Arity: required, Meta: "N", Help: "nodes that are sent to at the same time (8)", Env: "SBCAST_FANOUT"},
		{Long: "treewidth", Same: "fanout", Arity: required, Meta: "N"},
		{Long: "force", Short: 'f', Arity: none, Help: "replace a file that is there", Env: "SBCAST_FORCE"},
		{Long: "help", Arity: none, Help: "this text"},
		{Long: "jobid", Short: 'j', Arity: required, Meta: "JOB[.STEP]", Help: "the job or step whose nodes are sent to; otherwise the job in which sbcast is called"},
		{Long: "preserve", Short: 'p', Arity: none, Help: "keep modification time and permissions", Env: "SBCAST_PRESERVE"},
		{Long: "send-libs", Arity: optional, Value: "yes", Only: []string{"no"}, Refused: noLibs, Env: "SBCAST_SEND_LIBS"},
		{Long: "size", Short: 's', Arity: required, Meta: "SIZE", Help: "size of the pieces that are sent, up to 256k", Env: "SBCAST_SIZE"},
		{Long: "timeout", Short: 't', Arity: required, Meta: "SECONDS", Help: "give up on a node that makes no progress for so long (60)", Env: "SBCAST_TIMEOUT"},
		{Long: "usage", Arity: none, Help: "a short list of options"},
		{Long: "verbose", Short: 'v', Arity: none, Help: "say more"},
		{Long: "version", Short: 'V', Arity: none, Help: "the release of Slurm whose dialect is spoken"},
	}}
}

// cast is one call of sbcast.
type cast struct {
	s         *session.Session
	options   *option.Set
	file      *os.File
	source    string
	dest      string
	size      int64
	sha256    string
	mode      uint32
	modified  *timestamppb.Timestamp
	piece     int
	fanout    int
	timeout   time.Duration
	job, step uint32
	hasStep   bool
	force     bool
}

// Run is the command. It returns 0 if every node has the file, 255 for words that cannot be parsed, and otherwise 1.
func Run(ctx context.Context, s *session.Session) int {
	table := Table()
	line, words, err := table.Parse(s.Args)
	if err == nil && !line.Has("help") && !line.Has("usage") && !line.Has("version") && len(words) != 2 {
		s.Errorf("Need two file names, have %d names: %s", len(words), operands)
		return submit.CodeRefused
	}
	var env *option.Set
	if err == nil {
		env, err = table.Environment(s.Lookup)
	}
	switch {
	case err != nil:
		return fail(s, err)
	case line.Has("help"):
		fmt.Fprint(s.Stdout, table.Help(s.Program, operands, "Sends a file to all nodes of a job."))
		return 0
	case line.Has("usage"):
		fmt.Fprint(s.Stdout, table.Usage(s.Program, operands))
		return 0
	case line.Has("version"):
		s.Version()
		return 0
	}
	c := &cast{s: s, options: line.Over(env), piece: maxPiece, fanout: usualFanout, timeout: usualTimeout}
	if err := c.read(words[0], words[1]); err != nil {
		return fail(s, err)
	}
	defer c.file.Close() // only read
	cluster, err := s.Cluster(ctx)
	if err != nil {
		s.Errorf("Unable to contact the cluster\n%s", s.Sentence(err))
		return submit.CodeRefused
	}
	shares, attempt, err := c.nodes(ctx, cluster)
	if err != nil {
		submit.Explain(s, fmt.Sprintf("Unable to look up the nodes of job %d", c.job), err)
		return submit.CodeRefused
	}
	if len(shares) == 0 {
		s.Errorf("job %d has no nodes now: files are sent to jobs that run", c.job)
		return submit.CodeRefused
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if s.Signals != nil {
		heard, silence := s.Signals(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
		stop, done := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(done)
			select {
			case <-heard:
				cancel()
			case <-stop:
			}
		}()
		defer func() { close(stop); <-done; silence() }()
	}
	return c.send(ctx, cluster, shares, attempt)
}

func fail(s *session.Session, err error) int {
	var usage *option.UsageError
	if errors.As(err, &usage) {
		s.Usage(usage)
		return submit.CodeUsage
	}
	s.Errorf("%v", err)
	return submit.CodeOf(err)
}

// read reads the options and the file.
func (c *cast) read(source, dest string) error {
	refused := func(format string, args ...any) error {
		return &submit.Error{Text: fmt.Sprintf(format, args...), Code: submit.CodeRefused}
	}
	word := c.s.Get("SLURM_JOB_ID")
	if word == "" {
		word = c.s.Get("SLURM_JOBID")
	}
	if v, ok := c.options.Get("jobid"); ok {
		word = v.Text
	}
	if word == "" {
		return refused("Need a job: call it within one, or name one with --jobid")
	}
	var err error
	if c.job, c.step, c.hasStep, err = fetch.Step(word); err != nil {
		return refused("Invalid job id specified: %s", word)
	}
	for _, number := range []struct {
		name string
		take func(uint64)
	}{
		{"fanout", func(n uint64) { c.fanout = int(min(n, 1024)) }},
		{"timeout", func(n uint64) { c.timeout = time.Duration(n) * time.Second }},
	} {
		if v, ok := c.options.Get(number.name); ok {
			n, err := strconv.ParseUint(v.Text, 10, 31)
			if err != nil || n == 0 {
				return refused("Invalid numeric value \"%s\" for --%s.", v.Text, number.name)
			}
			number.take(n)
		}
	}
	if v, ok := c.options.Get("size"); ok {
		n, err := bytesOf(v.Text)
		if err != nil {
			return refused("Invalid --size specification: %s", v.Text)
		}
		c.piece = int(min(n, maxPiece))
	}
	c.force = c.options.Has("force")
	c.source = submit.Absolute(c.s.Dir, source)
	if strings.HasSuffix(dest, "/") {
		dest += filepath.Base(c.source)
	}
	c.dest = path.Clean(submit.Absolute(c.s.Dir, dest))
	return c.open()
}

// bytesOf reads a size in bytes with an optional k or m.
func bytesOf(text string) (uint64, error) {
	factor := uint64(1)
	switch {
	case strings.HasSuffix(strings.ToLower(text), "k"):
		factor, text = 1<<10, text[:len(text)-1]
	case strings.HasSuffix(strings.ToLower(text), "m"):
		factor, text = 1<<20, text[:len(text)-1]
	}
	n, err := strconv.ParseUint(text, 10, 31)
	if err != nil || n == 0 {
		return 0, value.ErrInvalid
	}
	return n * factor, nil
}

// open opens the file and reads what is to be kept of it.
func (c *cast) open() error {
	refused := func(err error) error {
		return &submit.Error{Text: fmt.Sprintf("Can't open `%s`: %v", c.source, err), Code: submit.CodeRefused}
	}
	f, err := os.Open(c.source)
	if err != nil {
		return refused(err)
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("it is not a regular file")
	}
	h := sha256.New()
	if err == nil {
		c.size, err = io.Copy(h, f)
	}
	if err != nil {
		_ = f.Close() // only read
		return refused(err)
	}
	c.file, c.sha256, c.mode = f, hex.EncodeToString(h.Sum(nil)), uint32(info.Mode().Perm())
	if c.options.Has("preserve") {
		c.modified = timestamppb.New(info.ModTime())
	} else {
		c.mode &^= c.s.Umask & 0o777
	}
	return nil
}

// nodes are those of the job, or of the step, each once.
func (c *cast) nodes(ctx context.Context, cluster session.Cluster) ([]*apiv1.NodeShare, uint32, error) {
	var shares []*apiv1.NodeShare
	var attempt uint32
	if c.hasStep {
		answer, err := cluster.Jobs().GetStep(ctx, &apiv1.GetStepRequest{JobId: c.job, StepId: c.step})
		if err != nil {
			return nil, 0, err
		}
		shares, attempt = answer.GetShares(), answer.GetStep().GetAttempt()
	} else {
		answer, err := cluster.Jobs().GetJob(ctx, &apiv1.GetJobRequest{JobId: c.job})
		if err != nil {
			return nil, 0, err
		}
		status := answer.GetJob().GetStatus()
		if status.GetState() != apiv1.JobState_JOB_STATE_RUNNING {
			return nil, 0, nil
		}
		shares, attempt = answer.GetShares(), status.GetAttempt()
	}
	seen := map[string]bool{}
	var once []*apiv1.NodeShare
	for _, share := range shares {
		if !seen[share.GetAgentAddress()] {
			seen[share.GetAgentAddress()] = true
			once = append(once, share)
		}
	}
	return once, attempt, nil
}
