package supervise

import (
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// limitNames are the names of the resource limits that tasks take over.
var limitNames = map[uint32]string{
	unix.RLIMIT_AS: "AS", unix.RLIMIT_CORE: "CORE", unix.RLIMIT_CPU: "CPU", unix.RLIMIT_DATA: "DATA", unix.RLIMIT_FSIZE: "FSIZE",
	unix.RLIMIT_LOCKS: "LOCKS", unix.RLIMIT_MEMLOCK: "MEMLOCK", unix.RLIMIT_MSGQUEUE: "MSGQUEUE", unix.RLIMIT_NICE: "NICE",
	unix.RLIMIT_NOFILE: "NOFILE", unix.RLIMIT_NPROC: "NPROC", unix.RLIMIT_RSS: "RSS", unix.RLIMIT_RTPRIO: "RTPRIO",
	unix.RLIMIT_RTTIME: "RTTIME", unix.RLIMIT_SIGPENDING: "SIGPENDING", unix.RLIMIT_STACK: "STACK",
}

// cutLimits says which of the plan's soft limits the node's hard limits cut; empty if none.
func (s *supervisor) cutLimits() string {
	var cut []string
	for _, l := range s.plan.GetResourceLimits() {
		var r unix.Rlimit
		if err := unix.Getrlimit(int(l.GetResource()), &r); err != nil || l.GetSoft() <= r.Max {
			continue
		}
		name := limitNames[l.GetResource()]
		if name == "" {
			name = strconv.FormatUint(uint64(l.GetResource()), 10)
		}
		cut = append(cut, fmt.Sprintf("%s %s instead of %s", name, amount(r.Max), amount(l.GetSoft())))
	}
	if len(cut) == 0 {
		return ""
	}
	return "the node's hard limits are lower than the limits of the submitting process; tasks have " + strings.Join(cut, ", ")
}

func amount(n uint64) string {
	if n == unix.RLIM_INFINITY {
		return "unlimited"
	}
	return strconv.FormatUint(n, 10)
}
