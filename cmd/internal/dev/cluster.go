package dev

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/muster-hpc/muster/ops/pki"
)

// Cluster is a local cluster, running or not. It keeps nothing open: every method reads dev.json, and those that change
// something hold its lock meanwhile.
type Cluster struct {
	dir      string
	progress func(string)
}

// Open returns the cluster in dir. ErrNoCluster if there is none.
func Open(dir string) (*Cluster, error) {
	if dir == "" {
		return nil, errors.New("no directory: give --dir DIR, or set MUSTER_DEV_DIR")
	}
	path, err := absolute(dir)
	if err != nil {
		return nil, err
	}
	if _, err := loadState(path); err != nil {
		return nil, err
	}
	return &Cluster{dir: path, progress: func(string) {}}, nil
}

// Up makes a cluster, or starts what does not run of the one that is there, and returns when all its controllers vote
// and all its nodes have joined. resumed says that the directory had a cluster, whose size and hardware stay as they
// are. If it fails, processes that were started stay for inspection: Down ends them.
func Up(ctx context.Context, o Options) (c *Cluster, resumed bool, err error) {
	if err := o.complete(); err != nil {
		return nil, false, err
	}
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return nil, false, fmt.Errorf("make the cluster's directory: %w", err)
	}
	if o.Dir, err = absolute(o.Dir); err != nil {
		return nil, false, err
	}
	unlock, err := lock(o.Dir)
	if err != nil {
		return nil, false, err
	}
	defer unlock()
	c = &Cluster{dir: o.Dir, progress: o.Progress}
	s, err := loadState(o.Dir)
	switch {
	case err == nil:
		resumed = true
		s.Bin = o.Bin
	case errors.Is(err, ErrNoCluster):
		if s, err = c.plan(o); err != nil {
			return nil, false, err
		}
	default:
		return nil, false, err
	}
	if s.Link, err = shortLink(o.Dir); err != nil {
		return nil, resumed, err
	}
	if err := s.save(o.Dir); err != nil {
		return nil, resumed, err
	}
	return c, resumed, c.startAll(ctx, s)
}

// plan decides names and addresses, and makes the certificates and the first configuration.
func (c *Cluster) plan(o Options) (*state, error) {
	processes := (o.Nodes + o.AgentsPerProcess - 1) / o.AgentsPerProcess
	addresses, err := freeAddresses(2*o.Controllers + o.Nodes)
	if err != nil {
		return nil, fmt.Errorf("choose addresses: %w", err)
	}
	take := func() string { a := addresses[0]; addresses = addresses[1:]; return a }
	configuration := o.configuration()
	s := &state{
		Cluster: configuration.ClusterName, Bin: o.Bin, CPUs: o.CPUs, Memory: o.Memory, GPUs: o.GPUs, GPUType: o.GPUType,
		AgentsPerProcess: o.AgentsPerProcess, Timing: o.Timing,
	}
	for i := range o.Controllers {
		s.Processes = append(s.Processes, &process{Name: "c" + strconv.Itoa(i+1), Role: RoleController, Listen: take(), Raft: take()})
	}
	for i := range processes {
		p := &process{Role: RoleNode, Boot: 1}
		for n := i * o.AgentsPerProcess; n < min((i+1)*o.AgentsPerProcess, o.Nodes); n++ {
			p.Nodes = append(p.Nodes, node{Name: "n" + strconv.Itoa(n+1), Listen: take()})
		}
		p.Name, p.Listen = p.Nodes[0].Name, p.Nodes[0].Listen
		s.Processes = append(s.Processes, p)
	}
	text, err := protojson.MarshalOptions{Multiline: true}.Marshal(configuration)
	if err != nil {
		return nil, fmt.Errorf("encode the configuration: %w", err)
	}
	if err := replaceFile(filepath.Join(c.dir, "configuration.json"), append(text, '\n'), 0o644); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Join(c.dir, "logs"), 0o755); err != nil {
		return nil, fmt.Errorf("make the directory of logs: %w", err)
	}
	c.progress(fmt.Sprintf("certificates for %d controllers and %d nodes", o.Controllers, o.Nodes))
	return s, c.certify(s)
}

// toolName is the name in the certificate with which `muster dev` itself talks to the controllers.
const toolName = "muster-dev"

// certify makes the cluster's CA and everybody's certificate.
func (c *Cluster) certify(s *state) error {
	ca, err := pki.NewCA(s.Cluster)
	if err != nil {
		return err
	}
	if err := ca.Save(filepath.Join(c.dir, "ca")); err != nil {
		return fmt.Errorf("save the CA: %w", err)
	}
	issue := func(name string, role pki.Role) error {
		identity, err := ca.Issue(name, role, "127.0.0.1", "localhost")
		if err != nil {
			return err
		}
		return identity.Save(filepath.Join(c.dir, name, "tls"))
	}
	if err := issue(toolName, pki.RoleController); err != nil { // it looks and promotes with a member's rights
		return fmt.Errorf("certificate of %s: %w", toolName, err)
	}
	for _, p := range s.Processes {
		if p.Role == RoleController {
			if err := issue(p.Name, pki.RoleController); err != nil {
				return fmt.Errorf("certificate of %s: %w", p.Name, err)
			}
		}
		for _, n := range p.Nodes {
			if err := issue(n.Name, pki.RoleNode); err != nil {
				return fmt.Errorf("certificate of %s: %w", n.Name, err)
			}
		}
	}
	return nil
}

