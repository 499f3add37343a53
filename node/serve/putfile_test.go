package serve

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
	"github.com/muster-hpc/muster/rpc"
)

// theirs is a user besides root and the owner of job 1.
const theirs = 1001

// putter sends files to job 1, whose tasks see the test's directory as /tmp.
type putter struct {
	*fixture
	client nodev1connect.NodeServiceClient
	owner  uint32
}

func newPutter(t *testing.T) *putter {
	f := newFixture(t)
	owner := uint32(1000)
	if os.Geteuid() != 0 {
		owner = uint32(os.Geteuid())
	}
	dir := filepath.Join(f.dir, "private")
	if err := errors.Join(os.Mkdir(dir, 0o700), os.Chmod(dir, os.ModeSticky|0o777), os.Chmod(f.dir, 0o711)); err != nil {
		t.Fatal(err)
	}
	f.where = Place{Attempt: 1, Owner: &apiv1.JobOwner{Uid: owner, Gid: owner, User: "me"}, UID: owner, GID: owner, Mounts: map[string]string{"/tmp": dir}}
	return &putter{f, f.as(owner), owner}
}

// at is where the node has what tasks see in /tmp.
func (p *putter) at(name string) string { return filepath.Join(p.where.Mounts["/tmp"], name) }

func (p *putter) put(r *nodev1.PutFileRequest) (uint64, error) {
	r = proto.Clone(r).(*nodev1.PutFileRequest)
	r.JobId, r.Transfer = 1, "transfer-1"
	if r.GetPath() == "" {
		r.Path = "/tmp/file"
	}
	answer, err := p.client.PutFile(p.t.Context(), r)
	return answer.GetOffset(), err
}

