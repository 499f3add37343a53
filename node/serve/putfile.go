package serve

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"regexp"
	"strconv"

	"connectrpc.com/connect/v2"
	"golang.org/x/sys/unix"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/rpc"
)

// Bounds of transfers; rows of docs/limits.md.
const (
	// maxFilePiece bounds a piece of a file.
	maxFilePiece = 256 << 10
	// maxPuts bounds the pieces that are written at the same time.
	maxPuts = 16
)

// Reasons of refusals of PutFile.
const (
	// ReasonJobNotHere: no attempt of the job runs on the node.
	ReasonJobNotHere = "JOB_NOT_HERE"
	// ReasonPathRefused: the job's user may not write there, or it is no place for a file.
	ReasonPathRefused = "PATH_REFUSED"
	// ReasonFileExists: there is a file, and replacing it was not asked for.
	ReasonFileExists = "FILE_EXISTS"
	// ReasonNoSpace: the disk or the user's quota is full.
	ReasonNoSpace = "NO_SPACE"
	// ReasonHashMismatch: what arrived is not what was sent; nothing of it is kept.
	ReasonHashMismatch = "HASH_MISMATCH"
	// ReasonTransferUnknown: nothing of the transfer is here; it begins with an empty or first piece.
	ReasonTransferUnknown = "TRANSFER_UNKNOWN"
)

// Place is where the files of a running attempt are, and whose they are.
type Place struct {
	// Attempt it is.
	Attempt uint32
	// Owner of the job.
	Owner *apiv1.JobOwner
	// UID, GID and Groups are those of its tasks.
	UID, GID uint32
	Groups   []uint32
	// Mounts are directories of the node that its tasks see at other paths ("/tmp").
	Mounts map[string]string
}

// place returns the place of a running attempt of which the caller may have something done.
func (s *nodeService) place(ctx context.Context, job, attempt uint32, what string) (Place, error) {
	about := fmt.Sprintf("job %d", job)
	p, ok, err := s.host.Place(job, attempt)
	if !ok {
		return p, rpc.Refuse(connect.CodeNotFound, ReasonJobNotHere, about,
			fmt.Sprintf("job %d does not run on node %s: it has not begun there, has ended, or has other nodes", job, s.host.Status().GetNode()))
	}
	if err != nil {
		return p, fmt.Errorf("find the place of job %d: %w", job, err)
	}
	caller := rpc.PrincipalOf(ctx)
	owns := caller.GetKind() == apiv1.PrincipalKind_PRINCIPAL_KIND_USER && caller.GetUid() == p.Owner.GetUid()
	if owns || rpc.IsOperator(caller, s.host.Settings()) {
		return p, nil
	}
	return p, rpc.Refuse(connect.CodePermissionDenied, ReasonNotOwner, about,
		fmt.Sprintf("job %d belongs to %s: only its owner and operators may %s", job, p.Owner.GetUser(), what))
}

var transferName = regexp.MustCompile(`^[0-9A-Za-z-]{8,64}$`)

