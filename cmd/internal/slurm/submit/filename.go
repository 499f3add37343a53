package submit

import (
	"strconv"
	"strings"
)

// FileNames are what the letters of a filename pattern stand for, as far as they do not depend on the node or the task.
type FileNames struct {
	// Job is %j, and %A of a job that is not part of an array. Step is %s.
	Job, Step uint32
	// ArrayJob is %A; 0 if the job is not part of an array.
	ArrayJob uint32
	// ArrayTask is %a; empty if the job is not part of an array.
	ArrayTask string
	// Name is %x, User is %u.
	Name, User string
	// Restarts is %r.
	Restarts uint32
}

// noArrayTask is %a of a job that is not part of an array.
const noArrayTask = "4294967294"

// maxPad is the widest zero padding, as in Slurm; a row of docs/limits.md.
const maxPad = 10

// OfTasks tells whether a filename pattern names another file for each node or task (%N, %n, %t).
func OfTasks(pattern string) bool {
	found := false
	eachLetter(pattern, func(letter byte, _ int) (string, bool) {
		found = found || strings.IndexByte("Nnt", letter) >= 0
		return "", true
	})
	return found
}

// Expand replaces the letters of a filename pattern. A number between % and a letter that stands for a number pads with zeros. A
// backslash anywhere turns replacement off and is removed. Unknown letters stay as they are.
func (f FileNames) Expand(pattern string) string {
	return eachLetter(pattern, func(letter byte, pad int) (string, bool) {
		number := func(n uint32) string {
			text := strconv.FormatUint(uint64(n), 10)
			return strings.Repeat("0", max(0, min(pad, maxPad)-len(text))) + text
		}
		switch letter {
		case '%':
			return "%", true
		case 'j':
			return number(f.Job), true
		case 'J':
			return number(f.Job) + "." + number(f.Step), true
		case 's':
			return number(f.Step), true
		case 'A':
			if f.ArrayJob != 0 {
				return number(f.ArrayJob), true
			}
			return number(f.Job), true
		case 'a':
			if f.ArrayTask != "" {
				return f.ArrayTask, true
			}
			return noArrayTask, true
		case 'x':
			return f.Name, true
		case 'u':
			return f.User, true
		case 'r':
			return number(f.Restarts), true
		}
		return "", false
	})
}

// eachLetter calls replace for each letter of a pattern, and returns the pattern with what that returns instead, unless it is false.
func eachLetter(pattern string, replace func(letter byte, pad int) (string, bool)) string {
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
		text, ok := replace(pattern[end], pad)
		if !ok {
			text = pattern[i : end+1]
		}
		b.WriteString(text)
		i = end
	}
	return b.String()
}
