package replica

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// TestACopyOfALiveMembersDirectoryIsRefusedAndAMovedOneIsNot: who copies a directory is told so at the start.
func TestACopyOfALiveMembersDirectoryIsRefusedAndAMovedOneIsNot(t *testing.T) {
	ms := cluster(t, 3, nil)
	propose(t, "x", ms...)
	original := ms[2]
	cfg := testConfig(t, filepath.Join(t.TempDir(), "copy"))
	if err := os.CopyFS(cfg.Dir, os.DirFS(original.cfg.Dir)); err != nil {
		t.Fatal(err)
	}
	cfg.TLS = original.cfg.TLS
	copied, err := OpenMember(cfg, &listMachine{})
	if err == nil {
		t.Fatal(errors.Join(errors.New("the copy takes part"), copied.Close()))
	}
	if !errors.Is(err, ErrCopied) {
		t.Errorf("the refusal: %v", err)
	}
	mustContain(t, err, original.ID(), original.Address(), "empty directory")
	propose(t, "the original goes on", ms...)
	if err := original.Close(); err != nil {
		t.Fatal(err)
	}
	if moved, err := OpenMember(cfg, &listMachine{}); err != nil {
		t.Errorf("nobody else has the id now: %v", err)
	} else if err := moved.Close(); err != nil {
		t.Error(err)
	}
}
