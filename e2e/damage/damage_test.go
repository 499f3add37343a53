package damage

import (
	"context"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/muster-hpc/muster/e2e/cluster"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// fill submits held jobs so that there is something to damage.
func fill(c *cluster.Cluster, jobs int) {
	script := c.Script("held.sh", "#!/bin/sh\ntrue\n")
	c.Must(c.Dir, "muster", "submit", "--hold", "--count", fmt.Sprint(jobs), script)
}

// follower returns the name of a controller that does not lead.
func follower(c *cluster.Cluster) string {
	leader := c.Leader()
	for _, p := range c.Status().Processes {
		if p.Role == "controller" && p.Name != leader {
			return p.Name
		}
	}
	return ""
}

// files lists the regular files of a controller's state, without its identity and certificates, which are checked otherwise.
func files(t *testing.T, dir string) []string {
	t.Helper()
	var found []string
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && entry.Name() == "tls" {
			return filepath.SkipDir
		}
		if info, err := entry.Info(); err == nil && info.Mode().IsRegular() && info.Size() > 0 && entry.Name() != "ballast" && !strings.Contains(entry.Name(), "lock") && !strings.HasSuffix(entry.Name(), "log") {
			found = append(found, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// sameState checks, at the controller itself, that it has the digest that the leader has at the same revision.
func sameState(t *testing.T, c *cluster.Cluster, name string) {
	t.Helper()
	mine, theirs := c.Direct(c.Process(name).Address), c.Direct(c.Process(c.Leader()).Address)
	stale := &apiv1.GetClusterRequest{Read: &apiv1.ReadOptions{Consistency: apiv1.ReadConsistency_READ_CONSISTENCY_STALE}}
	c.Eventually(cluster.Slack(20*time.Second), name+" has the leader's state", func() bool {
		a, err := mine.Cluster().GetCluster(context.Background(), stale)
		if err != nil {
			return false
		}
		b, err := theirs.Cluster().GetCluster(context.Background(), stale)
		if err != nil {
			return false
		}
		if a.Info.GetRevision().GetIndex() == 0 || a.Info.GetRevision().GetIndex() != b.Info.GetRevision().GetIndex() {
			return false
		}
		if a.Digest != b.Digest {
			t.Fatalf("%s has digest %s at revision %v, the leader %s", name, a.Digest, a.Info.Revision, b.Digest)
		}
		return true
	})
}

func TestFlippedBitsAreNeverServedAndOneCommandRebuilds(t *testing.T) {
	c := cluster.Up(t, "--nodes", "1")
	fill(c, 300)
	rounds := 6
	if cluster.Campaign() {
		rounds = 60
	}
	random := rand.New(rand.NewPCG(1, 60))
	refused := 0
	for round := range rounds {
		name := follower(c)
		c.Dev("kill", name)
		dir := filepath.Join(c.Dir, name)
		all := files(t, dir)
		path := all[random.IntN(len(all))]
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		where := random.IntN(len(data))
		data[where] ^= 1 << random.IntN(8)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		out := c.RunWith(cluster.Command{Name: "muster", Args: []string{"dev", "start", "--dir", c.Dir, name}, Timeout: time.Minute})
		relative, _ := filepath.Rel(dir, path)
		if out.Code == 0 {
			// The bit lay where nothing is stored. Then the state must be exactly the leader's.
			sameState(t, c, name)
			continue
		}
		refused++
		log, err := os.ReadFile(c.Process(name).Log)
		if err != nil {
			t.Fatal(err)
		}
		if said := string(log) + out.Stderr; !strings.Contains(said, "rejoin") || strings.Contains(said, "goroutine ") {
			t.Errorf("round %d, byte %d of %s: the controller does not say what to do: %s", round, where, relative, tail(said))
		}
		c.Dev("rejoin", name)
		sameState(t, c, name)
	}
	t.Logf("%d of %d flipped bits were noticed and refused; the others changed nothing", refused, rounds)
}

func TestATruncatedFileIsRefusedAndOneCommandRebuilds(t *testing.T) {
	c := cluster.Up(t, "--nodes", "1")
	fill(c, 300)
	name := follower(c)
	c.Dev("kill", name)
	largest, size := "", int64(0)
	for _, path := range files(t, filepath.Join(c.Dir, name)) {
		if info, err := os.Stat(path); err == nil && info.Size() > size {
			largest, size = path, info.Size()
		}
	}
	if err := os.Truncate(largest, size/2); err != nil {
		t.Fatal(err)
	}
	out := c.RunWith(cluster.Command{Name: "muster", Args: []string{"dev", "start", "--dir", c.Dir, name}, Timeout: time.Minute})
	if out.Code == 0 {
		t.Fatalf("%s starts although %s was cut in half", name, largest)
	}
	c.Dev("rejoin", name)
	sameState(t, c, name)
	c.Eventually(30*time.Second, "three controllers vote and the damaged member is forgotten", func() bool {
		text := c.Must(c.Dir, "muster", "cluster")
		return strings.Count(text, "voter")+strings.Count(text, "leader ") == 3
	})
}

func TestAFullDiskStopsOneControllerUntilThereIsSpace(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting a small file system needs root")
	}
	c := cluster.Up(t, "--nodes", "1")
	name := follower(c)
	c.Dev("kill", name)
	dir := filepath.Join(c.Dir, name)
	mount(t, dir)
	c.Dev("start", name)
	// Somebody else fills the disk.
	filler := filepath.Join(dir, "filler")
	file, err := os.Create(filler)
	if err != nil {
		t.Fatal(err)
	}
	block := make([]byte, 1<<20)
	for {
		if _, err := file.Write(block); err != nil {
			break
		}
	}
	file.Close()
	for range 20 {
		fill(c, 500)
	}
	c.Eventually(cluster.Slack(30*time.Second), "the controller says that its disk is full", func() bool {
		log, err := os.ReadFile(c.Process(name).Log)
		return err == nil && (strings.Contains(string(log), "no space") || strings.Contains(string(log), "is full"))
	})
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	c.Eventually(cluster.Slack(60*time.Second), "the controller has caught up, without being told", func() bool {
		s := c.Status()
		var lag, head uint64
		for _, p := range s.Processes {
			if p.Role == "controller" {
				head = max(head, p.Index)
			}
			if p.Name == name {
				lag = p.Index
				if !p.Alive { // stopped cleanly: starting it again is allowed to be the remedy
					c.Dev("start", name)
				}
			}
		}
		return lag > 0 && lag+20 >= head
	})
	sameState(t, c, name)
}

// mount puts a small file system with a copy of dir's contents over dir.
func mount(t *testing.T, dir string) {
	t.Helper()
	copied := dir + ".copy"
	for _, step := range [][]string{
		{"cp", "-a", dir, copied},
		{"mount", "-t", "tmpfs", "-o", "size=160m", "muster-e2e", dir},
		{"cp", "-a", copied + "/.", dir},
	} {
		if out, err := exec.Command(step[0], step[1:]...).CombinedOutput(); err != nil {
			t.Skipf("cannot make a small file system here: %v: %s", err, out)
		}
		if step[0] == "mount" {
			t.Cleanup(func() {
				if out, err := exec.Command("umount", "-l", dir).CombinedOutput(); err != nil {
					t.Errorf("umount: %v: %s", err, out)
				}
			})
		}
	}
}

func tail(s string) string { return s[max(0, len(s)-800):] }
