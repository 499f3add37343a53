package scontrol

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/muster-hpc/muster/cmd/internal/slurm/fetch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

func hold(ctx context.Context, c *call) error {
	return c.changeJobs(ctx, "hold", &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Hold{Hold: true}})
}

func release(ctx context.Context, c *call) error {
	return c.changeJobs(ctx, "release", &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Hold{Hold: false}})
}

func requeue(ctx context.Context, c *call) error {
	return c.changeJobs(ctx, "requeue", &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Requeue{Requeue: true}})
}

func requeueHold(ctx context.Context, c *call) error {
	return c.changeJobs(ctx, "requeuehold", &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Requeue{Requeue: true}, RequeueHold: true})
}

// changeJobs makes one change of the jobs that are named.
func (c *call) changeJobs(ctx context.Context, verb string, change *apiv1.UpdateJobRequest) error {
	if len(c.words) == 0 {
		fmt.Fprintf(c.s.Stderr, "too few arguments for keyword:%s\n", verb)
		return errSilent
	}
	var ids []uint32
	for _, word := range c.words {
		low := strings.ToLower(word)
		if low == "incomplete" || strings.HasPrefix(low, "state=") {
			return fmt.Errorf("%s %s is not supported yet: it is about arrays and special exits", verb, word)
		}
		word = strings.TrimPrefix(strings.TrimPrefix(low, "jobid="), "job=")
		more, count, err := fetch.JobIDs(word)
		if err != nil {
			return err
		}
		if len(more) < count {
			return fmt.Errorf("Invalid job id specified for job %s", word)
		}
		ids = append(ids, more...)
	}
	cluster, err := c.cluster(ctx)
	if err != nil {
		return err
	}
	return c.send(ctx, cluster, ids, change)
}

// send makes one change and says what was refused.
func (c *call) send(ctx context.Context, cluster session.Cluster, ids []uint32, change *apiv1.UpdateJobRequest) error {
	change.RequestId, change.JobIds = c.s.RequestID(), ids
	answer, err := cluster.Jobs().UpdateJob(ctx, change)
	if err != nil {
		submit.Explain(c.s, "slurm_update error", err)
		return errSilent
	}
	return c.refusals(answer.GetRefusals())
}

func (c *call) refusals(refusals []*apiv1.ErrorDetail) error {
	for _, refusal := range refusals {
		fmt.Fprintf(c.s.Stderr, "%s for %s\n", submit.Summary(refusal), refusal.GetSubject())
	}
	if len(refusals) > 0 {
		return errSilent
	}
	return nil
}

// assignment is KEY=VALUE of update; the sign of "KEY+=VALUE" is kept.
type assignment struct {
	key, text string
	sign      byte
}

func assignments(words []string) ([]assignment, error) {
	var list []assignment
	for _, word := range words {
		key, text, ok := strings.Cut(word, "=")
		if !ok || key == "" {
			return nil, fmt.Errorf("Invalid input: %s", word)
		}
		a := assignment{key: strings.ToLower(key), text: text}
		if last := key[len(key)-1]; last == '+' || last == '-' {
			a.key, a.sign = strings.ToLower(key[:len(key)-1]), last
		}
		list = append(list, a)
	}
	return list, nil
}

// update dispatches by the object that the first key names.
func update(ctx context.Context, c *call) error {
	list, err := assignments(c.words)
	if err != nil {
		return err
	}
	if len(list) == 0 {
		fmt.Fprintln(c.s.Stderr, "too few arguments for keyword:update")
		return errSilent
	}
	for _, a := range list {
		switch a.key {
		case "jobid", "job":
			return c.updateJob(ctx, list)
		case "nodename":
			return c.updateNode(ctx, list)
		case "partitionname", "partition":
			if a.key == "partitionname" {
				return errors.New("update PartitionName is not supported yet: partitions are part of the configuration; change it with `muster cluster configure`")
			}
		case "stepid", "reservationname", "suspendexcnodes", "suspendexcparts", "suspendexcstates", "powercap":
			return fmt.Errorf("update %s is not supported yet", a.key)
		}
	}
	return errors.New("No valid entity in update command\nInput line must include \"JobId\" or \"NodeName\"")
}

// updateJob makes one change for each key.
func (c *call) updateJob(ctx context.Context, list []assignment) error {
	var ids []uint32
	var changes []*apiv1.UpdateJobRequest
	var relative *assignment
	for _, a := range list {
		if a.key == "jobid" || a.key == "job" {
			more, count, err := fetch.JobIDs(a.text)
			if err != nil || len(more) < count {
				return fmt.Errorf("Invalid job id specified for job %s", a.text)
			}
			ids = more
			continue
		}
		if a.key == "timelimit" && (a.sign != 0 || strings.HasPrefix(a.text, "+") || strings.HasPrefix(a.text, "-") && a.text != "-1") {
			relative = &a
			continue
		}
		change, err := jobChange(a)
		if err != nil {
			return err
		}
		changes = append(changes, change)
	}
	cluster, err := c.cluster(ctx)
	if err != nil {
		return err
	}
	for _, change := range changes {
		if err := c.send(ctx, cluster, ids, change); err != nil {
			return err
		}
	}
	if relative == nil {
		return nil
	}
	for _, id := range ids {
		if err := c.extend(ctx, cluster, id, *relative); err != nil {
			return err
		}
	}
	return nil
}

