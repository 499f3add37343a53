package supervise_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
)

func TestTasksFindTheirProcessID(t *testing.T) {
	// A shell, a program that is no script, and a script that is executed by its first line.
	script := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(script, []byte("#!/bin/sh\necho $$ $SLURM_TASK_PID\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	plan := shell("echo $$ $SLURM_TASK_PID", "exec env", "")
	plan.Tasks[2].Args = []string{script}
	s := launch(t, normal, plan)
	s.start()
	state := s.ended()
	for i := range plan.Tasks {
		wantExit(t, state, i, "0:0")
	}
	for _, name := range []string{"out.0", "out.2"} {
		if word := strings.Fields(s.file(name)); len(word) != 2 || word[0] != word[1] {
			t.Errorf("%s: process id and SLURM_TASK_PID are %q", name, word)
		}
	}
	for _, unwanted := range []string{"MUSTER_TASK_PID_UNKNOWN", "\x00"} {
		if strings.Contains(s.file("out.1"), unwanted) {
			t.Errorf("the environment has %q: %q", unwanted, s.file("out.1"))
		}
	}
	if log := s.file("log"); strings.Contains(log, "SLURM_TASK_PID") {
		t.Errorf("the log complains: %s", log)
	}
}

func TestTasksAreFreeAfterTheirStart(t *testing.T) {
	s := launch(t, normal, shell("grep TracerPid /proc/self/status; echo ready; exec sleep 1000"))
	s.start()
	s.ready()
	if out := s.file("out.0"); !strings.Contains(out, "TracerPid:\t0\n") {
		t.Errorf("the task is traced: %s", out)
	}
	if _, err := s.Terminate(bound(t), 0, ""); err != nil {
		t.Fatal(err)
	}
	s.phase(supervisorv1.Phase_PHASE_ENDED)
}

func TestProgramsWithRightsOfTheirOwnKeepThem(t *testing.T) {
	// The kernel would take the rights away at exec from a program that is stopped there; such a one runs without the variable.
	b, err := os.ReadFile("/usr/bin/env")
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "env")
	if err := os.WriteFile(program, b, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(program, 0o755|os.ModeSetuid); err != nil {
		t.Fatal(err)
	}
	plan := shell("")
	plan.Tasks[0].Args = []string{program}
	s := launch(t, normal, plan)
	s.start()
	wantExit(t, s.ended(), 0, "0:0")
	if out := s.file("out.0"); strings.Contains(out, "TASK_PID") || !strings.Contains(out, "SLURMD_NODENAME=n1") {
		t.Errorf("environment: %s", out)
	}
}
