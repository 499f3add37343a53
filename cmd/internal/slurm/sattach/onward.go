package sattach

import (
	"context"
	"sync"

	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
)

// onward is the cluster for one who comes later: what it sends to a step's stdin follows what others have sent before, and its end is
// not the end of the step's stdin.
type onward struct {
	session.Cluster

	mu   sync.Mutex
	from map[string]uint64 // by address: how much others had sent
}

// Node reaches an agent.
func (o *onward) Node(address string) nodev1connect.NodeServiceClient {
	return &latecomer{NodeServiceClient: o.Cluster.Node(address), of: o, address: address}
}

type latecomer struct {
	nodev1connect.NodeServiceClient
	of      *onward
	address string
}

// WriteInput moves the piece behind what was there at the first one.
func (l *latecomer) WriteInput(ctx context.Context, r *nodev1.WriteInputRequest) (*nodev1.WriteInputResponse, error) {
	if len(r.GetData()) == 0 {
		return &nodev1.WriteInputResponse{Offset: r.GetOffset()}, nil
	}
	l.of.mu.Lock()
	begin, known := l.of.from[l.address]
	l.of.mu.Unlock()
	if !known {
		// An empty piece changes nothing, and the answer says how much was taken.
		answer, err := l.NodeServiceClient.WriteInput(ctx, &nodev1.WriteInputRequest{JobId: r.GetJobId(), Attempt: r.GetAttempt(), StepId: r.GetStepId()})
		if err != nil {
			return nil, err
		}
		begin = answer.GetOffset()
		l.of.mu.Lock()
		l.of.from[l.address] = begin
		l.of.mu.Unlock()
	}
	answer, err := l.NodeServiceClient.WriteInput(ctx, &nodev1.WriteInputRequest{
		JobId: r.GetJobId(), Attempt: r.GetAttempt(), StepId: r.GetStepId(), Offset: begin + r.GetOffset(), Data: r.GetData(),
	})
	if err != nil {
		return nil, err
	}
	return &nodev1.WriteInputResponse{Offset: answer.GetOffset() - begin}, nil
}
