package fsm

import (
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

var update = flag.Bool("update", false, "rewrite the expected outputs of scripts and the recorded logs")

// TestScripts applies the commands in testdata/script and compares answers and changes with what is written there.
//
// A script is a sequence of blocks separated by empty lines; lines that begin with # are comments. The first line of a block is
// "apply", with any of: as=NAME (alice, bob, oscar the operator, root, c1 the controller, or a node), +DURATION to let time
// pass before, term=N. The following lines, up to "----", are commands in protobuf's text format, one a line, applied as one entry. Below
// comes what is expected: a line for each result, then one for each record that changed. In commands, @sha(TEXT) is the hash of a text
// and @id(NAME) a request id minted now, @id(NAME-20m) one minted 20 minutes ago.
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/script/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			input, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := runScript(t, string(input))
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != string(input) {
				t.Errorf("%s differs; if it is right, run go test ./fsm -run TestScripts -update\n%s", file, firstDifference(string(input), got))
			}
		})
	}
}

func firstDifference(want, got string) string {
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range min(len(w), len(g)) {
		if w[i] != g[i] {
			return fmt.Sprintf("line %d\nwant: %s\ngot:  %s", i+1, w[i], g[i])
		}
	}
	return fmt.Sprintf("want %d lines, got %d", len(w), len(g))
}

func runScript(t *testing.T, input string) string {
	r := newRig(t)
	var out strings.Builder
	for i, block := range strings.Split(strings.TrimSpace(input), "\n\n") {
		if i > 0 {
			out.WriteString("\n")
		}
		var head []string
		lines := strings.Split(block, "\n")
		for len(lines) > 0 && strings.HasPrefix(lines[0], "#") {
			head = append(head, lines[0])
			lines = lines[1:]
		}
		for _, l := range head {
			out.WriteString(l + "\n")
		}
		if len(lines) == 0 {
			continue
		}
		out.WriteString(r.block(lines))
	}
	return out.String()
}

// block runs one block and returns it with its output.
func (r *rig) block(lines []string) string {
	var out strings.Builder
	words := strings.Fields(lines[0])
	if words[0] != "apply" {
		r.t.Fatalf("%q does not begin a block", lines[0])
	}
	who := member
	for _, w := range words[1:] {
		switch {
		case strings.HasPrefix(w, "as="):
			who = principalNamed(w[3:])
		case strings.HasPrefix(w, "term="):
			n, err := strconv.ParseUint(w[5:], 10, 64)
			if err != nil {
				r.t.Fatal(err)
			}
			r.term = n
		case strings.HasPrefix(w, "+"):
			d, err := time.ParseDuration(w[1:])
			if err != nil {
				r.t.Fatal(err)
			}
			r.ms += d.Milliseconds()
		default:
			r.t.Fatalf("%q means nothing", w)
		}
	}
	out.WriteString(lines[0] + "\n")
	var commands []*logv1.Command
	for _, line := range lines[1:] {
		if line == "----" {
			break
		}
		out.WriteString(line + "\n")
		cmd := &logv1.Command{}
		if err := prototext.Unmarshal([]byte(r.expand(line)), cmd); err != nil {
			r.t.Fatalf("%s: %v", line, err)
		}
		if cmd.Principal == nil {
			cmd.Principal = who
		}
		commands = append(commands, cmd)
	}
	out.WriteString("----\n")
	before := r.m.s.Revision()
	results, err := r.try(commands...)
	if err != nil {
		fmt.Fprintf(&out, "STOPPED: %v\n", err)
		return out.String()
	}
	for _, result := range results {
		result.Revision = nil
		line := text(result)
		if line == "" {
			line = "ok"
		}
		out.WriteString(line + "\n")
	}
	v := r.check()
	changes, ok := v.ChangedSince(before)
	if !ok {
		return out.String()
	}
	for c := range changes {
		out.WriteString("  " + describe(v, c) + "\n")
	}
	return out.String()
}

func principalNamed(name string) *apiv1.Principal {
	switch name {
	case "alice":
		return alice
	case "bob":
		return bob
	case "root":
		return root
	case "oscar":
		return &apiv1.Principal{Kind: userKind, Uid: 7, Name: "oscar"}
	case "c1":
		return member
	default:
		return agentOf(name)
	}
}

var macros = regexp.MustCompile(`@(sha|id)\(([^)]*)\)`)

func (r *rig) expand(line string) string {
	return macros.ReplaceAllStringFunc(line, func(s string) string {
		g := macros.FindStringSubmatch(s)
		if g[1] == "sha" {
			content, err := strconv.Unquote(`"` + g[2] + `"`)
			if err != nil {
				r.t.Fatal(err)
			}
			return hashOf([]byte(content))
		}
		name, at := g[2], r.ms
		if i := strings.IndexAny(name, "+-"); i >= 0 {
			d, err := time.ParseDuration(name[i:])
			if err != nil {
				r.t.Fatal(err)
			}
			at += d.Milliseconds()
		}
		return mint(at, name)
	})
}

// describe writes a changed record on one line.
func describe(v *View, c Change) string {
	switch c.Kind {
	case ChangeJob:
		if c.Removed {
			return fmt.Sprintf("job %d removed", c.Job)
		}
		j := v.Job(c.Job)
		return fmt.Sprintf("job %d (%s) %s", j.Id, j.Owner.User, text(j.Status))
	case ChangeAttempt:
		a := proto.Clone(v.Attempt(c.Job, c.Attempt)).(*apiv1.Attempt)
		a.JobId, a.Number, a.Revision = 0, 0, nil
		return fmt.Sprintf("attempt %d.%d %s", c.Job, c.Attempt, text(a))
	case ChangeStep:
		s := proto.Clone(v.Step(c.Job, c.Attempt, c.Step)).(*apiv1.Step)
		s.JobId, s.Id, s.Attempt, s.Revision, s.Spec = 0, 0, 0, nil, &apiv1.StepSpec{Name: s.Spec.Name}
		return fmt.Sprintf("%s %s", stepSubject(c.Job, c.Step), text(s))
	case ChangeNode:
		n := proto.Clone(v.Node(c.Node)).(*apiv1.Node)
		n.Number, n.Revision, n.Spec, n.Instance = 0, nil, &apiv1.NodeSpec{Name: n.Spec.Name}, nil
		return fmt.Sprintf("node %d %s", c.Node, text(n))
	case ChangeCluster:
		return fmt.Sprintf("cluster level=%d configured at %s", v.Level(), text(v.ConfigurationRevision()))
	default:
		return "unknown change " + hex.EncodeToString([]byte{byte(c.Kind)})
	}
}
