package sinfo

import (
	"strings"

	"github.com/muster-hpc/muster/cmd/internal/slurm/document"
	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// object shortens the rows below.
type object = document.Object

// span writes the smallest and the largest of a number.
func span(nodes []*apiv1.Node, of func(*apiv1.NodeSpec) uint64) object {
	low, high := uint64(0), uint64(0)
	for i, n := range nodes {
		v := of(n.GetSpec())
		if i == 0 || v < low {
			low = v
		}
		high = max(high, v)
	}
	return object{{Key: "minimum", Value: low}, {Key: "maximum", Value: high}}
}

func spanned(nodes []*apiv1.Node, of func(*apiv1.NodeSpec) uint32) object {
	return span(nodes, func(s *apiv1.NodeSpec) uint64 { return uint64(of(s)) })
}

// writeJSON prints rows in the dialect of 24.11.
func writeJSON(s *session.Session, groups []*group, cluster string) int {
	rows := make([]object, 0, len(groups))
	for _, g := range groups {
		rows = append(rows, row(g))
	}
	return document.Print(s, cluster, object{{Key: "sinfo", Value: rows}})
}

func row(g *group) object {
	hosts, addresses := document.List(), document.List()
	allocated := uint64(0)
	for _, n := range g.nodes {
		hosts = append(hosts, hostName(n))
		addresses = append(addresses, address(n))
		allocated += n.GetMemoryAllocatedMb()
	}
	cpus, nodes := cpuShares(g), nodeShares(g)
	memory := append(span(g.nodes, (*apiv1.NodeSpec).GetMemoryMb), object{
		{Key: "free", Value: object{{Key: "minimum", Value: document.Unset()}, {Key: "maximum", Value: document.Unset()}}},
		{Key: "allocated", Value: allocated},
	}...)
	states := document.List()
	if len(g.nodes) > 0 {
		states = g.state.Words()
	}
	feature, gres, used, why := "", "", "", object{{Key: "description", Value: ""}, {Key: "time", Value: document.Unset()}, {Key: "user", Value: ""}}
	if len(g.nodes) > 0 {
		n := g.nodes[0]
		feature, gres, used = strings.Join(n.GetSpec().GetFeatures(), ","), record.Gres(n), record.GresUsed(n)
		if n.GetReason() != "" {
			why = object{{Key: "description", Value: n.GetReason()}, {Key: "time", Value: document.Moment(record.At(n.GetReasonTime()))}, {Key: "user", Value: n.GetReasonBy()}}
		}
	}
	return object{
		{Key: "node", Value: object{{Key: "state", Value: states}}},
		{Key: "nodes", Value: object{
			{Key: "allocated", Value: nodes.Allocated}, {Key: "idle", Value: nodes.Idle}, {Key: "other", Value: nodes.Other},
			{Key: "total", Value: nodes.Total}, {Key: "hostnames", Value: hosts}, {Key: "addresses", Value: addresses}, {Key: "nodes", Value: hosts},
		}},
		{Key: "cpus", Value: append(spanned(g.nodes, (*apiv1.NodeSpec).GetCpus), object{
			{Key: "allocated", Value: cpus.Allocated}, {Key: "idle", Value: cpus.Idle}, {Key: "other", Value: cpus.Other}, {Key: "total", Value: cpus.Total},
		}...)},
		{Key: "sockets", Value: spanned(g.nodes, (*apiv1.NodeSpec).GetSockets)},
		{Key: "cores", Value: spanned(g.nodes, (*apiv1.NodeSpec).GetCoresPerSocket)},
		{Key: "threads", Value: spanned(g.nodes, (*apiv1.NodeSpec).GetThreadsPerCore)},
		{Key: "disk", Value: object{{Key: "minimum", Value: 0}, {Key: "maximum", Value: 0}}},
		{Key: "memory", Value: memory},
		{Key: "weight", Value: object{{Key: "minimum", Value: 1}, {Key: "maximum", Value: 1}}},
		{Key: "features", Value: object{{Key: "total", Value: feature}, {Key: "active", Value: feature}}},
		{Key: "gres", Value: object{{Key: "total", Value: gres}, {Key: "used", Value: used}}},
		{Key: "cluster", Value: g.cluster},
		{Key: "comment", Value: ""},
		{Key: "extra", Value: ""},
		{Key: "reason", Value: why},
		{Key: "reservation", Value: ""},
		{Key: "partition", Value: document.Partition(g.partition, g.members, nil)},
	}
}