// jobChange is the change that a key asks for.
func jobChange(a assignment) (*apiv1.UpdateJobRequest, error) {
	if a.sign != 0 {
		return nil, fmt.Errorf("%s%c= is not supported", a.key, a.sign)
	}
	switch a.key {
	case "timelimit":
		limit, err := value.TimeLimit(a.text)
		if err != nil {
			return nil, fmt.Errorf("Invalid TimeLimit value: %s", a.text)
		}
		return &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_TimeLimitS{TimeLimitS: limit}}, nil
	case "priority":
		n, err := strconv.ParseUint(a.text, 10, 32)
		if err != nil || n == math.MaxUint32 {
			return nil, fmt.Errorf("Invalid Priority value: %s", a.text)
		}
		if n == 0 { // Slurm's way to hold
			return &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Hold{Hold: true}}, nil
		}
		return &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Priority{Priority: uint32(n)}}, nil
	case "comment":
		return &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Comment{Comment: a.text}}, nil
	case "name", "jobname":
		return &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Name{Name: a.text}}, nil
	case "partition":
		return &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Partition{Partition: a.text}}, nil
	case "nice":
		text := a.text
		if text == "" {
			text = "100"
		}
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("Invalid nice value: %s", a.text)
		}
		return &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Nice{Nice: int32(n)}}, nil
	}
	return nil, fmt.Errorf("update of %s is not supported yet: TimeLimit, Priority, Comment, Name, Partition and Nice are", a.key)
}

// extend changes a time limit by an amount: "TimeLimit+=10", "TimeLimit=+10".
func (c *call) extend(ctx context.Context, cluster session.Cluster, id uint32, a assignment) error {
	sign, text := a.sign, a.text
	if sign == 0 {
		sign, text = text[0], text[1:]
	}
	amount, err := value.TimeLimit(text)
	if err != nil || amount == value.Unlimited {
		return fmt.Errorf("Invalid TimeLimit value: %s", a.text)
	}
	answer, err := cluster.Jobs().GetJob(ctx, &apiv1.GetJobRequest{JobId: id})
	if err != nil {
		submit.Explain(c.s, "slurm_update error", err)
		return errSilent
	}
	now := answer.GetJob().GetStatus().GetTimeLimitS()
	switch {
	case now == value.Unlimited || now == 0:
		return fmt.Errorf("job %d has no time limit that could be changed by %c%s", id, sign, text)
	case sign == '-' && amount >= now:
		return fmt.Errorf("job %d has a time limit of %s; it cannot be lowered by %s", id, value.Padded(int64(now)), text)
	case sign == '-':
		now -= amount
	default:
		now = uint32(min(uint64(now)+uint64(amount), value.Unlimited-1))
	}
	return c.send(ctx, cluster, []uint32{id}, &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_TimeLimitS{TimeLimitS: now}})
}

// updateNode drains, resumes or declares nodes dead.
func (c *call) updateNode(ctx context.Context, list []assignment) error {
	request := &apiv1.UpdateNodesRequest{RequestId: c.s.RequestID()}
	state := ""
	for _, a := range list {
		switch a.key {
		case "nodename":
			names, err := notation.Expand(a.text)
			if err != nil {
				return err
			}
			request.Names = names
		case "state":
			state = strings.ToLower(a.text)
		case "reason":
			request.Reason = strings.Trim(a.text, "\"'")
		default:
			return fmt.Errorf("update of a node's %s is not supported yet: State and Reason are", a.key)
		}
	}
	needsReason := false
	switch state {
	case "drain":
		request.Change, needsReason = &apiv1.UpdateNodesRequest_Drain{Drain: true}, true
	case "resume", "undrain", "idle":
		request.Change = &apiv1.UpdateNodesRequest_Resume{Resume: true}
	case "down":
		request.Change, needsReason = &apiv1.UpdateNodesRequest_Down{Down: true}, true
	case "":
		return errors.New("update of a node needs State=drain, resume or down")
	default:
		return fmt.Errorf("State=%s is not supported yet: drain, resume and down are", state)
	}
	if needsReason && request.GetReason() == "" {
		fmt.Fprintln(c.s.Stderr, "You must specify a reason when DOWNING or DRAINING a node. Request denied")
		return errSilent
	}
	cluster, err := c.cluster(ctx)
	if err != nil {
		return err
	}
	answer, err := cluster.Cluster().UpdateNodes(ctx, request)
	if err != nil {
		submit.Explain(c.s, "slurm_update error", err)
		return errSilent
	}
	return c.refusals(answer.GetRefusals())
}
