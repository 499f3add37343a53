package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestRecordsAreOverwrittenOnlyIfOneWriteSaysItAll(t *testing.T) {
	path := filepath.Join(t.TempDir(), "record")
	try := func(content string, want bool) {
		t.Helper()
		before, _ := os.ReadFile(path)
		done, err := overwrite(path, []byte(content))
		if done != want || err != nil {
			t.Errorf("overwriting %d bytes with %d: %v, %v", len(before), len(content), done, err)
		}
		expected := string(before)
		if want {
			expected = content
		}
		if after, _ := os.ReadFile(path); string(after) != expected {
			t.Errorf("then the file has %q", after)
		}
	}
	try("new", false) // there is none
	if err := os.WriteFile(path, []byte("old!"), 0o600); err != nil {
		t.Fatal(err)
	}
	try("longer than before", true)
	try("shorter", false)
	try(strings.Repeat("x", page+1), false) // a kill could come in the middle
	if err := os.Truncate(path, 0); err != nil {
		t.Fatal(err)
	}
	try("x", true)
}
