package node

import (
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestGroupsAreAskedForWhereTheyAreNotInFiles(t *testing.T) {
	for content, want := range map[string]bool{
		"passwd: files sss\ngroup: files systemd\n":           false,
		"group:\tfiles [SUCCESS=merge] sss # the directory\n": true,
		"group: files\ninitgroups: files ldap\n":              true,
		"# group: sss\ngroup: compat\nhosts: files dns\n":     false,
		"": false,
	} {
		path := filepath.Join(t.TempDir(), "nsswitch.conf")
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		if got := elsewhere(path); got != want {
			t.Errorf("%q: %v", content, got)
		}
	}
	if elsewhere(filepath.Join(t.TempDir(), "none")) {
		t.Error("without the file they are said to be elsewhere")
	}
}

func TestIDAndFilesAgreeAboutGroups(t *testing.T) {
	u, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	own, err := u.GroupIds()
	if err != nil {
		t.Fatal(err)
	}
	asked, err := askedGroups(u.Username)
	slices.Sort(own)
	slices.Sort(asked)
	if err != nil || !slices.Equal(own, asked) {
		t.Errorf("files say %v, id says %v (%v)", own, asked, err)
	}
	if _, err := askedGroups("-no-such-user"); err == nil || !strings.Contains(err.Error(), "-no-such-user") {
		t.Errorf("of nobody: %v", err)
	}
}
