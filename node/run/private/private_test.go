package private_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/muster-hpc/muster/node/run/private"
)

func store(t *testing.T) private.Store {
	t.Helper()
	if err := private.Supported(); err != nil {
		t.Skip(err)
	}
	memory := private.MemoryDir(fmt.Sprintf("test-%d-%s", os.Getpid(), t.Name()))
	t.Cleanup(func() {
		if err := os.RemoveAll(memory); err != nil {
			t.Error(err)
		}
	})
	return private.Store{Disk: filepath.Join(t.TempDir(), "private"), Memory: memory}
}

func makeDirs(t *testing.T, s private.Store, job, attempt uint32) private.Dirs {
	t.Helper()
	dirs, err := s.Make(job, attempt)
	if err != nil {
		t.Fatal(err)
	}
	return dirs
}

// inside runs a script in a new namespace with the directories.
func inside(t *testing.T, dirs private.Dirs, script string) string {
	t.Helper()
	type outcome struct {
		out []byte
		err error
	}
	c := make(chan outcome)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with its namespace
		ns, err := dirs.Enter()
		if err != nil {
			c <- outcome{nil, err}
			return
		}
		out, err := exec.Command("sh", "-c", script).CombinedOutput()
		c <- outcome{out, errorsOf(err, ns.Close())}
	}()
	o := <-c
	if o.err != nil {
		t.Fatalf("%v: %s", o.err, o.out)
	}
	return string(o.out)
}

func errorsOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func mounts(t *testing.T) []byte {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestStepsOfAJobShareWhatOthersDoNotSee(t *testing.T) {
	s := store(t)
	before := mounts(t)
	one, two := makeDirs(t, s, 1, 1), makeDirs(t, s, 2, 1)
	mark := fmt.Sprintf("muster-private-%d", os.Getpid())
	inside(t, one, "echo tmp >/tmp/"+mark+"; echo shm >/dev/shm/"+mark)
	if got := inside(t, one, "cat /tmp/"+mark+" /dev/shm/"+mark); got != "tmp\nshm\n" {
		t.Errorf("the next step of the job sees %q", got)
	}
	if got := inside(t, two, "ls /tmp /dev/shm; stat -c %a /tmp /dev/shm; stat -f -c %T /dev/shm"); got != "/dev/shm:\n\n/tmp:\n1777\n1777\ntmpfs\n" {
		t.Errorf("another job sees %q", got)
	}
	for _, dir := range []string{"/tmp", "/dev/shm"} {
		if _, err := os.Stat(filepath.Join(dir, mark)); err == nil {
			t.Errorf("the node sees the file in %s", dir)
		}
	}
	if after := mounts(t); !bytes.Equal(before, after) {
		t.Errorf("the node's mounts changed:\n%s\nto\n%s", before, after)
	}
	if again := makeDirs(t, s, 1, 1); again != one {
		t.Errorf("made again they are %v, not %v", again, one)
	}
	if err := s.Remove(1, 1); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{one.Tmp, one.Shm} {
		if _, err := os.Lstat(dir); err == nil {
			t.Errorf("%s is left", dir)
		}
	}
}

func TestUsersCannotReachTheDirectoriesOfOthers(t *testing.T) {
	s := store(t)
	makeDirs(t, s, 1, 1)
	for _, base := range []string{s.Disk, s.Memory} {
		info, err := os.Stat(base)
		if err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("%s: %v, %v", base, info.Mode(), err)
		}
	}
}

func TestWhatOthersPutInThePlaceIsRefused(t *testing.T) {
	s := store(t)
	if err := os.Symlink(t.TempDir(), s.Memory); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Make(1, 1); err == nil || !strings.Contains(err.Error(), "remove it") {
		t.Errorf("a link: %v", err)
	}
	if err := os.Remove(s.Memory); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(s.Memory, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(s.Memory, 65533, 65533); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Make(1, 1); err == nil || !strings.Contains(err.Error(), "remove it") {
		t.Errorf("a user's directory: %v", err)
	}
}

func TestCleanRemovesWhatIsNotKept(t *testing.T) {
	s := store(t)
	kept := makeDirs(t, s, 2, 3)
	makeDirs(t, s, 1, 1)
	lost := makeDirs(t, s, 2, 2)
	if err := os.RemoveAll(lost.Tmp); err != nil { // of a removal that was interrupted
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(lost.Shm, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	n, err := s.Clean(func(job, attempt uint32) bool { return job == 2 && attempt == 3 })
	if n != 2 || err != nil {
		t.Errorf("removed %d, error %v", n, err)
	}
	for dir, want := range map[string]bool{kept.Tmp: true, kept.Shm: true, lost.Shm: false} {
		if _, err := os.Stat(dir); (err == nil) != want {
			t.Errorf("%s: %v", dir, err)
		}
	}
}

func TestNamespaceEndsWithItsLastProcess(t *testing.T) {
	s := store(t)
	dirs := makeDirs(t, s, 1, 1)
	var st unix.Stat_t
	id := strings.TrimSpace(inside(t, dirs, "readlink /proc/self/ns/mnt"))
	if err := unix.Stat("/proc/self/ns/mnt", &st); err != nil || id == fmt.Sprintf("mnt:[%d]", st.Ino) {
		t.Fatalf("the script ran in the node's namespace %s: %v", id, err)
	}
	links, err := filepath.Glob("/proc/[0-9]*/task/[0-9]*/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	holders := 0
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil && to == id {
			holders++
		}
	}
	if holders > 1 { // The locked thread of this test may still be on its way out.
		t.Errorf("%d threads are in %s", holders, id)
	}
}
