package dev

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// up makes a cluster of fakes in a directory whose name is too long for sockets.
func up(t *testing.T, o Options) *Cluster {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Second)
	defer cancel()
	if o.Dir == "" {
		o.Dir = filepath.Join(t.TempDir(), strings.Repeat("x", 80))
	}
	if o.Bin == "" {
		o.Bin = fakePrograms(t)
	}
	c, _, err := Up(ctx, o)
	if c != nil {
		t.Cleanup(func() {
			if err := c.Down(); err != nil {
				t.Error(err)
			}
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func bootOf(t *testing.T, c *Cluster, node string) string {
	t.Helper()
	text, err := os.ReadFile(fakeCluster{root: c.dir}.path("node", node))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func find(t *testing.T, c *Cluster, name string) ProcessStatus {
	t.Helper()
	status, err := c.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range status.Processes {
		if p.Name == name {
			return p
		}
	}
	t.Fatalf("no process %s", name)
	return ProcessStatus{}
}

func TestAClusterComesUpVotingAndGoesDownWithoutATrace(t *testing.T) {
	c := up(t, Options{Controllers: 3, Nodes: 2, GPUs: -1})
	status, err := c.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if status.Leader != "c1" || status.Term != 1 || len(status.Processes) != 5 {
		t.Errorf("status %+v", status)
	}
	for _, p := range status.Processes {
		if !p.Alive || p.Pid == 0 || p.Address == "" || p.Role == RoleController && !p.Voter {
			t.Errorf("after up: %+v", p)
		}
	}
	if tasks, err := c.JobProcesses(1); err != nil || len(tasks) != 2 || tasks[0].Program != "sleep" {
		t.Errorf("job processes %v, %v", tasks, err)
	}
	if running := belonging(t, c); len(running) != 9 { // 3 controllers, 2 agents, supervisors, tasks
		t.Errorf("%d processes run:\n%s", len(running), strings.Join(running, "\n"))
	}
	for range 2 {
		if err := c.Down(); err != nil {
			t.Fatal(err)
		}
		if running := belonging(t, c); len(running) != 0 {
			t.Fatalf("after down:\n%s", strings.Join(running, "\n"))
		}
	}
	status, err = c.Status(t.Context())
	if err != nil || status.Leader != "" || status.Processes[0].Alive {
		t.Errorf("after down: %+v, %v", status, err)
	}
}

func TestADirectoryWithAClusterIsResumedAtItsAddresses(t *testing.T) {
	o := Options{Controllers: 2, Nodes: 1, Bin: fakePrograms(t), Dir: t.TempDir()}
	c := up(t, o)
	before := find(t, c, "c2").Address
	if err := c.Down(); err != nil {
		t.Fatal(err)
	}
	o.Nodes = 7 // not used
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Second)
	defer cancel()
	c, resumed, err := Up(ctx, o)
	if err != nil || !resumed {
		t.Fatalf("resumed %v, %v", resumed, err)
	}
	if after := find(t, c, "c2").Address; after != before {
		t.Errorf("c2 moved from %s to %s", before, after)
	}
	if boot := bootOf(t, c, "n1"); boot != "n1-boot-2" {
		t.Errorf("after down and up the node has the boot id %s", boot)
	}
}

func TestKillingANodeIsAPowerLossAndKillingItsAgentIsNot(t *testing.T) {
	c := up(t, Options{Controllers: 1, Nodes: 2})
	ctx := t.Context()
	if _, err := c.Kill(ctx, "n1", true); err != nil {
		t.Fatal(err)
	}
	if tasks, err := c.JobProcesses(1); err != nil || len(tasks) != 2 {
		t.Errorf("after the agent's end there are the tasks %v, %v", tasks, err)
	}
	if _, err := c.Kill(ctx, "n1", true); err == nil || !strings.Contains(err.Error(), "does not run") {
		t.Errorf("killing a dead agent: %v", err)
	}
	if _, err := c.Start(ctx, "n1", ""); err != nil {
		t.Fatal(err)
	}
	if boot := bootOf(t, c, "n1"); boot != "n1-boot-1" {
		t.Errorf("after the agent's end the node has the boot id %s", boot)
	}
	action, err := c.Kill(ctx, "n1", false)
	if err != nil || action.Others != 4 { // two supervisors and two tasks: the agent started twice
		t.Errorf("%+v, %v", action, err)
	}
	if tasks, err := c.JobProcesses(1); err != nil || len(tasks) != 1 {
		t.Errorf("after the node's end there are the tasks %v, %v: that of n2 was expected", tasks, err)
	}
	if _, err := c.Start(ctx, "n1", ""); err != nil {
		t.Fatal(err)
	}
	if boot := bootOf(t, c, "n1"); boot != "n1-boot-2" {
		t.Errorf("after the power loss the node has the boot id %s", boot)
	}
	if _, err := c.Start(ctx, "n1", ""); err == nil || !strings.Contains(err.Error(), "runs already") {
		t.Errorf("starting what runs: %v", err)
	}
}

func TestTheLeaderIsFoundKilledPausedAndResumedByThatName(t *testing.T) {
	c := up(t, Options{Controllers: 3, Nodes: 1})
	ctx := t.Context()
	if a, err := c.Kill(ctx, "leader", false); err != nil || a.Name != "c1" {
		t.Fatalf("%+v, %v", a, err)
	}
	if a, err := c.Pause(ctx, "leader", false); err != nil || a.Name != "c2" {
		t.Fatalf("%+v, %v", a, err)
	}
	if p := find(t, c, "c2"); !p.Paused || !p.Alive || p.Answers {
		t.Errorf("paused: %+v", p)
	}
	if _, err := c.Resume(ctx, "c2", false); err != nil {
		t.Fatal(err)
	}
	if p := find(t, c, "c2"); p.Paused {
		t.Errorf("resumed: %+v", p)
	}
	if _, err := c.Start(ctx, "c1", ""); err != nil {
		t.Fatal(err)
	}
	if leader, err := c.Leader(ctx); err != nil || leader != "c1" {
		t.Errorf("leader %q, %v", leader, err)
	}
	for name, want := range map[string]string{"c9": "c1, c2, c3, n1", "n2": "n1"} {
		if _, err := c.Kill(ctx, name, false); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := c.Kill(ctx, "c1", true); err == nil || !strings.Contains(err.Error(), "--agent-only") {
		t.Errorf("--agent-only of a controller: %v", err)
	}
}

func TestNodesThatShareAProcessShareItsFate(t *testing.T) {
	c := up(t, Options{Controllers: 1, Nodes: 5, AgentsPerProcess: 3})
	p := find(t, c, "n4")
	if strings.Join(p.Nodes, " ") != "n4 n5" {
		t.Fatalf("%+v", p)
	}
	if a, err := c.Kill(t.Context(), "n2", false); err != nil || a.Name != "n1" || a.Others != 6 {
		t.Errorf("%+v, %v", a, err)
	}
	if find(t, c, "n1").Alive || !find(t, c, "n4").Alive {
		t.Error("another process died")
	}
	variables, err := c.Env("n5")
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range variables {
		if v.Name == "MUSTER_AGENT_SOCKET" && !strings.HasSuffix(v.Value, "/n5/agent.sock") {
			t.Errorf("%s=%s", v.Name, v.Value)
		}
	}
}

func TestAControllerThatFailsIsShownAndWhatWasStartedCanBeTakenDown(t *testing.T) {
	bin := fakePrograms(t)
	agent := filepath.Join(bin, "muster-agent")
	if err := os.Remove(agent); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(agent, []byte("#!/bin/sh\necho out of cheese\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Second)
	defer cancel()
	c, _, err := Up(ctx, Options{Dir: t.TempDir(), Bin: bin, Controllers: 1, Nodes: 1})
	if err == nil || !strings.Contains(err.Error(), "out of cheese") || c == nil {
		t.Fatalf("%v", err)
	}
	if err := c.Down(); err != nil {
		t.Fatal(err)
	}
	if running := belonging(t, c); len(running) != 0 {
		t.Errorf("after down:\n%s", strings.Join(running, "\n"))
	}
}
