package health

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// Defaults are what a finding is where the program does not say it.
type Defaults struct {
	// Owner is the name under which it is known.
	Owner string
	// Code of a failure about which nothing more is said.
	Code string
	// Severity of a failure.
	Severity apiv1.ConditionSeverity
	// EndsWork as configured.
	EndsWork bool
	// Clears is what clears a failure.
	Clears string
	// GPU finds the number of a GPU by its unique id; nil finds none.
	GPU func(uuid string) (uint32, bool)
}

// line is a line of JSON that a program prints; docs/design/health.md describes it.
type line struct {
	Severity string          `json:"severity"`
	Code     string          `json:"code"`
	Reason   string          `json:"reason"`
	Clears   string          `json:"clears"`
	GPUs     json.RawMessage `json:"gpus"`
	CPUs     json.RawMessage `json:"cpus"`
	ExpiresS uint32          `json:"expires_s"`
	EndsWork *bool           `json:"ends_work"`
}

var severities = map[string]apiv1.ConditionSeverity{
	"info":     apiv1.ConditionSeverity_CONDITION_SEVERITY_INFO,
	"degraded": apiv1.ConditionSeverity_CONDITION_SEVERITY_DEGRADED,
	"failed":   apiv1.ConditionSeverity_CONDITION_SEVERITY_FAILED,
}

// Parse returns what a program that ended by itself found, from its exit code and output: the findings of its JSON lines, and with another
// exit code than 0 a failure, unless one of the lines is at least as severe. Lines that are no such JSON are text.
func Parse(code int, output []byte, now time.Time, d Defaults) []*apiv1.Condition {
	var found []*apiv1.Condition
	worst := apiv1.ConditionSeverity_CONDITION_SEVERITY_UNSPECIFIED
	var text []string
	for raw := range bytes.Lines(output) {
		raw = bytes.TrimSpace(raw)
		if c := finding(raw, now, d); c != nil {
			if i := slices.IndexFunc(found, func(o *apiv1.Condition) bool { return o.Code == c.Code }); i >= 0 {
				found[i] = joined(found[i], c)
			} else if len(found) < maxFindings {
				found = append(found, c)
			}
			worst = max(worst, c.Severity)
		} else if one := Line(string(raw)); one != "" {
			text = append(text, one)
		}
	}
	if code != 0 && worst < d.Severity {
		reason := Reason(text)
		if reason == "" {
			reason = fmt.Sprintf("it ended with exit code %d and printed nothing", code)
		}
		c := &apiv1.Condition{Owner: d.Owner, Code: d.Code, Severity: d.Severity, Reason: reason, Clears: d.Clears, Since: timestamppb.New(now),
			EndsWork: d.EndsWork && d.Severity == apiv1.ConditionSeverity_CONDITION_SEVERITY_FAILED}
		found = slices.DeleteFunc(found, func(o *apiv1.Condition) bool { return o.Code == d.Code })
		found = append(found, c)
	}
	return found
}

// finding reads a line of JSON; nil if it is none, or says nothing of a severity.
func finding(raw []byte, now time.Time, d Defaults) *apiv1.Condition {
	var l line
	if len(raw) == 0 || raw[0] != '{' || json.Unmarshal(raw, &l) != nil {
		return nil
	}
	severity, known := severities[strings.ToLower(l.Severity)]
	gpus, gpusOK := devices(l.GPUs, d.GPU)
	cpus, cpusOK := devices(l.CPUs, nil)
	if !known || !gpusOK || !cpusOK {
		return nil
	}
	c := &apiv1.Condition{Owner: d.Owner, Code: code(l.Code, d.Code), Severity: severity, Reason: Line(l.Reason), Clears: Line(l.Clears),
		GpuMask: gpus, CpuMask: cpus, Since: timestamppb.New(now), EndsWork: d.EndsWork}
	if l.EndsWork != nil {
		c.EndsWork = *l.EndsWork
	}
	c.EndsWork = c.EndsWork && severity == apiv1.ConditionSeverity_CONDITION_SEVERITY_FAILED
	if c.Clears == "" {
		c.Clears = d.Clears
	}
	if l.ExpiresS > 0 {
		c.Expires = timestamppb.New(now.Add(time.Duration(l.ExpiresS) * time.Second))
	}
	return c
}

