package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
	"github.com/muster-hpc/muster/rpc"
)

// Bounds; rows of docs/limits.md.
const (
	// maxPiece bounds a piece of output or input.
	maxPiece = 64 << 10
	// pollMin and pollMax bound the pauses between looks at files that may grow.
	pollMin = 2 * time.Millisecond
	pollMax = 100 * time.Millisecond
	// maxTerminal bounds the lines and columns of a terminal.
	maxTerminal = 65535
	// maxWait bounds how long a reader waits for a step to appear.
	maxWait = 10 * time.Minute
)

// Reasons of refusals.
const (
	// ReasonStepUnknown: the node knows no such step.
	ReasonStepUnknown = "STEP_UNKNOWN"
	// ReasonNotOwner: the caller does not own the job and is no operator.
	ReasonNotOwner = "NOT_OWNER"
	// ReasonStepOver: the step has ended and takes no input.
	ReasonStepOver = "STEP_OVER"
	// ReasonNoTerminal: the step has no terminal that could have a size.
	ReasonNoTerminal = "NO_TERMINAL"
)

// Stream is where one stream of a task goes.
type Stream struct {
	// Path of the file, absolute.
	Path string
	// Spool: the file is the agent's own; otherwise the user named it.
	Spool bool
}

// Task is a task of a step on this node.
type Task struct {
	// Rank in the step.
	Rank uint32
	// Stdout and Stderr; equal paths mean that both go to one file.
	Stdout, Stderr Stream
}

// Step is a step on this node as it is now.
type Step struct {
	// Attempt it belongs to.
	Attempt uint32
	// Owner of the job.
	Owner *apiv1.JobOwner
	// Tasks of this node; none while the step's preparation has not named their files.
	Tasks []Task
	// Started: the tasks were executed.
	Started bool
	// Over: no process is left, so that the output is complete.
	Over bool
	// Exits of this node's tasks, once it is over.
	Exits []*apiv1.TaskExit
	// Ended are the ends of single tasks that are known while the step is not over.
	Ended []*apiv1.TaskExit
}

// Errors of Host.Input and Host.ResizeTerminal.
var (
	ErrNoStep     = errors.New("no such step on this node")
	ErrStepOver   = errors.New("the step has ended")
	ErrNoTerminal = errors.New("the step has no terminal")
)

// Host is the agent.
type Host interface {
	// Step returns a step; attempt 0 means the latest on this node that has it. false if there is none.
	Step(job, attempt, step uint32) (Step, bool)
	// Changed returns a channel that is closed when something on the node has changed since the call.
	Changed() <-chan struct{}
	// Input writes to the stdin of the step's tasks and returns how much of the stream was taken. ErrNoStep, ErrStepOver.
	Input(ctx context.Context, job, attempt, step uint32, offset uint64, data []byte, end bool) (uint64, error)
	// ResizeTerminal tells the size of the user's terminal to the step. ErrNoStep, ErrStepOver, ErrNoTerminal.
	ResizeTerminal(ctx context.Context, job, attempt, step, rows, columns uint32) error
	// Place returns where the files of a running attempt are; attempt 0 means the one that runs. false if the node has none.
	Place(job, attempt uint32) (Place, bool, error)
	// Usage says what tasks of the job's running steps use here (step nil: of all), and whether control groups counted it.
	Usage(job uint32, step *uint32) (tasks []*nodev1.TaskUsage, counted bool)
	// Status describes the agent.
	Status() *nodev1.StatusResponse
	// Settings returns the cluster's settings; nil if not known.
	Settings() *apiv1.Settings
	// Cluster returns the cluster's name and its controllers' API addresses, the presumed leader first.
	Cluster() (name string, controllers []string)
}

// Handler answers clients over the network: the NodeService behind the guard, which finds out who calls.
func Handler(host Host, guard *rpc.Guard, log *slog.Logger) http.Handler {
	server := connect.NewServer(guard.Interceptor())
	nodev1connect.RegisterNodeServiceHandler(server, &nodeService{host: host, log: log, puts: make(chan struct{}, maxPuts)})
	mux := http.NewServeMux()
	connecthttp.Mount(mux, server, connecthttp.WithReadMaxBytes(rpc.MaxRequestBytes))
	return mux
}

// nodeService is the NodeService.
type nodeService struct {
	host Host
	log  *slog.Logger
	puts chan struct{} // pieces of files that are being written
}

// Status describes the agent.
func (s *nodeService) Status(context.Context, *nodev1.StatusRequest) (*nodev1.StatusResponse, error) {
	return s.host.Status(), nil
}

