package bench

import (
	"os"
	"syscall"
)

// peakOf is the most memory that a process which has ended had resident, in MiB.
func peakOf(state *os.ProcessState) float64 {
	if usage, ok := state.SysUsage().(*syscall.Rusage); ok {
		return float64(usage.Maxrss) / 1024
	}
	return 0
}
