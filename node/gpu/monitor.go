package gpu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

const (
	// defaultTimeout is how long a probe may take for an answer: without the driver's persistence mode the first one
	// initialises every GPU, which takes some seconds each.
	defaultTimeout = 30 * time.Second
	// defaultInterval is how often readings are taken. Errors are reported at once.
	defaultInterval = 10 * time.Second
	// retryMin and retryMax bound the pause before a probe that failed is started again.
	retryMin, retryMax = time.Second, time.Minute
	// leavePatience is how long a probe whose reader leaves may take to end by itself.
	leavePatience = 100 * time.Millisecond
	// writeEvery is how often at most what is remembered is written: errors may come in storms.
	writeEvery = time.Second
)

// Config says how GPUs are asked.
type Config struct {
	// Program is the path of muster-gpu.
	Program string
	// Args are put behind its verb; for tests (--mock).
	Args []string
	// Timeout is how long it may take for one answer; 0 means 30 s.
	Timeout time.Duration
	// Interval is how often readings are taken; 0 means 10 s.
	Interval time.Duration
	// Memory is the file in which numbers of devices and errors are remembered; empty means nothing is.
	Memory string
	// BootID replaces the kernel's boot id, for declared nodes; errors of another boot are forgotten.
	BootID string
	// Log is where it says what happens.
	Log *slog.Logger
}

// Monitor keeps a probe running and knows what it said. It is safe for concurrent use.
type Monitor struct {
	cfg      Config
	children *children

	mu        sync.Mutex
	facts     Facts
	readAt    time.Time
	since     map[string]time.Time
	slowed    map[string]Finding
	last      []Finding
	changed   chan struct{}
	unwritten bool
	wroteAt   time.Time
}

// Open returns a Monitor with what is remembered. It starts nothing: that is Run's matter. A memory that can't be read is logged and
// begun anew.
func Open(cfg Config) *Monitor {
	if cfg.Timeout == 0 {
		cfg.Timeout = defaultTimeout
	}
	if cfg.Interval == 0 {
		cfg.Interval = defaultInterval
	}
	if cfg.BootID == "" {
		cfg.BootID = bootID()
	}
	m := &Monitor{
		cfg: cfg, children: newChildren(cfg.Program), changed: make(chan struct{}),
		since: map[string]time.Time{}, slowed: map[string]Finding{},
	}
	m.facts.Unknown = &nodev1.GpuUnknown{Sentence: sentenceNotReadYet}
	m.facts.UnknownSince = time.Now()
	if cfg.Memory != "" {
		kept, err := load(cfg.Memory, cfg.BootID)
		if err != nil {
			cfg.Log.Warn("numbers of GPUs may change, and errors be forgotten", "error", err)
		}
		m.facts.Inventory, m.facts.Xids = kept.Inventory, kept.Xids
		m.readAt = kept.InventoryTime.AsTime()
	}
	return m
}

// Run watches the GPUs until the context ends, and returns when its probe has ended or was left behind as stuck.
func (m *Monitor) Run(ctx context.Context) {
	defer m.write()
	pause := retryMin
	for ctx.Err() == nil {
		answered, unknown := m.watch(ctx)
		if ctx.Err() != nil {
			return
		}
		m.cfg.Log.Warn("the GPU probe gives no answers; it is started again", "reason", unknown.Sentence, "again_in", pause)
		m.unknown(unknown)
		if answered {
			pause = retryMin
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, retryMax)
	}
}

// watch runs one probe until it fails, and says whether it ever answered and why it ended.
func (m *Monitor) watch(ctx context.Context) (bool, *nodev1.GpuUnknown) {
	args := append([]string{"watch", "--attached", "--interval", m.cfg.Interval.String()}, m.cfg.Args...)
	p, err := m.children.start(args...)
	if err != nil {
		return false, unstarted(err)
	}
	stop := context.AfterFunc(ctx, p.interrupt)
	answered, err := m.follow(ctx, p)
	stop()
	return answered, m.ended(p, err)
}

// follow takes in a probe's lines. The first is due within the timeout, each further one within that after the interval.
func (m *Monitor) follow(ctx context.Context, p *child) (bool, error) {
	answered := false
	limit := m.cfg.Timeout
	for {
		line, err := p.next(time.Now().Add(limit))
		if ctx.Err() != nil {
			return answered, ctx.Err()
		}
		if err != nil {
			return answered, err
		}
		event := &nodev1.GpuEvent{}
		if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(line, event); err != nil {
			return answered, fmt.Errorf("what it wrote can't be understood: %w", err)
		}
		m.take(event, time.Now())
		answered = true
		limit = m.cfg.Interval + m.cfg.Timeout
	}
}

