package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"

	"github.com/muster-hpc/muster/node"
	"github.com/muster-hpc/muster/ops/version"
)

// declared is a node as flags or an entry of the --nodes file describe it.
type declared struct {
	Dir         string   `json:"dir"`
	Name        string   `json:"name"`
	Listen      string   `json:"listen"`
	Advertise   string   `json:"advertise"`
	TaskAddress string   `json:"task_address"`
	Controllers []string `json:"controllers"`
	CPUs        int      `json:"cpus"`
	Memory      string   `json:"memory"`
	GPUs        int      `json:"gpus"`
	GPUType     string   `json:"gpu_type"`
	BootID      string   `json:"boot_id"`
	Features    []string `json:"features"`
	// GPUProbe is the program that reads GPUs, with its arguments; GPUIntervalS is how often, in seconds. Gres are other devices.
	GPUProbe     []string `json:"gpu_probe"`
	GPUIntervalS float64  `json:"gpu_interval_s"`
	Gres         []string `json:"gres"`
	Cgroups      string   `json:"cgroups"`
	PrivateTmp   bool     `json:"private_tmp"`
}

// maxNodes bounds the nodes of one process.
const maxNodes = 4096

func readNodes(path string) ([]declared, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the declared nodes: %w", err)
	}
	var nodes []declared
	decoder := json.NewDecoder(strings.NewReader(string(data)))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&nodes); err != nil {
		return nil, fmt.Errorf("read the declared nodes in %s: %w", path, err)
	}
	if len(nodes) == 0 || len(nodes) > maxNodes {
		return nil, fmt.Errorf("%s declares %d nodes; one process runs 1 to %d", path, len(nodes), maxNodes)
	}
	seen := map[string]bool{}
	for _, n := range nodes {
		if err := n.check(""); err != nil {
			return nil, fmt.Errorf("%s: node %q: %w", path, n.Name, err)
		}
		if seen[n.Name] || seen["/"+n.Dir] {
			return nil, fmt.Errorf("%s: node %q: its name or its dir is declared twice", path, n.Name)
		}
		seen[n.Name], seen["/"+n.Dir] = true, true
	}
	return nodes, nil
}

// check says what is missing; prefix is that of the option names.
func (d *declared) check(prefix string) error {
	for _, need := range []struct{ name, value string }{
		{"dir", d.Dir}, {"name", d.Name}, {"listen", d.Listen}, {"controllers", strings.Join(d.Controllers, ",")},
	} {
		if need.value == "" {
			return fmt.Errorf("%s%s is needed", prefix, need.name)
		}
	}
	if _, _, err := net.SplitHostPort(d.Listen); err != nil {
		return fmt.Errorf("%slisten %q is not HOST:PORT", prefix, d.Listen)
	}
	switch d.Cgroups {
	case "", cgroupsAuto, cgroupsOn, cgroupsOff:
	default:
		return fmt.Errorf("%scgroups %q is not %s, %s or %s", prefix, d.Cgroups, cgroupsAuto, cgroupsOn, cgroupsOff)
	}
	if d.GPUs > 0 && len(d.GPUProbe) > 0 {
		return fmt.Errorf("%sgpus declares GPUs and %sgpu-probe detects them: give one of them", prefix, prefix)
	}
	if d.GPUIntervalS < 0 || d.GPUIntervalS > 3600 {
		return fmt.Errorf("%sgpu-interval is %v; it is between 0 and 3600 seconds", prefix, d.GPUIntervalS)
	}
	for _, words := range d.Gres {
		if _, err := parseGres(words); err != nil {
			return err
		}
	}
	if d.CPUs < 0 || d.GPUs < 0 {
		return fmt.Errorf("%scpus and %sgpus can't be negative", prefix, prefix)
	}
	if _, err := parseMB(d.Memory); err != nil {
		return fmt.Errorf("%smemory: %w", prefix, err)
	}
	return nil
}

// spec is what the agent says of the node: detected, with what is declared in its place. bound is the address that
// --listen got.
func (d *declared) spec(bound string) (spec *apiv1.NodeSpec, bind bool, err error) {
	if spec, err = node.Detect(); err != nil {
		return nil, false, err
	}
	spec.Name, spec.AgentVersion, spec.Features = d.Name, version.Version, d.Features
	spec.AgentAddress = d.Advertise
	if spec.AgentAddress == "" {
		spec.AgentAddress = bound
	}
	spec.TaskAddress = d.TaskAddress
	if spec.TaskAddress == "" {
		if spec.TaskAddress, _, err = net.SplitHostPort(spec.AgentAddress); err != nil {
			return nil, false, fmt.Errorf("the address %q is not HOST:PORT: %w", spec.AgentAddress, err)
		}
	}
	if ip := net.ParseIP(spec.TaskAddress); spec.TaskAddress == "" || ip != nil && ip.IsUnspecified() {
		return nil, false, fmt.Errorf("others can't reach %q: say with --advertise and --task-address how they can", spec.AgentAddress)
	}
	if d.CPUs > 0 {
		spec.Cpus, spec.Declared = uint32(d.CPUs), true
		spec.Sockets, spec.CoresPerSocket, spec.ThreadsPerCore = 1, uint32(d.CPUs), 1
	}
	if mb, err := parseMB(d.Memory); err != nil {
		return nil, false, err
	} else if mb > 0 {
		spec.MemoryMb, spec.Declared = mb, true
	}
	return spec, d.CPUs == 0, nil
}

// address is the directory as an absolute path.
func (d *declared) absDir() (string, error) {
	dir, err := filepath.Abs(d.Dir)
	if err != nil {
		return "", fmt.Errorf("find the directory %s: %w", d.Dir, err)
	}
	return dir, nil
}

// parseMB reads a size as MiB: a number with K, M, G or T; without one it is MiB. Empty is 0.
func parseMB(size string) (uint64, error) {
	if size == "" {
		return 0, nil
	}
	number, shift := size, 20
	for unit, s := range map[string]int{"K": 10, "M": 20, "G": 30, "T": 40} {
		if rest, ok := strings.CutSuffix(strings.ToUpper(size), unit); ok {
			number, shift = rest, s
		}
	}
	n, err := strconv.ParseUint(number, 10, 32)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q is not a size; write for example 512G or 64000M", size)
	}
	return max(1, n<<shift>>20), nil
}
