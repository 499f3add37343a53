package control

import (
	"context"
	"errors"
	"time"

	"github.com/muster-hpc/muster/fsm/replica"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

const (
	// membersEvery is how often the members are looked after.
	membersEvery = 2 * time.Second
	// deadAfter is how long a former self of a member must have been silent before it is removed.
	deadAfter = 10 * time.Second
)

// members is the duty that lets learners vote that have caught up, and removes the former self of a member that joined again.
func (r *reign) members(ctx context.Context) error {
	for pause(ctx, membersEvery) {
		v := r.cfg.Replica.View()
		if !v.Bootstrapped() || r.isBlocked() {
			continue
		}
		names := map[string]string{}
		for m := range v.Members() {
			names[m.Id] = m.Name
		}
		servers := r.cfg.Replica.Servers()
		for _, s := range servers {
			// A learner that has not said who it is does not vote: nobody knows whom it replaces.
			if s.Voter || names[s.ID] == "" {
				continue
			}
			switch err := r.cfg.Replica.Promote(ctx, s.ID); {
			case err == nil:
				r.log.Info("member votes now", "member", s.ID, "name", names[s.ID])
			case errors.Is(err, replica.ErrNotCaughtUp), ctx.Err() != nil:
			default:
				r.log.Warn("learner can't be promoted", "member", s.ID, "error", err)
			}
		}
		for _, id := range former(servers, names, r.cfg.Replica.ID()) {
			r.forget(ctx, id, names[id])
		}
	}
	return nil
}

// former returns the ids of silent voters whose name another voter has that answers: what a data directory was before it was wiped.
func former(servers []replica.Server, names map[string]string, self string) []string {
	alive := map[string]bool{}
	for _, s := range servers {
		if s.Voter && names[s.ID] != "" && (s.ID == self || s.LastContact >= 0 && s.LastContact < deadAfter) {
			alive[names[s.ID]] = true
		}
	}
	var ids []string
	for _, s := range servers {
		dead := s.ID != self && (s.LastContact < 0 || s.LastContact >= deadAfter)
		if dead && alive[names[s.ID]] {
			ids = append(ids, s.ID)
		}
	}
	return ids
}

func (r *reign) forget(ctx context.Context, id, name string) {
	if err := r.cfg.Replica.Remove(ctx, id); err != nil {
		if ctx.Err() == nil {
			r.log.Warn("the former self of a member can't be removed", "member", id, "name", name, "error", err)
		}
		return
	}
	r.log.Info("removed the former self of a member", "member", id, "name", name)
	cmd := &logv1.Command{Op: &logv1.Command_AnnounceMember{AnnounceMember: &logv1.AnnounceMember{Member: &apiv1.Member{Id: id, Name: name}, Remove: true}}}
	if result, err := r.decide(ctx, cmd); err != nil || result.GetRefusal() != nil {
		r.log.Warn("the former self of a member can't be forgotten", "member", id, "error", err, "sentence", result.GetRefusal().GetSentence())
	}
}
