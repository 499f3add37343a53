package node

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"

	"github.com/muster-hpc/muster/node/run"
)

// Files in a step's directory beside the supervisor's.
const (
	recordFile   = "step"
	reportedFile = "reported"
)

// highestFile in the agent's directory has the highest job id of attempts that were forgotten.
const highestFile = "highest"

func (a *Agent) stepsDir() string    { return filepath.Join(a.cfg.Dir, "steps") }
func (a *Agent) attemptsDir() string { return filepath.Join(a.cfg.Dir, "attempts") }

// SocketPath is where the agent vouches for users.
func (a *Agent) SocketPath() string { return filepath.Join(a.cfg.Dir, "agent.sock") }

func label(key attemptKey, step uint32) string {
	return fmt.Sprintf("%d.%d.%d", key.job, key.attempt, step)
}

func (a *Agent) stepDir(order *nodev1.DesiredAttempt) string {
	return filepath.Join(a.stepsDir(), label(keyOf(order.GetJob().GetId(), order.GetFence()), order.GetSteps()[0].GetStep().GetId()))
}

// cookie marks every process of a step. It depends on nothing that could be lost, so that an agent whose directory was
// emptied still finds leftovers, and on the directory's path, so that clusters on one machine leave each other alone.
func (a *Agent) cookie(order *nodev1.DesiredAttempt) string {
	f := order.GetFence()
	h := sha256.Sum256(fmt.Appendf(nil, "%s\x00%s\x00%d.%d.%d.%d.%d", a.cfg.Dir, a.cfg.Spec.GetName(), order.GetJob().GetId(),
		f.GetIncarnation(), f.GetAttempt(), f.GetPlacement(), order.GetSteps()[0].GetStep().GetId()))
	return hex.EncodeToString(h[:16])
}

// loadInstance reads who the agent is, or makes a new nonce if the machine was booted since. reborn says that there was
// an instance of an earlier boot.
func loadInstance(path, boot string) (_ *apiv1.Instance, reborn bool, _ error) {
	data, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, false, fmt.Errorf("read the agent's instance: %w", err)
	}
	fields := strings.Fields(string(data))
	if len(fields) == 2 && fields[0] == boot {
		return &apiv1.Instance{BootId: boot, Nonce: fields[1]}, false, nil
	}
	if boot == "" || strings.ContainsAny(boot, " \t\n") {
		return nil, false, fmt.Errorf("the boot id %q is empty or contains blanks", boot)
	}
	instance := &apiv1.Instance{BootId: boot, Nonce: rand.Text()}
	if err := replaceFile(path, []byte(boot+" "+instance.Nonce+"\n"), true); err != nil {
		return nil, false, fmt.Errorf("write the agent's instance: %w", err)
	}
	return instance, len(fields) == 2, nil
}

