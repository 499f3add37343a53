// Package document writes the JSON of Slurm 24.11 (data_parser v0.0.42): states as lists, numbers that may be unset as
// {set, infinite, number}, and what was asked in "meta".
//
// Invariants: one dialect, named in meta.plugin.data_parser; a field is either true or the dialect's "not set".
//
// It is called by the commands of cmd/internal/slurm. It never asks the cluster.
package document

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/ops/version"
)

// Parser names the dialect.
const Parser = "v0.0.42"

// Speaks tells whether a value of --json asks for this dialect.
func Speaks(name string) bool { return name == Parser || name == "data_parser/"+Parser }

// Pair is a member of an object.
type Pair struct {
	// Key is the name.
	Key string
	// Value is anything that encoding/json writes.
	Value any
}

// Object is a JSON object whose members keep their order.
type Object []Pair

// MarshalJSON writes the members in order.
func (o Object) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, pair := range o {
		if i > 0 {
			b.WriteByte(',')
		}
		key, err := json.Marshal(pair.Key)
		if err != nil {
			return nil, err
		}
		b.Write(key)
		b.WriteByte(':')
		text, err := marshal(pair.Value)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", pair.Key, err)
		}
		b.Write(text)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// marshal is json.Marshal that leaves "<" and "&" alone.
func marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimRight(b.Bytes(), "\n"), nil
}

// Number is a number that is set.
func Number(n any) Object { return Object{{"set", true}, {"infinite", false}, {"number", n}} }

// Unset is a number that is not set.
func Unset() Object { return Object{{"set", false}, {"infinite", false}, {"number", 0}} }

// Infinite is a number without bound.
func Infinite() Object { return Object{{"set", false}, {"infinite", true}, {"number", 0}} }

// Counted is a number that is not set when it is 0.
func Counted[N int | int32 | int64 | uint32 | uint64](n N) Object {
	if n == 0 {
		return Unset()
	}
	return Number(n)
}

// Moment is a time in seconds since 1970; not known is the number 0.
func Moment(t time.Time) Object {
	if t.IsZero() {
		return Number(0)
	}
	return Number(t.Unix())
}

// List makes a list that is never null.
func List(words ...string) []string {
	if words == nil {
		return []string{}
	}
	return words
}

// Print writes a document: the body's members, then meta, errors and warnings. It returns the exit code.
func Print(s *session.Session, cluster string, body Object) int {
	release := strings.SplitN(version.Slurm+"..", ".", 4)
	document := append(body, Object{
		{"meta", Object{
			{"plugin", Object{{"type", ""}, {"name", ""}, {"data_parser", "data_parser/" + Parser}, {"accounting_storage", ""}}},
			{"client", Object{{"source", s.Host}, {"user", s.UserName(s.UID)}, {"group", s.GroupName(s.GID)}}},
			{"command", append([]string{s.Program}, s.Args...)},
			{"slurm", Object{
				{"version", Object{{"major", release[0]}, {"micro", release[2]}, {"minor", release[1]}}},
				{"release", version.Slurm},
				{"cluster", cluster},
			}},
		}},
		{"errors", List()},
		{"warnings", List()},
	}...)
	text, err := marshal(document)
	if err == nil {
		var out bytes.Buffer
		if err = json.Indent(&out, text, "", "  "); err == nil {
			out.WriteByte('\n')
			_, err = s.Stdout.Write(out.Bytes())
		}
	}
	if err != nil {
		s.Errorf("cannot write the JSON: %v", err)
		return 1
	}
	return 0
}
