package launch

import (
	"slices"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// onNode is what a step has on one node, in all its parts.
type onNode struct {
	share *apiv1.NodeShare // the first one of the node
	ranks []uint32         // ascending
}

// byNode adds up the shares of each node, in their order; nodes without tasks are left out. Where a share does not say its ranks, they
// follow those of the share before.
func byNode(shares []*apiv1.NodeShare) []onNode {
	var list []onNode
	index := map[string]int{}
	next := uint32(0)
	for _, share := range shares {
		ranks, ok := ranksOf(share)
		if !ok {
			for i := range share.GetTasks() {
				ranks = append(ranks, next+i)
			}
		}
		next += share.GetTasks()
		if len(ranks) == 0 {
			continue
		}
		i, seen := index[share.GetAgentAddress()]
		if !seen {
			index[share.GetAgentAddress()] = len(list)
			list = append(list, onNode{share: share, ranks: ranks})
			continue
		}
		list[i].ranks = append(list[i].ranks, ranks...)
		slices.Sort(list[i].ranks)
	}
	return list
}

// ranksOf reads the ranks of a share, if it says them.
func ranksOf(share *apiv1.NodeShare) ([]uint32, bool) {
	indexes, err := notation.ExpandIndexes(share.GetRanks())
	if err != nil || len(indexes) == 0 {
		return nil, false
	}
	ranks := make([]uint32, len(indexes))
	for i, n := range indexes {
		ranks[i] = uint32(n)
	}
	return ranks, true
}

// within cuts the exits of some ranks, given in ascending order, out of a step's exits.
func within(exits []*apiv1.TaskExit, ranks []uint32) []*apiv1.TaskExit {
	var out []*apiv1.TaskExit
	for begin := 0; begin < len(ranks); {
		end := begin + 1
		for end < len(ranks) && ranks[end] == ranks[end-1]+1 {
			end++
		}
		first, beyond := ranks[begin], ranks[end-1]+1
		for _, e := range exits {
			from, to := max(e.GetFirstRank(), first), min(e.GetFirstRank()+e.GetCount(), beyond)
			if from >= to {
				continue
			}
			out = append(out, &apiv1.TaskExit{
				FirstRank: from, Count: to - from, Code: e.GetCode(), Signal: e.GetSignal(), LaunchError: e.GetLaunchError(),
				OutOfMemory: e.GetOutOfMemory(), EndedBySupervisor: e.GetEndedBySupervisor(),
			})
		}
		begin = end
	}
	return out
}
