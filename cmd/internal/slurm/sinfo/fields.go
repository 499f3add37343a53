package sinfo

import (
	"fmt"
	"os/user"
	"strconv"
	"strings"

	"github.com/muster-hpc/muster/cmd/internal/slurm/format"
	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

type field = format.Field[*group]

func constant(text string) func(*group) string { return func(*group) string { return text } }

// first writes something of the first node of a row.
func first(f func(*apiv1.Node) string) func(*group) string {
	return func(g *group) string {
		if len(g.nodes) == 0 {
			return ""
		}
		return f(g.nodes[0])
	}
}

func measured(f func(*apiv1.NodeSpec) uint32) func(*group) string {
	return func(g *group) string {
		return measure(g, func(n *apiv1.Node) uint64 { return uint64(f(n.GetSpec())) })
	}
}

func memory(g *group) string {
	return measure(g, func(n *apiv1.Node) uint64 { return n.GetSpec().GetMemoryMb() })
}

func cpuShares(g *group) record.Shares {
	var s record.Shares
	for _, n := range g.nodes {
		s = s.Plus(record.CPUShares(n))
	}
	return s
}

func nodeShares(g *group) record.Shares {
	var s record.Shares
	for _, n := range g.nodes {
		s = s.Plus(record.NodeShares(record.StateOfNode(n, false)))
	}
	return s
}

func partitionStar(g *group) string {
	if g.partition.GetIsDefault() {
		return g.partition.GetName() + "*"
	}
	return g.partition.GetName()
}

func upDown(g *group) string {
	if g.partition.GetDown() {
		return "down"
	}
	return "up"
}

func maxTime(g *group) string {
	if s := g.partition.GetMaxTimeS(); s != 0 && s != value.Unlimited {
		return value.Elapsed(int64(s))
	}
	return "infinite"
}

func defaultTime(g *group) string {
	if s := g.partition.GetDefaultTimeS(); s != 0 && s != value.Unlimited {
		return value.Elapsed(int64(s))
	}
	return "n/a"
}

func jobSize(g *group) string {
	switch n := g.partition.GetMaxNodes(); n {
	case 0:
		return "1-infinite"
	case 1:
		return "1"
	default:
		return fmt.Sprintf("1-%d", n)
	}
}

func oversubscribe(g *group) string {
	if g.partition.GetExclusive() {
		return "EXCLUSIVE"
	}
	return "NO"
}

func stateText(of func(record.NodeState) string) func(*group) string {
	return func(g *group) string {
		if len(g.nodes) == 0 {
			return "n/a"
		}
		return of(g.state)
	}
}

func reason(n *apiv1.Node) string {
	if n.GetReason() == "" {
		return "none"
	}
	return n.GetReason()
}

func reasonUser(n *apiv1.Node) string {
	if n.GetReason() == "" || n.GetReasonBy() == "" {
		return "Unknown"
	}
	return n.GetReasonBy()
}

func reasonUserLong(n *apiv1.Node) string {
	name := reasonUser(n)
	if u, err := user.Lookup(name); err == nil {
		return name + "(" + u.Uid + ")"
	}
	return name
}

func reasonTime(n *apiv1.Node) string {
	if n.GetReason() == "" {
		return "Unknown"
	}
	return value.Stamp(record.At(n.GetReasonTime()), "Unknown")
}

func features(n *apiv1.Node) string { return value.Null(strings.Join(n.GetSpec().GetFeatures(), ",")) }

func coreShape(g *group) string {
	return sockets(g) + ":" + cores(g) + ":" + threads(g)
}

func hostName(n *apiv1.Node) string { return n.GetSpec().GetName() }

func address(n *apiv1.Node) string {
	if a := n.GetSpec().GetTaskAddress(); a != "" {
		return a
	}
	host, _, _ := strings.Cut(n.GetSpec().GetAgentAddress(), ":")
	return host
}

var (
	sockets = measured((*apiv1.NodeSpec).GetSockets)
	cores   = measured((*apiv1.NodeSpec).GetCoresPerSocket)
	threads = measured((*apiv1.NodeSpec).GetThreadsPerCore)
)

// letters are the fields of -o.
var letters = map[byte]field{
	'a': {Header: "AVAIL", Value: upDown},
	'A': {Header: "NODES(A/I)", Value: func(g *group) string { s := nodeShares(g); return fmt.Sprintf("%d/%d", s.Allocated, s.Idle) }},
	'b': {Header: "ACTIVE_FEATURES", Value: first(features)},
	'B': {Header: "MAX_CPUS_PER_NODE", Value: constant("UNLIMITED")},
	'c': {Header: "CPUS", Value: measured((*apiv1.NodeSpec).GetCpus)},
	'C': {Header: "CPUS(A/I/O/T)", Value: func(g *group) string { return cpuShares(g).String() }},
	'd': {Header: "TMP_DISK", Value: constant("0")},
	'D': {Header: "NODES", Value: func(g *group) string { return strconv.Itoa(len(g.nodes)) }},
	'e': {Header: "FREE_MEM", Value: constant("N/A")},
	'E': {Header: "REASON", Value: first(reason)},
	'f': {Header: "AVAIL_FEATURES", Value: first(features)},
	'F': {Header: "NODES(A/I/O/T)", Value: func(g *group) string { return nodeShares(g).String() }},
	'g': {Header: "GROUPS", Value: constant("all")},
	'G': {Header: "GRES", Value: first(func(n *apiv1.Node) string { return value.Null(record.Gres(n)) })},
	'h': {Header: "OVERSUBSCRIBE", Value: oversubscribe},
	'H': {Header: "TIMESTAMP", Value: first(reasonTime)},
	'i': {Header: "RESERVATION", Value: constant("")},
	'I': {Header: "PRIO_JOB_FACTOR", Value: constant("1")},
	'l': {Header: "TIMELIMIT", Value: maxTime},
	'L': {Header: "DEFAULTTIME", Value: defaultTime},
	'm': {Header: "MEMORY", Value: memory},
	'M': {Header: "PREEMPT_MODE", Value: constant("OFF")},
	'n': {Header: "HOSTNAMES", Value: first(hostName)},
	'N': {Header: "NODELIST", Value: func(g *group) string { return record.NodeNames(g.nodes) }},
	'o': {Header: "NODE_ADDR", Value: first(address)},
	'O': {Header: "CPU_LOAD", Value: constant("N/A")},
	'p': {Header: "PRIO_TIER", Value: func(g *group) string { return strconv.Itoa(int(record.PriorityTier(g.partition))) }},
	'P': {Header: "PARTITION", Value: partitionStar},
	'r': {Header: "ROOT", Value: constant("no")},
	'R': {Header: "PARTITION", Value: func(g *group) string { return g.partition.GetName() }},
	's': {Header: "JOB_SIZE", Value: jobSize},
	'S': {Header: "ALLOCNODES", Value: constant("all")},
	't': {Header: "STATE", Value: stateText(record.NodeState.Short)},
	'T': {Header: "STATE", Value: stateText(record.NodeState.Long)},
	'u': {Header: "USER", Value: first(reasonUser)},
	'U': {Header: "USER", Value: first(reasonUserLong)},
	'v': {Header: "VERSION", Value: first(func(n *apiv1.Node) string { return n.GetSpec().GetAgentVersion() })},
	'V': {Header: "CLUSTER", Value: func(g *group) string { return g.cluster }},
	'w': {Header: "WEIGHT", Value: constant("1")},
	'X': {Header: "SOCKETS", Value: sockets},
	'Y': {Header: "CORES", Value: cores},
	'z': {Header: "S:C:T", Value: coreShape},
	'Z': {Header: "THREADS", Value: threads},
}

// roles of the letters; those that are not here count over the nodes of a row.
var roles = map[byte]role{
	'a': ofPart, 'B': ofPart, 'g': ofPart, 'h': ofPart, 'I': ofPart, 'l': ofPart, 'L': ofPart, 'M': ofPart, 'p': ofPart, 'P': ofPart,
	'r': ofPart, 'R': ofPart, 's': ofPart, 'S': ofPart,
	'b': tells, 'E': tells, 'f': tells, 'G': tells, 'H': tells, 'n': tells, 'o': tells, 't': tells, 'T': tells, 'u': tells, 'U': tells, 'v': tells,
	'c': measures, 'd': measures, 'e': measures, 'm': measures, 'O': measures, 'w': measures, 'X': measures, 'Y': measures, 'z': measures, 'Z': measures,
}

// byName are the fields of -O that show what a letter shows.
var byName = map[string]byte{
	"allocnodes": 'S', "available": 'a', "cluster": 'V', "cores": 'Y', "cpus": 'c', "cpusload": 'O', "cpusstate": 'C', "defaulttime": 'L',
	"disk": 'd', "features": 'f', "featuresact": 'b', "freemem": 'e', "gres": 'G', "groups": 'g', "maxcpuspernode": 'B', "memory": 'm',
	"nodeai": 'A', "nodeaiot": 'F', "nodeaddr": 'o', "nodehost": 'n', "nodelist": 'N', "nodes": 'D', "oversubscribe": 'h', "share": 'h',
	"partition": 'P', "partitionname": 'R', "preemptmode": 'M', "priorityjobfactor": 'I', "prioritytier": 'p', "reason": 'E',
	"reservation": 'i', "root": 'r', "size": 's', "socketcorethread": 'z', "sockets": 'X', "statecompact": 't', "statelong": 'T',
	"threads": 'Z', "time": 'l', "timestamp": 'H', "user": 'u', "userlong": 'U', "version": 'v', "weight": 'w',
}

// ownNames are the fields of -O that have no letter; all of them tell nodes apart.
var ownNames = map[string]field{
	"allocmem": {Header: "ALLOCMEM", Value: first(func(n *apiv1.Node) string { return strconv.FormatUint(n.GetMemoryAllocatedMb(), 10) })},
	"comment":  {Header: "COMMENT", Value: constant("(null)")},
	"extra":    {Header: "EXTRA", Value: constant("(null)")},
	"gresused": {Header: "GRES_USED", Value: first(func(n *apiv1.Node) string { return value.Null(record.GresUsed(n)) })},
	"port": {Header: "PORT", Value: first(func(n *apiv1.Node) string {
		_, port, _ := strings.Cut(n.GetSpec().GetAgentAddress(), ":")
		return port
	})},
	"statecomplete": {Header: "STATECOMPLETE", Value: stateText(func(s record.NodeState) string { return strings.ToLower(strings.Join(s.Words(), "+")) })},
}
