package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"time"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
)

// runHook asks the site's submission program about a specification. The program gets it as JSON on stdin and who asks in
// MUSTER_USER, MUSTER_UID and MUSTER_GID; it prints nothing or a changed specification, or exits with another code than
// 0 and says why on stderr. It may be asked more than once about the same job, because callers repeat requests.
func (s *Server) runHook(ctx context.Context, program string, spec *apiv1.JobSpec) (*apiv1.JobSpec, error) {
	select {
	case s.hooks <- struct{}{}:
		defer func() { <-s.hooks }()
	case <-ctx.Done():
		return nil, hookRefusal(program, "the submission program is busy with other jobs; try again in a moment")
	}
	input, err := protojson.Marshal(spec)
	if err != nil {
		return nil, fmt.Errorf("write the specification for the submission program: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, hookTimeout)
	defer cancel()
	principal := rpc.PrincipalOf(ctx)
	var stdout, stderr limitedBuffer
	cmd := exec.CommandContext(ctx, program)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(input), &stdout, &stderr
	cmd.WaitDelay = time.Second // for children that keep its output open
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"MUSTER_USER=" + principal.Name, fmt.Sprintf("MUSTER_UID=%d", principal.Uid), fmt.Sprintf("MUSTER_GID=%d", principal.Gid)}
	err = cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		s.log.Warn("the submission program took too long", "program", program, "limit", hookTimeout)
		return nil, hookRefusal(program, fmt.Sprintf("the site's submission program %s gave no answer within %s; tell an operator", program, hookTimeout))
	case errors.As(err, &exit) && !exit.Exited():
		s.log.Error("the submission program was ended by a signal", "program", program, "state", exit.String())
		return nil, hookRefusal(program, fmt.Sprintf("the site's submission program %s was ended by a signal (%s); tell an operator", program,
			strings.TrimPrefix(exit.String(), "signal: ")))
	case errors.As(err, &exit):
		sentence := strings.TrimSpace(stderr.String())
		if sentence == "" {
			sentence = fmt.Sprintf("the site's submission program %s refused the job without saying why (%s)", program, exit)
		}
		return nil, hookRefusal(program, sentence)
	case err != nil:
		s.log.Error("the submission program cannot be run", "program", program, "error", err)
		return nil, hookRefusal(program, fmt.Sprintf("the site's submission program cannot be run (%v); tell an operator", err))
	}
	if stdout.overflow {
		return nil, hookRefusal(program, fmt.Sprintf("the site's submission program %s printed more than %d bytes; tell an operator", program, maxHookOutput))
	}
	if len(bytes.TrimSpace(stdout.Bytes())) == 0 {
		return spec, nil
	}
	changed := &apiv1.JobSpec{}
	if err := protojson.Unmarshal(stdout.Bytes(), changed); err != nil {
		s.log.Error("the submission program printed no specification", "program", program, "error", err)
		return nil, hookRefusal(program, fmt.Sprintf("the site's submission program %s printed something that is no job specification (%v); tell an operator", program, err))
	}
	if !proto.Equal(changed, spec) {
		s.log.Info("the submission program changed a job", "program", program, "user", principal.Name, "job_name", spec.Name)
	}
	return changed, nil
}

func hookRefusal(program, sentence string) error {
	return rpc.Refuse(connect.CodeFailedPrecondition, rpc.ReasonSubmitHook, "submission program "+program, sentence)
}

// limitedBuffer keeps the first maxHookOutput bytes. It takes everything, so that the program does not block.
type limitedBuffer struct {
	bytes.Buffer
	overflow bool
}

func (b *limitedBuffer) Write(p []byte) (int, error) {
	room := maxHookOutput - b.Len()
	if room < len(p) {
		b.overflow = true
		b.Buffer.Write(p[:max(room, 0)])
		return len(p), nil
	}
	return b.Buffer.Write(p)
}

// ReadFrom hides that of bytes.Buffer, which knows no limit.
func (b *limitedBuffer) ReadFrom(r io.Reader) (int64, error) {
	return io.Copy(struct{ io.Writer }{b}, r)
}
