package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"

	"github.com/muster-hpc/muster/node"
	"github.com/muster-hpc/muster/node/gpu"
)

const (
	// probeVariable is the environment variable with the probe and its arguments where --gpu-probe does not say it.
	probeVariable = "MUSTER_GPU_PROBE"
	// noProbe is the word that turns looking for GPUs off.
	noProbe = "none"
	// firstProbe is how long a node waits for the first reading of its GPUs before it joins without: it joins again when they are known.
	firstProbe = 20 * time.Second
	// probeInterval is how often GPUs are read; errors are told at once.
	probeInterval = 10 * time.Second
)

// probe returns the program that reads GPUs and its arguments; nil if none is to be asked. Resources that are declared are not the
// machine's, unless somebody says so.
func (d *declared) probe() []string {
	words := d.GPUProbe
	if len(words) == 0 {
		words = strings.Fields(os.Getenv(probeVariable))
	}
	switch {
	case d.GPUs > 0, len(words) == 1 && words[0] == noProbe:
		return nil
	case len(words) > 0:
		named := make([]string, len(words))
		for i, w := range words {
			named[i] = strings.ReplaceAll(w, "%n", d.Name)
		}
		return named
	case d.CPUs > 0 || d.Memory != "":
		return nil
	}
	self, err := os.Executable()
	if err != nil {
		return nil
	}
	beside := filepath.Join(filepath.Dir(self), "muster-gpu")
	if info, err := os.Stat(beside); err != nil || info.IsDir() {
		return nil
	}
	return []string{beside}
}

// watchGPUs begins to watch the node's GPUs, if there is a probe, and waits for the first reading, but not for long. The function ends it.
func (d *declared) watchGPUs(ctx context.Context, dir string, log *slog.Logger) (*gpu.Monitor, func()) {
	words := d.probe()
	if words == nil {
		return nil, func() {}
	}
	m := gpu.Open(gpu.Config{
		Program: words[0], Args: words[1:], Interval: d.interval(), Memory: filepath.Join(dir, "gpus"), BootID: d.BootID, Log: log.With("node", d.Name),
	})
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { m.Run(ctx) })
	timer := time.NewTimer(firstProbe)
	defer timer.Stop()
	for m.Readings() == nil && !saysUnknown(m) {
		select {
		case <-m.Changed():
			continue
		case <-timer.C:
			log.Warn("the GPUs could not be read yet; the node joins with what is known of them", "node", d.Name)
		case <-ctx.Done():
		}
		break
	}
	return m, func() { cancel(); wg.Wait() }
}

func (d *declared) interval() time.Duration {
	if d.GPUIntervalS > 0 {
		return time.Duration(d.GPUIntervalS * float64(time.Second))
	}
	return probeInterval
}

// saysUnknown reports whether the probe has answered that it knows nothing.
func saysUnknown(m *gpu.Monitor) bool {
	for _, f := range m.Health() {
		if f.Code == gpu.CodeDriverUnknown {
			return true
		}
	}
	inv, age := m.Inventory()
	return inv != nil && age < firstProbe
}

// devices fills the accelerators and other devices of a specification in.
func (d *declared) devices(spec *apiv1.NodeSpec, m *gpu.Monitor) error {
	for _, words := range d.Gres {
		g, err := parseGres(words)
		if err != nil {
			return err
		}
		if err := g.Check(os.Stat); err != nil {
			return fmt.Errorf("--gres: %w", err)
		}
		spec.Gres = append(spec.Gres, &apiv1.Gres{Name: g.Name, Type: g.Type, Count: g.Count, DeviceFiles: g.Files})
	}
	switch {
	case d.GPUs > 0:
		spec.Limitations = append(spec.Limitations, "accelerators are declared by count and not detected; their health is not watched")
		for i := range d.GPUs {
			spec.Gpus = append(spec.Gpus, &apiv1.Gpu{Index: uint32(i), Type: strings.ToLower(d.GPUType)})
		}
		return nil
	case m == nil:
		spec.Limitations = append(spec.Limitations, "no accelerators: nothing looks for them (install muster-gpu beside the agent, or say --gpu-probe or --gpus)")
		return nil
	}
	inv, _ := m.Inventory()
	if spec.Gpus = node.SpecGPUs(inv, spec.GetCpus()); len(spec.Gpus) > 0 {
		return nil
	}
	why := "the machine has none"
	for _, f := range m.Health() {
		if f.Verdict == gpu.Unknown {
			why = f.Reason
		}
	}
	spec.Limitations = append(spec.Limitations, "no accelerators were found: "+why)
	return nil
}

// parseGres reads NAME[:TYPE]=COUNT[:FILES], or a line in the words of gres.conf.
func parseGres(words string) (gpu.Gres, error) {
	if strings.HasPrefix(strings.ToLower(strings.TrimSpace(words)), "name=") {
		return gpu.ParseGres(words)
	}
	what, rest, ok := strings.Cut(words, "=")
	if !ok {
		return gpu.Gres{}, fmt.Errorf("--gres %q is not NAME[:TYPE]=COUNT[:FILES]; write for example ib=2:/dev/infiniband/uverbs[0-1]", words)
	}
	name, kind, _ := strings.Cut(what, ":")
	count, files, _ := strings.Cut(rest, ":")
	line := "Name=" + name + " Count=" + count
	if kind != "" {
		line += " Type=" + kind
	}
	if files != "" {
		line += " File=" + files
	}
	return gpu.ParseGres(line)
}
