package supervise_test

import (
	"fmt"
	"strings"
	"testing"

	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
)

// ask is a shell function that speaks PMI-1.
const ask = `ask() { echo "$1" >&$PMI_FD; read -r answer <&$PMI_FD; }
ask "cmd=init pmi_version=1 pmi_subversion=1"
`

// managed launches the supervisors of a step that has the given tasks on each of its nodes, and starts them.
func managed(t *testing.T, nodes ...[]string) []*step {
	t.Helper()
	var steps []*step
	size, rank, root := 0, uint32(0), ""
	for _, scripts := range nodes {
		size += len(scripts)
	}
	for i, scripts := range nodes {
		plan := shell(scripts...)
		for _, task := range plan.GetTasks() {
			task.Rank = rank
			task.Env[1] = fmt.Sprintf("SLURMD_NODENAME=n%d", i+1)
			rank++
		}
		plan.ProcessManager = &supervisorv1.ProcessManager{
			Size: uint32(size), Node: uint32(i), Nodes: uint32(len(nodes)), NodeList: fmt.Sprintf("n[1-%d]", len(nodes)),
			Key: []byte("the key of a step in a test"), Listen: "127.0.0.1",
		}
		s := launch(t, normal, plan)
		state := s.phase(supervisorv1.Phase_PHASE_PREPARED)
		if listens := state.GetPmiPort() != 0; listens != (i == 0 && len(nodes) > 1) {
			t.Errorf("node %d serves others: %t", i, listens)
		}
		if i == 0 {
			root = fmt.Sprintf("127.0.0.1:%d", state.GetPmiPort())
		}
		steps = append(steps, s)
	}
	for _, s := range steps {
		if _, err := s.StartMPI(bound(t), nil, root); err != nil {
			t.Fatal(err)
		}
	}
	return steps
}

func TestTasksOfSeveralNodesExchangeTheirAddresses(t *testing.T) {
	script := ask + `ask "cmd=put kvsname=kvs_$PMI_JOBID key=k$PMI_RANK value=v$PMI_RANK"; ask cmd=barrier_in
ask "cmd=get kvsname=kvs_$PMI_JOBID key=k$((PMI_SIZE-1-PMI_RANK))"; echo "$PMI_RANK of $PMI_SIZE in $PMI_JOBID: $answer"
ask cmd=barrier_in; ask cmd=finalize`
	for _, shape := range [][]int{{3}, {1, 2}, {1, 1, 1}} {
		var nodes [][]string
		for _, n := range shape {
			nodes = append(nodes, make([]string, n))
			for i := range n {
				nodes[len(nodes)-1][i] = script
			}
		}
		rank := 0
		for i, s := range managed(t, nodes...) {
			state := s.ended()
			for task := range shape[i] {
				wantExit(t, state, task, "0:0")
				want := fmt.Sprintf("%d of 3 in 17.0: cmd=get_result rc=0 msg=success value=v%d\n", rank, 2-rank)
				if got := s.file(fmt.Sprintf("out.%d", rank)); got != want {
					t.Errorf("nodes of %v tasks: rank %d says %q, want %q", shape, rank, got, want)
				}
				rank++
			}
		}
	}
}

func TestATaskThatAbortsEndsTheTasksOfAllNodes(t *testing.T) {
	wait := ask + "ask cmd=barrier_in; exec sleep 600"
	for _, aborting := range []string{"exec sleep 600", "exit 7"} { // it waits to be ended, or leaves as libraries do
		nodes := [][]string{{wait}, {wait, ask + "ask cmd=barrier_in; echo cmd=abort exitcode=7 >&$PMI_FD; " + aborting}, {wait}}
		for i, s := range managed(t, nodes...) {
			state := s.ended()
			if !strings.Contains(state.GetSentence(), "Task 2 aborted the step with exit code 7.") {
				t.Errorf("node %d: %q", i, state.GetSentence())
			}
			wantExit(t, state, 0, "0:15")
			said := ""
			for rank := i + i/2; rank <= i+min(i, 1); rank++ {
				said += s.file(fmt.Sprintf("err.%d", rank))
			}
			if strings.Contains(said, "slurmstepd-n2: error: task 2 aborted") != (i == 1) {
				t.Errorf("node %d says %q", i, said)
			}
			if i == 1 {
				wantExit(t, state, 1, "7:0")
			}
		}
	}
}

func TestATaskThatEndsWhileOthersWaitForItEndsTheStep(t *testing.T) {
	wait := ask + "ask cmd=barrier_in; ask cmd=barrier_in; exit 3"
	for i, s := range managed(t, []string{wait, ask + "ask cmd=barrier_in; exit 0"}, []string{wait}) {
		state := s.ended()
		if !strings.Contains(state.GetSentence(), "ask 1 ") || !strings.Contains(state.GetSentence(), "wait for it at a barrier") {
			t.Errorf("node %d: %q", i, state.GetSentence())
		}
		wantExit(t, state, 0, "0:15")
	}
}

func TestAStepWithAProcessManagerMayEndBeforeItsStart(t *testing.T) {
	plan := shell("true")
	plan.ProcessManager = &supervisorv1.ProcessManager{Size: 2, Nodes: 2, NodeList: "n[1-2]", Key: make([]byte, 32), Listen: "127.0.0.1"}
	s := launch(t, normal, plan)
	s.phase(supervisorv1.Phase_PHASE_PREPARED)
	if _, err := s.Terminate(bound(t), 0, ""); err != nil {
		t.Fatal(err)
	}
	s.ended()
}

func TestAStartThatDoesNotSayWhereTheFirstNodeIsEndsTheStep(t *testing.T) {
	plan := shell(ask + "ask cmd=barrier_in")
	plan.ProcessManager = &supervisorv1.ProcessManager{Size: 2, Node: 1, Nodes: 2, NodeList: "n[1-2]", Key: make([]byte, 32)}
	s := launch(t, normal, plan)
	s.phase(supervisorv1.Phase_PHASE_PREPARED)
	s.start()
	if state := s.ended(); !strings.Contains(state.GetSentence(), "was not told where node n1 serves them") {
		t.Errorf("%q", state.GetSentence())
	}
}

func TestTasksHaveNothingOfTheProcessManagerWithoutOne(t *testing.T) {
	s := launch(t, normal, shell(`env | grep ^PMI_; ls /proc/self/fd | grep -c .`))
	s.start()
	s.ended()
	if got := strings.TrimSpace(s.file("out.0")); got != "4" { // three, and the directory
		t.Errorf("the task has %q", got)
	}
}
