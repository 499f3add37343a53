package gpu

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// TestMain lets the test program be the probe, too: its last arguments are then a way to behave and a directory.
func TestMain(m *testing.M) {
	if len(os.Args) > 3 && (os.Args[1] == "watch" || os.Args[1] == "processes") {
		fakeProbe(os.Args[1], os.Args[len(os.Args)-2], os.Args[len(os.Args)-1])
		return
	}
	os.Exit(m.Run())
}

// fakeProbe behaves as the tests want it.
func fakeProbe(verb, way, dir string) {
	if text, err := os.ReadFile(filepath.Join(dir, "way")); err == nil {
		way = strings.TrimSpace(string(text))
	}
	f, err := os.OpenFile(filepath.Join(dir, verb+".starts"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		panic(err)
	}
	fmt.Fprintln(f, os.Getpid())
	f.Close()
	switch way {
	case "hang":
		signal.Ignore(syscall.SIGTERM)
		time.Sleep(5 * time.Minute) // Longer than any test; then a failed test leaves nothing behind.
	case "die":
		fmt.Fprintln(os.Stderr, "the library ended us")
		os.Exit(3)
	case "garbage":
		fmt.Println("NVRM: {oops")
	case "follow":
		follow(filepath.Join(dir, verb+".lines"))
	default:
		panic(way)
	}
}

// follow writes the lines of a file as they are appended, until its stdin is closed.
func follow(path string) {
	ended := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(ended)
	}()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0o600)
	if err != nil {
		panic(err)
	}
	for r := bufio.NewReader(f); ; {
		line, err := r.ReadString('\n')
		if err == nil {
			fmt.Print(line)
			continue
		}
		select {
		case <-ended:
			return
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// bench is a monitor with a fake probe.
type bench struct {
	t   *testing.T
	dir string
	m   *Monitor
}

func newBench(t *testing.T, way string, change func(*Config)) *bench {
	t.Helper()
	b := &bench{t: t, dir: t.TempDir()}
	cfg := Config{
		Program: os.Args[0], Args: []string{way, b.dir}, Timeout: 20 * time.Second, Interval: 20 * time.Second,
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)), BootID: "boot1",
	}
	if change != nil {
		change(&cfg)
	}
	b.m = Open(cfg)
	return b
}

// run runs the monitor until the test ends, or the function returned is called.
func (b *bench) run() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.m.Run(ctx)
	}()
	stop = func() {
		cancel()
		<-done
	}
	b.t.Cleanup(stop)
	return stop
}

// say lets the fake probe say something.
func (b *bench) say(verb string, messages ...proto.Message) {
	b.t.Helper()
	f, err := os.OpenFile(filepath.Join(b.dir, verb+".lines"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		b.t.Fatal(err)
	}
	defer f.Close()
	for _, m := range messages {
		text, err := protojson.Marshal(m)
		if err != nil {
			b.t.Fatal(err)
		}
		if _, err := f.Write(append(text, '\n')); err != nil {
			b.t.Fatal(err)
		}
	}
}

// starts returns the process ids of the probes started so far.
func (b *bench) starts(verb string) []int {
	text, err := os.ReadFile(filepath.Join(b.dir, verb+".starts"))
	if err != nil {
		return nil
	}
	var pids []int
	for _, line := range strings.Fields(string(text)) {
		var pid int
		if _, err := fmt.Sscan(line, &pid); err != nil {
			b.t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	return pids
}

// await waits until the findings are as wanted; it looks again whenever something changed.
func (b *bench) await(what string, want func([]Finding) bool) []Finding {
	b.t.Helper()
	deadline := time.After(30 * time.Second)
	for {
		changed := b.m.Changed()
		found := b.m.Health()
		if want(found) {
			return found
		}
		select {
		case <-changed:
		case <-deadline:
			b.t.Fatalf("%s: not within 30 s; findings are %+v", what, found)
		}
	}
}

func has(code string) func([]Finding) bool {
	return func(all []Finding) bool { return find(all, code) != nil }
}

func find(all []Finding, code string) *Finding {
	for i := range all {
		if all[i].Code == code {
			return &all[i]
		}
	}
	return nil
}

func inventoryEvent(i *nodev1.GpuInventory) *nodev1.GpuEvent {
	return &nodev1.GpuEvent{What: &nodev1.GpuEvent_Inventory{Inventory: i}}
}

func healthEvent(h *nodev1.GpuHealth) *nodev1.GpuEvent {
	return &nodev1.GpuEvent{What: &nodev1.GpuEvent_Health{Health: h}}
}

func xidEvent(uuid string, n uint32) *nodev1.GpuEvent {
	return &nodev1.GpuEvent{What: &nodev1.GpuEvent_Xid{Xid: &nodev1.GpuXid{Uuid: uuid, Xid: n}}}
}

// machineOf is an inventory of n H100s with NVSwitches on two NUMA nodes.
func machineOf(n int) *nodev1.GpuInventory {
	inv := &nodev1.GpuInventory{DriverVersion: "550", PciGpus: proto.Uint32(uint32(n))}
	for i := range n {
		inv.Devices = append(inv.Devices, &nodev1.GpuDevice{
			Index: uint32(i), Uuid: fmt.Sprintf("GPU-%d", i), Model: "NVIDIA H100 80GB HBM3", Type: "h100", MemoryMb: 81920,
			PciAddress: fmt.Sprintf("0000:%02x:00.0", 0x10+i), NumaNode: proto.Uint32(uint32(i / 4)), Minor: proto.Uint32(uint32(i)),
			Nvlinks: 18, NvlinksActive: 18,
		})
		for j := range i {
			path := nodev1.GpuPath_GPU_PATH_SYSTEM
			if j/4 == i/4 {
				path = nodev1.GpuPath_GPU_PATH_NUMA_NODE
			}
			inv.Pairs = append(inv.Pairs, &nodev1.GpuPair{A: uint32(j), B: uint32(i), Nvlinks: 18, Path: path})
		}
	}
	return inv
}

// wellness is a reading of that machine in which all is well.
func wellness(n int) *nodev1.GpuHealth {
	h := &nodev1.GpuHealth{}
	for i := range n {
		h.Gpus = append(h.Gpus, &nodev1.GpuReading{
			Index: uint32(i), Uuid: fmt.Sprintf("GPU-%d", i), TemperatureC: proto.Uint32(40), SlowdownC: proto.Uint32(89),
			NvlinksActive: proto.Uint32(18), RemapPending: proto.Bool(false), EccUncorrected: proto.Uint64(0),
		})
	}
	return h
}
