//go:build cgo && gpu

package main

import (
	"bytes"
	"context"
	"encoding/csv"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/muster-hpc/muster/node/gpu"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// These tests need a machine with NVIDIA GPUs and run with "make test-gpu". They only read. MUSTER_GPU_PROBE names the
// built program; without it the test program itself is the probe.

func hardwareProbe(t *testing.T) string {
	t.Helper()
	if _, err := os.Stat("/dev/nvidiactl"); err != nil {
		t.Skip("this machine has no NVIDIA driver (/dev/nvidiactl is not there)")
	}
	if p := os.Getenv("MUSTER_GPU_PROBE"); p != "" {
		return p
	}
	return os.Args[0]
}

// answered runs a verb of the probe within a time limit.
func answered[M proto.Message](t *testing.T, verb string, answer M) M {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, hardwareProbe(t), verb).Output()
	if err != nil {
		t.Fatalf("%s: %v", verb, err)
	}
	if err := protojson.Unmarshal(bytes.TrimSpace(out), answer); err != nil {
		t.Fatalf("%s: %v\n%s", verb, err, out)
	}
	t.Logf("%s: %s", verb, out)
	return answer
}

// smi asks nvidia-smi for a row of words for each GPU.
func smi(t *testing.T, words string) [][]string {
	t.Helper()
	path, err := exec.LookPath("nvidia-smi")
	if err != nil {
		t.Skip("nvidia-smi is not in PATH, so that there is nothing to compare with")
	}
	out, err := exec.CommandContext(t.Context(), path, "--query-gpu="+words, "--format=csv,noheader,nounits").Output()
	if err != nil {
		t.Fatalf("nvidia-smi: %v", err)
	}
	r := csv.NewReader(bytes.NewReader(out))
	r.TrimLeadingSpace = true
	rows, err := r.ReadAll()
	if err != nil {
		t.Fatalf("nvidia-smi: %v\n%s", err, out)
	}
	return rows
}

func TestHardwareInventoryEqualsNvidiaSmi(t *testing.T) {
	inv := answered(t, "inventory", &nodev1.GpuInventory{})
	if inv.Unknown != nil {
		t.Fatalf("unknown: %v", inv.Unknown)
	}
	var gpus []*nodev1.GpuDevice
	for _, d := range inv.Devices {
		if d.Mig == nil {
			gpus = append(gpus, d)
		}
	}
	rows := smi(t, "index,uuid,name,memory.total,pci.bus_id,driver_version")
	if len(rows) != len(gpus) {
		t.Fatalf("nvidia-smi lists %d GPUs, the probe %d", len(rows), len(gpus))
	}
	for i, row := range rows {
		d := gpus[i]
		// nvidia-smi writes the domain with eight digits and in capitals.
		pci := strings.ToLower(row[4])
		if strings.HasPrefix(pci, "0000") && len(pci) == len("00000000:1b:00.0") {
			pci = pci[4:]
		}
		got := []string{strconv.Itoa(int(d.Index)), d.Uuid, d.Model, strconv.FormatUint(d.MemoryMb, 10), d.PciAddress, inv.DriverVersion}
		if want := []string{row[0], row[1], row[2], row[3], pci, row[5]}; !slices.Equal(got, want) {
			t.Errorf("GPU %d: the probe says %q, nvidia-smi %q", i, got, want)
		}
		if d.Type == "" || d.Minor == nil || d.ComputeCapability == "" {
			t.Errorf("GPU %d lacks type, minor number or capability: %v", i, d)
		}
		for _, file := range gpu.DeviceFiles(d)[:2] {
			if _, err := os.Stat(file); err != nil {
				t.Errorf("GPU %d: %v", i, err)
			}
		}
	}
	if n := len(gpus); len(inv.Pairs) != n*(n-1)/2 {
		t.Errorf("%d GPUs have %d pairs", n, len(inv.Pairs))
	}
}

func TestHardwareHealthIsPlausible(t *testing.T) {
	h := answered(t, "health", &nodev1.GpuHealth{})
	if h.Unknown != nil || len(h.Gpus) == 0 {
		t.Fatalf("%v", h)
	}
	rows := smi(t, "temperature.gpu,memory.total")
	for i, r := range h.Gpus {
		if r.Lost || len(r.Errors) > 0 || r.Uuid == "" {
			t.Errorf("GPU %d: %v", i, r)
		}
		want, err := strconv.Atoi(rows[i][0])
		if err != nil || r.TemperatureC == nil || int(r.GetTemperatureC()) < want-15 || int(r.GetTemperatureC()) > want+15 {
			t.Errorf("GPU %d: temperature %v, nvidia-smi says %s", i, r.TemperatureC, rows[i][0])
		}
		if strconv.FormatUint(r.GetMemoryTotalMb(), 10) != rows[i][1] {
			t.Errorf("GPU %d: %d MiB, nvidia-smi says %s", i, r.GetMemoryTotalMb(), rows[i][1])
		}
	}
	inv := gpu.Merge(nil, answered(t, "inventory", &nodev1.GpuInventory{}))
	for _, f := range gpu.Judge(gpu.Facts{Inventory: inv, Health: h}, time.Now()) {
		t.Logf("found: %+v", f) // A sick machine is no fault of the code.
	}
}

func TestHardwareProcessesAreRead(t *testing.T) {
	if all := answered(t, "processes", &nodev1.GpuProcesses{}); all.Unknown != nil || len(all.Unread) > 0 {
		t.Errorf("%v", all)
	}
}

// TestHardwareIsWatched takes the first answer and two more, and measures them.
func TestHardwareIsWatched(t *testing.T) {
	m := gpu.Open(gpu.Config{
		Program: hardwareProbe(t), Timeout: 2 * time.Minute, Interval: 200 * time.Millisecond, Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		m.Run(ctx)
	}()
	defer func() {
		cancel()
		<-done
	}()
	began := time.Now()
	for readings, last := 0, (*nodev1.GpuHealth)(nil); readings < 3; {
		if now := m.Readings(); now != last {
			last, readings = now, readings+1
			t.Logf("reading %d after %v", readings, time.Since(began))
		}
		if time.Since(began) > 3*time.Minute {
			t.Fatalf("three readings take more than 3 minutes: %+v", m.Health())
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-t.Context().Done():
		}
	}
	if inv, age := m.Inventory(); len(gpu.ByNumber(inv)) == 0 || age > time.Minute {
		t.Errorf("inventory of age %v: %v", age, inv)
	}
}

// TestHardwareSilenceIsUnknown gives the probe no time at all: whatever the hardware does, that must not be a failure.
func TestHardwareSilenceIsUnknown(t *testing.T) {
	m := gpu.Open(gpu.Config{
		Program: hardwareProbe(t), Timeout: time.Millisecond, Interval: time.Hour, Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		m.Run(ctx)
	}()
	changed := m.Changed()
	select {
	case <-changed:
	case <-time.After(time.Minute):
		t.Error("the end of patience is not noticed")
	}
	found := m.Health()
	cancel()
	<-done
	if len(found) != 1 || found[0].Verdict != gpu.Unknown || found[0].EndsWork {
		t.Errorf("no answer in time: %+v", found)
	}
}
