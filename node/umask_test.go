package node

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// With umask 077 a user could not have reached the batch script.
func TestStepDirectoryLetsItsUserThroughWhateverTheUmask(t *testing.T) {
	for _, umask := range []int{0o077, 0} {
		dir := filepath.Join(t.TempDir(), "1.1.0")
		before := unix.Umask(umask)
		err := new(Agent).makeDir(t.Context(), &step{dir: dir, record: &nodev1.StepRecord{}})
		unix.Umask(before)
		if err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o711 {
			t.Errorf("with umask %o the directory has mode %v (%v)", umask, info.Mode(), err)
		}
		if info, err := os.Stat(filepath.Join(dir, recordFile)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("with umask %o the record has mode %v (%v)", umask, info.Mode(), err)
		}
	}
}
