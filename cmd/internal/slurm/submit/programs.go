package submit

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// Bounds of a file for --multi-prog; rows of docs/limits.md.
const (
	maxProgramsBytes = 1 << 20
	maxPrograms      = 1024
)

// Programs reads a file that says which program each rank runs (srun --multi-prog). Each line has ranks ("0-3,7", or "*" for all that are
// not mentioned), a program and its arguments, with "%t" for the rank and "%o" for its place among the ranks of the line, from 0. Words may
// be quoted with ' or ", and a backslash quotes the next character; at the end of a line it goes on with the next one. Lines that
// begin with "#" are comments. tasks is the number of ranks.
func Programs(path string, tasks uint32) ([]*apiv1.RankProgram, error) {
	info, err := os.Stat(path)
	if err == nil && info.Size() > maxProgramsBytes {
		err = fmt.Errorf("it has %d bytes; at most %d are read", info.Size(), maxProgramsBytes)
	}
	var data []byte
	if err == nil {
		data, err = os.ReadFile(path)
	}
	if err != nil {
		return nil, &Error{Fatal: true, Code: CodeRefused, Text: fmt.Sprintf("Unable to open configuration file %s: %v", path, err)}
	}
	p := programs{owner: make([]int, tasks)}
	if err := p.read(string(data)); err != nil {
		return nil, &Error{Fatal: true, Code: CodeRefused, Text: fmt.Sprintf("Line %d of configuration file %s invalid: %v", p.line, path, err)}
	}
	return p.list(path)
}

// programs is a file being read.
type programs struct {
	line    int   // where the entry begins that is being read, from 1
	owner   []int // by rank, the entry that runs there, from 1; 0: none yet
	entries [][]string
	others  int // the entry of "*", from 1; 0: there is none
}

func (p *programs) read(text string) error {
	lines := strings.Split(text, "\n")
	for i := 0; i < len(lines); {
		p.line = i + 1
		entry := strings.TrimSuffix(lines[i], "\r")
		i++
		for strings.HasSuffix(entry, `\`) && !strings.HasSuffix(entry, `\\`) && i < len(lines) {
			entry = strings.TrimSuffix(entry, `\`) + " " + strings.TrimSuffix(lines[i], "\r")
			i++
		}
		if strings.HasPrefix(entry, "#") {
			continue
		}
		words, err := shellWords(entry)
		if err != nil {
			return err
		}
		if len(words) == 0 {
			continue
		}
		if err := p.add(words); err != nil {
			return err
		}
	}
	return nil
}

// add takes an entry: ranks, program, arguments.
func (p *programs) add(words []string) error {
	if len(words) == 1 {
		return fmt.Errorf("there is no program for the ranks %s", words[0])
	}
	if p.entries = append(p.entries, words[1:]); len(p.entries) > maxPrograms {
		return fmt.Errorf("there are more than %d programs", maxPrograms)
	}
	if words[0] == "*" {
		if p.others != 0 {
			return fmt.Errorf(`"*" is there a second time`)
		}
		p.others = len(p.entries)
		return nil
	}
	for item := range strings.SplitSeq(words[0], ",") {
		low, high, ranged := strings.Cut(item, "-")
		first, err := strconv.ParseUint(low, 10, 32)
		last := first
		if err == nil && ranged {
			last, err = strconv.ParseUint(high, 10, 32)
		}
		if err != nil || last < first {
			return fmt.Errorf("%q is not a list of ranks, as 0-3,7 is", words[0])
		}
		if last >= uint64(len(p.owner)) {
			return fmt.Errorf("there is no rank %d: the step has %d tasks, from 0", last, len(p.owner))
		}
		for rank := first; rank <= last; rank++ {
			if p.owner[rank] != 0 {
				return fmt.Errorf("rank %d has a program already", rank)
			}
			p.owner[rank] = len(p.entries)
		}
	}
	return nil
}

// list has each program with its ranks.
func (p *programs) list(path string) ([]*apiv1.RankProgram, error) {
	ranks := make([][]int, len(p.entries)+1)
	for rank, owner := range p.owner {
		if owner == 0 {
			owner = p.others
		}
		if owner == 0 {
			return nil, &Error{Fatal: true, Code: CodeRefused, Text: fmt.Sprintf(
				"No executable program specified for this task: rank %d is not in configuration file %s, and there is no line for \"*\"", rank, path)}
		}
		ranks[owner] = append(ranks[owner], rank)
	}
	var list []*apiv1.RankProgram
	for i, args := range p.entries {
		if len(ranks[i+1]) > 0 {
			list = append(list, &apiv1.RankProgram{Ranks: notation.FoldIndexes(ranks[i+1]), Args: args})
		}
	}
	return list, nil
}

// shellWords splits a line at blanks outside of quotes.
func shellWords(line string) ([]string, error) {
	var words []string
	var word strings.Builder
	quote, begun := byte(0), false
	for i := 0; i < len(line); i++ {
		c := line[i]
		switch {
		case quote != 0 && c == quote:
			quote = 0
		case c == '\\' && quote != '\'' && i+1 < len(line):
			i++
			word.WriteByte(line[i])
			begun = true
		case quote != 0:
			word.WriteByte(c)
		case c == '\'' || c == '"':
			quote, begun = c, true
		case c == ' ' || c == '\t':
			if begun {
				words = append(words, word.String())
				word.Reset()
				begun = false
			}
		default:
			word.WriteByte(c)
			begun = true
		}
	}
	if quote != 0 {
		return nil, fmt.Errorf("the quote %c is not closed", quote)
	}
	if begun {
		words = append(words, word.String())
	}
	return words, nil
}
