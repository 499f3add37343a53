package server

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"sync"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/proto"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	"github.com/muster-hpc/muster/rpc"
)

// submission is one job of a request on its way into a command.
type submission struct {
	index   int // in the request
	spec    *apiv1.JobSpec
	blobs   []*logv1.BlobContent
	refusal *apiv1.ErrorDetail
}

// submit stores jobs durably. Order of events: look whether the request was answered before; ask the site's program;
// validate; store large blobs; propose.
func (s *Server) submit(ctx context.Context, request *apiv1.SubmitJobsRequest) (*apiv1.SubmitJobsResponse, error) {
	if len(request.Jobs) == 0 {
		return nil, malformed("jobs", "the request has no job")
	}
	if err := tooMany("jobs", len(request.Jobs), rpc.MaxJobsPerSubmit); err != nil {
		return nil, err
	}
	encoded, err := encode(request)
	if err != nil {
		return nil, err
	}
	if err := knownIn(request, encoded); err != nil {
		return nil, err
	}
	var command *logv1.Command
	if !request.ValidateOnly {
		if command, err = stampEncoded(ctx, request.RequestId, encoded); err != nil {
			return nil, err
		}
	}
	view, err := s.recent(ctx)
	if err != nil {
		return nil, err
	}
	// What a view here refuses is looked at again in one that is certainly new: partitions and nodes may have come.
	newest := sync.OnceValues(func() (*fsm.View, error) { return s.view(ctx, nil) })
	// Nearly always the request as a whole has no control character; then its jobs need not be looked at one by one.
	printed := schemaOf(request).unprintable(encoded) == ""
	submissions := make([]*submission, len(request.Jobs))
	if request.ValidateOnly {
		return s.validate(ctx, view, newest, request, printed)
	}
	refused := false
	for i, job := range request.Jobs {
		if submissions[i], err = s.prepare(ctx, view, newest, i, job, printed); err != nil {
			return nil, err
		}
		refused = refused || submissions[i].refusal != nil
	}
	if refused && s.answered(ctx, command) {
		return nil, rpc.Refuse(connect.CodeAborted, "ANSWERED_BEFORE", request.RequestId,
			"this request was carried out before, but would be refused in part now: look at your jobs instead of repeating it")
	}
	return s.store(ctx, command, submissions)
}

// validate says of each job what a submission would; nothing is proposed.
func (s *Server) validate(ctx context.Context, view *fsm.View, newest func() (*fsm.View, error), request *apiv1.SubmitJobsRequest,
	printed bool) (*apiv1.SubmitJobsResponse, error) {
	response := &apiv1.SubmitJobsResponse{Revision: view.Revision()}
	for i, job := range request.Jobs {
		sub, err := s.prepare(ctx, view, newest, i, job, printed)
		if err != nil {
			return nil, err
		}
		result := &apiv1.SubmitResult{Refusal: sub.refusal}
		if sub.refusal == nil {
			_, result.Warnings = fsm.ValidateSpec(view, sub.spec, rpc.PrincipalOf(ctx))
		}
		response.Results = append(response.Results, result)
	}
	return response, nil
}

// recent returns a view that lags at most as replication does. A controller that has just started may know nothing yet:
// it must not judge by that, nor leave out the site's program; so the first time it asks the leader.
func (s *Server) recent(ctx context.Context) (*fsm.View, error) {
	if s.caughtUp.Load() {
		return s.replica.View(), nil
	}
	view, err := s.view(ctx, nil)
	if err == nil {
		s.caughtUp.Store(true)
	}
	return view, err
}

// answered reports whether the cluster remembers an answer to this request.
func (s *Server) answered(ctx context.Context, command *logv1.Command) bool {
	view, err := s.view(ctx, nil)
	return err == nil && view.Request(requestKey(command.RequestId)) != nil
}

// prepare makes a job ready to be proposed, or refuses it. It writes into the job's specification: the request was stamped before.
// printed says that the job has no control character where none may be. An error means that neither could be found out.
func (s *Server) prepare(ctx context.Context, view *fsm.View, newest func() (*fsm.View, error), index int, job *apiv1.JobSubmission,
	printed bool) (*submission, error) {
	sub := &submission{index: index}
	refuse := func(err error) (*submission, error) {
		sub.refusal = detailOf(err, fmt.Sprintf("job %d of the request", index))
		return sub, nil
	}
	if job.GetSpec() == nil {
		return refuse(malformed("spec", "job %d of the request has no specification", index))
	}
	spec := job.Spec
	if program := view.Settings().GetSubmitHook(); program != "" {
		changed, err := s.runHook(ctx, program, spec)
		if err != nil {
			return refuse(err)
		}
		spec, printed = changed, false
	}
	if !printed {
		if err := printable(spec); err != nil {
			return refuse(err)
		}
	}
	blobs := []struct {
		name    string
		content []byte
		limit   int
		blob    func(*apiv1.JobSpec) *string
	}{
		{"script", job.Script, rpc.MaxScriptBytes, func(s *apiv1.JobSpec) *string { return &s.ScriptBlob }},
		{"environment", job.Environment, rpc.MaxEnvironmentBytes, func(s *apiv1.JobSpec) *string { return &s.EnvironmentBlob }},
	}
	for _, b := range blobs {
		if len(b.content) == 0 {
			continue
		}
		if len(b.content) > b.limit {
			return refuse(rpc.Refuse(connect.CodeInvalidArgument, rpc.ReasonTooLarge, b.name, fmt.Sprintf(
				"the %s has %d bytes; the limit is %d bytes (%d MiB)", b.name, len(b.content), b.limit, b.limit>>20)))
		}
		content := blobOf(b.content)
		*b.blob(spec) = content.Sha256
		sub.blobs = append(sub.blobs, content)
	}
	sub.spec = spec
	if refusal, _ := fsm.ValidateSpec(view, spec, rpc.PrincipalOf(ctx)); refusal != nil {
		newer, err := newest()
		if err != nil {
			return nil, err
		}
		sub.refusal, _ = fsm.ValidateSpec(newer, spec, rpc.PrincipalOf(ctx))
	}
	return sub, nil
}