// replaceFile writes a file so that a kill leaves either the old or the new one. With durable it survives a crash of
// the machine as well; records need not, because everything that they speak of is gone after one.
func replaceFile(path string, data []byte, durable bool) error {
	temporary := path + ".new"
	f, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil && durable {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	if durable {
		return run.SyncDir(filepath.Dir(path))
	}
	return nil
}

func attemptFile(r *nodev1.AttemptRecord) string {
	f := r.GetFence()
	return fmt.Sprintf("%d.%d.%d.%d", r.GetJobId(), f.GetAttempt(), f.GetPlacement(), f.GetIncarnation())
}

func (a *Agent) writeAttempt(r *nodev1.AttemptRecord) error {
	data, err := proto.Marshal(r)
	if err != nil {
		return fmt.Errorf("encode an attempt's record: %w", err)
	}
	path := filepath.Join(a.attemptsDir(), attemptFile(r))
	if done, err := overwrite(path, data); done || err != nil {
		return err
	}
	if err := replaceFile(path, data, false); err != nil {
		return fmt.Errorf("write an attempt's record: %w", err)
	}
	return nil
}

// page is how much one write puts into the page cache at once: a kill comes before or after it.
const page = 4096

// overwrite writes a small record that only grew over the old one: a file system takes long to find a new inode where others
// were just given back, and a record changes four times in a short life. false if the file must be replaced.
func overwrite(path string, data []byte) (done bool, _ error) {
	if len(data) > page {
		return false, nil
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return false, nil // it is new, or whatever is wrong shows when it is replaced
	}
	info, err := f.Stat()
	if err != nil || info.Size() > int64(len(data)) {
		return false, f.Close()
	}
	n, err := f.WriteAt(data, 0)
	if err = errors.Join(err, f.Close()); err != nil {
		if n > 0 {
			return false, fmt.Errorf("write an attempt's record: %w", err)
		}
		return false, nil
	}
	return true, nil
}

func (a *Agent) writeStep(dir string, r *nodev1.StepRecord) error {
	data, err := proto.Marshal(r)
	if err != nil {
		return fmt.Errorf("encode a step's record: %w", err)
	}
	if err := replaceFile(filepath.Join(dir, recordFile), data, false); err != nil {
		return fmt.Errorf("write a step's record: %w", err)
	}
	return nil
}

// markReported notes in a step's directory that its end is in the journal. A lost note costs a second report.
func (a *Agent) markReported(dir string) {
	f, err := os.OpenFile(filepath.Join(dir, reportedFile), os.O_WRONLY|os.O_CREATE, 0o600)
	if err == nil {
		err = f.Close()
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		a.log.Warn("a step's directory could not be marked as reported", "dir", dir, "err", err)
	}
}

// loadHighest reads the highest job id of attempts that were forgotten.
func (a *Agent) loadHighest() error {
	data, err := os.ReadFile(filepath.Join(a.cfg.Dir, highestFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the highest job id: %w", err)
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(data)), 10, 32)
	if err != nil {
		a.log.Warn("the highest job id cannot be read", "content", string(data), "err", err)
	}
	a.highest = uint32(n)
	return nil
}

// load reads what earlier lives of the agent left.
func (a *Agent) load() error {
	if err := a.loadHighest(); err != nil {
		return err
	}
	entries, err := os.ReadDir(a.attemptsDir())
	if err != nil {
		return fmt.Errorf("read the agent's records: %w", err)
	}
	for _, e := range entries {
		path := filepath.Join(a.attemptsDir(), e.Name())
		record := new(nodev1.AttemptRecord)
		if err := readRecord(path, record); err != nil || record.GetJobId() == 0 || attemptFile(record) != e.Name() {
			a.log.Warn("an attempt's record cannot be read and is removed", "path", path, "err", err)
			if err := os.Remove(path); err != nil {
				return fmt.Errorf("remove a damaged record: %w", err)
			}
			continue
		}
		a.attempts[keyOf(record.GetJobId(), record.GetFence())] = &attempt{record: record, steps: make(map[uint32]*step)}
	}
	dirs, err := os.ReadDir(a.stepsDir())
	if err != nil {
		return fmt.Errorf("read the steps' directories: %w", err)
	}
	for _, e := range dirs {
		if err := a.loadStep(filepath.Join(a.stepsDir(), e.Name())); err != nil {
			return err
		}
	}
	waiting := a.journal.Waiting(a.journal.Count())
	for _, report := range waiting {
		at := a.attempts[keyOf(report.GetJobId(), report.GetFence())]
		switch {
		case at == nil:
		case report.GetStepEnded() != nil:
			at.reportedAs(report.GetStepEnded().GetStepId(), report.GetJournalId())
		case report.GetPrepareFailed() != nil:
			at.reportedAs(report.GetPrepareFailed().GetStepId(), report.GetJournalId())
		case report.GetAttemptReaped() != nil:
			at.record.Reaped, at.report = true, report.GetJournalId()
		}
	}
	return nil
}

func (at *attempt) reportedAs(id uint32, report uint64) {
	if s := at.steps[id]; s != nil {
		s.reported, s.report = true, report
	}
}

func readRecord(path string, into proto.Message) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return proto.Unmarshal(data, into)
}

// loadStep reads one step's directory. One without a record was being made when the agent was killed, unless something
// was started there: that is left for people to look at.
func (a *Agent) loadStep(dir string) error {
	record := new(nodev1.StepRecord)
	err := readRecord(filepath.Join(dir, recordFile), record)
	if err != nil || len(record.GetOrder().GetSteps()) != 1 {
		if _, started := run.ReadStarted(dir); !errors.Is(started, fs.ErrNotExist) {
			a.log.Error("a step was started here but its record cannot be read; it is left alone", "dir", dir, "err", err)
			return nil
		}
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("remove the directory of a step that was not prepared: %w", err)
		}
		return nil
	}
	order := record.GetOrder()
	key := keyOf(order.GetJob().GetId(), order.GetFence())
	at := a.attempts[key]
	if at == nil { // the attempt's record was lost
		at = &attempt{steps: make(map[uint32]*step), record: &nodev1.AttemptRecord{
			JobId: key.job, Fence: order.GetFence(), BootId: record.GetBootId(), Owner: order.GetJob().GetOwner(),
		}}
		a.attempts[key] = at
	}
	s := newStep(key, record, dir)
	s.adopted = true
	at.steps[s.id] = s
	switch state, err := run.ReadResult(dir); {
	case err == nil:
		s.final, s.phase, s.startNS = state, PhaseEnded, state.GetStartBootNs()
		if state.GetPhase() == supervisorv1.Phase_PHASE_FAILED {
			s.phase = PhaseFailed
		}
		_, marked := os.Lstat(filepath.Join(dir, reportedFile))
		s.reported = marked == nil
	case errors.Is(err, fs.ErrNotExist):
	default:
		return fmt.Errorf("read the result of a step: %w", err)
	}
	return nil
}

// adopt follows every step that earlier lives of the agent left, and reports those that ended meanwhile.
func (a *Agent) adopt(ctx context.Context) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, at := range a.attempts {
		for _, s := range at.steps {
			switch {
			case !s.phase.over():
				a.wg.Go(func() { a.follow(ctx, s, nil) })
			case !s.reported:
				a.wg.Go(func() { a.reportEnd(ctx, s) })
			}
		}
	}
	if n := len(a.attempts); n > 0 {
		a.log.Info("adopted what was on the node", "attempts", n, "unacknowledged", a.journal.Count())
	}
}

// age is how long ago a wall-clock time was; times in the future count as now.
func age(t time.Time) time.Duration { return max(0, time.Since(t)) }
