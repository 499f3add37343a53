package main

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// batchStep is the id of the batch script's step.
const batchStep = 4294967291

// jobState is the state as people know it: "RUNNING", "COMPLETING" while an ended job is not accounted for.
func jobState(j *apiv1.Job) string {
	state := strings.TrimPrefix(j.Status.GetState().String(), "JOB_STATE_")
	switch {
	case !j.Status.GetCompleting() || state == "PENDING":
		return state
	case !ended(j):
		return "COMPLETING"
	}
	return state + "+COMPLETING"
}

// parseState reads a job state in any case, with the API's prefix or without.
func parseState(text string) (apiv1.JobState, error) {
	name := strings.ToUpper(strings.TrimSpace(text))
	value, ok := apiv1.JobState_value["JOB_STATE_"+strings.TrimPrefix(name, "JOB_STATE_")]
	if !ok || value == 0 {
		var known []string
		for i := int32(1); apiv1.JobState_name[i] != ""; i++ {
			known = append(known, strings.TrimPrefix(apiv1.JobState_name[i], "JOB_STATE_"))
		}
		return 0, usagef("%q is no job state: there are %s", text, strings.Join(known, ", "))
	}
	return apiv1.JobState(value), nil
}

// ended tells whether a job has ended for good.
func ended(j *apiv1.Job) bool { return j.Status.GetState() >= apiv1.JobState_JOB_STATE_COMPLETED }

// waitReason is the reason in Slurm's spelling: "Resources", "JobHeldUser".
func waitReason(r apiv1.WaitReason) string {
	if r == apiv1.WaitReason_WAIT_REASON_UNSPECIFIED {
		return ""
	}
	var b strings.Builder
	for word := range strings.SplitSeq(strings.TrimPrefix(r.String(), "WAIT_REASON_"), "_") {
		b.WriteString(word[:1] + strings.ToLower(word[1:]))
	}
	return b.String()
}

// why is the reason and sentence of a job in one cell.
func why(j *apiv1.Job) string {
	reason, sentence := waitReason(j.Status.GetReason()), value.Safe(j.Status.GetSentence())
	switch {
	case sentence == "":
		return reason
	case reason == "":
		return sentence
	}
	return reason + ": " + sentence
}

func stepState(s *apiv1.Step) string {
	return strings.TrimPrefix(s.State.String(), "STEP_STATE_")
}

func stepName(s *apiv1.Step) string {
	if s.Id == batchStep {
		return fmt.Sprintf("%d.batch", s.JobId)
	}
	return fmt.Sprintf("%d.%d", s.JobId, s.Id)
}

// nodeState is the state as people know it.
func nodeState(n *apiv1.Node) string {
	switch {
	case n.State == apiv1.NodeState_NODE_STATE_DOWN:
		return "DOWN"
	case n.Drain && len(n.Owners) > 0:
		return "DRAINING"
	case n.Drain:
		return "DRAINED"
	}
	return strings.TrimPrefix(n.State.String(), "NODE_STATE_")
}

// moment writes a time of the cluster in local time; "" for none.
func moment(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	return t.AsTime().Local().Format("2006-01-02 15:04:05")
}

// elapsed writes the time from start to end, or to now if there is no end.
func elapsed(start, end *timestamppb.Timestamp, now time.Time) string {
	if start == nil {
		return ""
	}
	last := now
	if end != nil && !end.AsTime().Before(start.AsTime()) {
		last = end.AsTime()
	}
	return clock(last.Sub(start.AsTime()))
}

// clock writes a duration as Slurm does: M:SS, H:MM:SS, D-HH:MM:SS.
func clock(d time.Duration) string {
	s := int64(max(d, 0) / time.Second)
	switch {
	case s >= 86400:
		return fmt.Sprintf("%d-%02d:%02d:%02d", s/86400, s/3600%24, s/60%60, s%60)
	case s >= 3600:
		return fmt.Sprintf("%d:%02d:%02d", s/3600, s/60%60, s%60)
	}
	return fmt.Sprintf("%d:%02d", s/60, s%60)
}

func exitText(code, signal uint32) string { return fmt.Sprintf("%d:%d", code, signal) }
