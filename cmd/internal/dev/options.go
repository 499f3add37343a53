package dev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"google.golang.org/protobuf/proto"

	"github.com/muster-hpc/muster/cmd/internal/config"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// Options describe a cluster to be made. The zero value of a number means its default, except for GPUs.
type Options struct {
	// Dir is the cluster's directory; it may exist.
	Dir string
	// Bin is the directory of the programs; empty means that of the running program.
	Bin string
	// Controllers is 1, 3 or 5 (others work, and gain nothing); default 3.
	Controllers int
	// Nodes; default 4.
	Nodes int
	// AgentsPerProcess is how many nodes share one agent process; default 1.
	AgentsPerProcess int
	// CPUs of each node; default 64.
	CPUs int
	// Memory of each node, a number with K, M, G or T; default 512G.
	Memory string
	// GPUs of each node; -1 means the default 8.
	GPUs int
	// GPUType in lower case; default h100.
	GPUType string
	// Timing is the profile of the controllers' timeouts, development or production; default development.
	Timing string
	// Configuration the cluster begins with; nil: a partition main with all nodes.
	Configuration *apiv1.Configuration
	// Settings replace those of the configuration where they are not 0.
	Settings *apiv1.Settings
	// Progress is told of each step, a line without an end; nil: nobody is.
	Progress func(string)
}

const (
	defaultControllers = 3
	defaultNodes       = 4
	defaultCPUs        = 64
	defaultMemory      = "512G"
	defaultGPUs        = 8
	defaultGPUType     = "h100"
	mostControllers    = 9
	mostNodes          = 5000
	mostPerProcess     = 4096 // as muster-agent --nodes
	mostGPUs           = 64
)

// complete fills in the defaults and says what is impossible.
func (o *Options) complete() error {
	if o.Dir == "" {
		return errors.New("no directory: give --dir DIR, or set MUSTER_DEV_DIR")
	}
	dir, err := absolute(o.Dir)
	if err != nil {
		return err
	}
	o.Dir = dir
	if o.Bin == "" {
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("find this program's directory: %w", err)
		}
		o.Bin = filepath.Dir(self)
	}
	if o.Bin, err = absolute(o.Bin); err != nil {
		return err
	}
	for _, program := range []string{"muster-controller", "muster-agent", "muster-supervisor"} {
		if _, err := os.Stat(filepath.Join(o.Bin, program)); err != nil {
			return fmt.Errorf("%s is not beside muster in %s: build all programs with `make build`", program, o.Bin)
		}
	}
	for _, n := range []struct {
		name             string
		value            *int
		otherwise, limit int
	}{
		{"--controllers", &o.Controllers, defaultControllers, mostControllers},
		{"--nodes", &o.Nodes, defaultNodes, mostNodes},
		{"--agents-per-process", &o.AgentsPerProcess, 1, mostPerProcess},
		{"--cpus", &o.CPUs, defaultCPUs, 4096},
	} {
		if *n.value == 0 {
			*n.value = n.otherwise
		}
		if *n.value < 1 || *n.value > n.limit {
			return fmt.Errorf("%s is %d; it must be between 1 and %d", n.name, *n.value, n.limit)
		}
	}
	if o.GPUs == -1 {
		o.GPUs = defaultGPUs
	}
	if o.GPUs < 0 || o.GPUs > mostGPUs {
		return fmt.Errorf("--gpus is %d; it must be between 0 and %d", o.GPUs, mostGPUs)
	}
	if o.Memory == "" {
		o.Memory = defaultMemory
	}
	if _, err := config.ParseMemory(o.Memory); err != nil {
		return fmt.Errorf("--memory: %w", err)
	}
	switch o.Timing {
	case "":
		o.Timing = "development"
	case "development", "production":
	default:
		return fmt.Errorf("--timing %q is no profile: there are development and production", o.Timing)
	}
	if o.GPUType == "" {
		o.GPUType = defaultGPUType
	}
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	return nil
}

// configuration is what the cluster begins with. The user who makes the cluster is an operator of it.
func (o *Options) configuration() *apiv1.Configuration {
	c := &apiv1.Configuration{
		ClusterName: "dev",
		Partitions:  []*apiv1.Partition{{Name: "main", Nodes: "ALL", IsDefault: true}},
	}
	if o.Configuration != nil {
		c = proto.CloneOf(o.Configuration)
	}
	if c.Settings == nil {
		c.Settings = &apiv1.Settings{}
	}
	if o.Settings != nil {
		proto.Merge(c.Settings, o.Settings)
	}
	if uid := os.Getuid(); uid != 0 {
		c.Settings.OperatorUids = append(c.Settings.OperatorUids, uint32(uid))
	}
	return c
}
