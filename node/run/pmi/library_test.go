package pmi

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

// These tests run real MPI programs, each rank a process that is started as a supervisor does.

// compile builds a C program of testdata, or skips the test with the reason.
func compile(t *testing.T, compiler, source string, flags ...string) string {
	t.Helper()
	path, err := exec.LookPath(compiler)
	if err != nil {
		t.Skipf("there is no %s: install mpich and libmpich-dev (mpicc.mpich), libpmi2-0-dev and gcc", compiler)
	}
	program := filepath.Join(t.TempDir(), strings.TrimSuffix(source, ".c"))
	args := append([]string{"-o", program, filepath.Join("testdata", source)}, flags...)
	if out, err := exec.Command(path, args...).CombinedOutput(); err != nil {
		if strings.Contains(string(out), "slurm/pmi2.h") {
			t.Skip("there is no slurm/pmi2.h: install libpmi2-0-dev")
		}
		t.Fatalf("%s %s: %v\n%s", compiler, source, err, out)
	}
	return program
}

// launch runs one process for each rank and returns the lines that they print, sorted, and how each ended. A failure of the step ends
// all processes.
func launch(t *testing.T, nodes []*node, program string, args ...string) (lines []string, states []*os.ProcessState, failure *Failure) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 6*patience)
	defer cancel()
	var group, watchers sync.WaitGroup
	var mu sync.Mutex
	var out bytes.Buffer
	over := make(chan struct{})
	for _, n := range nodes {
		watchers.Go(func() {
			select {
			case f := <-n.failures:
				mu.Lock()
				if failure == nil || !f.Remote {
					failure = &f
				}
				mu.Unlock()
				cancel()
			case <-over:
			}
		})
		for _, rank := range n.ranks {
			server, file := ends(t)
			cmd := exec.CommandContext(ctx, program, args...)
			var text bytes.Buffer
			cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = &text, &text, []*os.File{file}
			cmd.Env = append(os.Environ(), n.server.Environment(rank, 3)...)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			_ = file.Close()
			n.server.Serve(rank, server)
			group.Go(func() {
				_ = cmd.Wait() // its state says it
				n.server.Left(rank)
				mu.Lock()
				defer mu.Unlock()
				out.Write(text.Bytes())
				states = append(states, cmd.ProcessState)
			})
		}
	}
	group.Wait()
	close(over)
	watchers.Wait()
	lines = strings.Split(strings.TrimSpace(out.String()), "\n")
	slices.Sort(lines)
	return lines, states, failure
}

func TestMPICHRunsOverSeveralNodes(t *testing.T) {
	program := compile(t, "mpicc.mpich", "ring.c")
	for _, shape := range [][]int{{1}, {3}, {2, 2}, {1, 1, 1}} {
		nodes := step(t, DefaultTimes, shape...)
		lines, states, failure := launch(t, nodes, program)
		var want []string
		size, rank := 0, 0
		for _, n := range shape {
			size += n
		}
		for _, n := range shape {
			for range n {
				token := rank + 1
				if rank == 0 {
					token = size
				}
				want = append(want, fmt.Sprintf("rank %d of %d: token %d, wrong 0, sum %d, local %d", rank, size, token, size*(size-1)/2, n))
				rank++
			}
		}
		if failure != nil || !slices.Equal(lines, want) {
			t.Errorf("nodes of %v tasks: %v, they say\n%s\nwant\n%s", shape, failure, strings.Join(lines, "\n"), strings.Join(want, "\n"))
		}
		for _, state := range states {
			if !state.Success() {
				t.Errorf("nodes of %v tasks: a rank ended with %s", shape, state)
			}
		}
	}
}

func TestMPICHAbortsOnAllNodes(t *testing.T) {
	program := compile(t, "mpicc.mpich", "ring.c")
	lines, _, failure := launch(t, step(t, DefaultTimes, 1, 2), program, "abort", "2")
	if failure == nil || failure.Rank != 2 || failure.Code != 7 {
		t.Errorf("%+v\n%s", failure, strings.Join(lines, "\n"))
	}
}

func TestARankThatEndsBeforeMPIInitEndsTheStep(t *testing.T) {
	program := compile(t, "mpicc.mpich", "ring.c")
	lines, _, failure := launch(t, step(t, DefaultTimes, 1, 2), program, "die", "1")
	if failure == nil || !strings.Contains(failure.Sentence, "wait for it at a barrier") || !strings.Contains(failure.Sentence, "task 1 ") {
		t.Errorf("%+v\n%s", failure, strings.Join(lines, "\n"))
	}
}

func TestAnotherPMI2ClientUnderstandsTheServer(t *testing.T) {
	program := compile(t, "gcc", "kvs.c", "-lpmi2")
	nodes := step(t, DefaultTimes, 2, 2)
	lines, states, failure := launch(t, nodes, program)
	var want []string
	for rank := range 4 {
		want = append(want, fmt.Sprintf("rank %d of 4 in 17.0: (vector,(0,2,2)), yes", rank))
	}
	if failure != nil || !slices.Equal(lines, want) {
		t.Errorf("%v, they say\n%s\n%v", failure, strings.Join(lines, "\n"), states)
	}
}
