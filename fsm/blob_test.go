package fsm

import (
	"bytes"
	"strings"
	"testing"

	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

func piece(content []byte, sha string, from, to int) *logv1.PutBlob {
	return &logv1.PutBlob{Piece: &apiv1.PutBlobRequest{Sha256: sha, Size: uint64(len(content)), Offset: uint64(from), Data: content[from:to]}}
}

func TestBlobsComeInPiecesAndAreVerified(t *testing.T) {
	r := newRig(t)
	r.boot()
	content := bytes.Repeat([]byte("0123456789"), 1000)
	sha := hashOf(content)
	for _, c := range []struct {
		from, to int
		stored   uint64
		reason   string
	}{
		{100, 200, 0, "BLOB_OFFSET"}, {0, 4000, 4000, ""}, {0, 4000, 4000, ""}, {3000, 7000, 7000, ""}, {8000, 9000, 0, "BLOB_OFFSET"}, {7000, 10000, 10000, ""},
		{0, 10, 10000, ""},
	} {
		result := r.do(alice, piece(content, sha, c.from, c.to))
		if result.Refusal.GetReason() != c.reason || result.Stored != c.stored {
			t.Errorf("piece %d-%d: %v", c.from, c.to, result)
		}
		r.check()
	}
	if b := r.check().Blob(sha); b == nil || !bytes.Equal(b.Data, content) {
		t.Fatal("the blob is not there")
	}
	wrong := hashOf([]byte("something else"))
	if got := r.do(alice, piece(content, wrong, 0, len(content))).Refusal.GetReason(); got != "BLOB_HASH_MISMATCH" {
		t.Errorf("wrong contents: %q", got)
	}
	if v := r.check(); v.Uploads() != 0 || v.Blob(wrong) != nil {
		t.Error("the wrong contents were kept")
	}
	big := &logv1.PutBlob{Piece: &apiv1.PutBlobRequest{Sha256: sha, Size: MaxBlobBytes + 1}}
	if got := r.do(alice, big).Refusal.GetReason(); got != "BLOB_TOO_LARGE" {
		t.Errorf("too large: %q", got)
	}
}

// Knowing a hash must give nobody the contents: neither through a job nor by claiming an upload.
func TestNobodyUsesABlobThatHeDidNotUpload(t *testing.T) {
	r := newRig(t)
	r.boot()
	content := []byte("SECRET=1\x00")
	sha := hashOf(content)
	r.must(alice, piece(content, sha, 0, len(content)))
	spec := runSpec()
	spec.EnvironmentBlob = sha
	submit := func(who *apiv1.Principal) string {
		return r.must(who, &logv1.SubmitJobs{Specs: []*apiv1.JobSpec{spec}}).Submitted[0].Refusal.GetReason()
	}
	if got := submit(alice); got != "" {
		t.Errorf("alice: %q", got)
	}
	if got := submit(bob); got != "BLOB_UNKNOWN" {
		t.Errorf("bob: %q", got)
	}
	if result := r.must(bob, piece(content, sha, 0, 3)); result.Stored != 3 {
		t.Errorf("bob was told that all is there: %v", result)
	}
	r.must(bob, piece(content, sha, 3, len(content)))
	if got := submit(bob); got != "" {
		t.Errorf("bob, who has it himself: %q", got)
	}
	r.check()
}

func TestPruneTakesOnlyWhatNobodyNeeds(t *testing.T) {
	r := newRig(t)
	r.boot()
	r.join("n1", 8, 0)
	ended, runs := r.submit(alice, batchSpec()), r.submit(alice, batchSpec())
	r.start(runs, r.placement(1, 0, 1))
	r.must(alice, &logv1.CancelJobs{JobIds: []uint32{ended}})
	r.must(alice, &logv1.PutBlob{Piece: &apiv1.PutBlobRequest{Sha256: hashOf([]byte("half")), Size: 4, Data: []byte("ha")}})
	unused := []byte("unused")
	r.must(alice, piece(unused, hashOf(unused), 0, len(unused)))
	prune := func() *logv1.Result {
		return r.must(member, &logv1.Prune{JobIds: []uint32{ended, runs, 99}, Blobs: []string{hashOf([]byte(script)), hashOf(unused)},
			UploadsBefore: &timestamppb.Timestamp{Seconds: beginMs/1000 + 1}})
	}
	if result := prune(); len(result.JobIds) != 1 || result.JobIds[0] != ended {
		t.Errorf("pruned %v", result.JobIds)
	}
	v := r.check()
	if v.Job(ended) != nil || v.Job(runs) == nil || v.Blob(hashOf([]byte(script))) == nil || v.Uploads() != 0 {
		t.Error("prune took or left the wrong things")
	}
	if v.Blob(hashOf(unused)) == nil {
		t.Error("a blob went whose submission may be on its way")
	}
	r.ms += 16 * 60_000
	prune()
	if r.check().Blob(hashOf(unused)) != nil {
		t.Error("an unused blob stayed")
	}
}

func TestLargeScriptsAndEnvironmentsAreRefused(t *testing.T) {
	r := newRig(t)
	r.boot()
	environment := []byte(strings.Repeat("x", MaxEnvironmentBytes+1))
	for from := 0; from < len(environment); from += MaxPieceBytes {
		r.must(alice, piece(environment, hashOf(environment), from, min(len(environment), from+MaxPieceBytes)))
	}
	spec := runSpec()
	spec.EnvironmentBlob = hashOf(environment)
	if got := r.must(alice, &logv1.SubmitJobs{Specs: []*apiv1.JobSpec{spec}}).Submitted[0].Refusal.GetReason(); got != "BLOB_TOO_LARGE" {
		t.Errorf("environment: %q", got)
	}
}
