package users

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/muster-hpc/muster/e2e/cluster"
)

// person is a temporary user with a supplementary group and a home directory that nobody else may enter.
type person struct {
	t             *testing.T
	name, home    string
	uid, gid, own uint32 // own is the supplementary group
	env           []string
}

// newPerson makes the user, and removes everything of it when the test ends.
func newPerson(t *testing.T) *person {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("this test makes a temporary user and runs agents that take on its identity: run it as root")
	}
	for _, program := range []string{"useradd", "userdel", "groupadd", "groupdel"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("this test makes a temporary user with %s, which is missing here", program)
		}
	}
	p := &person{t: t, name: fmt.Sprintf("mstr%d", os.Getpid())}
	group := p.name + "g"
	home, err := os.MkdirTemp("", "muster-home-")
	if err != nil {
		t.Fatal(err)
	}
	p.home = home
	t.Cleanup(func() { os.RemoveAll(home) })
	p.admin("groupadd", group)
	t.Cleanup(func() { p.admin("groupdel", group) })
	p.admin("useradd", "-M", "-U", "-d", home, "-s", "/bin/sh", "-G", group, p.name)
	t.Cleanup(func() { p.admin("userdel", p.name) })
	u, err := user.Lookup(p.name)
	if err != nil {
		t.Fatal(err)
	}
	g, err := user.LookupGroup(group)
	if err != nil {
		t.Fatal(err)
	}
	p.uid, p.gid, p.own = number(t, u.Uid), number(t, u.Gid), number(t, g.Gid)
	if err := os.Chown(home, int(p.uid), int(p.gid)); err != nil {
		t.Fatal(err)
	}
	return p
}

func number(t *testing.T, text string) uint32 {
	t.Helper()
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	return uint32(n)
}

func (p *person) admin(program string, args ...string) {
	p.t.Helper()
	if out, err := exec.Command(program, args...).CombinedOutput(); err != nil {
		p.t.Errorf("%s: %v\n%s", program, err, out)
	}
}

// sh runs a script as the person, in the home directory.
func (p *person) sh(script string) (string, error) {
	cmd := exec.Command("/bin/sh", "-c", script)
	cmd.Dir = p.home
	cmd.Env = append(append([]string{}, p.env...), "HOME="+p.home, "SECRET_TOKEN=hunter2hunter2")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: p.uid, Gid: p.gid, Groups: []uint32{p.gid, p.own}}}
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func (p *person) must(script string) string {
	p.t.Helper()
	out, err := p.sh(script)
	if err != nil {
		p.t.Fatalf("%s: %v\n%s", script, err, out)
	}
	return out
}

func TestWorkIsItsUsers(t *testing.T) {
	p := newPerson(t)
	c := cluster.Up(t, "--controllers", "1", "--nodes", "1")
	if err := os.Chmod(c.Dir, 0o711); err != nil { // users reach the socket and their scripts through it
		t.Fatal(err)
	}
	p.env = c.Env

	ids := p.must("umask 027; srun sh -c 'id -u; id -g; id -G; umask; grep CapEff /proc/self/status'")
	want := fmt.Sprintf("%d\n%d\n%d %d\n0027\nCapEff:\t0000000000000000", p.uid, p.gid, p.gid, p.own)
	if ids != want {
		t.Errorf("a task is\n%s\ninstead of\n%s", ids, want)
	}

	id := p.must("umask 027; sbatch --parsable -o out.%j --wrap 'id -G; : >made; sleep 300'")
	c.WaitState(30*time.Second, id, "RUNNING")
	c.Eventually(30*time.Second, "the job has written its files", func() bool {
		_, err := os.Stat(filepath.Join(p.home, "made"))
		return err == nil
	})
	for _, name := range []string{"made", "out." + id} {
		owned(t, filepath.Join(p.home, name), p.uid, p.gid, 0o640)
	}

	t.Run("SecretsStaySecret", func(t *testing.T) { secrets(t, p, c, id) })
	t.Run("OutputIsOpenedAsTheUser", func(t *testing.T) { outputs(t, p, c) })
	t.Run("OthersMayNotTouchAJob", func(t *testing.T) { others(t, p, c) })
	p.must("scancel " + id)
}

func owned(t *testing.T, path string, uid, gid uint32, mode fs.FileMode) {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Error(err)
		return
	}
	st := info.Sys().(*syscall.Stat_t)
	if st.Uid != uid || st.Gid != gid || info.Mode().Perm() != mode {
		t.Errorf("%s belongs to %d:%d with mode %o, not to %d:%d with mode %o", path, st.Uid, st.Gid, info.Mode().Perm(), uid, gid, mode)
	}
}

