package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"

	"github.com/muster-hpc/muster/node/bind"
	"github.com/muster-hpc/muster/node/health"
	"github.com/muster-hpc/muster/node/journal"
	"github.com/muster-hpc/muster/node/run"
	"github.com/muster-hpc/muster/node/run/cgroup"
	"github.com/muster-hpc/muster/node/run/private"
)

// Controllers is how the agent calls the control plane. Implementations are safe for concurrent use.
type Controllers interface {
	// Join calls one controller by its API address.
	Join(ctx context.Context, address string, req *nodev1.JoinRequest) (*nodev1.JoinResponse, error)
	// Sync calls one controller by its API address.
	Sync(ctx context.Context, address string, req *nodev1.SyncRequest) (*nodev1.SyncResponse, error)
	// GetBlob asks any controller.
	GetBlob(ctx context.Context, req *apiv1.GetBlobRequest) (*apiv1.GetBlobResponse, error)
}

// Config says what an agent is and whom it serves.
type Config struct {
	// Dir is the agent's directory, absolute; made if need be.
	Dir string
	// Spec is what the agent says of its node.
	Spec *apiv1.NodeSpec
	// BootID is a declared boot id; empty means the kernel's.
	BootID string
	// Addresses are API addresses of controllers (host:port), until a controller names the members.
	Addresses []string
	// Controllers calls them.
	Controllers Controllers
	// Refusal returns the detail that travels in an error of Controllers, or nil.
	Refusal func(error) *apiv1.ErrorDetail
	// Supervisor is the path of the program muster-supervisor, absolute.
	Supervisor string
	// Supervisors are started ahead of steps; nil means a pool of this agent alone, which has IdleSupervisors of them.
	Supervisors *run.Pool
	// IdleSupervisors is how many supervisors the agent's own pool starts ahead.
	IdleSupervisors int
	// BindCPUs binds tasks to the CPUs of their allocation; only where CPUs were detected, not declared.
	BindCPUs bool
	// Groups is where the control groups of jobs are; nil means that they have none.
	Groups *cgroup.Hierarchy
	// Private is where private directories of jobs are; nil means that they see the node's /tmp and /dev/shm.
	Private *private.Store
	// Accelerators are watched ones; nil means that none are: then those of Spec are declared.
	Accelerators Accelerators
	// Commands is a directory of commands that jobs find at the end of their PATH, absolute; empty means none.
	Commands string
	// Blobs remembers scripts and environments; nil means one for this agent alone.
	Blobs *BlobCache
	// Joined is called each time a controller admitted the agent; it must not block.
	Joined func(*nodev1.JoinResponse)
	// Fault is called at named points of the agent's work, for tests that kill it there; nil in programs.
	Fault func(point string)
	// Boot returns the boot-time clock; nil means CLOCK_BOOTTIME. Deadlines of supervisors are on the real one.
	Boot func() time.Duration
	// Log gets structured lines.
	Log *slog.Logger
}

// Agent is one agent of one node. Its methods are safe for concurrent use.
type Agent struct {
	cfg      Config
	log      *slog.Logger
	boot     func() time.Duration
	lock     *os.File
	instance *apiv1.Instance
	// reborn: the directory was that of the node before the machine was booted anew.
	reborn bool
	// kernelBoot is the kernel's boot id, which supervisors know; the instance's may be a declared one.
	kernelBoot string
	journal    *journal.Journal
	accounts   *accounts
	// supervisors launches them; own says that the pool is the agent's.
	supervisors *run.Pool
	own         bool
	// topology is where the node's CPUs are; devicesKept: accelerators can be kept from those who do not have them.
	topology    bind.Topology
	devicesKept bool
	// forceAfter and stuckAfter are the constants, and pulse is made of them; tests have less patience.
	forceAfter, stuckAfter time.Duration
	pulse                  pulse

	// health runs a site's programs; ailments are what else is the case on the node.
	health   *health.Checks
	ailments ailments

	// work wakes the loop that reconciles; news wakes the loop that speaks with controllers; look that which looks at the agent's
	// surroundings; used says that a job has left, and resumed that an operator put the node back to work, to that which watches accelerators.
	work, news, look, used, resumed chan struct{}
	// wg counts what Run started and waits for.
	wg sync.WaitGroup

	mu       sync.Mutex
	attempts map[attemptKey]*attempt
	// stopped: Run has ended, and timers do nothing any more.
	stopped bool
	// changed is closed and replaced whenever something that readers may wait for has changed.
	changed chan struct{}
	control control
	lease   lease
	// highest is the highest job id of attempts that were forgotten: a restored cluster must not give it out again.
	highest uint32
	// sweep looks at finished attempts when it fires; sweepDue says that it did; sweepAt is the number of attempts at
	// which that is done at once.
	sweep    *time.Timer
	sweepDue bool
	sweepAt  int
}

