package node

import (
	"container/list"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"sync"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// BlobCache remembers scripts and environments by their hashes, the last used ones, for all agents of a process.
type BlobCache struct {
	mu    sync.Mutex
	by    map[string]*list.Element
	order *list.List // of *cachedBlob, last used first
	bytes int
}

type cachedBlob struct {
	sha  string
	data []byte
}

// NewBlobCache returns an empty cache.
func NewBlobCache() *BlobCache {
	return &BlobCache{by: make(map[string]*list.Element), order: list.New()}
}

func (c *BlobCache) get(sha string) ([]byte, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.by[sha]
	if !ok {
		return nil, false
	}
	c.order.MoveToFront(e)
	return e.Value.(*cachedBlob).data, true
}

func (c *BlobCache) put(sha string, data []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.by[sha]; ok {
		return
	}
	c.by[sha] = c.order.PushFront(&cachedBlob{sha, data})
	c.bytes += len(data)
	for c.order.Len() > blobCacheCount || c.bytes > blobCacheBytes {
		old := c.order.Remove(c.order.Back()).(*cachedBlob)
		delete(c.by, old.sha)
		c.bytes -= len(old.data)
	}
}

// blob fetches a blob that a job refers to; an empty hash is an empty blob. It tries until ctx ends, but not after a
// refusal.
func (a *Agent) blob(ctx context.Context, job uint32, sha string) ([]byte, error) {
	if sha == "" {
		return nil, nil
	}
	if data, ok := a.cfg.Blobs.get(sha); ok {
		return data, nil
	}
	for wait := blobRetryMin; ; wait = min(2*wait, blobRetryMax) {
		res, err := a.cfg.Controllers.GetBlob(ctx, &apiv1.GetBlobRequest{Sha256: sha, JobId: job})
		if err == nil {
			sum := sha256.Sum256(res.GetData())
			if hex.EncodeToString(sum[:]) == sha {
				a.cfg.Blobs.put(sha, res.GetData())
				return res.GetData(), nil
			}
			err = fmt.Errorf("a controller sent other contents than those with hash %s", sha)
		}
		switch detail := a.cfg.Refusal(err); detail.GetReason() {
		case "BLOB_UNKNOWN", "NOT_OWNER", "NOT_ALLOWED", "JOB_UNKNOWN":
			return nil, fmt.Errorf("the controllers refuse: %s", detail.GetSentence())
		default: // no leader, a controller that is leaving, the network
		}
		a.log.Warn("a blob could not be fetched", "sha256", sha, "job", job, "retry_in", wait, "err", err)
		if !sleep(ctx, jitter(wait)) {
			return nil, fmt.Errorf("%w; the last try said: %w", ctx.Err(), err)
		}
	}
}
