package house

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/muster-hpc/muster/"

type pkg struct {
	ImportPath string
	Dir        string
	Standard   bool
	GoFiles    []string
	Imports    []string
	Deps       []string
}

// packages returns ours by path without the module's prefix.
func packages(t *testing.T) map[string]pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Dir,Standard,GoFiles,Imports,Deps", module+"...")
	cmd.Dir = root(t)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.String())
	}
	all := map[string]pkg{}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		all[strings.TrimPrefix(p.ImportPath, module)] = p
	}
	return all
}

func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// rule says what the packages of a room may import of ours. Patterns are path prefixes at a slash; the first match counts.
type rule struct {
	room string
	ours []string
}

// rules is the map of docs/design/rooms.md.
var rules = []rule{
	{"proto/notation", nil},
	{"proto/wiring", nil},
	{"proto/muster/api", []string{"proto/muster/api"}},
	{"proto/muster", []string{"proto/muster"}},
	{"fsm/replica", []string{"proto", "fsm"}},
	{"fsm/history", []string{"proto/muster/api"}},
	{"fsm", []string{"proto", "fsm", "checkpoint"}},
	{"sched/control", []string{"proto", "fsm", "sched"}},
	{"sched/simulate", []string{"proto", "fsm", "sched"}},
	{"sched", []string{"sched", "proto/wiring"}},
	{"checkpoint", []string{"proto/muster/api", "proto/notation", "checkpoint"}},
	{"rpc/server", []string{"proto", "rpc", "fsm", "checkpoint", "ops/telemetry", "ops/version"}},
	{"rpc/client", []string{"proto", "rpc"}},
	{"rpc", []string{"proto", "rpc"}},
	{"node/run", []string{"proto/muster/supervisor", "proto/muster/api", "proto/notation", "node/run"}},
	{"node/gpu", []string{"proto/muster/node", "proto/muster/api", "proto/notation", "proto/wiring", "node/gpu"}},
	{"node", []string{"proto", "checkpoint", "rpc", "node"}},
	{"ops", []string{"proto", "rpc", "fsm", "ops"}},
	{"cmd/muster-supervisor", []string{"proto/muster/supervisor", "proto/muster/api", "node/run", "ops/version"}},
	{"cmd/muster-gpu", []string{"proto/muster/node", "ops/version"}},
	{"cmd/muster-agent", []string{"proto", "node", "rpc", "ops", "cmd/internal", "checkpoint"}},
	{"cmd/muster-controller", []string{"proto", "fsm", "sched", "rpc", "ops", "cmd/internal", "checkpoint"}},
	{"cmd/internal/slurm", []string{"proto", "rpc", "ops/version", "cmd/internal"}},
	{"cmd/internal/launch", []string{"proto", "rpc/client", "rpc", "cmd/internal/launch"}},
	{"cmd", []string{"proto", "rpc", "ops", "checkpoint", "sched/simulate", "cmd"}},
	{"examples", []string{"examples"}},
	{"e2e", []string{""}},
}

func within(path string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool {
		return p == "" || path == p || strings.HasPrefix(path, p+"/")
	})
}

func TestRoomsImportOnlyWhatTheMapAllows(t *testing.T) {
	for path, p := range packages(t) {
		i := slices.IndexFunc(rules, func(r rule) bool { return within(path, []string{r.room}) })
		if i < 0 {
			t.Errorf("%s is in no room of the map", path)
			continue
		}
		for _, imp := range p.Imports {
			if our, ok := strings.CutPrefix(imp, module); ok && !within(our, rules[i].ours) {
				t.Errorf("%s imports %s; the room %s may import only %v", path, our, rules[i].room, rules[i].ours)
			}
		}
	}
}

// outside lists libraries that stop at certain rooms (rule R4), and what pure rooms must not have (R3).
var outside = []struct {
	library string
	allowed []string
}{
	{"github.com/hashicorp/raft", []string{"fsm/replica"}},
	{"github.com/hashicorp/raft-boltdb", []string{"fsm/replica"}},
	{"go.etcd.io/bbolt", []string{"fsm/replica", "fsm/history"}},
	{"connectrpc.com/connect", []string{"rpc", "node/serve", "proto/muster", "e2e", "cmd"}},
	{"github.com/NVIDIA/go-nvml", []string{"node/gpu", "cmd/muster-gpu"}},
	{"github.com/spf13/cobra", []string{"cmd/muster", "cmd/internal", "cmd/muster-controller"}},
}

