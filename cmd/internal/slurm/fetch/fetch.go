// Package fetch reads listings of the cluster to their end and turns failures into Slurm's words.
//
// Invariants: every page is read; the listing's age is that of its first page.
//
// It is called by the commands of cmd/internal/slurm. It keeps nothing.
package fetch

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
)

// MinJobAge is for how long a finished job is shown by listings that do not name it, as Slurm's MinJobAge; a row of
// docs/limits.md.
const MinJobAge = 300 * time.Second

// pageSize is how many jobs are asked for at once; the server's default.
const pageSize = 10_000

// Listing is what ListJobs returned.
type Listing struct {
	// Jobs by id.
	Jobs []*apiv1.Job
	// Steps, if asked for.
	Steps []*apiv1.Step
	// Now is the state time of the first page.
	Now time.Time
	// Info is how fresh the first page is.
	Info *apiv1.ReadInfo
}

// Jobs reads all pages of a listing.
func Jobs(ctx context.Context, cluster session.Cluster, request *apiv1.ListJobsRequest) (*Listing, error) {
	listing := &Listing{}
	request.Page = &apiv1.Page{Size: pageSize}
	for {
		answer, err := cluster.Jobs().ListJobs(ctx, request)
		if err != nil {
			return nil, err
		}
		if listing.Now.IsZero() {
			listing.Now, listing.Info = StateTime(answer.GetInfo()), answer.GetInfo()
		}
		listing.Jobs = append(listing.Jobs, answer.GetJobs()...)
		listing.Steps = append(listing.Steps, answer.GetSteps()...)
		if answer.GetNextToken() == "" {
			return listing, nil
		}
		request.Page = &apiv1.Page{Size: pageSize, Token: answer.GetNextToken()}
	}
}

// StateTime is the state time of an answer, or the local clock's if it has none.
func StateTime(info *apiv1.ReadInfo) time.Time {
	if at := info.GetStateTime(); at != nil {
		return at.AsTime().In(time.Local)
	}
	return time.Now()
}

// Recent is the bound before which finished jobs are not listed.
func Recent(now time.Time) *timestamppb.Timestamp { return timestamppb.New(now.Add(-MinJobAge)) }

// JobID reads a job id; forms of array elements and heterogeneous components ("7_1", "7+0") are ids that no job has yet.
func JobID(word string) (id uint32, known bool, err error) {
	head := strings.TrimRight(word, " ")
	if i := strings.IndexAny(head, "_+"); i > 0 {
		head, known = head[:i], false
	} else {
		known = true
	}
	n, err := strconv.ParseUint(head, 10, 32)
	if err != nil || n == 0 {
		return 0, false, fmt.Errorf("Invalid job id: %s", word)
	}
	return uint32(n), known, nil
}

// JobIDs reads a list of ids; ids that no job can have are left out, with count telling how many were named.
func JobIDs(list string) (ids []uint32, count int, err error) {
	for word := range strings.SplitSeq(list, ",") {
		if word = strings.TrimSpace(word); word == "" {
			continue
		}
		word, _, _ = strings.Cut(word, ".")
		id, known, err := JobID(word)
		if err != nil {
			return nil, 0, err
		}
		count++
		if known {
			ids = append(ids, id)
		}
	}
	return ids, count, nil
}

// Step reads "JOB.STEP", where STEP is a number or "batch"; ok is false for a job alone.
func Step(word string) (job, step uint32, ok bool, err error) {
	head, tail, dotted := strings.Cut(word, ".")
	job, known, err := JobID(head)
	if err != nil {
		return 0, 0, false, err
	}
	if !known {
		return 0, 0, false, fmt.Errorf("Invalid job id: %s", word)
	}
	if !dotted {
		return job, 0, false, nil
	}
	switch tail {
	case "batch":
		return job, 4294967291, true, nil
	case "extern", "interactive":
		return job, 4294967292, true, nil
	}
	n, err := strconv.ParseUint(tail, 10, 32)
	if err != nil {
		return 0, 0, false, fmt.Errorf("Invalid job step id: %s", word)
	}
	return job, uint32(n), true, nil
}

// Error is a failed listing in the words of Slurm's library ("slurm_load_jobs error: …"), with Muster's sentence.
func Error(call string, err error) string {
	if detail := rpc.Detail(err); detail != nil && contact[detail.GetReason()] {
		return call + " error: Unable to contact slurm controller (connect failure)\n" + detail.GetSentence()
	}
	return call + " error: " + rpc.Sentence(err)
}

