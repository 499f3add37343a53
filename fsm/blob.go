package fsm

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"slices"

	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"

	"github.com/muster-hpc/muster/fsm/state"
)

const (
	// MaxBlobBytes is the size of the largest blob, and so of the largest script.
	MaxBlobBytes = 4 << 20
	// MaxEnvironmentBytes is the size of the largest environment.
	MaxEnvironmentBytes = 1 << 20
	// MaxPieceBytes is the size of the largest piece of an upload: it fits into a log entry.
	MaxPieceBytes = 192 << 10
	// maxUploads bounds the unfinished uploads of all users together.
	maxUploads = 1024
	// blobGraceS is how long a blob stays after its upload though nothing refers to it: a submission may be on its way.
	blobGraceS = 15 * 60
	// maxBlobUIDs bounds the users that may read one blob by having uploaded it.
	maxBlobUIDs = 10_000
)

// seconds returns a time's seconds; 0 if it is not set.
func seconds(t *timestamppb.Timestamp) int64 { return t.GetSeconds() }

// validSHA reports whether s is a SHA-256 in lower-case hexadecimal.
func validSHA(s string) bool {
	if len(s) != 2*sha256.Size {
		return false
	}
	for _, c := range []byte(s) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

func hashOf(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// storeBlobs stores whole blobs that came with a command. Nothing is stored if one is wrong.
func (m *Machine) storeBlobs(blobs []*logv1.BlobContent) *apiv1.ErrorDetail {
	for _, b := range blobs {
		if len(b.Data) > MaxBlobBytes {
			return refuse("BLOB_TOO_LARGE", "blob "+b.Sha256, "the blob has %d bytes; at most %d are stored", len(b.Data), MaxBlobBytes)
		}
		if hashOf(b.Data) != b.Sha256 {
			return refuse("BLOB_HASH_MISMATCH", "blob "+b.Sha256, "the contents do not have the SHA-256 %s that was announced", b.Sha256)
		}
	}
	for _, b := range blobs {
		m.completeBlob(b.Sha256, b.Data)
	}
	return nil
}

// completeBlob stores a verified blob for the command's principal.
func (m *Machine) completeBlob(sha string, data []byte) {
	uid := m.cmd.Principal.Uid
	known := m.s.Blob(sha)
	if known == nil {
		m.s.PutBlob(state.BlobKey{SHA256: sha}, &logv1.BlobRecord{
			Sha256: sha, Data: data, Size: uint64(len(data)), Uids: []uint32{uid}, BeginTime: m.now(), Revision: m.rev,
		})
		return
	}
	b := state.CopyBlob(known)
	b.BeginTime, b.Revision = m.now(), m.rev
	if !slices.Contains(b.Uids, uid) && len(b.Uids) < maxBlobUIDs {
		b.Uids = append(slices.Clone(b.Uids), uid)
	}
	m.s.PutBlob(state.BlobKey{SHA256: sha}, b)
}

// mayUse reports whether a user may refer to a blob, and through that read it.
func mayUse(b *logv1.BlobRecord, uid uint32, operator bool) bool {
	return operator || slices.Contains(b.Uids, uid)
}

// holdBlobs counts one more reference to each blob; "" is skipped.
func (m *Machine) holdBlobs(shas ...string) { m.countBlobs(1, shas) }

// releaseBlobs counts one reference less.
func (m *Machine) releaseBlobs(shas ...string) { m.countBlobs(-1, shas) }

func (m *Machine) countBlobs(by int32, shas []string) {
	for _, sha := range shas {
		known := m.s.Blob(sha)
		if sha == "" || known == nil {
			continue
		}
		b := state.CopyBlob(known)
		b.References = uint32(int64(b.References) + int64(by))
		b.Revision = m.rev
		m.s.PutBlob(state.BlobKey{SHA256: sha}, b)
	}
}

// putBlob stores a piece of a blob. Each user uploads for himself: knowing a hash gives nobody the contents. A piece that is
// there already is acknowledged again.
func (m *Machine) putBlob(p *apiv1.PutBlobRequest) *logv1.Result {
	subject := "blob " + p.GetSha256()
	switch {
	case !validSHA(p.GetSha256()):
		return refused(refuse("BLOB_INVALID", subject, "%q is not a SHA-256 in lower-case hexadecimal", p.GetSha256()))
	case p.Size > MaxBlobBytes:
		return refused(refuse("BLOB_TOO_LARGE", subject, "the blob has %d bytes; at most %d are stored", p.Size, MaxBlobBytes))
	case len(p.Data) > MaxPieceBytes:
		return refused(refuse("BLOB_TOO_LARGE", subject, "the piece has %d bytes; at most %d may come at once", len(p.Data), MaxPieceBytes))
	case p.Offset > p.Size || uint64(len(p.Data)) > p.Size-p.Offset:
		return refused(refuse("BLOB_INVALID", subject, "the piece ends behind the blob's size of %d bytes", p.Size))
	}
	uid := m.cmd.Principal.Uid
	if whole := m.s.Blob(p.Sha256); whole != nil && slices.Contains(whole.Uids, uid) {
		m.completeBlob(p.Sha256, whole.Data) // renews its grace
		return &logv1.Result{Stored: whole.Size}
	}
	key := state.BlobKey{SHA256: p.Sha256, Upload: uint64(uid) + 1}
	upload := m.s.BlobAt(key)
	if upload == nil {
		if m.s.Uploads() >= maxUploads {
			return refused(refuse("UPLOADS_TOO_MANY", subject, "%d uploads are unfinished; try again later", maxUploads))
		}
		upload = &logv1.BlobRecord{Sha256: p.Sha256, Size: p.Size, Uids: []uint32{uid}, BeginTime: m.now()}
	}
	return m.appendPiece(key, upload, p)
}

func (m *Machine) appendPiece(key state.BlobKey, upload *logv1.BlobRecord, p *apiv1.PutBlobRequest) *logv1.Result {
	subject := "blob " + p.Sha256
	stored := uint64(len(upload.Data))
	switch {
	case p.Size != upload.Size:
		return refused(refuse("BLOB_INVALID", subject, "the upload was begun with a size of %d bytes, now it is %d", upload.Size, p.Size))
	case p.Offset > stored:
		return refused(refuse("BLOB_OFFSET", subject, "%d bytes are stored; continue there, not at %d", stored, p.Offset))
	}
	overlap := min(stored-p.Offset, uint64(len(p.Data)))
	if !bytes.Equal(upload.Data[p.Offset:p.Offset+overlap], p.Data[:overlap]) {
		return refused(refuse("BLOB_INVALID", subject, "the piece at %d differs from what is stored there", p.Offset))
	}
	// Appending in place is safe: older records see only their own length, and only the newest is ever appended to.
	data := append(upload.Data, p.Data[overlap:]...)
	if uint64(len(data)) < p.Size {
		next := state.CopyBlob(upload)
		next.Data, next.Revision = data, m.rev
		m.s.PutBlob(key, next)
		return &logv1.Result{Stored: uint64(len(data))}
	}
	m.s.RemoveBlob(key)
	if hashOf(data) != p.Sha256 {
		return refused(refuse("BLOB_HASH_MISMATCH", subject, "the contents do not have the SHA-256 that was announced; upload it again"))
	}
	m.completeBlob(p.Sha256, data)
	return &logv1.Result{Stored: p.Size}
}

// pruneUploads removes unfinished uploads that began before the time asked for.
func (m *Machine) pruneUploads(p *logv1.Prune) {
	if p.UploadsBefore == nil {
		return
	}
	var old []state.BlobKey
	for b := range m.s.Blobs() {
		if !state.BlobComplete(b) && seconds(b.BeginTime) < p.UploadsBefore.Seconds {
			old = append(old, state.BlobKey{SHA256: b.Sha256, Upload: uint64(b.Uids[0]) + 1})
		}
	}
	for _, key := range old {
		m.s.RemoveBlob(key)
	}
}