// joined is one finding of two with the same code: the worse of both, about the devices of both. One about the whole node stays that.
func joined(a, b *apiv1.Condition) *apiv1.Condition {
	if b.Severity > a.Severity {
		a.Severity = b.Severity
	}
	whole := len(a.GpuMask)+len(a.CpuMask) == 0 || len(b.GpuMask)+len(b.CpuMask) == 0
	a.GpuMask, a.CpuMask = union(a.GpuMask, b.GpuMask), union(a.CpuMask, b.CpuMask)
	if whole {
		a.GpuMask, a.CpuMask = nil, nil
	}
	a.EndsWork = a.EndsWork || b.EndsWork
	a.Reason = Line(a.Reason + "; " + b.Reason)
	if b.Expires == nil || a.Expires != nil && b.Expires.AsTime().After(a.Expires.AsTime()) {
		a.Expires = b.Expires
	}
	return a
}

func union(a, b []uint64) []uint64 {
	sum := make([]uint64, max(len(a), len(b)))
	copy(sum, a)
	for i, w := range b {
		sum[i] |= w
	}
	if len(sum) == 0 {
		return nil
	}
	return sum
}

// code makes a code upper snake case; another is the default.
func code(said, otherwise string) string {
	upper := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z':
			return r - 'a' + 'A'
		case r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '_':
			return r
		case r == '-', r == ' ', r == '.':
			return '_'
		}
		return -1
	}, said)
	if upper == "" || len(upper) > 64 {
		return otherwise
	}
	return upper
}

// maxDevice bounds the numbers of devices that are believed.
const maxDevice = 1024

// devices reads device numbers: a number, "0-3,7", a unique id, or a list of these. False if they say something else: a finding about
// devices must not become one about the node.
func devices(raw json.RawMessage, find func(string) (uint32, bool)) ([]uint64, bool) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, true
	}
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) == nil {
		var mask []uint64
		for _, one := range list {
			some, ok := devices(one, find)
			if !ok || len(some) == 0 {
				return nil, false
			}
			mask = union(mask, some)
		}
		return mask, len(mask) > 0
	}
	var number uint32
	if json.Unmarshal(raw, &number) == nil {
		return bit(number)
	}
	var text string
	if json.Unmarshal(raw, &text) != nil {
		return nil, false
	}
	if numbers, err := notation.ExpandIndexes(text); err == nil && len(numbers) > 0 {
		var mask []uint64
		for _, n := range numbers {
			one, ok := bit(uint32(n))
			if !ok {
				return nil, false
			}
			mask = union(mask, one)
		}
		return mask, true
	}
	if find != nil {
		if n, ok := find(text); ok {
			return bit(n)
		}
	}
	return nil, false
}

func bit(n uint32) ([]uint64, bool) {
	if n >= maxDevice {
		return nil, false
	}
	mask := make([]uint64, n/64+1)
	mask[n/64] = 1 << (n % 64)
	return mask, true
}

// Reason is the sentence in lines of text: what a node health check (NHC) says, else the last line.
func Reason(lines []string) string {
	for _, l := range lines {
		rest, isError := strings.CutPrefix(l, "ERROR:")
		if rest, isNHC := strings.CutPrefix(strings.TrimSpace(rest), "nhc:"); isError && isNHC {
			return Line(rest)
		}
	}
	if len(lines) == 0 {
		return ""
	}
	return lines[len(lines)-1]
}

// Line makes any text one printable line of bounded length: white space becomes one blank, and what can't be shown is left out.
func Line(s string) string {
	var b strings.Builder
	for _, word := range strings.Fields(strings.ToValidUTF8(s, "")) {
		word = strings.Map(func(r rune) rune {
			if unicode.IsPrint(r) {
				return r
			}
			return -1
		}, word)
		if word == "" {
			continue
		}
		if b.Len() > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(word)
	}
	text := b.String()
	if len(text) > maxReason {
		cut := maxReason - len("…")
		for cut > 0 && !utf8.RuneStart(text[cut]) {
			cut--
		}
		text = text[:cut] + "…"
	}
	return text
}