// contact are the reasons of failures to reach a controller that could answer.
var contact = map[string]bool{"NO_LEADER": true, "NO_QUORUM": true, "NO_ANSWER": true, "NO_CONTROLLERS": true, "NO_AGENT": true, "QUARANTINED": true}

// Nodes is what ListNodes returned, and which jobs are being ended.
type Nodes struct {
	// Nodes in natural order.
	Nodes []*apiv1.Node
	// Partitions in order of the configuration.
	Partitions []*apiv1.Partition
	// Now is the state time.
	Now time.Time
	// Completing are the jobs on these nodes that are being ended.
	Completing map[uint32]bool
	// Silent are the nodes, by number, that are up but do not answer.
	Silent map[uint32]bool
}

// stale asks for what the answering controller has, however old.
var stale = &apiv1.ReadOptions{Consistency: apiv1.ReadConsistency_READ_CONSISTENCY_STALE}

// JobsOrStale is Jobs; without a quorum it returns what a controller has and says on stderr how old that is.
func JobsOrStale(ctx context.Context, cluster session.Cluster, request *apiv1.ListJobsRequest, stderr io.Writer) (*Listing, error) {
	listing, err := Jobs(ctx, cluster, request)
	if rpc.Reason(err) != rpc.ReasonNoQuorum {
		return listing, err
	}
	request.Read = stale
	old, again := Jobs(ctx, cluster, request)
	if again != nil {
		return nil, err
	}
	fmt.Fprintln(stderr, rpc.AsOf(old.Info, err))
	return old, nil
}

// ListNodesOrStale is ListNodes; without a quorum it returns what a controller has and says on stderr how old that is.
func ListNodesOrStale(ctx context.Context, cluster session.Cluster, names []string, stderr io.Writer) (*Nodes, error) {
	list, _, err := listNodes(ctx, cluster, names, nil)
	if rpc.Reason(err) != rpc.ReasonNoQuorum {
		return list, err
	}
	old, info, again := listNodes(ctx, cluster, names, stale)
	if again != nil {
		return nil, err
	}
	fmt.Fprintln(stderr, rpc.AsOf(info, err))
	return old, nil
}

// ListNodes reads nodes and partitions, and asks which of the jobs there are being ended.
func ListNodes(ctx context.Context, cluster session.Cluster, names []string) (*Nodes, error) {
	list, _, err := listNodes(ctx, cluster, names, nil)
	return list, err
}

func listNodes(ctx context.Context, cluster session.Cluster, names []string, read *apiv1.ReadOptions) (*Nodes, *apiv1.ReadInfo, error) {
	answer, err := cluster.Cluster().ListNodes(ctx, &apiv1.ListNodesRequest{Names: names, Read: read})
	if err != nil {
		return nil, nil, err
	}
	out := &Nodes{Nodes: answer.GetNodes(), Partitions: answer.GetPartitions(), Now: StateTime(answer.GetInfo()), Completing: map[uint32]bool{},
		Silent: map[uint32]bool{}}
	for _, silent := range answer.GetSilent() {
		out.Silent[silent.GetNode()] = true
	}
	jobs := map[uint32]bool{}
	for _, node := range out.Nodes {
		for _, owner := range node.GetOwners() {
			jobs[uint32(owner>>32)] = true
		}
	}
	if len(jobs) == 0 {
		return out, answer.GetInfo(), nil
	}
	filter := &apiv1.JobFilter{}
	for id := range jobs {
		filter.JobIds = append(filter.JobIds, id)
	}
	listing, err := Jobs(ctx, cluster, &apiv1.ListJobsRequest{Filter: filter, Brief: true, Read: read})
	if err != nil {
		return nil, nil, err
	}
	for _, job := range listing.Jobs {
		if job.GetStatus().GetCompleting() {
			out.Completing[job.GetId()] = true
		}
	}
	return out, answer.GetInfo(), nil
}

// State is the state of one of the nodes, with what is known of its jobs and of its silence.
func (n *Nodes) State(node *apiv1.Node) record.NodeState {
	state := record.StateOfNode(node, n.AllCompleting(node))
	state.Silent = state.Silent || n.Silent[node.GetNumber()]
	return state
}

// AllCompleting tells whether a node has jobs and all of them are being ended.
func (n *Nodes) AllCompleting(node *apiv1.Node) bool {
	for _, owner := range node.GetOwners() {
		if !n.Completing[uint32(owner>>32)] {
			return false
		}
	}
	return len(node.GetOwners()) > 0
}