// attemptKey names one placement of one attempt.
type attemptKey struct {
	job                uint32
	incarnation        uint64
	attempt, placement uint32
}

func keyOf(job uint32, fence *apiv1.Fence) attemptKey {
	return attemptKey{job, fence.GetIncarnation(), fence.GetAttempt(), fence.GetPlacement()}
}

// attempt is a placement of an attempt as it is here. All fields are guarded by Agent.mu.
type attempt struct {
	record *nodev1.AttemptRecord
	steps  map[uint32]*step
	// reaping: a goroutine makes sure that nothing is left.
	reaping bool
	// ended: an order to end it was seen, or a later placement.
	ended bool
	// report is the number of the journal's line about the reaping; 0 if none was written by this process.
	report uint64
	// settled is when the report was acknowledged, by the boot-time clock.
	settled time.Duration
	// noted is when processes of it that nothing ends were noted, by the boot-time clock; 0 if none were.
	noted time.Duration
	// bytes is the size of the step directories, once nothing is left.
	bytes int64
}

// ErrDirInUse is the error of Open for a directory that another agent has.
var ErrDirInUse = errors.New("another agent uses the directory")

// Open takes possession of the directory, reads what earlier lives of the agent left there, and adopts nothing yet:
// Run does. The error wraps ErrDirInUse if another agent has the directory.
func Open(cfg Config) (*Agent, error) {
	a := &Agent{
		cfg: cfg, log: cfg.Log.With("node", cfg.Spec.GetName()), boot: cfg.Boot,
		work: make(chan struct{}, 1), news: make(chan struct{}, 1), look: make(chan struct{}, 1), used: make(chan struct{}, 1), resumed: make(chan struct{}, 1), changed: make(chan struct{}),
		attempts: make(map[attemptKey]*attempt), accounts: newAccounts(), sweepAt: keepCount + keepCount/10,
		forceAfter: forceAfter, stuckAfter: stuckAfter, pulse: pulse{pulseEvery, commandTimeout, pulsePatience},
	}
	if a.boot == nil {
		a.boot = func() time.Duration { return time.Duration(run.BootNow()) }
	}
	if a.cfg.Blobs == nil {
		a.cfg.Blobs = NewBlobCache()
	}
	if a.supervisors = cfg.Supervisors; a.supervisors == nil {
		a.supervisors, a.own = run.NewPool(cfg.Supervisor, cfg.IdleSupervisors, a.log), true
	}
	a.topology = topologyOf(cfg.Spec, cfg.BindCPUs)
	a.devicesKept = cfg.Groups != nil && !slices.ContainsFunc(cfg.Groups.Missing(), func(s string) bool { return strings.Contains(s, "devices") })
	a.control.addresses = cfg.Addresses
	// An instance lasts a boot, and so does this clock: numbers go on rising when the agent is started again.
	a.control.sequence = uint64(a.boot() / time.Microsecond)
	a.lease.sent = make(map[uint64]time.Duration)
	a.ailments.byOwner, a.ailments.judged = map[string][]*apiv1.Condition{}, map[string]bool{}
	if err := a.open(); err != nil {
		return nil, errors.Join(err, a.Close())
	}
	return a, nil
}

func (a *Agent) open() error {
	if err := openDir(a.cfg.Dir); err != nil {
		return err
	}
	if err := a.lockDir(); err != nil {
		return err
	}
	if err := openDir(a.stepsDir()); err != nil {
		return err
	}
	if err := os.MkdirAll(a.attemptsDir(), 0o700); err != nil {
		return fmt.Errorf("make the agent's directory: %w", err)
	}
	var err error
	if a.kernelBoot, err = run.BootID(); err != nil {
		return err
	}
	boot := a.cfg.BootID
	if boot == "" {
		boot = a.kernelBoot
	}
	if a.instance, a.reborn, err = loadInstance(filepath.Join(a.cfg.Dir, "instance"), boot); err != nil {
		return err
	}
	var damage *journal.Damage
	if a.journal, damage, err = journal.Open(filepath.Join(a.cfg.Dir, "journal")); err != nil {
		return err
	}
	if damage != nil {
		a.log.Warn("the end of the journal was damaged and cut off; the ends of steps are taken from their directories",
			"offset", damage.Offset, "bytes", damage.Bytes, "why", damage.Why)
	}
	_, err = os.Stat(filepath.Join(a.cfg.Dir, drainedFile))
	a.ailments.drained = err == nil
	a.health = health.New(health.Config{
		Dir: filepath.Join(a.cfg.Dir, "health"), Node: a.cfg.Spec.GetName(), BootID: boot, Commands: a.cfg.Commands, GPU: a.gpuNumber, Log: a.log,
		Changed: func() { a.poke(a.news) },
	})
	return a.load()
}