func blobOf(content []byte) *logv1.BlobContent {
	hash := sha256.Sum256(content)
	return &logv1.BlobContent{Sha256: hex.EncodeToString(hash[:]), Data: content}
}

// store proposes the submissions that were not refused, in as many commands as the size of a log entry demands.
func (s *Server) store(ctx context.Context, command *logv1.Command, all []*submission) (*apiv1.SubmitJobsResponse, error) {
	response := &apiv1.SubmitJobsResponse{Results: make([]*apiv1.SubmitResult, len(all))}
	var accepted []*submission
	for _, sub := range all {
		if sub.refusal != nil {
			response.Results[sub.index] = &apiv1.SubmitResult{Refusal: sub.refusal}
		} else {
			accepted = append(accepted, sub)
		}
	}
	if len(accepted) == 0 {
		response.Revision = s.replica.View().Revision()
		return response, nil
	}
	for part, submissions := range split(accepted) {
		op := &logv1.SubmitJobs{}
		blobs := map[string]*logv1.BlobContent{}
		size := 0
		for _, sub := range submissions {
			op.Specs = append(op.Specs, sub.spec)
			for _, blob := range sub.blobs {
				if blobs[blob.Sha256] == nil {
					blobs[blob.Sha256] = blob
					op.Blobs = append(op.Blobs, blob)
					size += len(blob.Data)
				}
			}
		}
		if size > maxInlineBlobs {
			if err := s.putBlobs(ctx, command.Principal, op.Blobs); err != nil {
				return nil, err
			}
			op.Blobs = nil
		}
		result, err := s.propose(ctx, partOf(command, part, &logv1.Command{Op: &logv1.Command_SubmitJobs{SubmitJobs: op}}), false)
		if err != nil {
			return nil, err
		}
		if result.Refusal != nil {
			return nil, rpc.FromDetail(result.Refusal)
		}
		if len(result.Submitted) != len(submissions) {
			return nil, rpc.Refuse(connect.CodeAborted, "ANSWERED_BEFORE", command.RequestId, fmt.Sprintf(
				"this request was carried out before, with %d jobs where there are %d now: look at your jobs instead of repeating it",
				len(result.Submitted), len(submissions)))
		}
		for i, sub := range submissions {
			response.Results[sub.index] = result.Submitted[i]
		}
		response.Revision = result.Revision
	}
	return response, nil
}

// partOf makes one of several commands of a request: the same caller, time and trace, its own id and operation.
func partOf(command *logv1.Command, part int, op *logv1.Command) *logv1.Command {
	op.RequestId = partID(command.RequestId, part)
	op.Principal = command.Principal
	op.PayloadSha256 = command.PayloadSha256
	op.Traceparent = command.Traceparent
	return op
}

// split divides submissions so that the specs of each part fit into one log entry beside inline blobs. It depends on
// nothing but the submissions, so that a repeated request is divided in the same way.
func split(all []*submission) [][]*submission {
	if len(all) == 1 {
		return [][]*submission{all}
	}
	var parts [][]*submission
	var part []*submission
	size := 0
	for _, sub := range all {
		n := proto.Size(sub.spec) + 8
		if len(part) > 0 && size+n > maxPartBytes-maxInlineBlobs {
			parts, part, size = append(parts, part), nil, 0
		}
		part = append(part, sub)
		size += n
	}
	return append(parts, part)
}

// putBlobs stores blobs piece by piece, before the command that refers to them.
func (s *Server) putBlobs(ctx context.Context, principal *apiv1.Principal, blobs []*logv1.BlobContent) error {
	for _, blob := range blobs {
		if view := s.replica.View(); view.Blob(blob.Sha256) != nil && slices.Contains(view.Blob(blob.Sha256).Uids, principal.Uid) {
			continue // it is there, and it is known that this user has it
		}
		size := uint64(len(blob.Data))
		for offset := uint64(0); offset < size; {
			end := min(offset+rpc.MaxBlobPieceBytes, size)
			stored, err := s.putPiece(ctx, principal, &apiv1.PutBlobRequest{
				Sha256: blob.Sha256, Size: size, Offset: offset, Data: blob.Data[offset:end]})
			if err != nil {
				return err
			}
			if stored < end {
				return rpc.Refuse(connect.CodeAborted, "UPLOAD_INTERRUPTED", blob.Sha256, fmt.Sprintf(
					"the upload of a script or environment stopped at %d of %d bytes; repeat the request", stored, size))
			}
			offset = stored
		}
	}
	return nil
}

// putPiece stores one piece and returns how much is there. Storing it again does no harm.
func (s *Server) putPiece(ctx context.Context, principal *apiv1.Principal, piece *apiv1.PutBlobRequest) (uint64, error) {
	result, err := s.propose(ctx, &logv1.Command{Principal: principal,
		Op: &logv1.Command_PutBlob{PutBlob: &logv1.PutBlob{Piece: piece}}}, true)
	if err != nil {
		return 0, err
	}
	if result.Refusal != nil {
		return 0, rpc.FromDetail(result.Refusal)
	}
	return result.Stored, nil
}
