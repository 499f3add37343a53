package private

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// Where tasks see the directories.
const (
	tmpDir = "/tmp"
	shmDir = "/dev/shm"
)

// Store is where the private directories of a node's jobs are.
type Store struct {
	// Disk is the directory for those that become /tmp, for example DIR/private of the agent.
	Disk string
	// Memory is the directory for those that become /dev/shm; it should be in /dev/shm.
	Memory string
}

// MemoryDir is the usual Store.Memory of a node.
func MemoryDir(node string) string { return filepath.Join(shmDir, ".muster-"+node) }

// Dirs are the private directories of a job.
type Dirs struct {
	// Tmp becomes /tmp, Shm /dev/shm. Empty leaves the node's.
	Tmp, Shm string
}

// name is a job's directory.
func name(job, attempt uint32) string { return fmt.Sprintf("%d.%d", job, attempt) }

// Make makes the directories of a job, or finds them.
func (s Store) Make(job, attempt uint32) (Dirs, error) {
	dirs := Dirs{Tmp: filepath.Join(s.Disk, name(job, attempt)), Shm: filepath.Join(s.Memory, name(job, attempt))}
	for _, dir := range []string{dirs.Tmp, dirs.Shm} {
		// Users cannot pass through the parent; the bind mount leads around it.
		err := os.MkdirAll(filepath.Dir(dir), 0o700)
		if err == nil {
			err = trusted(filepath.Dir(dir))
		}
		if err == nil {
			if err = os.Mkdir(dir, 0o700); errors.Is(err, os.ErrExist) {
				err = trusted(dir)
			}
		}
		if err == nil {
			err = os.Chmod(dir, os.ModeSticky|0o777)
		}
		if err != nil {
			return Dirs{}, fmt.Errorf("making the private directories of job %d: %w", job, err)
		}
	}
	return dirs, nil
}

// trusted refuses what somebody else put there: everybody may write in /dev/shm.
func trusted(dir string) error {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return fmt.Errorf("looking at %s: %w", dir, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("%s is not a directory of the agent's user; remove it", dir)
	}
	return nil
}

// Remove removes the directories of a job with everything in them. What does not exist is removed.
func (s Store) Remove(job, attempt uint32) error {
	err := errors.Join(os.RemoveAll(filepath.Join(s.Disk, name(job, attempt))), os.RemoveAll(filepath.Join(s.Memory, name(job, attempt))))
	if err != nil {
		return fmt.Errorf("removing the private directories of job %d: %w", job, err)
	}
	return nil
}

// Clean removes the directories of all jobs that are not to be kept, and returns how many jobs those were.
func (s Store) Clean(keep func(job, attempt uint32) bool) (int, error) {
	found := make(map[[2]uint32]bool)
	for _, base := range []string{s.Disk, s.Memory} {
		entries, err := os.ReadDir(base)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return 0, fmt.Errorf("looking for private directories of jobs: %w", err)
		}
		for _, e := range entries {
			var id [2]uint32
			if n, err := fmt.Sscanf(e.Name(), "%d.%d", &id[0], &id[1]); err == nil && n == 2 && name(id[0], id[1]) == e.Name() {
				found[id] = true
			}
		}
	}
	removed := 0
	var errs []error
	for id := range found {
		if keep(id[0], id[1]) {
			continue
		}
		if err := s.Remove(id[0], id[1]); err != nil {
			errs = append(errs, err)
			continue
		}
		removed++
	}
	return removed, errors.Join(errs...)
}

// Supported is why jobs of this process cannot have directories of their own, as a sentence for the node's limitations;
// nil if they can.
func Supported() error {
	if os.Geteuid() != 0 {
		return errors.New("no private /tmp and /dev/shm for jobs: the agent does not run as root")
	}
	if _, err := os.Stat(shmDir); err != nil {
		return fmt.Errorf("no private /tmp and /dev/shm for jobs: %w", err)
	}
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // The thread ends with its namespace: it is never unlocked.
		result <- separate()
	}()
	if err := <-result; err != nil {
		return fmt.Errorf("no private /tmp and /dev/shm for jobs: %w", err)
	}
	return nil
}

// separate gives the calling thread a mount namespace of its own.
func separate() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("leaving the node's mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("keeping mounts from the node: %w", err)
	}
	return nil
}

// Enter moves the calling thread into a new mount namespace with the directories in place, and returns the namespace, for
// other processes to enter. The caller has locked the thread and must never unlock it. Needs root.
func (d Dirs) Enter() (*os.File, error) {
	if err := separate(); err != nil {
		return nil, err
	}
	// One of them may be below the other's place, and would disappear behind its mount: descriptors still lead there.
	var sources []*os.File
	defer func() {
		for _, f := range sources {
			_ = f.Close()
		}
	}()
	var places []string
	for _, bind := range []struct{ from, to string }{{d.Tmp, tmpDir}, {d.Shm, shmDir}} {
		if bind.from == "" {
			continue
		}
		f, err := os.OpenFile(bind.from, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
		if err != nil {
			return nil, fmt.Errorf("opening a private directory: %w", err)
		}
		sources, places = append(sources, f), append(places, bind.to)
	}
	for i, f := range sources {
		if err := unix.Mount(fmt.Sprintf("/proc/thread-self/fd/%d", f.Fd()), places[i], "", unix.MS_BIND, ""); err != nil {
			return nil, fmt.Errorf("binding %s at %s: %w", f.Name(), places[i], err)
		}
	}
	ns, err := os.Open("/proc/thread-self/ns/mnt")
	if err != nil {
		return nil, fmt.Errorf("opening the job's mount namespace: %w", err)
	}
	return ns, nil
}
