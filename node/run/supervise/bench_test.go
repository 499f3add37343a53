package supervise_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/muster-hpc/muster/node/run"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
)

// BenchmarkStep measures a step of one task, "true", with the real program: launch to prepared, start to exec, exec to
// the end on disk. Beside them, because they depend on the machine: bare fork+exec of "true". Medians.
func BenchmarkStep(b *testing.B) {
	supervisor := filepath.Join(b.TempDir(), "muster-supervisor")
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", supervisor, "github.com/muster-hpc/muster/cmd/muster-supervisor")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		b.Fatalf("building: %v\n%s", err, out)
	}
	plan := shell("true")
	plan.Tasks[0].Args = []string{"true"}
	times := make(map[string][]time.Duration)
	var memory []time.Duration
	for b.Loop() {
		dir := filepath.Join(b.TempDir(), "d"+strconv.Itoa(len(memory)))
		if err := os.Mkdir(dir, 0o700); err != nil {
			b.Fatal(err)
		}
		at := time.Now()
		lap := func(name string) {
			now := time.Now()
			times[name] = append(times[name], now.Sub(at))
			at = now
		}
		cmd := exec.Command("/bin/true")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Run(); err != nil {
			b.Fatal(err)
		}
		lap("true-ms")
		h, err := run.Launch(b.Context(), dir, plan, supervisor)
		if err != nil {
			b.Fatal(err)
		}
		lap("launch-ms")
		<-h.Events()
		lap("prepared-ms")
		if _, err := h.Start(b.Context(), nil); err != nil {
			b.Fatal(err)
		}
		lap("exec-ms")
		for state := range h.Events() {
			if state.GetPhase() == supervisorv1.Phase_PHASE_ENDED {
				break
			}
		}
		lap("end-ms")
		memory = append(memory, time.Duration(resident(b, int(h.State().GetPid()))))
		if err := h.Dismiss(b.Context()); err != nil {
			b.Fatal(err)
		}
		if err := h.Close(); err != nil {
			b.Fatal(err)
		}
	}
	for name, d := range times {
		slices.Sort(d)
		b.ReportMetric(float64(d[len(d)/2].Microseconds())/1000, name)
	}
	b.ReportMetric(float64(slices.Max(memory)), "peak-KiB")
	b.ReportMetric(0, "ns/op")
}

func resident(b *testing.B, pid int) int {
	status, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		b.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "VmHWM:")
	kib, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		b.Fatal(err)
	}
	return kib
}
