package serve

import (
	"errors"
	"fmt"
	"os"
	"path"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Bounds of paths; rows of docs/limits.md.
const (
	maxPath  = 4096
	maxLinks = 40
)

// asUser calls f with the rights of a user on files, on a thread that is thrown away. An agent without root is that user.
func asUser(p Place, f func() error) error {
	if os.Geteuid() != 0 || p.UID == 0 {
		return f()
	}
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := become(p.UID, p.GID, p.Groups); err != nil {
			done <- err
			return
		}
		// What root keeps besides its rights on files: space that is reserved for root, and freedom from quotas.
		header, none := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, [2]unix.CapUserData{}
		if err := unix.Capset(&header, &none[0]); err != nil {
			done <- fmt.Errorf("give up root's capabilities: %w", err)
			return
		}
		done <- f()
	}()
	return <-done
}

// walker finds directories as the tasks of a job see them, following only links of the user and of root: one that somebody else planted
// leads where that one wants.
type walker struct {
	uid    uint32
	mounts map[string]int // descriptors of directories, by where tasks see them
	root   int

	stack []int    // descriptors below root, the current directory last; those in mounts are not owned
	names []string // of stack
	links int
}

// openWalker opens the starting points. It is called with the agent's own rights.
func openWalker(p Place) (*walker, error) {
	w := &walker{uid: p.UID, mounts: map[string]int{}, root: -1}
	for at, dir := range p.Mounts {
		fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			w.close()
			return nil, fmt.Errorf("open the job's %s: %w", at, err)
		}
		w.mounts[at] = fd
	}
	fd, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		w.close()
		return nil, fmt.Errorf("open /: %w", err)
	}
	w.root = fd
	return w, nil
}

func (w *walker) close() {
	for len(w.stack) > 0 {
		w.up()
	}
	for _, fd := range w.mounts {
		_ = unix.Close(fd) // only a place
	}
	if w.root >= 0 {
		_ = unix.Close(w.root)
	}
}

// here is the descriptor of the current directory.
func (w *walker) here() int {
	if len(w.stack) == 0 {
		return w.root
	}
	return w.stack[len(w.stack)-1]
}

// up leaves the current directory; above root there is root.
func (w *walker) up() {
	n := len(w.stack) - 1
	if n < 0 {
		return
	}
	if fd, mounted := w.mounts["/"+strings.Join(w.names, "/")]; !mounted || fd != w.stack[n] {
		_ = unix.Close(w.stack[n])
	}
	w.stack, w.names = w.stack[:n], w.names[:n]
}

// walk goes along a path, absolute or from here.
func (w *walker) walk(dir string) error {
	if strings.HasPrefix(dir, "/") {
		for len(w.stack) > 0 {
			w.up()
		}
	}
	for name := range strings.SplitSeq(dir, "/") {
		switch name {
		case "", ".":
		case "..":
			w.up()
		default:
			if err := w.enter(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// enter goes into a directory here, or where a link here leads.
func (w *walker) enter(name string) error {
	at := "/" + strings.Join(append(w.names[:len(w.names):len(w.names)], name), "/")
	if fd, ok := w.mounts[at]; ok {
		w.stack, w.names = append(w.stack, fd), append(w.names, name)
		return nil
	}
	fd, err := unix.Openat(w.here(), name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%s: %w", at, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		_ = unix.Close(fd)
		return fmt.Errorf("%s: %w", at, err)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		w.stack, w.names = append(w.stack, fd), append(w.names, name)
		return nil
	case unix.S_IFLNK:
		defer func() { _ = unix.Close(fd) }()
		return w.link(fd, at, st.Uid)
	}
	_ = unix.Close(fd)
	return fmt.Errorf("%s: %w", at, unix.ENOTDIR)
}

// errForeignLink means that a link on the way belongs to another user.
var errForeignLink = errors.New("it is a symbolic link of another user")

func (w *walker) link(fd int, at string, owner uint32) error {
	if owner != 0 && owner != w.uid {
		return fmt.Errorf("%s: %w", at, errForeignLink)
	}
	if w.links++; w.links > maxLinks {
		return fmt.Errorf("%s: %w", at, unix.ELOOP)
	}
	buffer := make([]byte, maxPath)
	n, err := unix.Readlinkat(fd, "", buffer)
	if err != nil {
		return fmt.Errorf("%s: %w", at, err)
	}
	if strings.HasPrefix(at, "/proc/") { // magic links lead where their text does not say
		return fmt.Errorf("%s: %w", at, unix.ELOOP)
	}
	return w.walk(string(buffer[:n]))
}

// goodPath tells whether a path is absolute, short enough, and names a file.
func goodPath(p string) bool {
	return len(p) <= maxPath && strings.HasPrefix(p, "/") && path.Clean(p) == p && p != "/" && !strings.ContainsRune(p, 0)
}