// ended ends a probe and says what its end means.
func (m *Monitor) ended(p *child, err error) *nodev1.GpuUnknown {
	patience := time.Duration(0)
	if errors.Is(err, io.EOF) || errors.Is(err, context.Canceled) {
		patience = leavePatience
	}
	how := p.end(patience)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return &nodev1.GpuUnknown{
			Code:     nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_TIMEOUT,
			Sentence: fmt.Sprintf("unknown: the GPU probe did not answer within %v and was ended (%s)", m.cfg.Timeout, how),
		}
	case errors.Is(err, io.EOF):
		return &nodev1.GpuUnknown{
			Code:     nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_BAD_PROBE,
			Sentence: fmt.Sprintf("unknown: the GPU probe ended by itself (%s)", how),
		}
	default:
		return &nodev1.GpuUnknown{
			Code: nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_BAD_PROBE, Sentence: fmt.Sprintf("unknown: the GPU probe was ended (%s): %v", how, err),
		}
	}
}

// unstarted says why there is no probe.
func unstarted(err error) *nodev1.GpuUnknown {
	if errors.Is(err, errStuck) {
		return &nodev1.GpuUnknown{Code: nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_STUCK, Sentence: "unknown: " + err.Error()}
	}
	return &nodev1.GpuUnknown{
		Code: nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_NO_PROBE, Sentence: fmt.Sprintf("unknown: %v; install muster-gpu beside the agent", err),
	}
}

// take takes in one event.
func (m *Monitor) take(e *nodev1.GpuEvent, now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch what := e.What.(type) {
	case *nodev1.GpuEvent_Inventory:
		m.takeInventory(what.Inventory, now)
	case *nodev1.GpuEvent_Health:
		if what.Health.Unknown != nil {
			m.setUnknown(what.Health.Unknown, now)
		} else {
			m.facts.Health, m.facts.Unknown = what.Health, nil
			if m.facts.Inventory != nil {
				m.readAt = now
			}
		}
	case *nodev1.GpuEvent_Xid:
		m.facts.Xids = Remember(m.facts.Xids, what.Xid, now)
		m.unwritten = true
		// The first, and then the 2nd, 4th, 8th …: a program in a loop makes thousands.
		if n := m.facts.Xids[len(m.facts.Xids)-1].Count; n&(n-1) == 0 {
			m.cfg.Log.Warn("the driver reports an error of a GPU", "xid", what.Xid.Xid, "gpu", what.Xid.Uuid, "what", XidOf(what.Xid.Xid).What, "times", n)
		}
	default:
		// A newer probe says what we do not know; it shows at least that it lives.
		m.cfg.Log.Debug("the GPU probe said something unknown")
	}
	m.judge(now)
}

func (m *Monitor) takeInventory(fresh *nodev1.GpuInventory, now time.Time) {
	m.facts.PCIGPUs = fresh.PciGpus
	if fresh.Unknown != nil {
		m.setUnknown(fresh.Unknown, now)
		return
	}
	merged := Merge(m.facts.Inventory, fresh)
	if !proto.Equal(merged, m.facts.Inventory) {
		m.facts.Inventory, m.unwritten = merged, true
		m.cfg.Log.Info("the node's GPUs", "devices", len(ByNumber(merged)), "driver", merged.DriverVersion)
		m.notify()
	}
	m.readAt = now
}

func (m *Monitor) setUnknown(u *nodev1.GpuUnknown, now time.Time) {
	if m.facts.Unknown == nil || m.facts.Unknown.Code != u.Code {
		m.facts.UnknownSince = now
	}
	m.facts.Unknown = u
}

// unknown says that nothing new is known.
func (m *Monitor) unknown(u *nodev1.GpuUnknown) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	m.setUnknown(u, now)
	m.judge(now)
}

// judge finds out whether findings changed, tells it, and writes what must be remembered.
func (m *Monitor) judge(now time.Time) {
	findings := m.findings(now)
	if !slices.EqualFunc(findings, m.last, same) {
		m.notify()
	}
	m.last = findings
	m.writeLocked(now.Add(-writeEvery))
}

// write writes what must be remembered and is not yet.
func (m *Monitor) write() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.writeLocked(time.Now())
}

// writeLocked writes what must be remembered, unless something was written after the given time: then a later event does it.
func (m *Monitor) writeLocked(after time.Time) {
	if !m.unwritten || m.cfg.Memory == "" || m.wroteAt.After(after) {
		return
	}
	m.wroteAt = time.Now()
	memory := &nodev1.GpuMemory{BootId: m.cfg.BootID, Inventory: m.facts.Inventory, InventoryTime: timestamppb.New(m.readAt), Xids: m.facts.Xids}
	if err := save(m.cfg.Memory, memory); err != nil {
		m.cfg.Log.Warn("after a restart numbers of GPUs may change, and errors be forgotten", "error", err)
		return
	}
	m.unwritten = false
}

