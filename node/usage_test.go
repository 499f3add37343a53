package node

import (
	"bufio"
	"os/exec"
	"slices"
	"testing"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"

	"github.com/muster-hpc/muster/node/run"
)

func TestProcessesOfATaskAreFoundByMarkAndDescent(t *testing.T) {
	// A task that allocates, with a child that shed its environment.
	cmd := exec.Command("/bin/sh", "-c", `env -i sleep 60 & x=$(head -c 8000000 /dev/zero | tr '\0' x); echo "$!"; read line; kill $!`)
	cmd.Env = []string{"PATH=/usr/bin:/bin", run.CookieVariable + "=usage-test", "SLURM_PROCID=3"}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line == "" {
		t.Fatal(err)
	}
	all := readProcesses()
	of := all.ranks(watched{id: 0, mark: []byte(run.CookieVariable + "=usage-test"), ranks: []uint32{3}})
	u := &nodev1.TaskUsage{Rank: 3}
	all.add(u, of[3])
	if int(u.GetPid()) != cmd.Process.Pid || len(u.GetPids()) != 2 || !slices.Contains(u.GetPids(), uint32(cmd.Process.Pid)) {
		t.Errorf("found %v, the task is process %d", u, cmd.Process.Pid)
	}
	if u.GetMaxRssKb() < 8000 || u.GetMaxRssKb() < u.GetRssKb() || u.GetVirtualKb() < u.GetRssKb() {
		t.Errorf("memory is %v", u)
	}
	if len(all.ranks(watched{mark: []byte(run.CookieVariable + "=usage-tes"), ranks: []uint32{3}})) != 0 {
		t.Error("a mark that begins like another is taken for it")
	}
	if err := in.Close(); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Log(err) // killed or not, it is over
	}
}
