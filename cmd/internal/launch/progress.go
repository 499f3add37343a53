package launch

import (
	"fmt"
	"sync"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// Progress remembers which tasks of a step run and how others have ended. A nil *Progress remembers nothing. The zero value is ready;
// it is safe for concurrent use.
type Progress struct {
	mu    sync.Mutex
	tasks map[uint32]taskState
}

type taskState int

const (
	running taskState = iota + 1
	failed
	exited
)

// began notes that tasks were executed; those that have ended meanwhile stay so.
func (p *Progress) began(ranks []uint32) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, rank := range ranks {
		if p.tasks[rank] == 0 {
			p.put(rank, running)
		}
	}
}

// over notes the ends of tasks.
func (p *Progress) over(exits []*apiv1.TaskExit) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range exits {
		state := exited
		if ExitCode(e) != 0 {
			state = failed
		}
		for i := range max(e.GetCount(), 1) {
			p.put(e.GetFirstRank()+i, state)
		}
	}
}

func (p *Progress) put(rank uint32, state taskState) {
	if p.tasks == nil {
		p.tasks = map[uint32]taskState{}
	}
	p.tasks[rank] = state
}

// Lines says how the tasks of a step are, a line for each state: "StepId=12.0 tasks 0-3: running". total is the number of tasks; those
// that were not executed yet are said to be so.
func (p *Progress) Lines(step string, total uint32) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	ranks := map[taskState][]*apiv1.TaskExit{}
	for rank := range total {
		state := p.tasks[rank]
		ranks[state] = append(ranks[state], &apiv1.TaskExit{FirstRank: rank, Count: 1})
	}
	var lines []string
	for _, s := range []struct {
		state taskState
		text  string
	}{{0, "not started"}, {running, "running"}, {failed, "exited abnormally"}, {exited, "exited"}} {
		if len(ranks[s.state]) == 0 {
			continue
		}
		list, many := foldRanks(ranks[s.state])
		word := "task"
		if many {
			word = "tasks"
		}
		lines = append(lines, fmt.Sprintf("StepId=%s %s %s: %s", step, word, list, s.text))
	}
	return lines
}
