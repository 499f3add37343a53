package submit

import (
	"maps"
	"slices"
	"strings"
)

// MaxEnvironmentBytes is the largest environment that the API takes.
const MaxEnvironmentBytes = 1 << 20

// Environment chooses the variables that travel with a job or a step.
//
// export is the value of --export: "ALL" (or empty) takes everything; "NONE" (or "NIL") takes nothing but SLURM_ and
// SPANK_ variables; a list of NAME and NAME=value takes these too, and all others if ALL is among them. Words of the list may be
// quoted. set are further variables, which win.
//
// Variables that describe an enclosing job or step travel like any other: the agent knows them and drops them, and adds
// what no program can do without (HOME, PATH).
func Environment(environ []string, export string, set map[string]string) ([]byte, error) {
	words := exportWords(export)
	all := len(words) == 0
	for _, word := range words {
		all = all || word == "ALL"
	}
	chosen, order := map[string]string{}, []string{}
	put := func(name, text string) {
		if _, ok := chosen[name]; !ok {
			order = append(order, name)
		}
		chosen[name] = text
	}
	given := map[string]string{}
	for _, pair := range environ {
		name, text, ok := strings.Cut(pair, "=")
		if !ok || name == "" {
			continue
		}
		if _, twice := given[name]; twice {
			continue
		}
		given[name] = text
		if all || strings.HasPrefix(name, "SLURM_") || strings.HasPrefix(name, "SPANK_") || strings.HasPrefix(name, "MUSTER_") {
			put(name, text)
		}
	}
	for _, word := range words {
		switch name, text, assigned := strings.Cut(word, "="); {
		case word == "ALL" || word == "NONE" || word == "NIL":
		case assigned:
			put(name, text)
		default:
			if text, ok := given[name]; ok {
				put(name, text)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(set)) {
		put(name, set[name])
	}
	var blob []byte
	for _, name := range order {
		blob = append(blob, name+"="+chosen[name]...)
		blob = append(blob, 0)
	}
	if len(blob) > MaxEnvironmentBytes {
		return nil, refused("the environment has %d bytes, more than %d: choose what the job needs with --export=NAMES", len(blob), MaxEnvironmentBytes)
	}
	return blob, nil
}

// exportWords splits the value of --export at commas outside quotes.
func exportWords(export string) []string {
	var words []string
	var word strings.Builder
	quote := rune(0)
	for _, c := range export {
		switch {
		case quote != 0 && c == quote:
			quote = 0
		case quote != 0:
			word.WriteRune(c)
		case c == '\'' || c == '"':
			quote = c
		case c == ',':
			if word.Len() > 0 {
				words = append(words, word.String())
			}
			word.Reset()
		default:
			word.WriteRune(c)
		}
	}
	if word.Len() > 0 {
		words = append(words, word.String())
	}
	return words
}