// root is the cluster's directory by the name that processes get: a short one.
func (c *Cluster) root(s *state) string {
	if s.Link != "" {
		return s.Link
	}
	return c.dir
}

func (c *Cluster) logPath(p *process) string { return filepath.Join(c.dir, "logs", p.Name+".log") }

// socket is where the agent of a node vouches for local users.
func (c *Cluster) socket(s *state, node string) string {
	return filepath.Join(c.root(s), node, "agent.sock")
}

// places says where the files of a process's nodes are.
func (c *Cluster) places(s *state, p *process) []place {
	var all []place
	for _, n := range p.Nodes {
		l := place{}
		for _, root := range []string{c.dir, s.Link} {
			if root != "" {
				l.dirs = append(l.dirs, filepath.Join(root, n.Name))
				l.sockets = append(l.sockets, filepath.Join(root, n.Name, "agent.sock"))
			}
		}
		all = append(all, l)
	}
	return all
}

// command returns program and arguments of a process.
func (c *Cluster) command(s *state, p *process) (string, []string, error) {
	if p.Role == RoleController {
		args := []string{"--dir", filepath.Join(c.root(s), p.Name), "--name", p.Name, "--listen", p.Listen, "--raft", p.Raft,
			"--timing", s.Timing}
		if first := s.controllers()[0]; p.Admitted {
			return filepath.Join(s.binOf(p), "muster-controller"), args, nil
		} else if p == first && !p.Rejoins {
			return filepath.Join(s.binOf(p), "muster-controller"), append(args, "--bootstrap", filepath.Join(c.root(s), "configuration.json")), nil
		}
		return filepath.Join(s.binOf(p), "muster-controller"), append(args, "--join", strings.Join(s.others(p), ",")), nil
	}
	agent, supervisor := filepath.Join(s.binOf(p), "muster-agent"), filepath.Join(s.binOf(p), "muster-supervisor")
	if s.AgentsPerProcess > 1 {
		file, err := c.writeNodes(s, p)
		return agent, []string{"--nodes", file, "--supervisor", supervisor}, err
	}
	return agent, []string{
		"--dir", filepath.Join(c.root(s), p.Name), "--name", p.Name, "--listen", p.Listen,
		"--controllers", strings.Join(s.controllerAddresses(), ","),
		"--cpus", strconv.Itoa(s.CPUs), "--memory", s.Memory, "--gpus", strconv.Itoa(s.GPUs), "--gpu-type", s.GPUType,
		"--boot-id", bootID(p), "--supervisor", supervisor,
	}, nil
}

// binOf is the directory of a process's programs: its own, if it was started with another build than the rest.
func (s *state) binOf(p *process) string {
	if p.Bin != "" {
		return p.Bin
	}
	return s.Bin
}

// bootID is the declared boot id of a process's nodes: another after every power loss.
func bootID(p *process) string { return fmt.Sprintf("%s-boot-%d", p.Name, p.Boot) }

// declaredNode is one entry of the file for muster-agent --nodes.
type declaredNode struct {
	Dir         string   `json:"dir"`
	Name        string   `json:"name"`
	Listen      string   `json:"listen"`
	Controllers []string `json:"controllers"`
	CPUs        int      `json:"cpus"`
	Memory      string   `json:"memory"`
	GPUs        int      `json:"gpus"`
	GPUType     string   `json:"gpu_type"`
	BootID      string   `json:"boot_id"`
}

// writeNodes writes the file that declares the nodes of one agent process, and returns its path.
func (c *Cluster) writeNodes(s *state, p *process) (string, error) {
	var nodes []declaredNode
	for _, n := range p.Nodes {
		nodes = append(nodes, declaredNode{
			Dir: filepath.Join(c.root(s), n.Name), Name: n.Name, Listen: n.Listen, Controllers: s.controllerAddresses(),
			CPUs: s.CPUs, Memory: s.Memory, GPUs: s.GPUs, GPUType: s.GPUType, BootID: bootID(p),
		})
	}
	text, err := json.MarshalIndent(nodes, "", "  ")
	if err != nil {
		return "", fmt.Errorf("encode the declared nodes: %w", err)
	}
	path := filepath.Join(c.root(s), p.Name+"-nodes.json")
	return path, replaceFile(path, append(text, '\n'), 0o644)
}
