package replica

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Names in the data directory.
const (
	idFile         = "id"
	raftDir        = "raft"
	dbFile         = "raft.db"
	snapshotDir    = "snapshots"
	quarantineFile = "quarantine"
)

func dbPath(dir string) string { return filepath.Join(dir, raftDir, dbFile) }

// prepareDir returns the id of a data directory that was checked. It makes id, log and stable store if the directory has none.
func prepareDir(dir string) (string, error) {
	id, err := readID(dir)
	if err == nil {
		return id, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	return makeID(dir)
}

// readID reads the id of a data directory.
func readID(dir string) (string, error) {
	path := filepath.Join(dir, idFile)
	b, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("read the member's id: %w", err)
	}
	id, ok := strings.CutSuffix(string(b), "\n")
	if raw, err := hex.DecodeString(id); !ok || err != nil || len(raw) != 16 || hex.EncodeToString(raw) != id {
		return "", &DamageError{Path: path, What: "it does not contain an id of 32 hexadecimal digits"}
	}
	return id, nil
}

// makeID makes an empty log and stable store for a new random id, then the file that names the id. The id is known to nobody
// before the file is durable, so an interrupted attempt can be repeated.
func makeID(dir string) (string, error) {
	raw := make([]byte, 16)
	rand.Read(raw)
	id := hex.EncodeToString(raw)
	for _, d := range []string{dir, filepath.Join(dir, raftDir), filepath.Join(dir, snapshotDir)} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return "", fmt.Errorf("make the data directory: %w", err)
		}
	}
	temp := dbPath(dir) + snapTemp
	for _, stale := range []string{temp, dbPath(dir)} {
		if err := os.Remove(stale); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("make the data directory: %w", err)
		}
	}
	if err := createBolt(temp, id); err != nil {
		return "", fmt.Errorf("make the log: %w", err)
	}
	if err := os.Rename(temp, dbPath(dir)); err != nil {
		return "", fmt.Errorf("make the log: %w", err)
	}
	if err := syncDir(filepath.Join(dir, raftDir)); err != nil {
		return "", fmt.Errorf("make the log: %w", err)
	}
	if err := writeDurably(filepath.Join(dir, idFile), id+"\n"); err != nil {
		return "", fmt.Errorf("make the member's id: %w", err)
	}
	return id, nil
}

// writeDurably replaces a small file.
func writeDurably(path, content string) error {
	f, err := os.OpenFile(path+snapTemp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(content)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(path+snapTemp, path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// readQuarantine returns why the directory must not be used; empty if it may.
func readQuarantine(dir string) (string, error) {
	b, err := os.ReadFile(filepath.Join(dir, quarantineFile))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read the quarantine mark: %w", err)
	}
	if reason := strings.TrimSpace(string(b)); reason != "" {
		return reason, nil
	}
	return "the quarantine mark gives no reason", nil
}

// SetAside moves the state of a member that must not go on with it, log, stable store, snapshots, id and quarantine mark, to
// DIR/damaged-TIME, and makes a new id: the member then joins as a new one. Certificates stay. The member must not be running.
// It is what `muster-controller rejoin` does.
func SetAside(dir string) error {
	if _, err := os.Stat(dir); err != nil {
		return fmt.Errorf("set the state of %s aside: %w", dir, err)
	}
	if used, err := inUse(dbPath(dir)); err != nil {
		return fmt.Errorf("set the state of %s aside: %w", dir, err)
	} else if used {
		return fmt.Errorf("set the state of %s aside: %w", dir, errInUse(dbPath(dir)))
	}
	aside := filepath.Join(dir, "damaged-"+time.Now().UTC().Format("20060102T150405.000"))
	if err := os.Mkdir(aside, 0o700); err != nil {
		return fmt.Errorf("set the state of %s aside: %w", dir, err)
	}
	// The id goes last: until then the directory can't be taken for a new one.
	for _, name := range []string{raftDir, snapshotDir, quarantineFile, idFile} {
		err := os.Rename(filepath.Join(dir, name), filepath.Join(aside, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("set the state of %s aside: %w", dir, err)
		}
	}
	if err := errors.Join(syncDir(aside), syncDir(dir)); err != nil {
		return fmt.Errorf("set the state of %s aside: %w", dir, err)
	}
	if _, err := makeID(dir); err != nil {
		return fmt.Errorf("set the state of %s aside: %w", dir, err)
	}
	return nil
}
