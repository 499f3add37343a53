package main

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// host answers what the kernel, and not the driver's library, knows of GPUs and processes.
type host interface {
	// numaNode of a PCI address; nil if the machine does not say.
	numaNode(pci string) *uint32
	// cpus near a PCI address, as a list of ranges; empty if the machine does not say.
	cpus(pci string) string
	// onBus counts NVIDIA's GPUs on the PCI bus; nil if the bus can't be read.
	onBus() *uint32
	// capability is N of /dev/nvidia-caps/nvidia-capN for an instance of the GPU with this minor number; a negative
	// compute instance asks for the GPU instance. Nil if the driver does not say.
	capability(minor, gpuInstance, computeInstance int) *uint32
	// process returns the program's name and its user; empty and nil if there is no such process.
	process(pid uint32) (string, *uint32)
}

// machine is the host by its files.
type machine struct {
	// sys and proc are where sysfs and procfs are mounted.
	sys, proc string
}

func (m machine) pciFile(pci, name string) string {
	text, err := os.ReadFile(filepath.Join(m.sys, "bus/pci/devices", pci, name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

func (m machine) numaNode(pci string) *uint32 {
	// The kernel says -1 where it does not know.
	n, err := strconv.ParseUint(m.pciFile(pci, "numa_node"), 10, 32)
	if err != nil {
		return nil
	}
	node := uint32(n)
	return &node
}

func (m machine) cpus(pci string) string { return m.pciFile(pci, "local_cpulist") }

func (m machine) onBus() *uint32 { return countOnBus(m.sys) }

// countOnBus counts display controllers (PCI class 0x03) of NVIDIA (vendor 0x10de); nil if the bus can't be read.
func countOnBus(sys string) *uint32 {
	dir := filepath.Join(sys, "bus/pci/devices")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	count := uint32(0)
	for _, e := range entries {
		vendor, errV := os.ReadFile(filepath.Join(dir, e.Name(), "vendor"))
		class, errC := os.ReadFile(filepath.Join(dir, e.Name(), "class"))
		if errV == nil && errC == nil && bytes.HasPrefix(vendor, []byte("0x10de")) && bytes.HasPrefix(class, []byte("0x03")) {
			count++
		}
	}
	return &count
}

func (m machine) capability(minor, gpuInstance, computeInstance int) *uint32 {
	path := fmt.Sprintf("driver/nvidia/capabilities/gpu%d/mig/gi%d/access", minor, gpuInstance)
	if computeInstance >= 0 {
		path = fmt.Sprintf("driver/nvidia/capabilities/gpu%d/mig/gi%d/ci%d/access", minor, gpuInstance, computeInstance)
	}
	n, ok := numberIn(filepath.Join(m.proc, path), "DeviceFileMinor:")
	if !ok {
		return nil
	}
	return &n
}

func (m machine) process(pid uint32) (string, *uint32) {
	dir := filepath.Join(m.proc, strconv.FormatUint(uint64(pid), 10))
	comm, err := os.ReadFile(filepath.Join(dir, "comm"))
	if err != nil {
		return "", nil
	}
	uid, ok := numberIn(filepath.Join(dir, "status"), "Uid:")
	if !ok {
		return strings.TrimSpace(string(comm)), nil
	}
	return strings.TrimSpace(string(comm)), &uid
}

// numberIn returns the first number behind a label at the beginning of a line of a file.
func numberIn(path, label string) (uint32, bool) {
	f, err := os.Open(path)
	if err != nil {
		return 0, false
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), label); ok {
			first, _, _ := strings.Cut(strings.TrimSpace(rest), "\t")
			n, err := strconv.ParseUint(first, 10, 32)
			return uint32(n), err == nil
		}
	}
	return 0, false
}
