package document

import (
	"fmt"
	"strconv"
	"strings"

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
