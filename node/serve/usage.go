package serve

import (
	"context"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// GetUsage says what the running tasks of a job use here.
func (s *nodeService) GetUsage(ctx context.Context, req *nodev1.GetUsageRequest) (*nodev1.GetUsageResponse, error) {
	if _, err := s.place(ctx, req.GetJobId(), 0, "see what it uses"); err != nil {
		return nil, err
	}
	tasks, counted := s.host.Usage(req.GetJobId(), req.StepId)
	return &nodev1.GetUsageResponse{Tasks: tasks, FromCgroup: counted}, nil
}
