package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/muster-hpc/muster/cmd/internal/config"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
	"github.com/muster-hpc/muster/rpc/client"
)

// nodesRequest is a change of nodes.
type nodesRequest = apiv1.UpdateNodesRequest

func (a *app) nodesCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "nodes [NODE…]", Short: "List nodes, or drain and resume them",
		RunE: func(c *cobra.Command, args []string) error {
			names, err := parseNames(args)
			if err != nil {
				return err
			}
			return a.listNodes(c.Context(), names)
		},
	}
	var reason string
	change := func(use, short, verb string, needsReason bool, set func(*nodesRequest)) *cobra.Command {
		sub := &cobra.Command{
			Use: use + " NODE…", Short: short, Args: atLeastOne("node names"),
			RunE: func(c *cobra.Command, args []string) error {
				names, err := parseNames(args)
				if err != nil {
					return err
				}
				if needsReason && reason == "" {
					return usagef("nodes %s needs --reason: whoever finds the node like that will ask why", use)
				}
				in := &apiv1.UpdateNodesRequest{RequestId: client.NewRequestID(), Names: names, Reason: reason}
				set(in)
				return a.updateNodes(c.Context(), in, verb)
			},
		}
		if needsReason {
			sub.Flags().StringVarP(&reason, "reason", "r", "", "why; one `sentence`")
		}
		return sub
	}
	c.AddCommand(
		&cobra.Command{
			Use: "show NODE", Short: "Show a node with its devices and what checks found", Args: exactlyOne("a node name"),
			RunE: func(c *cobra.Command, args []string) error { return a.showNode(c.Context(), args[0]) },
		},
		change("drain", "Place no new work on nodes; running work goes on", "Drained", true, func(r *nodesRequest) {
			r.Change = &apiv1.UpdateNodesRequest_Drain{Drain: true}
		}),
		change("resume", "Place work on nodes again", "Resumed", false, func(r *nodesRequest) {
			r.Change = &apiv1.UpdateNodesRequest_Resume{Resume: true}
		}),
		change("down", "Declare nodes dead: their work ends now, and waits until it is accounted for", "Declared dead:", true, func(r *nodesRequest) {
			r.Change = &apiv1.UpdateNodesRequest_Down{Down: true}
		}),
		change("fenced", "Declare nodes dead and powered off: their work may start elsewhere at once", "Declared powered off:", true, func(r *nodesRequest) {
			r.Change = &apiv1.UpdateNodesRequest_Fenced{Fenced: true}
		}),
	)
	return c
}

func (a *app) listNodes(ctx context.Context, names []string) error {
	c, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	answer, err := c.Cluster().ListNodes(ctx, &apiv1.ListNodesRequest{Names: names})
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(answer)
	}
	t := table{
		header: []string{"NODE", "STATE", "CPUS", "MEMORY", "GPUS", "PARTITIONS", "JOBS", "REASON"},
		right:  map[int]bool{2: true, 3: true, 4: true},
		paint:  states(1),
	}
	for _, n := range answer.Nodes {
		t.add(nodeRow(n, answer)...)
	}
	t.write(a.out, a.colour)
	return nil
}

// stateIn is the state of a node in an answer, with what checks found in a word, and how long the leader has not heard of it.
func stateIn(n *apiv1.Node, answer *apiv1.ListNodesResponse) string {
	i := slices.IndexFunc(answer.Silent, func(s *apiv1.SilentNode) bool { return s.Node == n.Number })
	about := marks(n)
	if i >= 0 {
		about = append(about, fmt.Sprintf("not responding, last heard %d s ago", answer.Silent[i].SilentMs/1000))
	}
	if len(about) == 0 {
		return nodeState(n)
	}
	return nodeState(n) + " (" + strings.Join(about, "; ") + ")"
}

func nodeRow(n *apiv1.Node, answer *apiv1.ListNodesResponse) []string {
	var jobs []string
	for _, owner := range n.Owners {
		jobs = append(jobs, strconv.Itoa(int(owner>>32)))
	}
	return []string{
		n.Spec.Name, stateIn(n, answer), fmt.Sprintf("%d/%d", n.CpusAllocated, n.Spec.Cpus),
		config.FormatMemory(n.MemoryAllocatedMb) + "/" + config.FormatMemory(n.Spec.MemoryMb),
		gpuCounts(n), partitionsOf(n.Spec.Name, answer.Partitions), strings.Join(jobs, ","), nodeReason(n),
	}
}

// partitionsOf names the partitions that contain a node.
func partitionsOf(name string, partitions []*apiv1.Partition) string {
	var in []string
	for _, p := range partitions {
		members, err := notation.Expand(p.Nodes)
		contains := strings.EqualFold(p.Nodes, "ALL")
		for _, m := range members {
			contains = contains || err == nil && m == name
		}
		if contains {
			in = append(in, p.Name)
		}
	}
	return strings.Join(in, ",")
}

func (a *app) updateNodes(ctx context.Context, in *apiv1.UpdateNodesRequest, verb string) error {
	c, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	answer, err := c.Cluster().UpdateNodes(ctx, in)
	if err != nil {
		return err
	}
	if a.json {
		if err := a.printJSON(answer); err != nil {
			return err
		}
	} else if len(answer.Refusals) == 0 {
		fmt.Fprintf(a.out, "%s %s\n", verb, notation.Fold(in.Names))
	}
	return a.refused(answer.Refusals)
}
