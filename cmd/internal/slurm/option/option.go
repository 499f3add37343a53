// Package option declares the options of the Slurm-named commands and parses command lines with the semantics of
// getopt_long: unique prefixes of long names, options after operands, "-t10", "--opt=value" and "--opt value", "--".
//
// Invariants: every option of the real command is a row of its table, and is either read by the command, refused with
// a sentence, or harmless with a reason; nothing is dropped silently. Help and usage come from the same table.
//
// It is called by the commands of cmd/internal/slurm. It never reads the environment and never prints.
package option

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Arity says whether an option takes a value.
type Arity int

// Arities.
const (
	// None takes no value.
	None Arity = iota
	// Required takes the rest of the word or the next word.
	Required
	// Optional takes a value only in the same word.
	Optional
)

// Option is a row of a table.
type Option struct {
	// Long is the name without dashes; empty if there is only a letter.
	Long string
	// Short is the letter; 0 if there is none.
	Short byte
	// Arity says whether it takes a value.
	Arity Arity
	// Meta names the value in the help.
	Meta string
	// Help is a short description; empty hides the option from the help.
	Help string
	// Same names the option (Long) for which this is another spelling.
	Same string
	// Value is the text that is stored when the option is given without one.
	Value string
	// Refused says why the option is not accepted; empty means it is.
	Refused string
	// Only lists values, in lower case, that a refused option accepts because they ask for what happens anyway.
	Only []string
	// Harmless says why accepting the option without doing anything is true to its meaning.
	Harmless string
	// Env is the variable that gives the option where the command line and the script do not; of several, divided by commas,
	// the first that is set.
	Env string
}

// Name is how the option is known after parsing: its long name, or that of the option it is the same as.
func (o *Option) Name() string {
	if o.Same != "" {
		return o.Same
	}
	if o.Long == "" {
		return string(o.Short)
	}
	return o.Long
}

// Spelled is the option as a user writes it.
func (o *Option) Spelled() string {
	if o.Long == "" {
		return "-" + string(o.Short)
	}
	return "--" + o.Long
}

// Table is the set of options of one command, in the order of the help.
type Table struct {
	// Options in order.
	Options []Option
	// StopAtOperand ends option parsing at the first operand (srun's command has options of its own).
	StopAtOperand bool
}

// find returns the option with that long name.
func (t *Table) find(long string) *Option {
	for i := range t.Options {
		if t.Options[i].Long == long {
			return &t.Options[i]
		}
	}
	return nil
}

// short returns the option with that letter.
func (t *Table) short(letter byte) *Option {
	for i := range t.Options {
		if t.Options[i].Short == letter {
			return &t.Options[i]
		}
	}
	return nil
}

// UsageError is a command line that getopt would refuse; the text is getopt's.
type UsageError struct{ Text string }

// Error returns the text.
func (e *UsageError) Error() string { return e.Text }

// RefusedError is an option that exists in Slurm and is not supported here.
type RefusedError struct {
	// Option is the row.
	Option *Option
	// Text is the value that was given.
	Text string
}

// Error names the option and says why.
func (e *RefusedError) Error() string {
	name := e.Option.Spelled()
	if len(e.Option.Only) > 0 && e.Text != "" {
		name += "=" + e.Text
	}
	return name + " is not supported yet: " + e.Option.Refused
}

// Refuses tells whether the option is refused with such a value.
func (o *Option) Refuses(text string) bool {
	return o.Refused != "" && !slices.Contains(o.Only, strings.ToLower(text))
}

// Parse splits words (without the program's name) into options and operands.
func (t *Table) Parse(words []string) (*Set, []string, error) {
	set := &Set{}
	var operands []string
	for i := 0; i < len(words); i++ {
		word := words[i]
		switch {
		case word == "--":
			return set, append(operands, words[i+1:]...), nil
		case strings.HasPrefix(word, "--"):
			used, err := t.long(set, word, words[i+1:])
			if err != nil {
				return nil, nil, err
			}
			i += used
		case len(word) > 1 && word[0] == '-':
			used, err := t.letters(set, word, words[i+1:])
			if err != nil {
				return nil, nil, err
			}
			i += used
		case t.StopAtOperand:
			return set, append(operands, words[i:]...), nil
		default:
			operands = append(operands, word)
		}
	}
	return set, operands, nil
}

// long parses "--name", "--name=value" or "--name value"; it returns how many of the following words it took.
func (t *Table) long(set *Set, word string, rest []string) (int, error) {
	name, value, glued := strings.Cut(word[2:], "=")
	o, err := t.resolve(name, word)
	if err != nil {
		return 0, err
	}
	used := 0
	switch o.Arity {
	case None:
		if glued {
			return 0, &UsageError{fmt.Sprintf("option '--%s' doesn't allow an argument", o.Long)}
		}
	case Required:
		if !glued {
			if len(rest) == 0 {
				return 0, &UsageError{fmt.Sprintf("option '--%s' requires an argument", o.Long)}
			}
			value, glued, used = rest[0], true, 1
		}
	case Optional: // only in the same word
	}
	return used, set.take(o, value, glued)
}

