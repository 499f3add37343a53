package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestMemoryIsReadInMebibytes(t *testing.T) {
	for text, want := range map[string]uint64{"64G": 65536, "64g": 65536, "512": 512, "1T": 1 << 20, "1K": 1, "1025k": 2, "2GB": 2048, "0": 0} {
		if got, err := ParseMemory(text); err != nil || got != want {
			t.Errorf("%s: %d MiB, %v; expected %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "G", "-1G", "1.5G", "1GG", "1 G", "1P", "9999999999999G"} {
		if got, err := ParseMemory(text); err == nil {
			t.Errorf("%q was read as %d MiB", text, got)
		}
	}
}

func TestTimeIsReadAsSlurmReadsIt(t *testing.T) {
	for text, want := range map[string]uint32{
		"10": 600, "10:30": 630, "1:00:00": 3600, "2-12": 216000, "1-0:30": 88200, "1-02:03:04": 93784, "infinite": Unlimited, "UNLIMITED": Unlimited, "0": 0,
	} {
		if got, err := ParseTime(text); err != nil || got != want {
			t.Errorf("%s: %d s, %v; expected %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "x", "1:2:3:4", "-5", "1-", "1h", "1-2-3", "99999999999"} {
		if got, err := ParseTime(text); err == nil {
			t.Errorf("%q was read as %d s", text, got)
		}
	}
	for seconds, want := range map[uint32]string{0: "0:00", 65: "1:05", 3661: "1:01:01", 90061: "1-01:01:01", Unlimited: "UNLIMITED"} {
		if got := FormatTime(seconds); got != want {
			t.Errorf("%d s is written %q, expected %q", seconds, got, want)
		}
	}
}

func TestAMisspeltFieldOfTheConfigurationIsAnError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.json")
	if err := os.WriteFile(path, []byte(`{"clusterName":"x","partitions":[{"name":"main","nodes":"ALL","max_times":5}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(path); err == nil || !strings.Contains(err.Error(), "max_times") {
		t.Errorf("loaded with a misspelt field: %v", err)
	}
	if err := os.WriteFile(path, []byte(`{"cluster_name":"x","settings":{"lease_ms":2000}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := Load(path)
	if err != nil || c.ClusterName != "x" || c.Settings.LeaseMs != 2000 {
		t.Errorf("%v, %v", c, err)
	}
}