// WriteInput writes to stdin; it returns when the tasks' pipes have taken it.
func (s *nodeService) WriteInput(ctx context.Context, req *nodev1.WriteInputRequest) (*nodev1.WriteInputResponse, error) {
	if len(req.GetData()) > maxPiece {
		return nil, rpc.Refuse(connect.CodeInvalidArgument, rpc.ReasonTooLarge, subject(req.GetJobId(), req.GetStepId()),
			fmt.Sprintf("a piece of input has %d bytes; the limit is %d", len(req.GetData()), maxPiece))
	}
	step, err := s.await(ctx, req.GetJobId(), req.GetAttempt(), req.GetStepId(), 0)
	if err != nil {
		return nil, err
	}
	taken, err := s.host.Input(ctx, req.GetJobId(), step.Attempt, req.GetStepId(), req.GetOffset(), req.GetData(), req.GetEnd())
	switch {
	case errors.Is(err, ErrStepOver):
		return nil, rpc.Refuse(connect.CodeFailedPrecondition, ReasonStepOver, subject(req.GetJobId(), req.GetStepId()),
			fmt.Sprintf("step %d of job %d has ended and takes no more input", req.GetStepId(), req.GetJobId()))
	case errors.Is(err, ErrNoStep):
		return nil, s.unknown(req.GetJobId(), req.GetStepId())
	case err != nil:
		return nil, fmt.Errorf("write to the stdin of step %d of job %d: %w", req.GetStepId(), req.GetJobId(), err)
	}
	return &nodev1.WriteInputResponse{Offset: taken}, nil
}

// ResizeTerminal tells the size of the user's terminal to a step with a pty.
func (s *nodeService) ResizeTerminal(ctx context.Context, req *nodev1.ResizeTerminalRequest) (*nodev1.ResizeTerminalResponse, error) {
	if req.GetRows() == 0 || req.GetColumns() == 0 || req.GetRows() > maxTerminal || req.GetColumns() > maxTerminal {
		return nil, rpc.Refuse(connect.CodeInvalidArgument, ReasonNoTerminal, subject(req.GetJobId(), req.GetStepId()),
			fmt.Sprintf("a terminal has 1 to %d lines and columns, not %d and %d", maxTerminal, req.GetRows(), req.GetColumns()))
	}
	step, err := s.await(ctx, req.GetJobId(), req.GetAttempt(), req.GetStepId(), 0)
	if err != nil {
		return nil, err
	}
	switch err := s.host.ResizeTerminal(ctx, req.GetJobId(), step.Attempt, req.GetStepId(), req.GetRows(), req.GetColumns()); {
	case errors.Is(err, ErrStepOver):
		return nil, rpc.Refuse(connect.CodeFailedPrecondition, ReasonStepOver, subject(req.GetJobId(), req.GetStepId()),
			fmt.Sprintf("step %s of job %d has ended", stepName(req.GetStepId()), req.GetJobId()))
	case errors.Is(err, ErrNoTerminal):
		return nil, rpc.Refuse(connect.CodeFailedPrecondition, ReasonNoTerminal, subject(req.GetJobId(), req.GetStepId()),
			fmt.Sprintf("step %s of job %d was started by an older version, which knows no terminals", stepName(req.GetStepId()), req.GetJobId()))
	case errors.Is(err, ErrNoStep):
		return nil, s.unknown(req.GetJobId(), req.GetStepId())
	case err != nil:
		return nil, fmt.Errorf("resize the terminal of step %d of job %d: %w", req.GetStepId(), req.GetJobId(), err)
	}
	return &nodev1.ResizeTerminalResponse{}, nil
}

// await finds a step that the caller may see; it waits for it as long as asked.
func (s *nodeService) await(ctx context.Context, job, attempt, id uint32, wait time.Duration) (Step, error) {
	timer := time.NewTimer(min(wait, maxWait))
	defer timer.Stop()
	for {
		changed := s.host.Changed()
		if step, ok := s.host.Step(job, attempt, id); ok {
			return step, s.allowed(ctx, step, job, id)
		}
		if wait == 0 {
			return Step{}, s.unknown(job, id)
		}
		select {
		case <-ctx.Done():
			return Step{}, ctx.Err()
		case <-timer.C:
			return Step{}, s.unknown(job, id)
		case <-changed:
		}
	}
}

// allowed refuses callers who neither own the job nor are operators.
func (s *nodeService) allowed(ctx context.Context, step Step, job, id uint32) error {
	p := rpc.PrincipalOf(ctx)
	owns := p.GetKind() == apiv1.PrincipalKind_PRINCIPAL_KIND_USER && p.GetUid() == step.Owner.GetUid()
	if owns || rpc.IsOperator(p, s.host.Settings()) {
		return nil
	}
	return rpc.Refuse(connect.CodePermissionDenied, ReasonNotOwner, subject(job, id),
		fmt.Sprintf("job %d belongs to %s: only its owner and operators may read its output and write to its input",
			job, step.Owner.GetUser()))
}

func (s *nodeService) unknown(job, id uint32) error {
	return rpc.Refuse(connect.CodeNotFound, ReasonStepUnknown, subject(job, id),
		fmt.Sprintf("node %s has no step %s of job %d: it has not begun there, ran elsewhere, or its output was removed after a while",
			s.host.Status().GetNode(), stepName(id), job))
}

func subject(job, step uint32) string { return fmt.Sprintf("step %d.%s", job, stepName(step)) }

// batchStep is the id of the step that runs the batch script.
const batchStep = 4294967291

func stepName(step uint32) string {
	if step == batchStep {
		return "batch"
	}
	return fmt.Sprint(step)
}