// resolve finds a long option by its name or a unique prefix of it.
func (t *Table) resolve(name, word string) (*Option, error) {
	var found []*Option
	for i := range t.Options {
		o := &t.Options[i]
		switch {
		case o.Long == "" || !strings.HasPrefix(o.Long, name):
		case o.Long == name:
			return o, nil
		default:
			found = append(found, o)
		}
	}
	if len(found) == 0 {
		return nil, &UsageError{fmt.Sprintf("unrecognized option '%s'", word)}
	}
	for _, o := range found[1:] {
		if o.Name() != found[0].Name() {
			var names []string
			for _, o := range found {
				names = append(names, "'--"+o.Long+"'")
			}
			return nil, &UsageError{fmt.Sprintf("option '%s' is ambiguous; possibilities: %s", word, strings.Join(names, " "))}
		}
	}
	return found[0], nil
}

// letters parses "-abc", "-t10" or "-t 10"; it returns how many of the following words it took.
func (t *Table) letters(set *Set, word string, rest []string) (int, error) {
	for i := 1; i < len(word); i++ {
		o := t.short(word[i])
		if o == nil {
			return 0, &UsageError{fmt.Sprintf("invalid option -- '%c'", word[i])}
		}
		tail := word[i+1:]
		switch o.Arity {
		case None:
			if err := set.take(o, "", false); err != nil {
				return 0, err
			}
			continue
		case Optional:
			return 0, set.take(o, tail, tail != "")
		case Required:
			if tail != "" {
				return 0, set.take(o, tail, true)
			}
			if len(rest) == 0 {
				return 0, &UsageError{fmt.Sprintf("option requires an argument -- '%c'", word[i])}
			}
			return 1, set.take(o, rest[0], true)
		}
	}
	return 0, nil
}

// Environment returns the options that the variables of the table give. lookup is os.LookupEnv.
func (t *Table) Environment(lookup func(string) (string, bool)) (*Set, error) {
	set := &Set{}
	for i := range t.Options {
		o := &t.Options[i]
		name, value := o.variable(lookup)
		if name == "" {
			continue
		}
		if o.Arity == None && (value == "0" || strings.EqualFold(value, "no") || strings.EqualFold(value, "false")) {
			continue // "SLURM_LABELIO=0" does not ask for labels
		}
		if o.Refuses(value) {
			return nil, fmt.Errorf("variable %s: %w", name, &RefusedError{Option: o, Text: value})
		}
		set.put(o, value, o.Arity != None && value != "")
	}
	return set, nil
}

// variable returns the first variable of the option that is set, and its value; the name is empty if none is.
func (o *Option) variable(lookup func(string) (string, bool)) (name, value string) {
	if o.Env == "" {
		return "", ""
	}
	for name := range strings.SplitSeq(o.Env, ",") {
		if value, ok := lookup(name); ok {
			return name, value
		}
	}
	return "", ""
}

// Value is one option as it was given.
type Value struct {
	// Option is its row.
	Option *Option
	// Text is the value; empty if none was given.
	Text string
	// Given tells "--nice=" from "--nice".
	Given bool
	// Count is how often the option was given.
	Count int
}

// Set is the options that were given; of a repeated one the last counts. The zero value is empty.
type Set struct {
	values map[string]Value
	asked  map[string]bool
}

// take stores an option of a command line.
func (s *Set) take(o *Option, text string, given bool) error {
	if o.Refuses(text) {
		return &RefusedError{Option: o, Text: text}
	}
	s.put(o, text, given)
	return nil
}

func (s *Set) put(o *Option, text string, given bool) {
	if s.values == nil {
		s.values = map[string]Value{}
	}
	if !given {
		text = o.Value
	}
	s.values[o.Name()] = Value{Option: o, Text: text, Given: given, Count: s.values[o.Name()].Count + 1}
}

// Add stores an option by its long name, as if it had been given; unknown names panic.
func (s *Set) Add(t *Table, long, text string) error {
	o := t.find(long)
	if o == nil {
		panic("option: no option " + long)
	}
	return s.take(o, text, true)
}

// Get returns an option and whether it was given.
func (s *Set) Get(name string) (Value, bool) {
	if s.asked == nil {
		s.asked = map[string]bool{}
	}
	s.asked[name] = true
	v, ok := s.values[name]
	return v, ok
}

// Has tells whether an option was given.
func (s *Set) Has(name string) bool {
	_, ok := s.Get(name)
	return ok
}

// Text returns the value of an option; empty if it was not given.
func (s *Set) Text(name string) string {
	v, _ := s.Get(name)
	return v.Text
}

// Over returns s with the options of lower where s does not have them.
func (s *Set) Over(lower *Set) *Set {
	out := &Set{values: map[string]Value{}}
	for name, v := range lower.values {
		out.values[name] = v
	}
	for name, v := range s.values {
		out.values[name] = v
	}
	return out
}

// Names lists the options that were given, sorted.
func (s *Set) Names() []string { return slices.Sorted(maps.Keys(s.values)) }

// Drop removes an option.
func (s *Set) Drop(name string) { delete(s.values, name) }

// Unasked lists options that were given and that nobody asked for, sorted: an option that is neither refused nor
// harmless must never be among them.
func (s *Set) Unasked() []string {
	var names []string
	for name, v := range s.values {
		if !s.asked[name] && v.Option.Harmless == "" && len(v.Option.Only) == 0 {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}
