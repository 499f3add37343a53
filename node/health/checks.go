package health

import (
	"cmp"
	"context"
	"hash/fnv"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// Config says on what node programs run.
type Config struct {
	// Dir is a directory of this package's own; made when something is written there.
	Dir string
	// Node is the node's name; BootID its boot.
	Node, BootID string
	// Commands is a directory that programs find at the end of their PATH; empty means none.
	Commands string
	// Changed is called when Conditions changed. It must not block, nor call Checks.
	Changed func()
	// GPU finds the number of a GPU by its unique id; nil finds none.
	GPU func(uuid string) (uint32, bool)
	// Log says what happens.
	Log *slog.Logger
}

// Checks runs the programs of one node. Its methods are safe for concurrent use.
type Checks struct {
	cfg Config
	run runner
	// wake wakes Run.
	wake chan struct{}

	mu       sync.Mutex
	settings *apiv1.Settings
	cluster  string
	found    map[string][]*apiv1.Condition // by owner
	due      map[string]time.Time          // of checks at intervals, by name
	told     map[string]time.Time          // when the log said that a check gives no verdict
	busy     bool
	quiet    time.Time // since when there is no work
	// endIdle ends the check for idle nodes that runs; idleOver is closed when it is gone. nil if none runs.
	endIdle  context.CancelFunc
	idleOver chan struct{}
	prologs  map[attemptKey]*prolog
}

// New returns the programs of a node, with what they found before. It starts nothing: that is Run's matter.
func New(cfg Config) *Checks {
	c := &Checks{
		cfg: cfg, wake: make(chan struct{}, 1), settings: &apiv1.Settings{}, found: map[string][]*apiv1.Condition{},
		due: map[string]time.Time{}, told: map[string]time.Time{}, quiet: time.Now(), prologs: map[attemptKey]*prolog{},
	}
	if err := c.load(); err != nil {
		cfg.Log.Warn("what checks found before is forgotten", "error", err)
	}
	c.tidy()
	return c
}

// Configure takes the cluster's settings in. What checks found that there are no more is forgotten. The settings must not be changed.
func (c *Checks) Configure(settings *apiv1.Settings, cluster string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if settings == nil || settings == c.settings && cluster == c.cluster {
		return
	}
	c.settings, c.cluster = settings, cluster
	gone := false
	for owner := range c.found {
		if !c.has(owner) {
			delete(c.found, owner)
			gone = true
		}
	}
	for name := range c.due {
		if !c.has(name) {
			delete(c.due, name)
		}
	}
	if gone {
		c.save()
		c.cfg.Changed()
	}
	c.poke()
}

// has reports whether the configuration has a program of this name. c.mu is held.
func (c *Checks) has(owner string) bool {
	switch owner {
	case ownerProlog:
		return c.settings.Prolog != ""
	case ownerEpilog:
		return c.settings.Epilog != ""
	}
	return slices.ContainsFunc(c.settings.HealthChecks, func(h *apiv1.HealthCheck) bool { return h.Name == owner })
}

func (c *Checks) poke() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// Busy says whether work is on the node. When some comes, a check for idle nodes is killed at once.
func (c *Checks) Busy(busy bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if busy == c.busy {
		return
	}
	c.busy = busy
	if busy {
		if c.endIdle != nil {
			c.endIdle()
		}
		return
	}
	c.quiet = time.Now()
	c.poke()
}

// Conditions returns what programs found, those that have expired left out, worst first and at most as many as are told of a node. The
// messages must not be changed.
func (c *Checks) Conditions() []*apiv1.Condition {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	var all []*apiv1.Condition
	for _, owner := range slices.Sorted(maps.Keys(c.found)) {
		for _, f := range c.found[owner] {
			if f.Expires == nil || f.Expires.AsTime().After(now) {
				all = append(all, f)
			}
		}
	}
	slices.SortStableFunc(all, func(a, b *apiv1.Condition) int { return cmp.Compare(b.Severity, a.Severity) })
	return all[:min(len(all), maxConditions)]
}

// Run runs checks at their intervals until the context ends.
func (c *Checks) Run(ctx context.Context) {
	for ctx.Err() == nil {
		h, idle, wait := c.next(time.Now())
		if h != nil {
			c.interval(ctx, h, idle)
			continue
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-c.wake:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// next returns the check that is due, or how long none is. idle says that it may run only beside no work.
func (c *Checks) next(now time.Time) (first *apiv1.HealthCheck, idle bool, wait time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	wait = time.Hour
	var at time.Time
	for _, h := range c.settings.HealthChecks {
		periodic := slices.Contains(h.Times, apiv1.CheckTime_CHECK_TIME_PERIODIC)
		if !periodic && !slices.Contains(h.Times, apiv1.CheckTime_CHECK_TIME_IDLE) {
			continue
		}
		due, known := c.due[h.Name]
		if !known {
			due = now.Add(Jitter(c.cfg.Node+"\x00"+h.Name, interval(h)))
			c.due[h.Name] = due
		}
		if !periodic {
			if c.busy {
				continue // Busy says when to look again
			}
			if quiet := c.quiet.Add(idleQuiet); due.Before(quiet) {
				due = quiet
			}
		}
		if left := due.Sub(now); left > 0 {
			wait = min(wait, left)
		} else if first == nil || due.Before(at) {
			first, at, idle = h, due, !periodic
		}
	}
	return first, idle, wait
}

func interval(h *apiv1.HealthCheck) time.Duration {
	if h.IntervalS > 0 {
		return time.Duration(h.IntervalS) * time.Second
	}
	return defaultInterval
}

// Jitter is a time from 0 to the interval, the same for a name every time: many nodes that begin together do not do everything together.
func Jitter(name string, interval time.Duration) time.Duration {
	h := fnv.New64a()
	_, _ = h.Write([]byte(name)) // never fails
	// Names that differ in their last letters have hashes that differ in their low bits: the finish of MurmurHash3 spreads them.
	x := h.Sum64()
	x = (x ^ x>>33) * 0xff51afd7ed558ccd
	x = (x ^ x>>33) * 0xc4ceb9fe1a85ec53
	x ^= x >> 33
	return time.Duration(float64(x>>11) / (1 << 53) * float64(interval))
}

// interval runs a check that is due.
func (c *Checks) interval(ctx context.Context, h *apiv1.HealthCheck, idle bool) {
	word := "periodic"
	if idle {
		word = "idle"
		var end context.CancelFunc
		ctx, end = context.WithCancel(ctx)
		defer end()
		c.mu.Lock()
		if c.busy {
			c.mu.Unlock()
			return
		}
		over := make(chan struct{})
		c.endIdle, c.idleOver = end, over
		c.mu.Unlock()
		defer func() {
			c.mu.Lock()
			c.endIdle, c.idleOver = nil, nil
			c.mu.Unlock()
			close(over)
		}()
	}
	cut := c.check(ctx, h, word, nil)
	c.mu.Lock()
	defer c.mu.Unlock()
	next := time.Now()
	if !cut { // what had to make room for work is still due
		next = next.Add(interval(h))
	}
	c.due[h.Name] = next
}

// alone waits until no check for idle nodes is left.
func (c *Checks) alone(ctx context.Context) {
	c.mu.Lock()
	over := c.idleOver
	if c.endIdle != nil {
		c.endIdle()
	}
	c.mu.Unlock()
	if over == nil {
		return
	}
	select {
	case <-over:
	case <-ctx.Done():
	}
}

// check runs a check and takes in what it found. It reports whether the context ended it.
func (c *Checks) check(ctx context.Context, h *apiv1.HealthCheck, word string, more []string) (cut bool) {
	timeout := defaultTimeout
	if h.TimeoutS > 0 {
		timeout = time.Duration(h.TimeoutS) * time.Second
	}
	env := append(c.environment(), "MUSTER_CHECK="+h.Name, "MUSTER_CHECK_TIME="+word)
	r := c.run.run(ctx, h.Name, h.Command, append(env, more...), timeout)
	switch {
	case r.cut:
		return true
	case r.why != nil:
		c.unknown(h.Name, r.why)
		return false
	}
	severity := h.Severity
	if severity == apiv1.ConditionSeverity_CONDITION_SEVERITY_UNSPECIFIED {
		severity = apiv1.ConditionSeverity_CONDITION_SEVERITY_FAILED
	}
	found := Parse(r.code, r.output, time.Now(), Defaults{
		Owner: h.Name, Code: codeFailed, Severity: severity, EndsWork: h.EndsWork, GPU: c.cfg.GPU,
		Clears: "the next run of the check that succeeds",
	})
	c.say(h.Name, found, r.took)
	c.replaceFound(h.Name, found)
	return false
}

func (c *Checks) say(name string, found []*apiv1.Condition, took time.Duration) {
	c.mu.Lock()
	known := c.found[name]
	delete(c.told, name)
	c.mu.Unlock()
	if equal(known, found) {
		c.cfg.Log.Debug("a check has run", "check", name, "took", took, "findings", len(found))
		return
	}
	c.cfg.Log.Info("a check found something else than before", "check", name, "took", took, "findings", len(found))
	for _, f := range found {
		c.cfg.Log.Warn("found", "check", name, "code", f.Code, "severity", f.Severity, "reason", f.Reason)
	}
}

// Codes of what programs are found to do.
const (
	codeFailed  = "CHECK_FAILED"
	codeUnknown = "CHECK_UNKNOWN"
)

// unknown notes that a check gave no verdict: what it found before stays, and nobody is kept from the node by that.
func (c *Checks) unknown(name string, why error) {
	c.mu.Lock()
	now := time.Now()
	tell := now.Sub(c.told[name]) >= tellAgain
	if tell {
		c.told[name] = now
	}
	kept := slices.DeleteFunc(slices.Clone(c.found[name]), func(f *apiv1.Condition) bool { return f.Code == codeUnknown })
	c.mu.Unlock()
	if tell {
		c.cfg.Log.Warn("a check gives no verdict; what it found before stays", "check", name, "error", why)
	}
	c.replaceFound(name, append(kept, &apiv1.Condition{
		Owner: name, Code: codeUnknown, Severity: apiv1.ConditionSeverity_CONDITION_SEVERITY_INFO, Reason: Line(why.Error()),
		Clears: "the next run of the check that gives a verdict", Since: timestamppb.New(now),
	}))
}

func equal(a, b []*apiv1.Condition) bool {
	return slices.EqualFunc(a, b, func(x, y *apiv1.Condition) bool { return proto.Equal(x, y) })
}

// environment is what every program gets: nothing of the agent's own.
func (c *Checks) environment() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	path := "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	if c.cfg.Commands != "" {
		path += ":" + c.cfg.Commands
	}
	return []string{
		"PATH=" + path, "HOME=/root", "SHELL=/bin/sh", "USER=root", "LOGNAME=root", "LANG=C.UTF-8", "HOSTNAME=" + c.cfg.Node,
		"SLURMD_NODENAME=" + c.cfg.Node, "SLURM_CLUSTER_NAME=" + c.cluster, "MUSTER_NODE=" + c.cfg.Node,
		"MUSTER_AGENT_SOCKET=" + filepath.Join(filepath.Dir(c.cfg.Dir), "agent.sock"),
	}
}
