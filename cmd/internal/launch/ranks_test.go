package launch_test

import (
	"os"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/muster-hpc/muster/cmd/internal/launch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/slurmtest"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

func TestRanksThatAreNotConsecutiveAreFoundOnTheirNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		one := &slurmtest.Agent{Release: release, Exits: []*apiv1.TaskExit{{FirstRank: 0, Count: 1, Code: 3}, {FirstRank: 2, Count: 1, Code: 3}}}
		two := &slurmtest.Agent{
			Release: release, Wrote: make(chan struct{}), Exits: []*apiv1.TaskExit{{FirstRank: 1, Count: 1}, {FirstRank: 3, Count: 1}},
			Pieces: []*nodev1.ReadOutputResponse{slurmtest.Out(1, 0, "no\n"), slurmtest.Out(3, 0, "yes\n")},
		}
		c := cluster(t, one, two)
		c.Shares[6][0].Ranks, c.Shares[6][1].Ranks = "0,2", "1,3"
		go func() { <-two.Wrote; close(release) }()
		out, errs, outcome, err := attach(t, c, func(o *launch.Options) {
			rank := uint32(3)
			o.Stdin, o.StdinRank, o.OnlyStdout = strings.NewReader("in"), 3, &rank
		})
		if err != nil || out != "yes\n" || outcome.ExitCode != 3 || errs != "srun: error: n1: tasks 0,2: Exited with exit code 3\n" {
			t.Errorf("out %q, stderr %q, %+v, %v", out, errs, outcome, err)
		}
		if got, _ := one.Got(); got != "" {
			t.Errorf("the wrong node got %q", got)
		}
		if got, end := two.Got(); got != "in" || !end {
			t.Errorf("rank 3 got %q, end %v", got, end)
		}
		var skipped []uint32
		for _, o := range two.Reads[0].GetOffsets() {
			if o.GetStream() == nodev1.OutputStream_OUTPUT_STREAM_STDOUT {
				skipped = append(skipped, o.GetRank())
			}
		}
		if !reflect.DeepEqual(skipped, []uint32{1}) {
			t.Errorf("not asked for: the stdout of ranks %v", skipped)
		}
	})
}

func TestANodeInSeveralPartsOfAStepIsReadOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one := &slurmtest.Agent{Pieces: []*nodev1.ReadOutputResponse{slurmtest.Out(0, 0, "a\n"), slurmtest.Out(2, 0, "c\n")}, Exits: []*apiv1.TaskExit{{FirstRank: 0, Count: 1}, {FirstRank: 2, Count: 1}}}
		two := &slurmtest.Agent{Pieces: []*nodev1.ReadOutputResponse{slurmtest.Out(1, 0, "b\n")}, Exits: slurmtest.Ends(1, 1, 0, 0)}
		c := cluster(t, one, two)
		c.Shares[6] = []*apiv1.NodeShare{
			{Node: "n1", AgentAddress: "a1", Tasks: 1, Ranks: "0"}, {Node: "n2", AgentAddress: "a2", Tasks: 1, Ranks: "1"},
			{Node: "n1", AgentAddress: "a1", Tasks: 1, Ranks: "2"},
		}
		out, _, outcome, err := attach(t, c, func(o *launch.Options) { o.Label = true })
		if err != nil || outcome.ExitCode != 0 || len(one.Reads) != 1 || strings.Count(out, "\n") != 3 || !strings.Contains(out, "2: c\n") {
			t.Errorf("out %q, %d reads, %+v, %v", out, len(one.Reads), outcome, err)
		}
	})
}

func TestProgressSaysHowEachTaskIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		progress := &launch.Progress{}
		hold := make(chan struct{})
		one := &slurmtest.Agent{Release: hold, Pieces: []*nodev1.ReadOutputResponse{{Ended: slurmtest.Ends(1, 1, 4, 0)}}, Exits: []*apiv1.TaskExit{{FirstRank: 0, Count: 1}, {FirstRank: 1, Count: 1, Code: 4}}}
		two := &slurmtest.Agent{NotYet: 1000, Exits: slurmtest.Ends(2, 2, 0, 0)}
		before := progress.Lines("6.0", 4)
		var during []string
		started := 0
		c := cluster(t, one, two)
		go func() {
			synctest.Wait()
			during = progress.Lines("6.0", 4)
			two.Appear()
			close(hold)
		}()
		if _, _, _, err := attach(t, c, func(o *launch.Options) { o.Progress, o.Started = progress, func() { started++ } }); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(before, []string{"StepId=6.0 tasks 0-3: not started"}) ||
			!reflect.DeepEqual(during, []string{"StepId=6.0 tasks 2-3: not started", "StepId=6.0 task 0: running", "StepId=6.0 task 1: exited abnormally"}) {
			t.Errorf("before %q, during %q", before, during)
		}
		if after := progress.Lines("6.0", 4); started != 1 ||
			!reflect.DeepEqual(after, []string{"StepId=6.0 task 1: exited abnormally", "StepId=6.0 tasks 0,2-3: exited"}) {
			t.Errorf("after %q; started %d times", after, started)
		}
	})
}

func TestTheSizeOfTheTerminalIsToldToTheNodeOfRankZero(t *testing.T) {
	keyboard, tty := slurmtest.Pty(t, 24, 80)
	_ = keyboard
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan struct{})
		one := &slurmtest.Agent{Release: hold, Exits: []*apiv1.TaskExit{{FirstRank: 1, Count: 1}, {FirstRank: 3, Count: 1}}}
		two := &slurmtest.Agent{Release: hold, Exits: []*apiv1.TaskExit{{FirstRank: 0, Count: 1}, {FirstRank: 2, Count: 1}}}
		c := cluster(t, one, two)
		c.Shares[6][0].Ranks, c.Shares[6][1].Ranks = "1,3", "0,2"
		resized := make(chan os.Signal, 1)
		go func() {
			synctest.Wait()
			slurmtest.Resize(t, tty, 50, 132)
			resized <- syscall.SIGWINCH
			synctest.Wait()
			close(hold)
		}()
		if _, _, _, err := attach(t, c, func(o *launch.Options) { o.Terminal, o.Resized = launch.OpenTerminal(tty), resized }); err != nil {
			t.Fatal(err)
		}
		sizes := two.Resized()
		if len(one.Resized()) != 0 || len(sizes) < 2 || sizes[0] != "24x80" || sizes[len(sizes)-1] != "50x132" {
			t.Errorf("node 1 was told %v, node 2 %v", one.Resized(), sizes)
		}
	})
}

func TestARawTerminalIsPutBackAsItWas(t *testing.T) {
	_, tty := slurmtest.Pty(t, 24, 80)
	before := slurmtest.Mode(t, tty)
	terminal := launch.OpenTerminal(tty)
	for range 2 { // again after a stop
		if err := terminal.Raw(); err != nil {
			t.Fatal(err)
		}
	}
	if slurmtest.Mode(t, tty) == before || !terminal.IsRaw() {
		t.Error("the terminal is not raw")
	}
	terminal.Restore()
	terminal.Restore()
	if slurmtest.Mode(t, tty) != before || terminal.IsRaw() {
		t.Error("the terminal was not put back")
	}
	if null, err := os.Open(os.DevNull); err != nil || launch.OpenTerminal(null) != nil || launch.OpenTerminal(strings.NewReader("")) != nil {
		t.Error("what is no terminal is taken for one")
	}
	var none *launch.Terminal
	none.Restore()
	if err := none.Raw(); err != nil || none.IsRaw() {
		t.Error("no terminal became raw: ", err)
	}
}