// gpuNumber finds an accelerator by its unique id.
func (a *Agent) gpuNumber(uuid string) (uint32, bool) {
	for _, g := range a.cfg.Spec.GetGpus() {
		if g.GetUuid() != "" && g.GetUuid() == uuid {
			return g.GetIndex(), true
		}
	}
	return 0, false
}

// openDir makes a directory through which users reach the agent's socket and their scripts: others may pass through, but
// not look around.
func openDir(dir string) error {
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return fmt.Errorf("make the agent's directory: %w", err)
	}
	info, err := os.Stat(dir)
	if err == nil && info.Mode().Perm()&0o111 != 0o111 {
		err = os.Chmod(dir, info.Mode().Perm()|0o111)
	}
	if err != nil {
		return fmt.Errorf("let users through the agent's directory: %w", err)
	}
	return nil
}

func (a *Agent) lockDir() error {
	path := filepath.Join(a.cfg.Dir, "lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("lock the agent's directory: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("%w %s; stop the other one, or choose another --dir", ErrDirInUse, a.cfg.Dir)
		}
		return fmt.Errorf("lock the agent's directory %s: %w", a.cfg.Dir, err)
	}
	a.lock = f
	return nil
}

// Run serves until ctx ends, which returns nil and leaves all work running, or until the agent cannot be admitted.
// It is called once.
func (a *Agent) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer a.wg.Wait()
	defer a.stopTimers()
	defer cancel()
	a.tidy(ctx)
	a.adopt(ctx)
	a.mu.Lock()
	a.busyNow()
	a.mu.Unlock()
	if err := a.join(ctx); err != nil {
		return quiet(ctx, err)
	}
	if a.own {
		a.supervisors.Fill()
		defer a.supervisors.Close()
	}
	a.wg.Go(func() { a.workLoop(ctx) })
	a.wg.Go(func() { a.health.Run(ctx) })
	a.wg.Go(func() { a.selfLoop(ctx) })
	var other atomic.Bool
	if a.cfg.Accelerators != nil {
		a.wg.Go(func() {
			if a.gpuLoop(ctx) {
				other.Store(true)
				cancel()
			}
		})
	}
	a.poke(a.work)
	err := a.syncLoop(ctx)
	if other.Load() {
		return ErrInventoryChanged
	}
	return quiet(ctx, err)
}

// quiet makes the end that the caller ordered no error.
func quiet(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// Close gives the directory up. Run must have returned.
func (a *Agent) Close() error {
	a.stopTimers()
	var errs []error
	if a.journal != nil {
		errs = append(errs, a.journal.Close())
	}
	if a.lock != nil {
		errs = append(errs, a.lock.Close())
	}
	return errors.Join(errs...)
}

// stopTimers lets go of what is not a file.
func (a *Agent) stopTimers() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stopped = true
	if a.sweep != nil {
		a.sweep.Stop()
	}
	if a.lease.watch != nil {
		a.lease.watch.Stop()
	}
	for _, at := range a.attempts {
		for _, s := range at.steps {
			s.closePort()
			if s.force != nil {
				s.force.Stop()
			}
		}
	}
}

// poke wakes a loop; several pokes before it looks are one.
func (a *Agent) poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// touch tells readers and the loop that reconciles that something on the node has changed. The controllers learn of it
// with the next Sync: readiness and reports are all that they wait for (announce). a.mu must be held.
func (a *Agent) touch() {
	a.show()
	a.busyNow()
	a.poke(a.work)
}

// show tells readers of output that something has changed. a.mu must be held.
func (a *Agent) show() {
	close(a.changed)
	a.changed = make(chan struct{})
}

// announce is touch for what the controllers wait for: they are told at once. a.mu must be held.
func (a *Agent) announce() {
	a.touch()
	a.poke(a.news)
}

func (a *Agent) fault(point string) {
	if a.cfg.Fault != nil {
		a.cfg.Fault(point)
	}
}

// workLoop reconciles whenever something may have changed.
func (a *Agent) workLoop(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.work:
			a.reconcile(ctx)
		}
	}
}

// reconcile carries out actions until none is left.
func (a *Agent) reconcile(ctx context.Context) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for range maxPasses {
		if ctx.Err() != nil {
			return
		}
		actions := Reconcile(a.control.desired, a.local())
		if len(actions) == 0 {
			a.planSweep()
			return
		}
		for _, action := range actions {
			a.carryOut(ctx, action)
		}
	}
	a.log.Error("reconciling does not come to an end; it goes on at the next change")
}

