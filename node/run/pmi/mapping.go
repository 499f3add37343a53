package pmi

import "fmt"

// Mapping says where the ranks of a step are in the form of PMI_process_mapping: "(vector,(FIRST,NODES,TASKS),…)", read
// from left to right: TASKS ranks on each of NODES nodes from FIRST on. nodeOf is the node's index for each rank. It is
// empty if there are no ranks, or if it would be longer than a PMI-1 value: libraries then find out by host names.
func Mapping(nodeOf []uint32) string {
	type run struct{ node, tasks uint32 }
	var runs []run
	for _, node := range nodeOf {
		if n := len(runs); n > 0 && runs[n-1].node == node {
			runs[n-1].tasks++
			continue
		}
		runs = append(runs, run{node, 1})
	}
	if len(runs) == 0 {
		return ""
	}
	text := []byte("(vector")
	for i := 0; i < len(runs); {
		n := 1
		for i+n < len(runs) && runs[i+n].node == runs[i].node+uint32(n) && runs[i+n].tasks == runs[i].tasks {
			n++
		}
		text = fmt.Appendf(text, ",(%d,%d,%d)", runs[i].node, n, runs[i].tasks)
		i += n
	}
	if text = append(text, ')'); len(text) > maxValue1 {
		return ""
	}
	return string(text)
}
