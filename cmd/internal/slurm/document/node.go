package document

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// Count counts the numbers of a folded index list ("0-7,16").
func Count(list string) int {
	n := 0
	for part := range strings.SplitSeq(list, ",") {
		from, to, ranged := strings.Cut(part, "-")
		low, err := strconv.Atoi(from)
		if err != nil {
			continue
		}
		high := low
		if ranged {
			if high, err = strconv.Atoi(to); err != nil {
				continue
			}
		}
		n += high - low + 1
	}
	return n
}

// Gres writes the GPUs of a share as "gpu:h100:2(IDX:0-1)".
func Gres(share *apiv1.NodeShare) string {
	n := Count(share.GetGpus())
	if n == 0 {
		return ""
	}
	kind := "gpu"
	if share.GetGpuType() != "" {
		kind += ":" + share.GetGpuType()
	}
	return fmt.Sprintf("%s:%d(IDX:%s)", kind, n, share.GetGpus())
}

// Partition writes a partition with the number of its nodes; nodes are its members if they are known.
func Partition(p *apiv1.Partition, members int, nodes []*apiv1.Node) Object {
	limit := Infinite()
	if s := p.GetMaxTimeS(); s != 0 && s != 4294967295 {
		limit = Number(s / 60)
	}
	usual := Unset()
	if s := p.GetDefaultTimeS(); s != 0 && s != 4294967295 {
		usual = Number(s / 60)
	}
	most := Infinite()
	if n := p.GetMaxNodes(); n > 0 {
		most = Number(n)
	}
	state, cpus := "UP", uint32(0)
	if p.GetDown() {
		state = "DOWN"
	}
	for _, n := range nodes {
		cpus += n.GetSpec().GetCpus()
	}
	return Object{
		{"name", p.GetName()},
		{"nodes", Object{{"configured", p.GetNodes()}, {"total", members}}},
		{"cpus", Object{{"total", cpus}}},
		{"defaults", Object{{"time", usual}, {"memory_per_cpu", p.GetDefaultMemoryPerCpuMb()}}},
		{"maximums", Object{{"nodes", most}, {"time", limit}}},
		{"minimums", Object{{"nodes", 0}}},
		{"partition", Object{{"state", List(state)}}},
		{"priority", Object{{"job_factor", 1}, {"tier", record.PriorityTier(p)}}},
		{"exclusive", p.GetExclusive()},
	}
}
