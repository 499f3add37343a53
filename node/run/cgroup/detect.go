package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Detection is where to look.
type Detection struct {
	// Node names the node; jobs of other nodes on this machine have other groups.
	Node string
	// Root is the group below which "muster" is made, from the top of the hierarchies ("/system.slice/x"); empty means
	// to find it.
	Root string
	// Proc is /proc; empty means that.
	Proc string
}

// agentGroup is the child into which an agent moves that was given a group with Delegate=yes.
const agentGroup = "agent"

// Detect finds where the groups of the node's jobs can be and makes the node's. It returns nil if the machine offers
// none, and a sentence for each limit that jobs will not have, or why there is none at all.
func Detect(d Detection) (*Hierarchy, []string) {
	if d.Proc == "" {
		d.Proc = "/proc"
	}
	if d.Node == "" || strings.ContainsAny(d.Node, "/\x00\n") {
		return nil, []string{without(fmt.Errorf("%q cannot be the name of a group", d.Node))}
	}
	mounts, err := d.mounts()
	if err != nil {
		return nil, []string{without(err)}
	}
	var errs []error
	// A machine with both has its controllers in one of them; without any, version 2 still kills reliably.
	controllers := strings.Fields(read(mounts[Unified], "cgroup.controllers"))
	tries := []func(map[string]string) (*Hierarchy, error){d.version1, d.version2}
	if slices.Contains(controllers, Memory) || len(mounts) == 1 {
		slices.Reverse(tries)
	}
	for _, try := range tries {
		h, err := try(mounts)
		if h != nil {
			return h, h.Missing()
		}
		errs = append(errs, err)
	}
	return nil, []string{without(errors.Join(errs...))}
}

// without is the sentence for a machine that offers nothing.
func without(err error) string {
	why := strings.ReplaceAll(err.Error(), "\n", "; ")
	return "no cgroup: process groups and rlimits only, so nothing keeps jobs to their memory, CPUs and devices (" + why + ")"
}

// mounts finds where hierarchies are mounted, by controller.
func (d Detection) mounts() (map[string]string, error) {
	b, err := os.ReadFile(filepath.Join(d.Proc, "self/mounts"))
	if err != nil {
		return nil, fmt.Errorf("finding where control groups are mounted: %w", err)
	}
	mounts := make(map[string]string)
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 4 {
			continue
		}
		// The first one counts: others may be in a user's reach.
		add := func(controller string) {
			if mounts[controller] == "" {
				mounts[controller] = unescape(f[1])
			}
		}
		switch f[2] {
		case "cgroup2":
			add(Unified)
		case "cgroup":
			for option := range strings.SplitSeq(f[3], ",") {
				if slices.Contains(listed, option) {
					add(option)
				}
			}
		}
	}
	if len(mounts) == 0 {
		return nil, errors.New("no hierarchy is mounted")
	}
	return mounts, nil
}

// unescape reads the octal escapes of a list of mounts.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// own is this process's group: by controller in version 1, under Unified in version 2.
func (d Detection) own() map[string]string {
	groups := make(map[string]string)
	for line := range strings.Lines(read(d.Proc, "self/cgroup")) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		if f[1] == "" {
			groups[Unified] = f[2]
		}
		for controller := range strings.SplitSeq(f[1], ",") {
			if controller != "" {
				groups[controller] = f[2]
			}
		}
	}
	return groups
}

// version2 makes the node's group in the one hierarchy.
func (d Detection) version2(mounts map[string]string) (*Hierarchy, error) {
	mount := mounts[Unified]
	if mount == "" {
		return nil, errors.New("cgroup2 is not mounted")
	}
	root, err := d.root2(mount)
	if err != nil {
		return nil, err
	}
	h := &Hierarchy{version: V2, roots: map[string]string{Unified: filepath.Join(root, "muster", d.Node)}}
	for _, dir := range []string{root, filepath.Join(root, "muster"), h.roots[Unified]} {
		if err := h.open(Unified, dir); err != nil {
			return nil, err
		}
	}
	if err := unix.Access(filepath.Join(h.roots[Unified], "cgroup.procs"), unix.W_OK); err != nil {
		return nil, fmt.Errorf("%s cannot be written: %w", h.roots[Unified], err)
	}
	return h, nil
}

