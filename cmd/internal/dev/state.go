package dev

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// The roles of processes.
const (
	RoleController = "controller"
	RoleNode       = "node"
)

// state is dev.json.
type state struct {
	Cluster          string     `json:"cluster"`
	Bin              string     `json:"bin"`                // directory of the programs
	Link             string     `json:"link,omitempty"`     // short name of the directory, if its own is too long for sockets
	Timing           string     `json:"timing"`             // profile of the controllers' timeouts
	MachineBoot      string     `json:"machine_boot"`       // the kernel's boot id when processes were last started
	CPUs             int        `json:"cpus"`               // of each node
	Memory           string     `json:"memory"`             // of each node, for example "512G"
	GPUs             int        `json:"gpus"`               // of each node
	GPUType          string     `json:"gpu_type"`           // lower case
	AgentsPerProcess int        `json:"agents_per_process"` // nodes that share one agent process
	Processes        []*process `json:"processes"`          // controllers first, in order of their names
}

// process is one controller, or one agent process with its nodes.
type process struct {
	Name   string `json:"name"`
	Role   string `json:"role"`
	Listen string `json:"listen"`         // API address; of the first node for an agent process
	Raft   string `json:"raft,omitempty"` // controllers
	Nodes  []node `json:"nodes,omitempty"`
	// Admitted: the process has been ready once, so that a start needs neither --bootstrap nor --join.
	Admitted bool `json:"admitted"`
	// Rejoins: its state was set aside, so that it joins the others even if it once began the cluster.
	Rejoins bool `json:"rejoins,omitempty"`
	// Bin is the directory of its programs, if it was started with another build than the cluster's.
	Bin string `json:"bin,omitempty"`
	// Boot is the number of the declared boot of its nodes; PowerLost makes the next start a new one.
	Boot      int  `json:"boot,omitempty"`
	PowerLost bool `json:"power_lost,omitempty"`
	// The running process; pid 0 if it was never started.
	Pid   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks from the machine's boot
}

// node is one declared node.
type node struct {
	Name   string `json:"name"`
	Listen string `json:"listen"`
}

// ErrNoCluster is returned for a directory without a local cluster.
var ErrNoCluster = errors.New("there is no local cluster")

func statePath(dir string) string { return filepath.Join(dir, "dev.json") }

func loadState(dir string) (*state, error) {
	text, err := os.ReadFile(statePath(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w in %s: start one with `muster dev up --dir %s`", ErrNoCluster, dir, dir)
	} else if err != nil {
		return nil, fmt.Errorf("read the local cluster's state: %w", err)
	}
	s := &state{}
	if err := json.Unmarshal(text, s); err != nil {
		return nil, fmt.Errorf("%s is damaged (%w): end the processes that `ps` shows for this directory, then remove it", statePath(dir), err)
	}
	return s, nil
}

func (s *state) save(dir string) error {
	text, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the local cluster's state: %w", err)
	}
	return replaceFile(statePath(dir), append(text, '\n'), 0o644)
}

// replaceFile makes contents appear at path as a whole, or not at all.
func replaceFile(path string, contents []byte, mode fs.FileMode) error {
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer os.Remove(file.Name()) // fails once it is renamed
	_, err = file.Write(contents)
	if err := errors.Join(err, file.Chmod(mode), file.Close()); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return os.Rename(file.Name(), path)
}

// lock keeps other commands from changing the cluster until the returned function is called.
func lock(dir string) (unlock func(), err error) {
	file, err := os.OpenFile(filepath.Join(dir, "dev.lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock the local cluster: %w", err)
	}
	for {
		err = unix.Flock(int(file.Fd()), unix.LOCK_EX)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("lock the local cluster: %w", err)
	}
	return func() { file.Close() }, nil
}

// controllers and agents return the processes of one role.
func (s *state) controllers() []*process { return s.role(RoleController) }
func (s *state) agents() []*process      { return s.role(RoleNode) }

func (s *state) role(role string) (found []*process) {
	for _, p := range s.Processes {
		if p.Role == role {
			found = append(found, p)
		}
	}
	return found
}

// find returns the process with that name, or the agent process that carries the node of that name.
func (s *state) find(name string) (*process, error) {
	var names []string
	for _, p := range s.Processes {
		if p.Name == name || slices.ContainsFunc(p.Nodes, func(n node) bool { return n.Name == name }) {
			return p, nil
		}
		names = append(names, p.Name)
	}
	return nil, fmt.Errorf("no process is called %q: this cluster has %s", name, strings.Join(names, ", "))
}

// controllerAddresses returns the API addresses of all controllers.
func (s *state) controllerAddresses() []string {
	var all []string
	for _, c := range s.controllers() {
		all = append(all, c.Listen)
	}
	return all
}