func TestLibrariesStopAtTheirRooms(t *testing.T) {
	for path, p := range packages(t) {
		for _, o := range outside {
			for _, imp := range p.Imports {
				if within(imp, []string{o.library}) && !within(path, o.allowed) {
					t.Errorf("%s imports %s; only %v may", path, imp, o.allowed)
				}
			}
		}
	}
}

func TestPureRoomsHaveNoClockNoRandomnessNoIO(t *testing.T) {
	forbidden := []string{"os", "net", "net/http", "log", "log/slog", "context", "math/rand", "math/rand/v2", "crypto/rand", "sync", "io/fs", "syscall"}
	pure := []string{"fsm", "sched", "checkpoint"}
	except := []string{"fsm/replica", "fsm/history", "sched/control", "sched/simulate", "checkpoint/store"}
	clock := regexp.MustCompile(`\btime\.(Now|Since|Until|After|Sleep|NewTimer|NewTicker|Tick|AfterFunc)\(`)
	goroutine := regexp.MustCompile(`(?m)^\s*go (func|\w)`)
	float := regexp.MustCompile(`\b(float32|float64)\b`)
	for path, p := range packages(t) {
		if !within(path, pure) || within(path, except) {
			continue
		}
		for _, imp := range p.Imports {
			// A lock is no clock: views are read by many goroutines, which may need sync.
			if slices.Contains(forbidden, imp) && !(imp == "sync" && path == "fsm") {
				t.Errorf("%s imports %s; pure rooms must not", path, imp)
			}
		}
		for _, file := range p.GoFiles {
			text, err := os.ReadFile(filepath.Join(p.Dir, file))
			if err != nil {
				t.Fatal(err)
			}
			for what, re := range map[string]*regexp.Regexp{"a clock": clock, "a goroutine": goroutine} {
				if m := re.Find(text); m != nil {
					t.Errorf("%s/%s uses %s (%s)", path, file, what, m)
				}
			}
			if m := float.Find(text); m != nil && within(path, []string{"fsm"}) {
				t.Errorf("%s/%s uses floating point (%s)", path, file, m)
			}
		}
	}
}

func TestAgentAndControllerAreApart(t *testing.T) {
	for path, p := range packages(t) {
		for _, dep := range p.Deps {
			our, ok := strings.CutPrefix(dep, module)
			switch {
			case !ok:
			case within(path, []string{"node", "cmd/muster-agent", "cmd/muster-supervisor"}) && within(our, []string{"fsm", "sched"}):
				t.Errorf("%s depends on %s: the agent never imports the state machine or the planner", path, our)
			case within(path, []string{"cmd/muster-controller", "rpc/server", "sched", "fsm"}) && within(our, []string{"node"}):
				t.Errorf("%s depends on %s: the controller never imports the agent", path, our)
			}
		}
	}
}

func TestSmallProgramsStaySmall(t *testing.T) {
	heavy := map[string][]string{
		"cmd/muster-supervisor": {"net/http", "connectrpc.com/connect/v2", "github.com/spf13/cobra", "go.opentelemetry.io/otel"},
		"cmd/muster-slurm":      {"github.com/spf13/cobra", "go.opentelemetry.io/otel"},
	}
	all := packages(t)
	for path, libraries := range heavy {
		for _, dep := range all[path].Deps {
			if within(dep, libraries) {
				t.Errorf("%s depends on %s, which makes it slow to start", path, dep)
			}
		}
	}
}

func TestEveryPackageSaysWhatItIsFor(t *testing.T) {
	for path, p := range packages(t) {
		if within(path, []string{"proto/muster"}) || len(p.GoFiles) == 0 {
			continue
		}
		found := false
		for _, file := range p.GoFiles {
			text, err := os.ReadFile(filepath.Join(p.Dir, file))
			if err != nil {
				t.Fatal(err)
			}
			if regexp.MustCompile(`(?m)^//.*\npackage \w+`).Match(text) {
				found = true
			}
		}
		if !found {
			t.Errorf("%s has no package documentation", path)
		}
		for _, bad := range []string{"util", "utils", "common", "helper", "helpers", "misc"} {
			if filepath.Base(path) == bad {
				t.Errorf("%s: a package is named after what it is about", path)
			}
		}
	}
}

func TestTopLevelIsTheDesignCards(t *testing.T) {
	allowed := strings.Fields("cmd fsm rpc proto node sched checkpoint ops e2e buf.yaml buf.gen.yaml go.mod go.sum tools.mod tools.sum Makefile docs examples README.md LICENSE bin")
	entries, err := os.ReadDir(root(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") && !slices.Contains(allowed, e.Name()) {
			t.Errorf("%s is not on the design card", e.Name())
		}
	}
}
