package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// write sets one of a group's files: one write, as the kernel wants it, and no creation.
func write(dir, file, value string) error {
	f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY|os.O_TRUNC, 0)
	if err == nil {
		_, err = f.WriteString(value)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return fmt.Errorf("writing %q to %s: %w", value, filepath.Join(dir, file), err)
	}
	return nil
}

// exists reports whether a group has a file.
func exists(dir, file string) bool {
	_, err := os.Lstat(filepath.Join(dir, file))
	return err == nil
}

// read returns one of a group's files without the final newline; empty if it cannot be read.
func read(dir, file string) string {
	b, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// number reads a file of one number. "max", and what is not there or no number, are 0: no figure.
func number(dir, file string) uint64 {
	n, err := strconv.ParseUint(read(dir, file), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// field returns the number after a word in a file of lines "word number"; 0 if it has none.
func field(dir, file, word string) uint64 {
	for line := range strings.Lines(read(dir, file)) {
		f := strings.Fields(line)
		if len(f) != 2 || f[0] != word {
			continue
		}
		if n, err := strconv.ParseUint(f[1], 10, 64); err == nil {
			return n
		}
	}
	return 0
}

// makeDir makes one group; one that exists is as good.
func makeDir(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("making a control group: %w", err)
	}
	return nil
}

// procs appends the processes of a group and all below it.
func procs(pids []int, dir string) ([]int, error) {
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if gone(err) {
		return pids, nil
	}
	if err != nil {
		return pids, fmt.Errorf("listing the processes of a control group: %w", err)
	}
	for word := range bytes.FieldsSeq(b) {
		// 0 is a process that this process's namespace cannot name.
		if pid, err := strconv.Atoi(string(word)); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
	}
	children, err := below(dir)
	if err != nil {
		return pids, err
	}
	for _, child := range children {
		if pids, err = procs(pids, child); err != nil {
			return pids, err
		}
	}
	return pids, nil
}

// below lists the groups directly below a group; none if it is gone.
func below(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if gone(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing control groups: %w", err)
	}
	var dirs []string
	for _, e := range entries {
		if e.IsDir() {
			dirs = append(dirs, filepath.Join(dir, e.Name()))
		}
	}
	return dirs, nil
}

// gone reports whether an error means that the group was removed meanwhile.
func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) }
