package virtual

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

const (
	userCount    = 6
	operationGap = 30 * time.Minute // mean, for each user
	shell        = "#!/bin/sh\ntrain\n"
)

var shellHash = func() string { h := sha256.Sum256([]byte(shell)); return hex.EncodeToString(h[:]) }()

// plan is what a program will do.
type plan struct {
	duration     time.Duration
	code, signal uint32
	execFails    bool
	steps        int
}

// user is a person with a script: requests are repeated with the same id until they are answered.
type user struct {
	s         *sim
	idx       int
	offset    time.Duration
	principal *apiv1.Principal
	mine      []uint32 // jobs that were acknowledged
}

// request is something asked for until the answer is known.
type request struct {
	u        *user
	cmd      *logv1.Command
	answered bool
	tries    int
	first    *logv1.Result
	// name of the job or step that it makes; empty if it makes none.
	name string
	// job it speaks of.
	job  uint32
	done func(*logv1.Result)
}

// id mints a request id (UUIDv7) with the user's clock.
func (u *user) id() string {
	var id uuid.UUID
	binary.BigEndian.PutUint64(id[:8], uint64(u.s.wall().Add(u.offset).UnixMilli())<<16|uint64(u.s.rng.IntN(1<<12)))
	binary.BigEndian.PutUint64(id[8:], u.s.rng.Uint64())
	id[6] = id[6]&0x0f | 0x70
	id[8] = id[8]&0x3f | 0x80
	return id.String()
}

// ask sends a request until it is answered.
func (u *user) ask(r *request) {
	r.u = u
	r.cmd.Principal = u.principal
	plain, err := proto.MarshalOptions{Deterministic: true}.Marshal(r.cmd)
	if err != nil {
		panic(err)
	}
	sum := sha256.Sum256(plain)
	r.cmd.PayloadSha256 = sum[:]
	r.cmd.RequestId = u.id()
	u.s.asked(r)
	u.try(r)
}

func (u *user) try(r *request) {
	s := u.s
	r.tries++
	c := s.controllers[s.rng.IntN(members)]
	s.send(u, c, agedDelays, func() {
		c.forward(r.cmd, s.now+forwardLimit, func(result *logv1.Result) {
			s.send(c, u, agedDelays, func() { u.answered(r, result) })
		})
	})
	s.after(s.between(15*time.Second, 90*time.Second), func() {
		if !r.answered {
			u.try(r)
		}
	})
}

func (u *user) answered(r *request, result *logv1.Result) {
	if r.answered {
		if result.GetRefusal().GetReason() != "REQUEST_TOO_OLD" {
			u.s.sameAnswer(r, result)
		}
		return
	}
	r.answered = true
	if result.GetRefusal().GetReason() == "REQUEST_TOO_OLD" {
		u.lookUp(r, result.Revision)
		return
	}
	r.first = result
	u.s.trace("answered", uint64(u.idx), uint64(r.tries), uint64(r.job))
	u.s.acknowledged(r, result)
	r.done(result)
}

// lookUp finds out whether a request was done whose answer is not remembered. If it was not, it is made anew: its old copies are
// refused from now on.
func (u *user) lookUp(r *request, after *apiv1.Revision) {
	s := u.s
	for _, c := range s.controllers {
		if !c.up || fsm.CompareRevisions(c.view.Revision(), after) < 0 {
			continue
		}
		s.trace("looks up", uint64(u.idx), uint64(r.job))
		if r.name == "" || s.nameIn(c.view, r) {
			r.done(nil)
			return
		}
		again := *r
		again.answered, again.tries = false, 0
		again.cmd = proto.CloneOf(r.cmd)
		again.cmd.PayloadSha256, again.cmd.RequestId = nil, ""
		u.ask(&again)
		return
	}
	s.after(30*time.Second, func() { u.lookUp(r, after) })
}

// live does something now and then until the day ends.
func (u *user) live() {
	s := u.s
	wait := time.Duration(s.rng.ExpFloat64() * float64(operationGap))
	s.after(min(wait, 4*operationGap), func() {
		if s.now > s.dusk {
			return
		}
		u.operate()
		u.live()
	})
}

