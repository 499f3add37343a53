package main

import (
	"path/filepath"
	"strings"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"

	"github.com/muster-hpc/muster/node/run/cgroup"
	"github.com/muster-hpc/muster/node/run/private"
)

// Values of --cgroups.
const (
	cgroupsAuto = "auto"
	cgroupsOn   = "on"
	cgroupsOff  = "off"
)

// confinement finds what the machine offers to keep jobs apart, as far as that is wanted, and adds what it does not offer to
// the node's limitations. dir is the agent's directory.
func (d *declared) confinement(dir string, spec *apiv1.NodeSpec) (*cgroup.Hierarchy, *private.Store) {
	var groups *cgroup.Hierarchy
	var store *private.Store
	// Declared resources are not the machine's: several nodes pretend to have all of it.
	if d.Cgroups == cgroupsOn || d.Cgroups != cgroupsOff && !spec.GetDeclared() {
		var missing []string
		groups, missing = cgroup.Detect(cgroup.Detection{Node: d.Name})
		spec.Limitations = append(spec.Limitations, missing...)
	} else {
		spec.Limitations = append(spec.Limitations,
			"no cgroup: process groups and rlimits only, so nothing keeps jobs to their memory, CPUs and devices (--cgroups=on changes that)")
	}
	if !d.PrivateTmp {
		return groups, nil
	}
	switch err := private.Supported(); {
	case err != nil:
		spec.Limitations = append(spec.Limitations, err.Error())
	case strings.HasPrefix(dir+"/", "/tmp/"), strings.HasPrefix(dir+"/", "/dev/shm/"):
		spec.Limitations = append(spec.Limitations, "no private /tmp and /dev/shm for jobs: they would not see the agent's directory "+dir+
			" any more; move it elsewhere")
	default:
		store = &private.Store{Disk: filepath.Join(dir, "private"), Memory: private.MemoryDir(d.Name)}
	}
	return groups, store
}