// secrets looks at everything that users may see, and at all files of the cluster.
func secrets(t *testing.T, p *person, c *cluster.Cluster, id string) {
	for _, command := range []string{"scontrol show job " + id, "squeue --json", "sacct --json", "scontrol show job " + id + " --json", "cat " + c.Dir + "/logs/*"} {
		if out, err := p.sh(command); err != nil || strings.Contains(out, "hunter2hunter2") {
			t.Errorf("%s (%v) shows the environment:\n%s", command, err, out)
		}
	}
	err := filepath.WalkDir(c.Dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		open := info.Mode().Perm()&0o077 != 0
		relative, err := filepath.Rel(c.Dir, path)
		if err != nil {
			return err
		}
		top, _, inside := strings.Cut(relative, string(filepath.Separator))
		name := filepath.Base(path)
		switch {
		case !inside || top == "logs" || name == "ca.pem" || name == "cert.pem": // nothing in them is secret
		case open:
			t.Errorf("%s has mode %o", path, info.Mode().Perm())
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	steps := filepath.Join(c.Dir, "n1", "steps")
	for _, path := range []string{steps, filepath.Join(c.Dir, "n1", "tls"), filepath.Join(c.Dir, "n1", "journal"), filepath.Join(c.Dir, "c1"),
		filepath.Join(c.Dir, "ca"), filepath.Join(steps, id+".1.4294967291", "plan")} {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
		if out, err := p.sh("ls -l " + path + "/. || cat " + path); err == nil {
			t.Errorf("a user may look into %s:\n%s", path, out)
		}
	}
}

// outputs asks for output where the user may not write, also by way of a link.
func outputs(t *testing.T, p *person, c *cluster.Cluster) {
	victim := filepath.Join(t.TempDir(), "victim")
	if err := os.WriteFile(victim, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	p.must("ln -s " + victim + " link")
	for _, path := range []string{victim, "link"} {
		id := p.must("sbatch --parsable -o " + path + " --wrap 'echo overwritten'")
		c.WaitState(30*time.Second, id, "FAILED")
	}
	if text, err := os.ReadFile(victim); err != nil || string(text) != "precious" {
		t.Errorf("the file of another is %q (%v)", text, err)
	}
}

// others is what a user tries with a job of root.
func others(t *testing.T, p *person, c *cluster.Cluster) {
	id := c.Must(c.Dir, "sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 300")
	c.WaitState(30*time.Second, id, "RUNNING")
	for _, command := range []string{"scancel " + id, "scontrol update jobid=" + id + " name=mine", "scontrol requeue " + id,
		"srun --jobid=" + id + " true", "muster logs " + id, "scontrol update nodename=n1 state=drain reason=x",
		"sbatch --priority=4000000000 --wrap true"} {
		if out, err := p.sh(command); err == nil {
			t.Errorf("%s succeeded:\n%s", command, out)
		}
	}
	if state, _ := c.JobState(id); state != "RUNNING" {
		t.Errorf("the job is %s", state)
	}
	c.Must(c.Dir, "scancel", id)
}

func TestClusterRunsWithoutRoot(t *testing.T) {
	p := newPerson(t)
	bin := cluster.Bin(t)
	p.env = []string{"PATH=" + os.Getenv("PATH")}
	muster := filepath.Join(bin, "muster")
	if _, err := p.sh("test -x " + muster); err != nil {
		t.Skipf("the temporary user cannot reach the programs in %s", bin)
	}
	dir := filepath.Join(p.home, "own")
	t.Cleanup(func() {
		if out, err := p.sh(muster + " dev down --dir " + dir); err != nil {
			t.Errorf("muster dev down: %v\n%s", err, out)
		}
	})
	p.must(muster + " dev up --dir " + dir + " --controllers 1 --nodes 1")
	env := "eval \"$(" + muster + " dev env --dir " + dir + ")\"; "
	if got, want := p.must(env+"srun id -u"), fmt.Sprint(p.uid); got != want {
		t.Errorf("a task's user id is %s, not %s", got, want)
	}
	p.must(env + "sbatch -o batch --wrap 'id -G'; for i in $(seq 300); do test -s batch && break; sleep 0.1; done; test -s batch")
	if got, want := p.must("cat batch"), fmt.Sprintf("%d %d", p.gid, p.own); got != want {
		t.Errorf("a batch script's groups are %q, not %q", got, want)
	}
}
