package replica

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"
	"github.com/klauspost/compress/zstd"
)

// Reading a broken bolt file can end the process (a fault in mapped memory, an endless recursion), so files are checked by a
// child: this program again, with a verb that CheckFilesMain takes before anything else happens.
const (
	checkVerb     = "muster-check-files"
	checkVariable = "MUSTER_CHECK_FILES"
	exitDamaged   = 3
	exitUnchecked = 4 // the files could not be checked, which says nothing about them
	checkMinimum  = 30 * time.Second
	checkRate     = 4 << 20 // bytes a second that a check must manage
)

var checkerInstalled atomic.Bool

// CheckFilesMain must be called first in main by every program that calls Open, VerifyDir or uses them in tests (TestMain). In the
// child process that checks files it does that and does not return.
func CheckFilesMain() {
	if len(os.Args) != 3 || os.Args[1] != checkVerb || os.Getenv(checkVariable) != "1" {
		checkerInstalled.Store(true)
		return
	}
	debug.SetMaxStack(64 << 20)
	if err := checkDir(os.Args[2]); err != nil {
		fmt.Println(err)
		if !errors.Is(err, ErrDamaged) {
			os.Exit(exitUnchecked)
		}
		os.Exit(exitDamaged)
	}
	os.Exit(0)
}

// VerifyDir checks all files of a member that is not running: checksums, completeness, and whether log, snapshots and id fit
// together. The error is a sentence that names the file, the log index if it is about one, and the remedy.
func VerifyDir(dir string) error {
	if reason, err := readQuarantine(dir); err != nil {
		return err
	} else if reason != "" {
		return fmt.Errorf("%w: %s. %s", ErrQuarantined, reason, remedy(dir))
	}
	err := checkInChild(dir)
	if errors.Is(err, ErrDamaged) {
		return fmt.Errorf("%w. %s", err, remedy(dir))
	}
	return err
}

func checkInChild(dir string) error {
	if !checkerInstalled.Load() {
		return errors.New("replica: the program must call replica.CheckFilesMain first in main")
	}
	limit := checkMinimum
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error { // only an estimate
		if err == nil && d.Type().IsRegular() {
			if st, err := d.Info(); err == nil {
				limit += time.Duration(st.Size()) * time.Second / checkRate
			}
		}
		return nil
	})
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", checkVerb, dir)
	cmd.Env = append(os.Environ(), checkVariable+"=1", "GOTRACEBACK=none")
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return &checkFailure{fmt.Sprintf("%s: the check of the files did not end within %v, as happens when they are damaged", dir, limit)}
	case errors.As(err, &exit) && exit.ExitCode() == exitDamaged:
		return &checkFailure{strings.TrimSpace(out.String())}
	case errors.As(err, &exit) && exit.ExitCode() == exitUnchecked:
		return fmt.Errorf("check the files of %s: %s", dir, strings.TrimSpace(out.String()))
	case errors.As(err, &exit):
		line, _, _ := strings.Cut(strings.TrimSpace(errOut.String()), "\n")
		return &checkFailure{fmt.Sprintf("%s is damaged: reading it ended the process that checked it (%v: %s)", dbPath(dir), exit, line)}
	}
	return fmt.Errorf("check the files of %s: %w", dir, err)
}

// checkFailure is what the child found.
type checkFailure struct{ sentence string }

func (e *checkFailure) Error() string        { return e.sentence }
func (e *checkFailure) Is(target error) bool { return target == ErrDamaged }

// checkDir checks all files of a directory. A directory that was never used is sound.
func checkDir(dir string) error {
	id, err := readID(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return checkUnused(dir)
	}
	if err != nil {
		return err
	}
	log, err := checkBolt(dbPath(dir))
	if err != nil {
		return err
	}
	if log.id != id {
		return &DamageError{Path: filepath.Join(dir, idFile), What: fmt.Sprintf("it says %s, the log belongs to %s", id, log.id)}
	}
	snaps, err := listSnapshots(filepath.Join(dir, snapshotDir))
	if err != nil {
		return err
	}
	for _, d := range snaps {
		path := filepath.Join(dir, snapshotDir, d.id()+snapSuffix)
		if err := checkSnapshot(path); err != nil {
			return &DamageError{Path: path, What: err.Error()}
		}
	}
	if log.first > 1 && (len(snaps) == 0 || snaps[0].Index < log.first-1) {
		return &DamageError{Path: filepath.Join(dir, snapshotDir), What: fmt.Sprintf("no snapshot reaches entry %d, where the log begins", log.first)}
	}
	return nil
}

// checkUnused checks that a directory without id was never used: making it was interrupted, or has not begun.
func checkUnused(dir string) error {
	missing := &DamageError{Path: filepath.Join(dir, idFile), What: "the file is missing, but there are entries, a vote or snapshots"}
	if snaps, err := filepath.Glob(filepath.Join(dir, snapshotDir, "*"+snapSuffix)); err != nil {
		return err
	} else if len(snaps) > 0 {
		return missing
	}
	if _, err := os.Stat(dbPath(dir)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if log, err := checkBolt(dbPath(dir)); err != nil {
		return err
	} else if log.last != 0 || len(log.stable) > 0 {
		return missing
	}
	return nil
}

// checkBolt checks the database: its pages, every record, and that no entry is missing.
func checkBolt(path string) (m boltMeta, err error) {
	damage := func(index uint64, what error) error {
		return &DamageError{Path: path, Index: index, What: what.Error()}
	}
	if used, err := inUse(path); err != nil {
		return m, err
	} else if used {
		return m, errInUse(path)
	}
	if err := checkPages(path); errors.Is(err, fs.ErrPermission) {
		return m, err
	} else if err != nil {
		return m, damage(0, err)
	}
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = damage(0, fmt.Errorf("the database can't be read: %v", p))
		}
	}()
	db, err := openDB(path, true)
	if err != nil {
		return m, damage(0, err)
	}
	defer db.Close()
	if m, err = readMeta(db); err != nil {
		return m, damage(0, err)
	}
	return m, checkEntries(db, m.logEnds, damage)
}

// inUse tells whether another process has the database open: bolt locks it.
func inUse(path string) (bool, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return true, nil
	}
	return false, err
}

func errInUse(path string) error {
	return fmt.Errorf("%s is in use by another process: stop that member first", path)
}

// checkEntries reads every entry by its key, as the member does, and checks that each follows the one before it. Entries outside the
// ends were deleted and are nobody's concern.
func checkEntries(db *raftboltdb.BoltStore, e logEnds, damage func(uint64, error) error) error {
	if e.last == 0 {
		return nil
	}
	var last seam
	for i := e.first; i <= e.last; i++ {
		var l raft.Log
		at, err := readEntry(db, i, &l)
		if err != nil {
			return damage(i, err)
		}
		if i > e.first && at.before != last.sum {
			return damage(i, fmt.Errorf("it follows an entry with checksum %08x; entry %d has %08x", at.before, i-1, last.sum))
		}
		last = at
	}
	if last.sum != e.sum {
		return damage(e.last, fmt.Errorf("the log should end with an entry of checksum %08x; this one has %08x", e.sum, last.sum))
	}
	return nil
}

// checkSnapshot verifies a snapshot's checksums and that its state can be unpacked.
func checkSnapshot(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	d, err := verifySnapshot(f)
	if err != nil {
		return err
	}
	r := io.NewSectionReader(f, int64(len(snapMagic)), d.Size)
	if _, err := readStateHeader(r); err != nil {
		return err
	}
	z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1))
	if err != nil {
		return err
	}
	defer z.Close()
	_, err = io.Copy(io.Discard, z)
	return err
}