// local describes the node for Reconcile. Attempts that are settled and of which no order speaks are left out.
func (a *Agent) local() Local {
	spoken := make(map[uint32]bool, len(a.control.desired))
	for _, order := range a.control.desired {
		spoken[order.GetJob().GetId()] = true
	}
	l := Local{Node: a.control.number, Leased: a.leased()}
	for key, at := range a.attempts {
		if !spoken[key.job] {
			continue
		}
		la := LocalAttempt{
			Job: key.job, Fence: at.record.GetFence(), Started: at.record.GetStartBootNs() != 0,
			Reaping: at.reaping, Reaped: at.record.GetReaped(), Repeat: a.mayRepeat(at.report, at.settled),
		}
		for id, s := range at.steps {
			la.Steps = append(la.Steps, LocalStep{
				ID: id, Phase: s.phase, Ending: s.end != nil, Reported: s.reported, Repeat: a.mayRepeat(s.report, s.settled),
				SignalsDelivered: s.signalled, LimitS: s.limitS,
			})
		}
		l.Attempts = append(l.Attempts, la)
	}
	return l
}

// mayRepeat reports whether a report may be sent once more: it does not wait in the journal, and long enough has passed
// that an answer which still asks for it was given after its acknowledgement.
func (a *Agent) mayRepeat(report uint64, settled time.Duration) bool {
	return !a.journal.IsWaiting(report) && a.boot()-settled >= repeatAfter
}

// carryOut begins one action. a.mu is held.
func (a *Agent) carryOut(ctx context.Context, action Action) {
	key := keyOf(action.Job, action.Fence)
	at := a.attempts[key]
	switch action.Kind {
	case ActionAdmit:
		a.admit(key, action.Order)
	case ActionBegin:
		at.record.StartBootNs = int64(a.boot())
		a.save(at)
		a.touch()
	case ActionPrepare:
		a.beginPrepare(ctx, at, action)
	case ActionStart:
		s := at.steps[action.Step]
		s.phase = PhaseStarting
		s.startEnv, s.manager = lateVariables(action), managerAddress(action.StepOrder)
		a.poke(s.kick)
	case ActionEnd:
		s := at.steps[action.Step]
		s.end = &ending{grace: time.Duration(action.GraceS) * time.Second, sentence: action.Sentence}
		at.ended = at.ended || action.StepOrder == nil
		a.armForce(s, s.end.grace+a.forceAfter)
		s.cancelPrepare()
		a.poke(s.kick)
		a.touch()
	case ActionSignal:
		s := at.steps[action.Step]
		s.signalled = action.Signal.GetOrdinal()
		s.signals = append(s.signals, action.Signal)
		a.poke(s.kick)
	case ActionLimit:
		a.changeLimit(at.steps[action.Step], action.Order.GetTimeLimitS())
	case ActionReap:
		at.reaping, at.ended = true, true
		a.wg.Go(func() { a.reap(ctx, at, action.Order) })
	case ActionReportReaped:
		at.settled = a.boot()
		a.wg.Go(func() { a.reportReaped(ctx, at) })
	case ActionReportEnded:
		s := at.steps[action.Step]
		s.settled = a.boot()
		a.wg.Go(func() { a.reportEnd(ctx, s) })
	case ActionReportMissing:
		a.missing(ctx, at, action)
	}
}

// admit remembers an attempt that is new here.
func (a *Agent) admit(key attemptKey, order *nodev1.DesiredAttempt) {
	at := &attempt{
		record: &nodev1.AttemptRecord{
			JobId: key.job, Fence: order.GetFence(), BootId: a.instance.GetBootId(), Owner: order.GetJob().GetOwner(),
		},
		steps: make(map[uint32]*step),
	}
	a.attempts[key] = at
	a.save(at)
	a.touch()
	if len(order.GetSteps()) == 0 { // there is nothing to prepare: it is ready
		a.announce()
	}
}

// save writes the attempt's record. If the disk is full the attempt goes on: its steps say so when they are prepared,
// and without the record the node only forgets sooner that it has ended. a.mu is held.
func (a *Agent) save(at *attempt) {
	if err := a.writeAttempt(at.record); err != nil {
		a.log.Error("an attempt's record could not be written", "job", at.record.GetJobId(), "err", err)
	}
}

// append puts a report into the journal and tries again while the disk is full; false if ctx ended before.
func (a *Agent) append(ctx context.Context, report *logv1.TaskReport) (uint64, bool) {
	for wait := appendRetryMin; ; wait = min(2*wait, appendRetryMax) {
		id, err := a.journal.Append(report)
		if err == nil {
			return id, true
		}
		a.log.Error("a report could not be written to the journal; it is kept and tried again, free some space on the disk",
			"job", report.GetJobId(), "dir", a.cfg.Dir, "retry_in", wait, "err", err)
		if !sleep(ctx, wait) {
			return 0, false
		}
	}
}

// sleep waits; false if ctx ended before.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
