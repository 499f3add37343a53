package node

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"

	"github.com/muster-hpc/muster/node/bind"
)

// Detect returns what the machine has: CPUs, sockets, memory, operating system and boot time. Names, addresses and
// accelerators are left to the caller.
func Detect() (*apiv1.NodeSpec, error) {
	spec := &apiv1.NodeSpec{
		Architecture: machine(), OperatingSystem: kernel(),
	}
	memory, err := memoryMB("/proc/meminfo")
	if err != nil {
		return nil, err
	}
	spec.MemoryMb = memory
	spec.Cpus = uint32(runtime.NumCPU())
	spec.Sockets, spec.CoresPerSocket, spec.ThreadsPerCore = topology("/sys/devices/system/cpu", spec.Cpus)
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err == nil {
		spec.BootTime = timestamppb.New(time.Now().Add(-time.Duration(info.Uptime) * time.Second).Truncate(time.Second))
	}
	return spec, nil
}

func machine() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return runtime.GOARCH
	}
	return text(u.Machine[:])
}

func kernel() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return runtime.GOOS
	}
	return text(u.Sysname[:]) + " " + text(u.Release[:])
}

func text(field []byte) string {
	if i := bytes.IndexByte(field, 0); i >= 0 {
		field = field[:i]
	}
	return string(field)
}

// memoryMB reads the machine's memory.
func memoryMB(path string) (uint64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, fmt.Errorf("read how much memory the machine has: %w", err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) >= 2 && fields[0] == "MemTotal:" {
			kib, err := strconv.ParseUint(fields[1], 10, 64)
			if err != nil {
				return 0, fmt.Errorf("read how much memory the machine has: %w", err)
			}
			return kib / 1024, nil
		}
	}
	return 0, fmt.Errorf("read how much memory the machine has: %s has no line MemTotal", path)
}

// topology counts sockets, cores and threads below a sysfs folder; a machine that does not say is one socket of
// single-threaded cores.
func topology(root string, cpus uint32) (sockets, cores, threads uint32) {
	packages, coreIDs := map[string]bool{}, map[string]bool{}
	for i := range cpus {
		dir := filepath.Join(root, "cpu"+strconv.Itoa(int(i)), "topology")
		p, errP := os.ReadFile(filepath.Join(dir, "physical_package_id"))
		c, errC := os.ReadFile(filepath.Join(dir, "core_id"))
		if errP != nil || errC != nil {
			return 1, cpus, 1
		}
		packages[string(p)] = true
		coreIDs[string(p)+"/"+string(c)] = true
	}
	if len(packages) == 0 || len(coreIDs)%len(packages) != 0 || int(cpus)%len(coreIDs) != 0 {
		return 1, cpus, 1
	}
	return uint32(len(packages)), uint32(len(coreIDs) / len(packages)), cpus / uint32(len(coreIDs))
}

// topologyOf is where the CPUs of a node are: as the machine says if they are its own, otherwise as the declaration has them.
func topologyOf(spec *apiv1.NodeSpec, detected bool) bind.Topology {
	if detected {
		if t, err := places("/sys/devices/system/cpu", spec.GetCpus()); err == nil {
			return t
		}
	}
	return bind.Regular(spec.GetCpus(), spec.GetSockets(), spec.GetCoresPerSocket(), spec.GetThreadsPerCore())
}

// places reads the socket and core of each CPU below a sysfs folder.
func places(root string, cpus uint32) (bind.Topology, error) {
	t := make(bind.Topology, cpus)
	coreNumbers := make(map[[2]int]int)
	for i := range t {
		var at [2]int
		for k, name := range []string{"physical_package_id", "core_id"} {
			b, err := os.ReadFile(filepath.Join(root, "cpu"+strconv.Itoa(i), "topology", name))
			if err != nil {
				return nil, fmt.Errorf("read where CPU %d is: %w", i, err)
			}
			if at[k], err = strconv.Atoi(strings.TrimSpace(string(b))); err != nil {
				return nil, fmt.Errorf("read where CPU %d is: %w", i, err)
			}
		}
		number, known := coreNumbers[at]
		if !known {
			number = len(coreNumbers)
			coreNumbers[at] = number
		}
		t[i] = bind.Place{Socket: max(at[0], 0), Core: number} // a machine that does not know its sockets says -1
	}
	return t, nil
}