// same reports whether two findings say the same, but for times and wording.
func same(a, b Finding) bool {
	return a.Code == b.Code && a.UUID == b.UUID && a.Severity == b.Severity && a.Verdict == b.Verdict && slices.Equal(a.Devices, b.Devices)
}

func (m *Monitor) notify() {
	close(m.changed)
	m.changed = make(chan struct{})
}

func key(f Finding) string { return f.Code + " " + f.UUID }

// findings judges the facts, adds what came and went with the load, and says since when.
func (m *Monitor) findings(now time.Time) []Finding {
	found := Judge(m.facts, now)
	seen := map[string]bool{}
	for i := range found {
		k := key(found[i])
		seen[k] = true
		if found[i].Code == CodeHot || found[i].Code == CodeSlowed {
			m.slowed[k] = found[i]
		}
	}
	for k, f := range m.slowed {
		switch {
		case !f.Expires.After(now):
			delete(m.slowed, k)
		case !seen[k]:
			seen[k] = true
			found = append(found, f)
		}
	}
	for k := range m.since {
		if !seen[k] {
			delete(m.since, k)
		}
	}
	for i := range found {
		k := key(found[i])
		if _, known := m.since[k]; !known {
			m.since[k] = now
			if !found[i].Since.IsZero() {
				m.since[k] = found[i].Since
			}
		}
		found[i].Since = m.since[k]
	}
	(&judge{findings: found}).sort()
	return found
}

// Inventory returns the devices as they were last known, and how long ago the probe last confirmed them. It is nil if
// none was ever read; then the age is meaningless. It must not be changed.
func (m *Monitor) Inventory() (*nodev1.GpuInventory, time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.facts.Inventory, time.Since(m.readAt)
}

// Readings returns the last reading of all GPUs, nil if there is none. It must not be changed.
func (m *Monitor) Readings() *nodev1.GpuHealth {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.facts.Health
}

// Health returns what is wrong, worst first. Nothing means that all is well, a reading was taken, and it is not old. Findings that are
// held for a while leave without Changed telling it; ask every minute or so.
func (m *Monitor) Health() []Finding {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.findings(time.Now()))
}

// Changed returns a channel that is closed when inventory or findings change next.
func (m *Monitor) Changed() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.changed
}

// Forget drops what is remembered of a GPU: its errors (it was reset, or the operator says that all is well), and if the driver
// no longer lists it the GPU itself, with its number.
func (m *Monitor) Forget(uuid string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.facts.Xids = slices.DeleteFunc(slices.Clone(m.facts.Xids), func(x *nodev1.GpuRemembered) bool { return x.Xid.Uuid == uuid })
	if inv := m.facts.Inventory; inv != nil {
		left := proto.CloneOf(inv)
		left.Devices = slices.DeleteFunc(left.Devices, func(d *nodev1.GpuDevice) bool {
			return d.Missing && (d.Uuid == uuid || d.Mig.GetParentUuid() == uuid)
		})
		for _, d := range left.Devices {
			if d.Uuid == uuid {
				d.NvlinksBest = d.NvlinksActive
			}
		}
		m.facts.Inventory = left
	}
	m.unwritten = true
	m.notify()
	m.judge(time.Now())
}

// UnreadError says that the processes of some GPUs could not be read.
type UnreadError struct {
	// GPUs are their indexes.
	GPUs []uint32
}

// Error returns a sentence.
func (e *UnreadError) Error() string {
	return fmt.Sprintf("ask who uses the GPUs: GPUs %v could not be read", e.GPUs)
}

// Processes asks who uses the GPUs. Errors say why that is not known; they never mean that nobody does. With an
// *UnreadError the list is that of the other GPUs.
func (m *Monitor) Processes(ctx context.Context) ([]*nodev1.GpuProcess, error) {
	p, err := m.children.start(append([]string{"processes", "--attached"}, m.cfg.Args...)...)
	if err != nil {
		return nil, fmt.Errorf("ask who uses the GPUs: %w", err)
	}
	stop := context.AfterFunc(ctx, p.interrupt)
	line, err := p.next(time.Now().Add(m.cfg.Timeout))
	answer := &nodev1.GpuProcesses{}
	if err == nil {
		err = (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(line, answer)
	}
	stop()
	patience := leavePatience
	if errors.Is(err, os.ErrDeadlineExceeded) {
		patience = 0
	}
	how := p.end(patience)
	switch {
	case ctx.Err() != nil && err != nil:
		return nil, fmt.Errorf("ask who uses the GPUs: %w", ctx.Err())
	case err != nil:
		return nil, fmt.Errorf("ask who uses the GPUs: the probe gave no answer (%s): %w", how, err)
	case answer.Unknown != nil:
		return nil, fmt.Errorf("ask who uses the GPUs: %s", answer.Unknown.Sentence)
	case len(answer.Unread) > 0:
		return answer.Processes, &UnreadError{GPUs: answer.Unread}
	}
	return answer.Processes, nil
}