func (u *user) operate() {
	s := u.s
	if len(u.mine) == 0 || s.chance(6500) {
		u.submit()
		return
	}
	job := u.mine[max(0, len(u.mine)-1-s.rng.IntN(min(len(u.mine), 8)))]
	update := &apiv1.UpdateJobRequest{JobIds: []uint32{job}}
	switch s.rng.IntN(5) {
	case 0:
		u.ask(&request{job: job, cmd: &logv1.Command{Op: &logv1.Command_CancelJobs{CancelJobs: &logv1.CancelJobs{JobIds: []uint32{job}}}},
			done: func(*logv1.Result) {}})
		return
	case 1:
		update.Change = &apiv1.UpdateJobRequest_Requeue{Requeue: true}
	case 2:
		update.Change = &apiv1.UpdateJobRequest_Hold{Hold: true}
	case 3:
		update.Change = &apiv1.UpdateJobRequest_Hold{Hold: false}
	case 4:
		update.Change = &apiv1.UpdateJobRequest_TimeLimitS{TimeLimitS: uint32(600 + s.rng.IntN(3600))}
	}
	u.ask(&request{job: job, cmd: &logv1.Command{Op: &logv1.Command_UpdateJobs{UpdateJobs: &logv1.UpdateJobs{Request: update}}},
		done: func(*logv1.Result) {}})
}

// submit submits one job.
func (u *user) submit() {
	s := u.s
	s.names++
	name := fmt.Sprintf("job-%d", s.names)
	p := &plan{duration: time.Duration(1<<s.rng.IntN(7)) * s.between(30*time.Second, time.Minute), execFails: s.chance(400)}
	switch {
	case s.chance(1500):
		p.code = uint32(1 + s.rng.IntN(255))
	case s.chance(300):
		p.signal = 11
	}
	spec := &apiv1.JobSpec{
		Name: name, Kind: apiv1.JobKind_JOB_KIND_RUN, Args: []string{"train"}, WorkDir: "/home", Requeue: s.chance(7000),
		AutomaticRecovery: s.chance(5000), TimeLimitS: uint32(2*p.duration/time.Second) + 60, Hold: s.chance(300),
		Resources: &apiv1.ResourceRequest{NodesMin: uint32(1 << s.rng.IntN(5)), GpusPerNode: uint32(1 << s.rng.IntN(4)), Exclusive: s.chance(1000)},
	}
	if s.chance(500) {
		spec.TimeLimitS = uint32(p.duration/time.Second)/2 + 1
	}
	submit := &logv1.SubmitJobs{Specs: []*apiv1.JobSpec{spec}}
	if s.chance(3000) {
		spec.Kind, spec.Args, spec.ScriptBlob = apiv1.JobKind_JOB_KIND_BATCH, nil, shellHash
		submit.Blobs = []*logv1.BlobContent{{Sha256: shellHash, Data: []byte(shell)}}
		p.steps = s.rng.IntN(3)
	}
	s.plans[name] = p
	u.ask(&request{name: name, cmd: &logv1.Command{Op: &logv1.Command_SubmitJobs{SubmitJobs: submit}}, done: func(r *logv1.Result) {
		if id := s.jobNamed[name]; id != 0 {
			u.mine = append(u.mine, id)
		}
	}})
}

// script is a batch script: it creates steps while it runs.
func (s *sim) script(p *supervisor, took time.Duration) {
	for range s.planOf(p).steps {
		s.after(s.between(0, took/2), func() {
			if !p.running() || p.ending {
				return
			}
			job := s.canon.Job(p.job)
			i := slices.IndexFunc(s.users, func(u *user) bool { return u.principal.Uid == job.Owner.Uid })
			s.names++
			name := fmt.Sprintf("step-%d", s.names)
			sp := &plan{duration: s.between(5*time.Second, took/2+10*time.Second)}
			if s.chance(1000) {
				sp.code = 3
			}
			s.plans[name] = sp
			s.users[i].ask(&request{name: name, job: p.job, done: func(*logv1.Result) {}, cmd: &logv1.Command{
				Op: &logv1.Command_CreateStep{CreateStep: &logv1.CreateStep{JobId: p.job, Attempt: p.fence.Attempt, Spec: &apiv1.StepSpec{
					Name: name, Args: []string{"work"}, WorkDir: "/home", Resources: &apiv1.ResourceRequest{}}}}}})
		})
	}
}

// planOf is what the program of a supervisor will do.
func (s *sim) planOf(p *supervisor) *plan {
	name := p.step.order.Job.Spec.Name
	if p.step.id != fsm.BatchStep && p.step.order.Job.Spec.Kind == apiv1.JobKind_JOB_KIND_BATCH {
		name = p.step.want.Step.Spec.Name
	}
	if known := s.plans[name]; known != nil {
		return known
	}
	s.fail("nobody asked for %s", name)
	return &plan{duration: time.Second}
}
