package environ

import (
	"path/filepath"
	"strconv"
	"strings"
)

// Names are what the letters of a filename pattern stand for.
type Names struct {
	// JobID is %j and %A.
	JobID uint32
	// StepID is %s and the second half of %J; the batch step is written "batch".
	StepID uint32
	// JobName is %x.
	JobName string
	// User is %u.
	User string
	// Node is %N.
	Node string
	// NodeIndex is %n: the node's place in the step, from 0.
	NodeIndex uint32
	// Rank is %t.
	Rank uint32
	// Restarts is %r: how often the job was started again before, as in SLURM_RESTART_COUNT.
	Restarts uint32
}

// noArrayTask is %a of a job that is not part of an array.
const noArrayTask = "4294967294"

// maxPad is the widest zero padding, as in Slurm.
const maxPad = 10

// Expand replaces the letters of a filename pattern. A number between % and a letter that stands for a number pads with
// zeros. A backslash anywhere turns replacement off and is removed. Unknown letters stay as they are.
func (n Names) Expand(pattern string) string {
	if strings.Contains(pattern, `\`) {
		return strings.ReplaceAll(pattern, `\`, "")
	}
	var b strings.Builder
	for i := 0; i < len(pattern); i++ {
		if pattern[i] != '%' {
			b.WriteByte(pattern[i])
			continue
		}
		end := i + 1
		for end < len(pattern) && pattern[end] >= '0' && pattern[end] <= '9' {
			end++
		}
		if end == len(pattern) {
			b.WriteString(pattern[i:])
			break
		}
		pad, err := strconv.Atoi(pattern[i+1 : end])
		if err != nil {
			pad = 0
		}
		if text, ok := n.letter(pattern[end], min(pad, maxPad)); ok {
			b.WriteString(text)
		} else {
			b.WriteString(pattern[i : end+1])
		}
		i = end
	}
	return b.String()
}

func (n Names) letter(letter byte, pad int) (string, bool) {
	number := func(v uint32) string { return leftPad(strconv.FormatUint(uint64(v), 10), pad) }
	step := "batch"
	if n.StepID != BatchStep {
		step = number(n.StepID)
	}
	switch letter {
	case '%':
		return "%", true
	case 'A', 'j':
		return number(n.JobID), true
	case 'a':
		return noArrayTask, true
	case 'J':
		return number(n.JobID) + "." + step, true
	case 's':
		return step, true
	case 'N':
		return n.Node, true
	case 'n':
		return number(n.NodeIndex), true
	case 'r':
		return number(n.Restarts), true
	case 't':
		return number(n.Rank), true
	case 'u':
		return n.User, true
	case 'x':
		return n.JobName, true
	}
	return "", false
}

// Path expands a pattern and makes it absolute below dir. An empty pattern stays empty.
func (n Names) Path(pattern, dir string) string {
	if pattern == "" {
		return ""
	}
	name := n.Expand(pattern)
	if filepath.IsAbs(name) {
		return filepath.Clean(name)
	}
	return filepath.Join(dir, name)
}
