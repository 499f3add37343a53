package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// TestMain lets the test program be muster-gpu, for tests that need it as a process.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		for _, v := range verbs {
			if os.Args[1] == v {
				main()
				return
			}
		}
	}
	os.Exit(m.Run())
}

func TestWrongCallsAreRefusedWithASentence(t *testing.T) {
	for line, fault := range map[string]string{
		"":                             "a verb is missing",
		"reset":                        `"reset" is no verb`,
		"inventory now":                `"now" is one argument too many`,
		"watch --interval 1ms":         "at least 10ms",
		"watch --indent":               "exclude each other",
		"health --mock-faults f.json":  "needs --mock",
		"inventory --no-such-flag 123": "no-such-flag",
	} {
		_, _, err := parse(strings.Fields(line), io.Discard)
		if err == nil || !strings.Contains(err.Error(), fault) {
			t.Errorf("%q: %v, want %q", line, err, fault)
		}
	}
}

func TestHelpSaysWhatIsForTests(t *testing.T) {
	var help bytes.Buffer
	if _, _, err := parse([]string{"--help"}, &help); err == nil {
		t.Error("help is no call")
	}
	for _, want := range []string{"inventory", "health", "processes", "watch", "for tests: pretend"} {
		if !strings.Contains(help.String(), want) {
			t.Errorf("help lacks %q:\n%s", want, help.String())
		}
	}
}

// TestAMachineWithoutADriverIsUnknownAndNoError holds for builds with and without cgo.
func TestAMachineWithoutADriverIsUnknownAndNoError(t *testing.T) {
	if _, err := os.Stat("/dev/nvidiactl"); err == nil {
		t.Skip("this machine has NVIDIA's driver")
	}
	for verb, answer := range map[string]interface{ GetUnknown() *nodev1.GpuUnknown }{
		"inventory": &nodev1.GpuInventory{}, "health": &nodev1.GpuHealth{}, "processes": &nodev1.GpuProcesses{},
	} {
		var out bytes.Buffer
		if err := run(options{}, verb, &out); err != nil {
			t.Errorf("%s: %v", verb, err)
			continue
		}
		switch m := answer.(type) {
		case *nodev1.GpuInventory:
			if err := protojson.Unmarshal(out.Bytes(), m); err != nil {
				t.Error(err)
			}
		case *nodev1.GpuHealth:
			if err := protojson.Unmarshal(out.Bytes(), m); err != nil {
				t.Error(err)
			}
		case *nodev1.GpuProcesses:
			if err := protojson.Unmarshal(out.Bytes(), m); err != nil {
				t.Error(err)
			}
		}
		u := answer.GetUnknown()
		if u.GetCode() == 0 || !strings.HasPrefix(u.GetSentence(), "unknown: ") || !strings.Contains(u.GetSentence(), "; ") {
			t.Errorf("%s: %v", verb, u)
		}
	}
}

func TestTypesAreWhatPeopleCallThem(t *testing.T) {
	for model, want := range map[string]string{
		"NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H200": "h200", "NVIDIA B200": "b200",
		"NVIDIA GH200 480GB": "gh200", "Tesla V100-SXM2-16GB": "v100", "Tesla T4": "t4", "NVIDIA L40S": "l40s",
		"NVIDIA RTX A6000": "a6000", "NVIDIA TITAN V": "titan_v", "NVIDIA GeForce RTX 4090": "geforce_rtx_4090",
	} {
		if got := typeOf(model); got != want {
			t.Errorf("%s is %s, want %s", model, got, want)
		}
	}
}

func TestProfilesAreNamedAsTheVendorDoes(t *testing.T) {
	for _, c := range []struct {
		name       string
		gi, ci     uint32
		memory, of uint64
		want       string
	}{
		{"NVIDIA H100 80GB HBM3 MIG 2g.20gb", 2, 2, 19968, 81920, "2g.20gb"},
		{"NVIDIA A30 MIG 1g.6gb+me", 1, 1, 5952, 24576, "1g.6gb+me"},
		{"", 1, 1, 4864, 40960, "1g.5gb"},
		{"", 2, 1, 9856, 40960, "1c.2g.10gb"},
		{"", 3, 3, 40448, 81920, "3g.40gb"},
		{"", 7, 7, 80384, 81920, "7g.80gb"},
	} {
		if got := profileOf(c.name, c.gi, c.ci, c.memory, c.of); got != c.want {
			t.Errorf("%+v is %s", c, got)
		}
	}
}

// files writes files below a directory.
func files(t *testing.T, dir string, all map[string]string) {
	t.Helper()
	for name, text := range all {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func TestTheKernelsFilesAreRead(t *testing.T) {
	dir := t.TempDir()
	files(t, dir, map[string]string{
		"sys/bus/pci/devices/0000:1b:00.0/vendor":                 "0x10de\n",
		"sys/bus/pci/devices/0000:1b:00.0/class":                  "0x030200\n",
		"sys/bus/pci/devices/0000:1b:00.0/numa_node":              "1\n",
		"sys/bus/pci/devices/0000:1b:00.0/local_cpulist":          "56-111,168-223\n",
		"sys/bus/pci/devices/0000:1b:00.1/vendor":                 "0x10de\n",
		"sys/bus/pci/devices/0000:1b:00.1/class":                  "0x040300\n",
		"sys/bus/pci/devices/0000:05:00.0/vendor":                 "0x1a03\n",
		"sys/bus/pci/devices/0000:05:00.0/class":                  "0x030000\n",
		"sys/bus/pci/devices/0000:05:00.0/numa_node":              "-1\n",
		"proc/driver/nvidia/capabilities/gpu0/mig/gi1/access":     "DeviceFileMinor: 12\nDeviceFileMode: 292\n",
		"proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access": "DeviceFileMinor: 13\nDeviceFileMode: 292\n",
		"proc/7/comm":   "python\n",
		"proc/7/status": "Name:\tpython\nUid:\t1000\t1000\t1000\t1000\n",
	})
	m := machine{sys: filepath.Join(dir, "sys"), proc: filepath.Join(dir, "proc")}
	if n := m.numaNode("0000:1b:00.0"); n == nil || *n != 1 {
		t.Errorf("NUMA node %v", n)
	}
	if n := m.numaNode("0000:05:00.0"); n != nil {
		t.Errorf("an unknown NUMA node is %d", *n)
	}
	if c := m.cpus("0000:1b:00.0"); c != "56-111,168-223" {
		t.Errorf("CPUs %q", c)
	}
	if n := m.onBus(); n == nil || *n != 1 {
		t.Errorf("GPUs on the bus: %v; sound devices and other vendors do not count", n)
	}
	if gi, ci := m.capability(0, 1, -1), m.capability(0, 1, 0); gi == nil || ci == nil || *gi != 12 || *ci != 13 {
		t.Errorf("capabilities %v %v", gi, ci)
	}
	if c := m.capability(1, 1, -1); c != nil {
		t.Errorf("a capability that is not there is %d", *c)
	}
	if name, uid := m.process(7); name != "python" || uid == nil || *uid != 1000 {
		t.Errorf("process 7 is %q of %v", name, uid)
	}
	if name, uid := m.process(8); name != "" || uid != nil {
		t.Errorf("a process that ended is %q of %v", name, uid)
	}
	if n := countOnBus(filepath.Join(dir, "nowhere")); n != nil {
		t.Errorf("a bus that can't be read has %d GPUs", *n)
	}
}
