package serve

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"runtime"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// open opens a file of output for reading. The agent's own spool is opened as it is; a file that the user named is
// opened with the user's rights. Only regular files are read; /dev/null and the like are empty.
func open(stream Stream, owner *apiv1.JobOwner) (*os.File, error) {
	if stream.Spool {
		return openRegular(stream.Path)
	}
	if os.Geteuid() != 0 || owner.GetUid() == 0 {
		return openRegular(stream.Path)
	}
	return openAs(stream.Path, owner.GetUid(), owner.GetGid())
}

// errNotRegular is the reason why a device, pipe or directory is not read.
var errNotRegular = errors.New("it is not a regular file")

func openRegular(path string) (*os.File, error) {
	// Not blocking: opening a pipe without a writer would hang.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && (!info.Mode().IsRegular() || onProc(f)) {
		err = fmt.Errorf("%s: %w", path, errNotRegular)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// onProc reports whether a file is the kernel's: a link to /proc/self would show the agent where the user means himself.
func onProc(f *os.File) bool {
	var fs unix.Statfs_t
	return unix.Fstatfs(int(f.Fd()), &fs) != nil || fs.Type == unix.PROC_SUPER_MAGIC
}

// openAs opens a file with the rights of a user: on a thread of its own, which takes on the user's ids for file access
// and is thrown away afterwards. The raw calls change only that thread, unlike their wrappers.
func openAs(path string, uid, gid uint32) (*os.File, error) {
	groups := supplementary(uid)
	type result struct {
		f   *os.File
		err error
	}
	done := make(chan result, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := become(uid, gid, groups); err != nil {
			done <- result{nil, err}
			return
		}
		f, err := openRegular(path)
		done <- result{f, err}
	}()
	r := <-done
	return r.f, r.err
}

func become(uid, gid uint32, groups []uint32) error {
	var first unsafe.Pointer
	if len(groups) > 0 {
		first = unsafe.Pointer(&groups[0])
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(first), 0); errno != 0 {
		return fmt.Errorf("take on the user's groups: %w", errno)
	}
	const unchanged = ^uintptr(0)
	// setfsgid and setfsuid return the id before; asked with an id that does not exist they change nothing.
	_, _, _ = unix.RawSyscall(unix.SYS_SETFSGID, uintptr(gid), 0, 0)
	_, _, _ = unix.RawSyscall(unix.SYS_SETFSUID, uintptr(uid), 0, 0)
	gotGID, _, _ := unix.RawSyscall(unix.SYS_SETFSGID, unchanged, 0, 0)
	gotUID, _, _ := unix.RawSyscall(unix.SYS_SETFSUID, unchanged, 0, 0)
	if uint32(gotGID) != gid || uint32(gotUID) != uid {
		return fmt.Errorf("take on the rights of user %d and group %d: %w", uid, gid, unix.EPERM)
	}
	return nil
}

// supplementary returns the user's groups; none if the node does not know the user.
func supplementary(uid uint32) []uint32 {
	u, err := user.LookupId(strconv.FormatUint(uint64(uid), 10))
	if err != nil {
		return nil
	}
	ids, err := u.GroupIds()
	if err != nil {
		return nil
	}
	var groups []uint32
	for _, id := range ids {
		if n, err := strconv.ParseUint(id, 10, 32); err == nil {
			groups = append(groups, uint32(n))
		}
	}
	return groups
}