// root2 finds the group below which everything is, and frees it of processes.
func (d Detection) root2(mount string) (string, error) {
	if d.Root != "" {
		return filepath.Join(mount, d.Root), nil
	}
	own := filepath.Join(mount, d.own()[Unified])
	if parent := filepath.Dir(own); filepath.Base(own) == agentGroup && delegated(parent) {
		return parent, nil // It moved there in an earlier life, or systemd began it there.
	}
	top := filepath.Clean(own) == filepath.Clean(mount)
	if !delegated(own) && os.Geteuid() == 0 || top {
		if err := unix.Access(mount, unix.W_OK); err != nil {
			return "", fmt.Errorf("%s cannot be written and no group was delegated to the agent: %w", mount, err)
		}
		return mount, nil
	}
	for _, file := range []string{"", "cgroup.procs", "cgroup.subtree_control"} {
		if err := unix.Access(filepath.Join(own, file), unix.W_OK); err != nil {
			return "", fmt.Errorf("the agent's own group %s is not delegated to it (Delegate=yes in its unit does that): %w", own, err)
		}
	}
	return own, vacate(own)
}

// delegated reports whether systemd marked a group as given away.
func delegated(dir string) bool {
	for _, name := range []string{"trusted.delegate", "user.delegate"} {
		b := make([]byte, 1)
		if n, err := unix.Getxattr(dir, name, b); err == nil && n == 1 && b[0] == '1' {
			return true
		}
	}
	return false
}

// vacateRounds bounds the rounds in which a group is freed of processes that are born meanwhile.
const vacateRounds = 20

// vacate moves the processes of the agent's group, itself above all, into a child.
func vacate(dir string) error {
	to := filepath.Join(dir, agentGroup)
	if err := makeDir(to); err != nil {
		return err
	}
	for range vacateRounds {
		pids := strings.Fields(read(dir, "cgroup.procs"))
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			if err := write(to, "cgroup.procs", pid); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("moving the agent's processes into %s: %w", to, err)
			}
		}
	}
	return fmt.Errorf("moving the agent's processes into %s: new ones appear all the time", to)
}

// version1 makes the node's groups in the hierarchies of all controllers that can be written.
func (d Detection) version1(mounts map[string]string) (*Hierarchy, error) {
	h := &Hierarchy{version: V1, roots: make(map[string]string)}
	var errs []error
	for _, controller := range listed {
		mount := mounts[controller]
		if mount == "" {
			continue
		}
		if err := h.open1(controller, filepath.Join(mount, d.Root), d.Node); err != nil {
			errs = append(errs, err)
		}
	}
	if h.roots[h.main()] == "" {
		return nil, errors.Join(append(errs, errors.New("no controller of cgroup version 1 can be used"))...)
	}
	return h, nil
}

// open1 makes the node's group of one controller.
func (h *Hierarchy) open1(controller, root, node string) error {
	if err := unix.Access(root, unix.W_OK); err != nil {
		return fmt.Errorf("%s cannot be written: %w", root, err)
	}
	dirs := []string{filepath.Join(root, "muster"), filepath.Join(root, "muster", node)}
	for _, dir := range dirs {
		if err := h.open(controller, dir); err != nil {
			return err
		}
		// Before 5.11 limits did not reach groups below unless that was asked for.
		if controller == Memory && read(dir, "memory.use_hierarchy") == "0" {
			if err := write(dir, "memory.use_hierarchy", "1"); err != nil {
				return err
			}
		}
	}
	h.roots[controller] = dirs[1]
	return nil
}
