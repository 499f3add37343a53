package session

import (
	"os"
	"strconv"
	"strings"
	"syscall"
)

// umask reads the mask from the kernel without changing it where it can: changing it back and forth would race with
// other threads that create files.
func umask() uint32 {
	if status, err := os.ReadFile("/proc/self/status"); err == nil {
		for line := range strings.SplitSeq(string(status), "\n") {
			if value, ok := strings.CutPrefix(line, "Umask:"); ok {
				if mask, err := strconv.ParseUint(strings.TrimSpace(value), 8, 32); err == nil {
					return uint32(mask)
				}
			}
		}
	}
	mask := syscall.Umask(0o022)
	syscall.Umask(mask)
	return uint32(mask)
}
