package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/muster-hpc/muster/fsm/replica"
)

func TestFlagsThatMakeNoSenseAreExplained(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad.json")
	if err := os.WriteFile(bad, []byte(`{"clusterName": 7}`), 0o644); err != nil {
		t.Fatal(err)
	}
	full := []string{"--dir", dir, "--name", "c1", "--listen", "127.0.0.1:0", "--raft", "127.0.0.1:0"}
	for name, c := range map[string]struct {
		args []string
		says string
	}{
		"no directory":            {nil, "--dir"},
		"no name":                 {[]string{"--dir", dir}, "--name"},
		"no port":                 {append(full[:4:4], "--listen", "127.0.0.1", "--raft", "127.0.0.1:0"), "HOST:PORT"},
		"both beginnings":         {append(full[:8:8], "--bootstrap", bad, "--join", "a:1"), "--bootstrap"},
		"a configuration too few": {append(full[:8:8], "--bootstrap", filepath.Join(dir, "none")), "none"},
		"a bad configuration":     {append(full[:8:8], "--bootstrap", bad), "bad.json"},
		"a bad seed":              {append(full[:8:8], "--join", "a:1,b"), "\"b\""},
		"a bad profile":           {append(full[:8:8], "--timing", "lucky"), "lucky"},
		"an unknown verb":         {[]string{"reboot"}, "reboot"},
		"a word too many":         {append(full[:8:8], "now"), "now"},
		"rejoin without seeds":    {append([]string{"rejoin"}, full...), "--join"},
		"no certificate":          {full, filepath.Join(dir, "tls")},
	} {
		var stdout, stderr bytes.Buffer
		err := command(t.Context(), c.args, &stdout, &stderr)
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
		if stdout.Len() > 0 {
			t.Errorf("%s: stdout has %q", name, stdout.String())
		}
	}
}

func TestTimingProfiles(t *testing.T) {
	for text, want := range map[string]replica.Timing{"production": replica.Production(), "development": replica.Development()} {
		o, err := parse("", []string{"--dir", "d", "--name", "c1", "--listen", "h:1", "--raft", "h:2", "--timing", text, "--join", "a:1, b:2"}, os.Stderr)
		if err != nil || o.timing != want || len(o.join) != 2 {
			t.Errorf("%s: %+v, %v", text, o, err)
		}
	}
}
