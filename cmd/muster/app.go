package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
	"github.com/muster-hpc/muster/rpc/client"
)

// app is what all commands share.
type app struct {
	in          io.Reader
	out, errOut io.Writer
	colour      bool

	// Flags of all commands.
	json    bool
	socket  string
	timeout time.Duration

	// patient is client.Config.Patient.
	patient bool
}

// errNoAgent wraps failures to find a cluster at all.
var errNoAgent = errors.New("no cluster")

// open finds the cluster through the local agent.
func (a *app) open(ctx context.Context) (*client.Client, error) {
	c, err := client.Open(ctx, client.Config{Socket: a.socket, Timeout: a.timeout, Patient: a.patient})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNoAgent, err)
	}
	return c, nil
}

var jsonForm = protojson.MarshalOptions{EmitDefaultValues: true}

// printJSON prints a message as one indented object. protojson varies its blanks on purpose; this does not.
func (a *app) printJSON(m proto.Message) error {
	text, err := jsonForm.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode the answer: %w", err)
	}
	var b bytes.Buffer
	if err := json.Indent(&b, text, "", "  "); err != nil {
		return fmt.Errorf("encode the answer: %w", err)
	}
	_, err = fmt.Fprintln(a.out, b.String())
	return err
}

// printJSONLine prints a message as one line.
func (a *app) printJSONLine(m proto.Message) error {
	text, err := jsonForm.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode the answer: %w", err)
	}
	var b bytes.Buffer
	if err := json.Compact(&b, text); err != nil {
		return fmt.Errorf("encode the answer: %w", err)
	}
	_, err = fmt.Fprintln(a.out, b.String())
	return err
}

// printValue prints a value that is no message of the API.
func (a *app) printValue(v any) error {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the answer: %w", err)
	}
	_, err = fmt.Fprintln(a.out, string(text))
	return err
}

// refused turns the refusals of an answer into an error; each is shown.
func (a *app) refused(refusals []*apiv1.ErrorDetail) error {
	if len(refusals) == 0 {
		return nil
	}
	for _, r := range refusals {
		fmt.Fprintf(a.errOut, "muster: %s [%s]\n", r.Sentence, r.Reason)
	}
	return &exitError{code: exitFailed}
}

// parseJobs reads job ids: "17", "17,18", "17-19".
func parseJobs(args []string) ([]uint32, error) {
	var ids []uint32
	for _, arg := range args {
		for part := range strings.SplitSeq(arg, ",") {
			first, last, isRange := strings.Cut(part, "-")
			if !isRange {
				last = first
			}
			from, err1 := strconv.ParseUint(first, 10, 32)
			to, err2 := strconv.ParseUint(last, 10, 32)
			if err1 != nil || err2 != nil || from == 0 || to < from || to-from >= 10000 {
				return nil, usagef("%q names no job: write a job id, 17,18 or 17-19", part)
			}
			for id := from; id <= to; id++ {
				ids = append(ids, uint32(id))
			}
		}
	}
	return ids, nil
}

// parseNames reads host lists: "n1", "n[1-4]".
func parseNames(args []string) ([]string, error) {
	var names []string
	for _, arg := range args {
		more, err := notation.Expand(arg)
		if err != nil {
			return nil, usagef("%v", err)
		}
		names = append(names, more...)
	}
	return names, nil
}

// every calls f for each page of a list of jobs.
func every(ctx context.Context, c *client.Client, request *apiv1.ListJobsRequest, f func(*apiv1.ListJobsResponse) error) error {
	for {
		answer, err := c.Jobs().ListJobs(ctx, request)
		if err != nil {
			return err
		}
		if err := f(answer); err != nil {
			return err
		}
		if answer.NextToken == "" {
			return nil
		}
		request.Page = &apiv1.Page{Size: request.Page.GetSize(), Token: answer.NextToken}
	}
}
