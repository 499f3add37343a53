package dev

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// A Unix socket's path has at most 107 bytes. The longest here is that of a supervisor,
// "/n10000/steps/4294967295.99.4294967291/socket": 46 bytes.
const longestDir = 107 - 46 - 8

// shortLink returns a short name for a directory whose own is too long for the sockets in it: a symbolic link in /tmp,
// which belongs to this user. It is made if it is not there. A short directory needs none: the answer is "".
func shortLink(dir string) (string, error) {
	if len(dir) <= longestDir {
		return "", nil
	}
	sum := sha256.Sum256([]byte(dir))
	link := fmt.Sprintf("/tmp/muster-%d-%s", os.Getuid(), hex.EncodeToString(sum[:6]))
	info, err := os.Lstat(link)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if err := os.Symlink(dir, link); err != nil {
			return "", fmt.Errorf("make a short name for %s, which is too long for sockets: %w", dir, err)
		}
		return link, nil
	case err != nil:
		return "", fmt.Errorf("make a short name for %s: %w", dir, err)
	}
	target, err := os.Readlink(link)
	owner, ok := info.Sys().(*syscall.Stat_t)
	if err != nil || target != dir || !ok || int(owner.Uid) != os.Getuid() {
		return "", fmt.Errorf("%s is too long for sockets, and its short name %s is something else: remove that, or choose a --dir of at most %d bytes",
			dir, link, longestDir)
	}
	return link, nil
}

// removeLink removes the short name if it still is one for dir.
func removeLink(link, dir string) error {
	if link == "" {
		return nil
	}
	if target, err := os.Readlink(link); err != nil || target != dir {
		return nil
	}
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the short name of %s: %w", dir, err)
	}
	return nil
}

// absolute returns the directory's absolute path without links, so that one cluster has one name.
func absolute(dir string) (string, error) {
	path, err := filepath.Abs(dir)
	if err != nil {
		return "", fmt.Errorf("directory %q: %w", dir, err)
	}
	if real, err := filepath.EvalSymlinks(path); err == nil {
		return real, nil
	}
	return path, nil // it does not exist yet
}
