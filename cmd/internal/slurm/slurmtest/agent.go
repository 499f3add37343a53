package slurmtest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"sync"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
	"github.com/muster-hpc/muster/rpc"
)

// Agent is a fake agent that sends a script of pieces to every reader, and keeps what is written to stdin.
type Agent struct {
	nodev1connect.UnimplementedNodeServiceHandler

	// Pieces are sent to a reader in order, less what it has.
	Pieces []*nodev1.ReadOutputResponse
	// Exits are sent at the end; nil keeps the stream open until Release is closed.
	Exits []*apiv1.TaskExit
	// BreakAfter breaks the first connections after so many pieces, one number for each connection.
	BreakAfter []int
	// Release holds the exits back until it is closed; nil does not.
	Release <-chan struct{}
	// NotYet makes so many first reads fail because the step is not there.
	NotYet int
	// Usage is what tasks use; nil lets the question fail.
	Usage []*nodev1.TaskUsage
	// PutErrors are the answers to the first pieces of files; nil is a good one.
	PutErrors []error

	mu    sync.Mutex
	Input []byte
	Ended bool
	Reads []*nodev1.ReadOutputRequest
	Wrote chan struct{} // closed when stdin has ended; set before the first call
	Puts  []*nodev1.PutFileRequest
	Files map[string][]byte // by path
	Sizes []*nodev1.ResizeTerminalRequest
}

// ReadOutput sends the script.
func (a *Agent) ReadOutput(ctx context.Context, r *nodev1.ReadOutputRequest, stream nodev1connect.NodeServiceReadOutputServerStream) error {
	a.mu.Lock()
	a.Reads = append(a.Reads, r)
	limit := -1
	if len(a.BreakAfter) > 0 {
		limit, a.BreakAfter = a.BreakAfter[0], a.BreakAfter[1:]
	}
	missing := a.NotYet > 0
	if missing {
		a.NotYet--
	}
	a.mu.Unlock()
	if missing {
		return connect.NewError(connect.CodeNotFound, "no such step on this node")
	}
	offset := map[[2]uint32]uint64{}
	for _, o := range r.GetOffsets() {
		offset[[2]uint32{o.GetRank(), uint32(o.GetStream())}] = o.GetOffset()
	}
	if err := stream.Send(&nodev1.ReadOutputResponse{Started: true}); err != nil {
		return err
	}
	for i, piece := range a.Pieces {
		if i == limit {
			return connect.NewError(connect.CodeUnavailable, "the agent was killed")
		}
		at := offset[[2]uint32{piece.GetRank(), uint32(piece.GetStream())}]
		if !piece.GetEnd() && len(piece.GetEnded()) == 0 && piece.GetOffset()+uint64(len(piece.GetData())) <= at {
			continue
		}
		if err := stream.Send(piece); err != nil {
			return err
		}
	}
	if a.Release != nil {
		select {
		case <-a.Release:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return stream.Send(&nodev1.ReadOutputResponse{Exits: a.Exits})
}

// WriteInput takes stdin, each byte once.
func (a *Agent) WriteInput(_ context.Context, r *nodev1.WriteInputRequest) (*nodev1.WriteInputResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if have := uint64(len(a.Input)); r.GetOffset() <= have {
		if skip := have - r.GetOffset(); skip < uint64(len(r.GetData())) {
			a.Input = append(a.Input, r.GetData()[skip:]...)
		}
	}
	if r.GetEnd() && !a.Ended {
		a.Ended = true
		if a.Wrote != nil {
			close(a.Wrote)
		}
	}
	return &nodev1.WriteInputResponse{Offset: uint64(len(a.Input))}, nil
}

// ResizeTerminal keeps the request.
func (a *Agent) ResizeTerminal(_ context.Context, r *nodev1.ResizeTerminalRequest) (*nodev1.ResizeTerminalResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.Sizes = append(a.Sizes, r)
	return &nodev1.ResizeTerminalResponse{}, nil
}

// Resized are the sizes that the terminal was given, as "ROWSxCOLUMNS".
func (a *Agent) Resized() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	var sizes []string
	for _, r := range a.Sizes {
		sizes = append(sizes, strconv.Itoa(int(r.GetRows()))+"x"+strconv.Itoa(int(r.GetColumns())))
	}
	return sizes
}

// Appear lets the reads find the step that NotYet made fail.
func (a *Agent) Appear() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.NotYet = 0
}

