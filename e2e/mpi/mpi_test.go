package mpi

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/muster-hpc/muster/e2e/cluster"
)

// sources has the C programs.
const sources = "../../node/run/pmi/testdata"

// compile builds a program into the cluster's directory, or skips the test with the reason.
func compile(t *testing.T, c *cluster.Cluster, compiler, source, program string, flags ...string) string {
	t.Helper()
	path, err := exec.LookPath(compiler)
	if err != nil {
		t.Skipf("there is no %s: install mpich and libmpich-dev, openmpi-bin and libopenmpi-dev, or gcc and libpmi2-0-dev", compiler)
	}
	program = filepath.Join(c.Dir, program)
	out, err := exec.Command(path, append([]string{"-o", program, filepath.Join(sources, source)}, flags...)...).CombinedOutput()
	if err != nil && strings.Contains(string(out), "slurm/pmi2.h") {
		t.Skip("there is no slurm/pmi2.h: install libpmi2-0-dev")
	}
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", compiler, source, err, out)
	}
	return program
}

// ranks are the lines of the ring program, by rank; local is the number of ranks on each rank's node.
func ranks(local ...int) []string {
	var want []string
	size := len(local)
	for rank, n := range local {
		token := rank + 1
		if rank == 0 {
			token = size
		}
		want = append(want, fmt.Sprintf("rank %d of %d: token %d, wrong 0, sum %d, local %d", rank, size, token, size*(size-1)/2, n))
	}
	return want
}

// expect checks the exit code and the lines of ranks, whatever else there is.
func expect(t *testing.T, what string, out cluster.Outcome, text string, want []string) {
	t.Helper()
	var lines []string
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "rank ") {
			lines = append(lines, strings.TrimSuffix(line, "\n"))
		}
	}
	slices.Sort(lines)
	if out.Code != 0 || !slices.Equal(lines, want) {
		t.Errorf("%s: exit %d\n%s\n%s\nwant\n%s", what, out.Code, text, out.Stderr, strings.Join(want, "\n"))
	}
}

func TestMPIProgramsRunOverSeveralNodes(t *testing.T) {
	c := cluster.Up(t, "--nodes", "3")
	t.Run("MPICH under srun", func(t *testing.T) { mpich(t, c) })
	t.Run("a client of PMI-2 under srun", func(t *testing.T) { pmi2(t, c) })
	t.Run("MPI_Abort ends the step on all nodes", func(t *testing.T) { abort(t, c) })
	t.Run("MPICH's launcher in an allocation", func(t *testing.T) { hydra(t, c) })
	t.Run("Open MPI's launcher in an allocation", func(t *testing.T) { openMPI(t, c) })
	t.Run("without a process manager nothing of one is seen", func(t *testing.T) {
		if out := c.Run(c.Dir, "srun", "-N2", "-n2", "sh", "-c", "env | grep PMI_; true"); out.Code != 0 || out.Stdout != "" {
			t.Errorf("%+v", out)
		}
		out := c.Run(c.Dir, "srun", "--mpi=pmi2", "-N2", "-n2", "sh", "-c", "env | grep MUSTER_PMI_SECRET; true")
		if out.Code != 0 || out.Stdout != "" {
			t.Errorf("tasks see their nodes' secret: %+v", out)
		}
	})
}

func mpich(t *testing.T, c *cluster.Cluster) {
	ring := compile(t, c, "mpicc.mpich", "ring.c", "ring")
	out := c.Run(c.Dir, "srun", "--mpi=pmi2", "-N3", "-n6", ring)
	expect(t, "6 ranks on 3 nodes", out, out.Stdout, ranks(2, 2, 2, 2, 2, 2))
	out = c.Run(c.Dir, "srun", "--mpi=pmi2", "-N2", "-n3", "-m", "cyclic", ring)
	expect(t, "3 ranks on 2 nodes in turn", out, out.Stdout, ranks(2, 1, 2))
	out = c.Run(c.Dir, "srun", "--mpi=pmi2", "-N1", "-n2", ring)
	expect(t, "2 ranks on a node", out, out.Stdout, ranks(2, 2))
	// Several steps of a job; those that follow get none of what the earlier had.
	script := c.Script("steps", "#!/bin/sh\n#SBATCH -N2 --ntasks-per-node=1 -o steps.out\nexport SLURM_MPI_TYPE=pmi2\n"+
		fmt.Sprintf("srun %s > one; srun %s > two; srun %s > three; cat one two three\n", ring, ring, ring))
	out = c.Run(c.Dir, "sbatch", "--wait", script)
	text, err := os.ReadFile(filepath.Join(c.Dir, "steps.out"))
	if err != nil {
		t.Fatal(err)
	}
	want := slices.Sorted(slices.Values(slices.Concat(ranks(1, 1), ranks(1, 1), ranks(1, 1))))
	expect(t, "steps", out, string(text), want)
}

func pmi2(t *testing.T, c *cluster.Cluster) {
	program := compile(t, c, "gcc", "kvs.c", "kvs", "-lpmi2")
	out := c.Run(c.Dir, "srun", "--mpi=pmi2", "-N3", "-n4", program)
	if out.Code != 0 || strings.Count(out.Stdout, ": (vector,(0,1,2),(1,2,1)), yes\n") != 4 {
		t.Errorf("%+v", out)
	}
}

func abort(t *testing.T, c *cluster.Cluster) {
	ring := compile(t, c, "mpicc.mpich", "ring.c", "ring")
	out := c.Run(c.Dir, "srun", "--mpi=pmi2", "-N3", "-n6", ring, "abort", "4")
	if out.Code != 143 || !strings.Contains(out.Stderr, "task 4: Exited with exit code 7") ||
		strings.Count(out.Stderr, "task 4 aborted the step with exit code 7\n") != 1 {
		t.Errorf("%+v", out)
	}
	out = c.Run(c.Dir, "srun", "--mpi=pmi2", "-N3", "-n3", ring, "die", "1")
	if out.Code != 143 || !strings.Contains(out.Stderr, "task 1: Exited with exit code 5") || !strings.Contains(out.Stderr, "wait for it at a barrier") {
		t.Errorf("a rank that leaves before MPI_Init: %+v", out)
	}
}

// launched runs a launcher in a job of 3 nodes with 2 tasks each.
func launched(t *testing.T, c *cluster.Cluster, name, command string) {
	t.Helper()
	script := c.Script(name, "#!/bin/sh\n#SBATCH -N3 --ntasks-per-node=2 -o "+name+".out\n"+command+"\n")
	out := c.Run(c.Dir, "sbatch", "--wait", script)
	text, err := os.ReadFile(filepath.Join(c.Dir, name+".out"))
	if err != nil {
		t.Fatal(err)
	}
	expect(t, name, out, string(text), ranks(2, 2, 2, 2, 2, 2))
}

func hydra(t *testing.T, c *cluster.Cluster) {
	ring := compile(t, c, "mpicc.mpich", "ring.c", "ring")
	launched(t, c, "hydra", "exec mpirun.mpich "+ring)
}

func openMPI(t *testing.T, c *cluster.Cluster) {
	ring := compile(t, c, "mpicc.openmpi", "ring.c", "ring-openmpi")
	// The nodes share a machine and its name, so that shared memory of one node's ranks would meet another's.
	launched(t, c, "openmpi", "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1\nexec mpirun.openmpi --mca pml ob1 --mca btl tcp,self "+ring)
}
