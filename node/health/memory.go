package health

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// findingsFile has what was found; prologDir a file for each attempt whose prolog was begun on this boot.
const (
	findingsFile = "findings"
	prologDir    = "prologs"
)

// load reads what was found before.
func (c *Checks) load() error {
	data, err := os.ReadFile(filepath.Join(c.cfg.Dir, findingsFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read what checks found before: %w", err)
	}
	kept := &nodev1.SyncRequest{} // its list of conditions is what there is to keep
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(data, kept); err != nil {
		return fmt.Errorf("read what checks found before: %w", err)
	}
	for _, condition := range kept.Conditions {
		c.found[condition.Owner] = append(c.found[condition.Owner], condition)
	}
	return nil
}

// save writes what was found. c.mu is held.
func (c *Checks) save() {
	all := &nodev1.SyncRequest{}
	for _, list := range c.found {
		all.Conditions = append(all.Conditions, list...)
	}
	data, err := protojson.Marshal(all)
	if err == nil {
		err = replace(filepath.Join(c.cfg.Dir, findingsFile), data)
	}
	if err != nil {
		c.cfg.Log.Warn("what checks found may be forgotten at the agent's next start", "error", err)
	}
}

func replace(path string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func (c *Checks) prologFile(key attemptKey) string {
	return filepath.Join(c.cfg.Dir, prologDir, fmt.Sprintf("%d.%d.%d", key.job, key.incarnation, key.attempt))
}

// prologState is how far an attempt's prolog came on this boot.
type prologState int

const (
	prologNever prologState = iota
	prologBegun
	prologDone
)

func (c *Checks) prologOf(key attemptKey) prologState {
	data, err := os.ReadFile(c.prologFile(key))
	if err != nil {
		return prologNever
	}
	boot, word, _ := strings.Cut(strings.TrimSpace(string(data)), " ")
	switch {
	case boot != c.cfg.BootID:
		return prologNever
	case word == "done":
		return prologDone
	}
	return prologBegun
}

func (c *Checks) markProlog(key attemptKey, word string) error {
	if err := replace(c.prologFile(key), fmt.Appendf(nil, "%s %s\n", c.cfg.BootID, word)); err != nil {
		return fmt.Errorf("note that the prolog was begun: %w", err)
	}
	return nil
}

func (c *Checks) forgetProlog(key attemptKey) {
	if err := os.Remove(c.prologFile(key)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		c.cfg.Log.Warn("the note of a prolog could not be removed", "job", key.job, "error", err)
	}
}

// tidy drops notes of other boots.
func (c *Checks) tidy() {
	entries, err := os.ReadDir(filepath.Join(c.cfg.Dir, prologDir))
	if err != nil {
		return
	}
	for _, e := range entries {
		path := filepath.Join(c.cfg.Dir, prologDir, e.Name())
		data, err := os.ReadFile(path)
		if boot, _, _ := strings.Cut(string(data), " "); err == nil && boot != c.cfg.BootID {
			_ = os.Remove(path) // the next start tries again
		}
	}
}

// replaceFound puts what an owner found in the place of what it found before, and tells it if it is something else. Since stays.
func (c *Checks) replaceFound(owner string, found []*apiv1.Condition) {
	c.mu.Lock()
	defer c.mu.Unlock()
	old := c.found[owner]
	for _, f := range found {
		for _, o := range old {
			if o.Code == f.Code && o.Severity == f.Severity {
				f.Since = o.Since
			}
		}
	}
	if equal(old, found) {
		return
	}
	if len(found) == 0 {
		delete(c.found, owner)
	} else {
		c.found[owner] = found
	}
	c.save()
	c.cfg.Changed()
}
