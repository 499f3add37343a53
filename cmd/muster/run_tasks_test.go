package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// specOf parses flags of submit and run into a specification.
func specOf(t *testing.T, words string) (*apiv1.JobSpec, error) {
	t.Helper()
	var r request
	f := pflag.NewFlagSet("test", pflag.ContinueOnError)
	r.flags(f)
	if err := f.Parse(strings.Fields(words)); err != nil {
		t.Fatal(err)
	}
	return r.spec()
}

func TestFlagsOfTasksReachTheSpecification(t *testing.T) {
	for words, holds := range map[string]func(*apiv1.JobSpec) bool{
		"": func(s *apiv1.JobSpec) bool {
			return s.WarnSignal == nil && len(s.TaskOptions.Rlimits) == 0 && s.TaskOptions.Distribution == ""
		},
		"-m plane=2":         func(s *apiv1.JobSpec) bool { return s.TaskOptions.Distribution == "plane=2" },
		"--cpu-bind v,cores": func(s *apiv1.JobSpec) bool { return s.TaskOptions.CpuBind == "verbose,cores" },
		"--signal B:USR1@90": func(s *apiv1.JobSpec) bool { return s.WarnSignal.BatchOnly && s.WarnSignal.LeadS == 90 },
		"--propagate STACK":  func(s *apiv1.JobSpec) bool { return len(s.TaskOptions.Rlimits) == 1 },
		"--task-prolog /p -k -O": func(s *apiv1.JobSpec) bool {
			return s.TaskOptions.TaskProlog == "/p" && s.NoKill && s.Resources.Overcommit
		},
		"--gres gpu:a100:1,ib:2": func(s *apiv1.JobSpec) bool { return len(s.Resources.Gres) == 2 },
		"--gpus-per-task 2 -n 2": func(s *apiv1.JobSpec) bool { return s.TaskOptions.BindGpusPerTask },
		"--gpu-bind single:1 --gpus-per-task 2 -n 2": func(s *apiv1.JobSpec) bool {
			return s.TaskOptions.GpuBind == "single:1" && !s.TaskOptions.BindGpusPerTask
		},
		"--cpus-per-gpu 3 --gpus 2 --tasks-per-gpu 2": func(s *apiv1.JobSpec) bool { return s.Resources.CpusPerGpu == 3 && s.Resources.NtasksPerGpu == 2 },
	} {
		if spec, err := specOf(t, words); err != nil || !holds(spec) {
			t.Errorf("%s: %v, %v", words, spec, err)
		}
	}
	for _, words := range []string{"-m diagonal", "-m arbitrary", "--cpu-bind bogus", "--signal X@1", "--propagate BOGUS", "--gres gpu:1,gpu:a100:1", "--gpu-bind cores"} {
		if spec, err := specOf(t, words); err == nil {
			t.Errorf("%s is accepted: %v", words, spec)
		}
	}
}

func TestTheFirstBadExitEndsGPUJobsOnSeveralNodes(t *testing.T) {
	for words, want := range map[string]bool{
		"-N2 --gpus-per-node 1": true, "-N2 --gres gpu:a:1,gpu:b:1": true, "-N1 --gpus-per-node 8": false, "-N2": false, "-N2 --gres ib:1": false,
	} {
		spec, err := specOf(t, words)
		if err != nil {
			t.Fatal(err)
		}
		if killByDefault(spec); spec.TaskOptions.KillOnBadExit != want {
			t.Errorf("%s: %v", words, !want)
		}
	}
}

func TestProgramsOfRanksComeFromAFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ranks.conf")
	if err := os.WriteFile(path, []byte("0 first\n* others %t\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	spec, err := specOf(t, "-N2 --tasks-per-node 2")
	if err != nil {
		t.Fatal(err)
	}
	if err := programs(spec, path); err != nil || len(spec.TaskOptions.Programs) != 2 || spec.TaskOptions.Programs[1].Ranks != "1-3" {
		t.Errorf("%v, %v", spec.TaskOptions.Programs, err)
	}
	open, err := specOf(t, "-N1-2")
	if err != nil {
		t.Fatal(err)
	}
	if err := programs(open, path); err == nil || !strings.Contains(err.Error(), "needs --tasks") {
		t.Error(err)
	}
	if err := programs(spec, path+".missing"); err == nil {
		t.Error("a missing file is accepted")
	}
}