func hashText(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

// names are those in the private directory.
func (p *putter) names() string {
	entries, err := os.ReadDir(p.where.Mounts["/tmp"])
	if err != nil {
		p.t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return strings.Join(names, " ")
}

func TestAFileArrivesWholeAndAsTheJobsUser(t *testing.T) {
	p := newPutter(t)
	modified := time.Unix(1_000_000_000, 0)
	end := &nodev1.PutFileRequest{Offset: 6, End: true, Sha256: hashText("abcdef"), Mode: 0o751, Modified: timestamppb.New(modified)}
	for i, step := range []struct {
		r    *nodev1.PutFileRequest
		want uint64
	}{
		{&nodev1.PutFileRequest{}, 0}, // how much is there?
		{&nodev1.PutFileRequest{Data: []byte("abc")}, 3},
		{&nodev1.PutFileRequest{Offset: 4, Data: []byte("ef")}, 3}, // a gap
		{end, 3}, // too early
		{&nodev1.PutFileRequest{Data: []byte("abc")}, 3}, // again
		{&nodev1.PutFileRequest{Offset: 2, Data: []byte("cdef")}, 6},
	} {
		if got, err := p.put(step.r); err != nil || got != step.want {
			t.Fatalf("call %d: %d, %v", i, got, err)
		}
		if _, err := os.Lstat(p.at("file")); err == nil {
			t.Fatalf("after call %d a file that is not complete has its name", i)
		}
	}
	for range 2 { // the answer may be lost
		if got, err := p.put(end); err != nil || got != 6 {
			t.Fatalf("the end: %d, %v", got, err)
		}
	}
	info, err := os.Stat(p.at("file"))
	if err != nil || info.Mode() != 0o751 || !info.ModTime().Equal(modified) || info.Sys().(*syscall.Stat_t).Uid != p.owner {
		t.Errorf("it is %v of user %d (%v)", info, info.Sys().(*syscall.Stat_t).Uid, err)
	}
	if data, err := os.ReadFile(p.at("file")); string(data) != "abcdef" || p.names() != "file" {
		t.Errorf("it contains %q (%v), beside it are %s", data, err, p.names())
	}
}

func TestAnotherHashLeavesNothing(t *testing.T) {
	p := newPutter(t)
	if _, err := p.put(&nodev1.PutFileRequest{Data: []byte("abX")}); err != nil {
		t.Fatal(err)
	}
	_, err := p.put(&nodev1.PutFileRequest{Offset: 3, End: true, Sha256: hashText("abc")})
	if rpc.Reason(err) != ReasonHashMismatch || p.names() != "" {
		t.Errorf("%v, there are %s", err, p.names())
	}
	if _, err := p.put(&nodev1.PutFileRequest{Offset: 3, Data: []byte("d")}); rpc.Reason(err) != ReasonTransferUnknown {
		t.Errorf("then %v", err)
	}
}

func TestATransferThatIsGivenUpLeavesNothing(t *testing.T) {
	p := newPutter(t)
	if _, err := p.put(&nodev1.PutFileRequest{Data: []byte("abc")}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := p.put(&nodev1.PutFileRequest{Abort: true}); err != nil || p.names() != "" {
			t.Errorf("%v, there are %s", err, p.names())
		}
	}
}

func TestWhatIsThereIsReplacedOnlyIfAsked(t *testing.T) {
	p := newPutter(t)
	secret := filepath.Join(p.dir, "secret")
	if err := errors.Join(os.WriteFile(secret, []byte("root's"), 0o600), os.Symlink(secret, p.at("file"))); err != nil {
		t.Fatal(err)
	}
	if _, err := p.put(&nodev1.PutFileRequest{Data: []byte("abc")}); rpc.Reason(err) != ReasonFileExists || !strings.Contains(rpc.Sentence(err), "--force") {
		t.Errorf("without force: %v", err)
	}
	if os.Geteuid() == 0 {
		if err := os.Lchown(p.at("file"), int(p.owner), int(p.owner)); err != nil { // in a sticky directory only its owner may replace it
			t.Fatal(err)
		}
	}
	for _, r := range []*nodev1.PutFileRequest{{Data: []byte("abc"), Force: true}, {Offset: 3, End: true, Sha256: hashText("abc"), Force: true, Mode: 0o600}} {
		if _, err := p.put(r); err != nil {
			t.Fatal(err)
		}
	}
	if info, err := os.Lstat(p.at("file")); err != nil || !info.Mode().IsRegular() {
		t.Errorf("the link was followed: %v, %v", info, err)
	}
	if data, err := os.ReadFile(secret); string(data) != "root's" {
		t.Errorf("where it led is %q now (%v)", data, err)
	}
}

func TestLinksOfOthersAreNotFollowed(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can make links of others")
	}
	p := newPutter(t)
	target := filepath.Join(p.dir, "target")
	if err := errors.Join(os.Mkdir(target, 0o777), os.Chmod(target, 0o777), os.Symlink(target, p.at("own")), os.Lchown(p.at("own"), int(p.owner), 0),
		os.Symlink(target, p.at("planted")), os.Lchown(p.at("planted"), theirs, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := p.put(&nodev1.PutFileRequest{Path: "/tmp/planted/file", Data: []byte("x")}); rpc.Reason(err) != ReasonPathRefused || !strings.Contains(rpc.Sentence(err), "symbolic link of another user") {
		t.Errorf("a link that somebody else planted: %v", err)
	}
	// A hidden name that somebody else took is not written through either.
	if err := errors.Join(os.Symlink("/etc/passwd", p.at(".file.transfer-1")), os.Lchown(p.at(".file.transfer-1"), theirs, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := p.put(&nodev1.PutFileRequest{Data: []byte("x")}); rpc.Reason(err) != ReasonPathRefused {
		t.Errorf("a hidden name that was taken: %v", err)
	}
	if p.dir[0] == '/' && strings.HasPrefix(p.dir, "/tmp/") {
		return // the link of the user leads to the node's /tmp, which the job does not see
	}
	if _, err := p.put(&nodev1.PutFileRequest{Path: "/tmp/own/file", Data: []byte("x")}); err != nil {
		t.Errorf("the user's own link: %v", err)
	}
}

func TestOnlyWhatTheUserMayWriteIsWritten(t *testing.T) {
	p := newPutter(t)
	if os.Geteuid() == 0 {
		if _, err := p.put(&nodev1.PutFileRequest{Path: "/etc/muster-test", Data: []byte("x")}); rpc.Reason(err) != ReasonPathRefused {
			t.Errorf("a directory of root: %v", err)
		}
	}
	if err := os.Mkdir(p.at("dir"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/tmp/nosuch/file", "/tmp/dir", "/proc/self/fd/file"} {
		if _, err := p.put(&nodev1.PutFileRequest{Path: path, Data: []byte("x"), Force: true}); rpc.Reason(err) != ReasonPathRefused {
			t.Errorf("%s: %v", path, err)
		}
	}
	for _, path := range []string{"relative", "/tmp/../etc/x", "/", "/tmp/x/", "/tmp//x", "/" + strings.Repeat("x", maxPath)} {
		if _, err := p.put(&nodev1.PutFileRequest{Path: path}); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%.20s: %v", path, err)
		}
	}
	if _, err := p.put(&nodev1.PutFileRequest{Data: make([]byte, maxFilePiece+1)}); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("a large piece: %v", err)
	}
}

func TestFilesAndFiguresAreForTheOwnerAndOperators(t *testing.T) {
	p := newPutter(t)
	for uid, want := range map[uint32]string{p.owner: "", 500: "", 1077: ReasonNotOwner} {
		client := p.as(uid)
		_, put := client.PutFile(t.Context(), &nodev1.PutFileRequest{JobId: 1, Path: "/tmp/file", Transfer: "transfer-1"})
		usage, err := client.GetUsage(t.Context(), &nodev1.GetUsageRequest{JobId: 1, StepId: proto.Uint32(7)})
		if rpc.Reason(put) != want || rpc.Reason(err) != want || want == "" && usage.GetTasks()[0].GetStepId() != 7 {
			t.Errorf("user %d: %v, %v, %v", uid, put, usage, err)
		}
	}
	if _, err := p.client.PutFile(t.Context(), &nodev1.PutFileRequest{JobId: 2, Path: "/tmp/file", Transfer: "transfer-1"}); rpc.Reason(err) != ReasonJobNotHere {
		t.Errorf("another job: %v", err)
	}
}