// Got is what was written to stdin, and whether it has ended.
func (a *Agent) Got() (string, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return string(a.Input), a.Ended
}

// Out is a piece of stdout.
func Out(rank uint32, offset uint64, data string) *nodev1.ReadOutputResponse {
	return &nodev1.ReadOutputResponse{Rank: rank, Stream: nodev1.OutputStream_OUTPUT_STREAM_STDOUT, Offset: offset, Data: []byte(data)}
}

// Err is a piece of stderr.
func Err(rank uint32, offset uint64, data string) *nodev1.ReadOutputResponse {
	return &nodev1.ReadOutputResponse{Rank: rank, Stream: nodev1.OutputStream_OUTPUT_STREAM_STDERR, Offset: offset, Data: []byte(data)}
}

// End is the end of stdout.
func End(rank uint32, offset uint64) *nodev1.ReadOutputResponse {
	return &nodev1.ReadOutputResponse{Rank: rank, Stream: nodev1.OutputStream_OUTPUT_STREAM_STDOUT, Offset: offset, End: true}
}

// Ends makes the exits of ranks first to first+count-1.
func Ends(first, count, code, signal uint32) []*apiv1.TaskExit {
	return []*apiv1.TaskExit{{FirstRank: first, Count: count, Code: code, Signal: signal}}
}

// PutFile keeps what is sent, as an agent's disk would.
func (a *Agent) PutFile(_ context.Context, r *nodev1.PutFileRequest) (*nodev1.PutFileResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.Puts = append(a.Puts, proto.Clone(r).(*nodev1.PutFileRequest))
	if a.Files == nil {
		a.Files = map[string][]byte{}
	}
	hidden := r.GetPath() + "." + r.GetTransfer()
	if len(a.PutErrors) > 0 {
		err := a.PutErrors[0]
		if a.PutErrors = a.PutErrors[1:]; err != nil {
			return nil, err
		}
	}
	have, begun := a.Files[hidden]
	switch {
	case r.GetAbort():
		delete(a.Files, hidden)
		return &nodev1.PutFileResponse{}, nil
	case !begun && r.GetOffset() > 0:
		return nil, rpc.Refuse(connect.CodeFailedPrecondition, "TRANSFER_UNKNOWN", "file", "nothing of this transfer is here")
	case r.GetOffset() <= uint64(len(have)):
		have = append(have[:r.GetOffset():r.GetOffset()], r.GetData()...)
	}
	a.Files[hidden] = have
	if r.GetEnd() {
		if sum := sha256.Sum256(have); hex.EncodeToString(sum[:]) != r.GetSha256() {
			return nil, rpc.Refuse(connect.CodeDataLoss, "HASH_MISMATCH", "file", "another SHA-256")
		}
		a.Files[r.GetPath()] = have
		delete(a.Files, hidden)
	}
	return &nodev1.PutFileResponse{Offset: uint64(len(have))}, nil
}

// GetUsage answers with Usage, or fails if there is none.
func (a *Agent) GetUsage(_ context.Context, r *nodev1.GetUsageRequest) (*nodev1.GetUsageResponse, error) {
	if a.Usage == nil {
		return nil, connect.NewError(connect.CodeUnavailable, "the agent was killed")
	}
	answer := &nodev1.GetUsageResponse{}
	for _, task := range a.Usage {
		if r.StepId == nil || task.GetStepId() == r.GetStepId() {
			answer.Tasks = append(answer.Tasks, task)
		}
	}
	return answer, nil
}
