package sbcast

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"connectrpc.com/connect/v2"

	"github.com/muster-hpc/muster/cmd/internal/slurm/slurmtest"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
	"github.com/muster-hpc/muster/rpc"
)

// try sends a file of so many bytes within job 6 and returns its contents.
func try(t *testing.T, agents []*slurmtest.Agent, size int, words ...string) (slurmtest.Outcome, []byte) {
	t.Helper()
	c := slurmtest.Recorded(t)
	c.Nodes = map[string]nodev1connect.NodeServiceHandler{"n1:1": agents[0], "n2:1": agents[1]}
	data := bytes.Repeat([]byte("0123456789abcdef"), size/16+1)[:size]
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "source"), data, 0o751); err != nil {
		t.Fatal(err)
	}
	s, stdout, stderr := c.Session(t, append([]string{"sbcast"}, words...)...)
	s.Dir, s.Environ = dir, []string{"SLURM_JOB_ID=6"}
	code := Run(t.Context(), s)
	return slurmtest.Outcome{Code: code, Stdout: stdout.String(), Stderr: stderr.String()}, data
}

func TestEveryNodeGetsTheFileWhateverBreaks(t *testing.T) {
	broken := connect.NewError(connect.CodeUnavailable, "the agent was killed")
	notHere := rpc.Refuse(connect.CodeNotFound, "JOB_NOT_HERE", "job 6", "it has not begun there")
	forgotten := rpc.Refuse(connect.CodeFailedPrecondition, "TRANSFER_UNKNOWN", "file", "nothing is here")
	mismatch := rpc.Refuse(connect.CodeDataLoss, "HASH_MISMATCH", "file", "another SHA-256")
	for name, errs := range map[string][]error{
		"nothing": nil, "the first call": {broken}, "a later one": {nil, broken, broken, nil, broken}, "the node is late": {notHere, notHere},
		"the directory was emptied": {nil, nil, forgotten}, "a flipped bit": {nil, nil, nil, mismatch},
	} {
		for _, size := range []int{0, 1, maxPiece, 2*maxPiece + 100} {
			synctest.Test(t, func(t *testing.T) {
				agents := []*slurmtest.Agent{{PutErrors: errs}, {}}
				got, data := try(t, agents, size, "-p", "source", "/scratch/dest")
				if got.Code != 0 || got.Stderr != "" {
					t.Fatalf("%s, %d bytes: %+v", name, size, got)
				}
				for i, a := range agents {
					if sent, ok := a.Files["/scratch/dest"]; !ok || !bytes.Equal(sent, data) || len(a.Files) != 1 {
						t.Errorf("%s, %d bytes: node %d has %d files, %d bytes", name, size, i+1, len(a.Files), len(sent))
					}
					last := a.Puts[len(a.Puts)-1]
					if !last.GetEnd() || last.GetMode() != 0o751 || last.GetModified() == nil || last.GetJobId() != 6 || last.GetAttempt() != 1 {
						t.Errorf("%s: the end was %v", name, last)
					}
				}
				if agents[0].Puts[0].GetTransfer() == agents[1].Puts[0].GetTransfer() {
					t.Error("nodes that share a directory would write the same hidden file")
				}
			})
		}
	}
}

func TestATransferGoesOnWhereItBroke(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := connect.NewError(connect.CodeUnavailable, "the agent was killed")
		agents := []*slurmtest.Agent{{PutErrors: []error{nil, nil, broken}}, {}}
		if got, _ := try(t, agents, 4*maxPiece, "source", "/dest"); got.Code != 0 {
			t.Fatalf("%+v", got)
		}
		if n := len(agents[0].Puts); n != 6 { // four pieces, one of them twice, and the end
			t.Errorf("%d calls", n)
		}
		if mode := agents[0].Puts[5].GetMode(); mode != 0o751&^0o22 || agents[0].Puts[5].GetModified() != nil {
			t.Errorf("without --preserve it has mode %o", mode)
		}
	})
}

func TestANodeThatCannotTakeItIsSaidAndTheOthersHaveIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		full := rpc.Refuse(connect.CodeResourceExhausted, "NO_SPACE", "file", "node n1: no space is left for /dest")
		agents := []*slurmtest.Agent{{PutErrors: []error{nil, full}}, {}}
		got, data := try(t, agents, 3*maxPiece, "source", "/dest")
		if got.Code != 1 || !strings.Contains(got.Stderr, "n1") || !strings.Contains(got.Stderr, "no space is left") || strings.Contains(got.Stderr, "n2") {
			t.Errorf("%+v", got)
		}
		if !bytes.Equal(agents[1].Files["/dest"], data) || len(agents[0].Files) != 0 || !agents[0].Puts[len(agents[0].Puts)-1].GetAbort() {
			t.Errorf("n1 has %d files, n2 %d", len(agents[0].Files), len(agents[1].Files))
		}
	})
}

func TestANodeThatIsSilentIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var broken []error
		for range 1000 {
			broken = append(broken, connect.NewError(connect.CodeUnavailable, "no route"))
		}
		if got, _ := try(t, []*slurmtest.Agent{{PutErrors: broken}, {}}, 10, "-t3", "source", "/dest"); got.Code != 1 || !strings.Contains(got.Stderr, "n1") {
			t.Errorf("%+v", got)
		}
	})
}

func TestWordsThatAreRefused(t *testing.T) {
	for words, want := range map[string]string{
		"--send-libs source /dest":  "--send-libs is not supported yet",
		"source":                    "Need two file names, have 1 names",
		"nosuch /dest":              "Can't open `",
		"--size=0 source /dest":     "Invalid --size specification: 0",
		"--fanout=0 source /dest":   `Invalid numeric value "0" for --fanout.`,
		"-j x source /dest":         "Invalid job id specified: x",
		"-j 7 source /dest":         "job 7 has no nodes now",
		"-j 4711 source /dest":      "Unable to look up the nodes of job 4711",
		"--bogus source /dest":      "unrecognized option '--bogus'",
		"--send-libs=no . /scratch": "it is not a regular file",
	} {
		agents := []*slurmtest.Agent{{}, {}}
		if got, _ := try(t, agents, 10, strings.Fields(words)...); got.Code == 0 || !strings.Contains(got.Stderr, want) || len(agents[0].Puts) != 0 {
			t.Errorf("%s: %+v", words, got)
		}
	}
}

func TestADestinationThatIsADirectoryOrRelative(t *testing.T) {
	agents := []*slurmtest.Agent{{}, {}}
	if got, _ := try(t, agents, 10, "-C", "-F", "2", "-s", "4", "-v", "source", "/scratch/"); got.Code != 0 || agents[0].Files["/scratch/source"] == nil {
		t.Errorf("%+v", got)
	}
	if n := len(agents[0].Puts); n != 4 { // 4, 4 and 2 bytes, and the end
		t.Errorf("%d calls", n)
	}
}
