// Package directive reads batch scripts: it checks that Slurm would accept the file and takes the options out of its
// "#SBATCH" (and "#PBS") lines.
//
// Invariants: the script's body is never interpreted; directives end at the first line that is neither blank nor a
// comment; nothing that looks like a directive before that line is dropped without an error.
//
// It is called by sbatch. It never reads files and knows no option of sbatch.
package directive

import (
	"bytes"
	"fmt"
	"strings"
)

// MaxBytes is the largest script, as the API bounds it.
const MaxBytes = 4 << 20

// Error is a script that is refused: its lines are printed as they are, and Fatal asks for the word "fatal".
type Error struct {
	// Lines of the message, each to be printed after "sbatch: error: ".
	Lines []string
	// Fatal prints "sbatch: fatal: " instead.
	Fatal bool
	// Code is the exit code of sbatch.
	Code int
}

// Error joins the lines.
func (e *Error) Error() string { return strings.Join(e.Lines, "\n") }

func refuse(lines ...string) error { return &Error{Lines: lines, Code: 1} }

// Options are what the script asks for.
type Options struct {
	// Words are the words of its directives, to be parsed with the option table of sbatch. PBS directives are
	// translated and in their place.
	Words []string
}

// Check refuses what is not a batch script.
func Check(script []byte) error {
	switch {
	case len(script) == 0:
		return refuse("Batch script is empty!")
	case len(bytes.TrimSpace(script)) == 0:
		return refuse("Batch script contains only whitespace!")
	case !bytes.HasPrefix(script, []byte("#!")):
		return refuse("This does not look like a batch script.  The first",
			"line must start with #! followed by the path to an interpreter.",
			"For instance: #!/bin/sh")
	case bytes.IndexByte(script, 0) >= 0:
		return refuse(fmt.Sprintf("Batch script contains a NUL byte in line %d: it is not a text file.",
			1+bytes.Count(script[:bytes.IndexByte(script, 0)], []byte("\n"))))
	case bytes.IndexByte(script, '\r') >= 0:
		return refuse(`Batch script contains DOS line breaks (\r\n)`, `instead of expected UNIX line breaks (\n).`)
	case len(script) > MaxBytes:
		return refuse("Batch job submission failed: Pathname of a file, directory or other parameter too long",
			fmt.Sprintf("The script has %d bytes; the most that is kept is %d.", len(script), MaxBytes))
	}
	return nil
}

// Parse takes the options out of a script that Check accepts. name is the file's name in messages ("stdin" for standard
// input).
func Parse(name string, script []byte, ignorePBS bool) (Options, error) {
	var o Options
	number := 0
	for line := range bytes.Lines(script) {
		number++
		text := strings.TrimSuffix(string(line), "\n")
		trimmed := strings.TrimLeft(text, " \t\v\f")
		if trimmed != "" && trimmed[0] != '#' {
			break
		}
		switch {
		case strings.HasPrefix(text, "#SBATCH"):
			words, err := split(name, number, text[len("#SBATCH"):])
			if err != nil {
				return o, err
			}
			if len(words) == 1 && (words[0] == "hetjob" || words[0] == "packjob") {
				return o, refuse(fmt.Sprintf("%s: line %d: heterogeneous jobs (\"#SBATCH %s\") are not supported yet: "+
					"submit the components as separate jobs", name, number, words[0]))
			}
			o.Words = append(o.Words, words...)
		case strings.HasPrefix(text, "#PBS") && !ignorePBS:
			words, err := split(name, number, text[len("#PBS"):])
			if err != nil {
				return o, err
			}
			translated, err := translate(name, number, words)
			if err != nil {
				return o, err
			}
			o.Words = append(o.Words, translated...)
		}
	}
	return o, nil
}

// split cuts a directive into words: quotes keep blanks and "#", "#" outside quotes begins a comment, and a backslash
// is an ordinary character.
func split(name string, number int, text string) ([]string, error) {
	var words []string
	for {
		text = strings.TrimLeft(text, " \t\v\f")
		if text == "" || text[0] == '#' {
			return words, nil
		}
		var word strings.Builder
		quote := byte(0)
		i := 0
	scan:
		for ; i < len(text); i++ {
			c := text[i]
			switch {
			case quote != 0 && c == quote:
				quote = 0
			case quote != 0:
				word.WriteByte(c)
			case c == '"' || c == '\'':
				quote = c
			case c == '#' || c == ' ' || c == '\t' || c == '\v' || c == '\f':
				break scan
			default:
				word.WriteByte(c)
			}
		}
		if quote != 0 {
			return nil, &Error{Fatal: true, Code: 1,
				Lines: []string{fmt.Sprintf("%s: line %d: Unmatched `%c` in [%s]", name, number, quote, text)}}
		}
		words = append(words, word.String())
		text = text[i:]
	}
}