// PutFile writes a piece of a file as the job's user. Pieces may come again; one that leaves a gap is not written, and the answer says
// where to go on. The file has its name when an answer to end says so, and then all of it.
func (s *nodeService) PutFile(ctx context.Context, req *nodev1.PutFileRequest) (*nodev1.PutFileResponse, error) {
	p, err := s.place(ctx, req.GetJobId(), req.GetAttempt(), "send files to its nodes")
	if err != nil {
		return nil, err
	}
	invalid := func(sentence string) error {
		return rpc.Refuse(connect.CodeInvalidArgument, rpc.ReasonMalformed, "file "+strconv.Quote(req.GetPath()), sentence)
	}
	switch {
	case len(req.GetData()) > maxFilePiece:
		return nil, invalid(fmt.Sprintf("a piece of a file has %d bytes; the limit is %d", len(req.GetData()), maxFilePiece))
	case !goodPath(req.GetPath()):
		return nil, invalid(fmt.Sprintf("%q is not the absolute path of a file, without . and .., of at most %d bytes", req.GetPath(), maxPath))
	case !transferName.MatchString(req.GetTransfer()):
		return nil, invalid("a transfer has a name of 8 to 64 letters, digits and dashes")
	case req.GetOffset() > 1<<62 || req.GetMode() > 0o777:
		return nil, invalid("the offset or the mode is out of range")
	case req.GetAbort() && (req.GetEnd() || len(req.GetData()) > 0):
		return nil, invalid("a transfer is given up, or it goes on")
	}
	select {
	case s.puts <- struct{}{}:
		defer func() { <-s.puts }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	w, err := openWalker(p)
	if err != nil {
		return nil, err
	}
	defer w.close()
	size := uint64(0)
	err = asUser(p, func() error {
		if err := w.walk(path.Dir(req.GetPath())); err != nil {
			return err
		}
		t := &transfer{dir: w.here(), req: req, name: path.Base(req.GetPath()), uid: p.UID}
		size, err = t.run()
		return err
	})
	if err != nil {
		return nil, s.refusePut(req, err)
	}
	return &nodev1.PutFileResponse{Offset: size}, nil
}

// Errors of transfers.
var (
	errUnknownTransfer = errors.New("nothing of this transfer is here")
	errHash            = errors.New("the file that arrived has another SHA-256 than the one that was sent")
	errOccupied        = errors.New("it exists")
)

// refusePut turns an error into a refusal with the user's sentence.
func (s *nodeService) refusePut(req *nodev1.PutFileRequest, err error) error {
	node, about := s.host.Status().GetNode(), "file "+strconv.Quote(req.GetPath())
	refuse := func(code connect.Code, reason, format string, args ...any) error {
		return rpc.Refuse(code, reason, about, fmt.Sprintf("node %s: %s", node, fmt.Sprintf(format, args...)))
	}
	switch {
	case errors.Is(err, unix.ENOSPC):
		return refuse(connect.CodeResourceExhausted, ReasonNoSpace, "no space is left for %s; free some there, or send it to another place", req.GetPath())
	case errors.Is(err, unix.EDQUOT):
		return refuse(connect.CodeResourceExhausted, ReasonNoSpace, "the user's quota is used up for %s; free some there, or send it to another place", req.GetPath())
	case errors.Is(err, errOccupied):
		return refuse(connect.CodeAlreadyExists, ReasonFileExists, "%s exists; replace it with --force", req.GetPath())
	case errors.Is(err, errUnknownTransfer):
		return refuse(connect.CodeFailedPrecondition, ReasonTransferUnknown, "%v", err)
	case errors.Is(err, errHash):
		return refuse(connect.CodeDataLoss, ReasonHashMismatch, "%s: %v; nothing of it was kept", req.GetPath(), err)
	}
	var errno unix.Errno
	if errors.As(err, &errno) || errors.Is(err, errForeignLink) || errors.Is(err, errNotRegular) {
		return refuse(connect.CodePermissionDenied, ReasonPathRefused, "%s cannot be written: %v", req.GetPath(), err)
	}
	return fmt.Errorf("write %s: %w", req.GetPath(), err)
}

// transfer is one call within one directory.
type transfer struct {
	dir  int
	req  *nodev1.PutFileRequest
	name string
	uid  uint32
}

// hidden is the name under which the file grows.
func (t *transfer) hidden() string {
	return "." + t.name[:min(len(t.name), 150)] + "." + t.req.GetTransfer()
}

// run does what the request asks and returns how much of the file is there.
func (t *transfer) run() (uint64, error) {
	if t.req.GetAbort() {
		if err := unix.Unlinkat(t.dir, t.hidden(), 0); err != nil && !errors.Is(err, unix.ENOENT) {
			return 0, err
		}
		return 0, nil
	}
	f, err := t.open()
	if errors.Is(err, unix.ENOENT) && t.req.GetEnd() && len(t.req.GetData()) == 0 && t.arrived() {
		return t.req.GetOffset(), nil // the answer to this end was lost
	}
	if errors.Is(err, unix.ENOENT) {
		return 0, errUnknownTransfer
	}
	if err != nil {
		return 0, err
	}
	size, err := t.write(f)
	if err == nil && t.req.GetEnd() && size == t.req.GetOffset()+uint64(len(t.req.GetData())) {
		err = t.finish(f)
	}
	return size, errors.Join(err, f.Close())
}

// open opens the hidden file; the first piece makes it.
func (t *transfer) open() (*os.File, error) {
	flags := unix.O_RDWR | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC
	if t.req.GetOffset() == 0 && (!t.req.GetEnd() || len(t.req.GetData()) > 0) {
		if err := t.free(); err != nil {
			return nil, err
		}
		flags |= unix.O_CREAT
	}
	fd, err := unix.Openat(t.dir, t.hidden(), flags, 0o600)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), t.hidden())
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil && (st.Mode&unix.S_IFMT != unix.S_IFREG || st.Uid != t.uid || st.Nlink != 1) {
		err = fmt.Errorf("%s: %w of the user alone", t.hidden(), errNotRegular)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// free refuses a name that is taken, before anything is sent: by a directory, or by a file that shall not be replaced.
func (t *transfer) free() error {
	var st unix.Stat_t
	err := unix.Fstatat(t.dir, t.name, &st, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case err != nil:
		return err
	case st.Mode&unix.S_IFMT == unix.S_IFDIR:
		return fmt.Errorf("%s: %w", t.name, unix.EISDIR)
	case !t.req.GetForce():
		return errOccupied
	}
	return nil
}

// write writes the piece, unless it leaves a gap, and returns the size of what is there.
func (t *transfer) write(f *os.File) (uint64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	size, begin, data := uint64(info.Size()), t.req.GetOffset(), t.req.GetData()
	if begin > size || len(data) == 0 {
		return size, nil
	}
	if _, err := f.WriteAt(data, int64(begin)); err != nil {
		return size, err
	}
	return max(size, begin+uint64(len(data))), nil
}

// finish checks the file and gives it its name.
func (t *transfer) finish(f *os.File) error {
	sum, err := hashOf(f)
	if err != nil {
		return err
	}
	if sum != t.req.GetSha256() {
		return errors.Join(errHash, unix.Unlinkat(t.dir, t.hidden(), 0))
	}
	if err := f.Chmod(os.FileMode(t.req.GetMode())); err != nil {
		return err
	}
	if m := t.req.GetModified(); m != nil {
		times := []unix.Timeval{unix.NsecToTimeval(m.AsTime().UnixNano()), unix.NsecToTimeval(m.AsTime().UnixNano())}
		if err := unix.Futimes(int(f.Fd()), times); err != nil {
			return err
		}
	}
	if t.req.GetForce() {
		return unix.Renameat(t.dir, t.hidden(), t.dir, t.name)
	}
	err = unix.Renameat2(t.dir, t.hidden(), t.dir, t.name, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) { // not every file system can do that in one
		if err = unix.Linkat(t.dir, t.hidden(), t.dir, t.name, 0); err == nil {
			err = unix.Unlinkat(t.dir, t.hidden(), 0)
		}
	}
	if errors.Is(err, unix.EEXIST) {
		return errOccupied
	}
	return err
}

// arrived tells whether the file under the final name is the one that was sent.
func (t *transfer) arrived() bool {
	fd, err := unix.Openat(t.dir, t.name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	f := os.NewFile(uintptr(fd), t.name)
	defer f.Close()
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() || uint64(info.Size()) != t.req.GetOffset() {
		return false
	}
	sum, err := hashOf(f)
	return err == nil && sum == t.req.GetSha256()
}

func hashOf(f *os.File) (string, error) {
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(f, 0, 1<<62)); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
