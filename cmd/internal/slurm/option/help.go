package option

import (
	"fmt"
	"strings"
)

// helpColumn is where descriptions begin.
const helpColumn = 34

// Usage is the short form: one line with the options that take no value together, as getopt programs print it.
func (t *Table) Usage(program, operands string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "Usage: %s", program)
	column := b.Len()
	for i := range t.Options {
		o := &t.Options[i]
		if o.Help == "" || o.Refused != "" {
			continue
		}
		word := " [" + o.spelling(" ") + "]"
		if column+len(word) > 96 {
			b.WriteString("\n          ")
			column = 10
		}
		b.WriteString(word)
		column += len(word)
	}
	if operands != "" {
		b.WriteString(" " + operands)
	}
	b.WriteString("\n")
	return b.String()
}

// spelling is the option in a usage line.
func (o *Option) spelling(between string) string {
	name := "-" + string(o.Short)
	if o.Short == 0 || between == "=" {
		name, between = "--"+o.Long, "="
	}
	switch o.Arity {
	case Required:
		return name + between + o.Meta
	case Optional:
		if o.Meta == "" {
			return name
		}
		return name + "[" + strings.TrimSpace(between) + o.Meta + "]"
	case None:
	}
	return name
}

// Help is the long form: every supported option with its description, then the names of those that are refused.
func (t *Table) Help(program, operands, purpose string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "Usage: %s [OPTIONS...] %s\n\n%s\n\n", program, operands, purpose)
	var refused []string
	for i := range t.Options {
		o := &t.Options[i]
		if o.Refused != "" {
			refused = append(refused, o.Spelled())
			continue
		}
		if o.Help == "" {
			continue
		}
		left := "      "
		if o.Short != 0 {
			left = "  -" + string(o.Short)
			if o.Long != "" {
				left += ", "
			}
		}
		if o.Long != "" {
			left += o.spelling("=")
		} else if o.Arity == Required {
			left += " " + o.Meta
		}
		if len(left) >= helpColumn {
			left += "\n" + strings.Repeat(" ", helpColumn)
		}
		help := o.Help
		if o.Harmless != "" {
			help += " (accepted: " + o.Harmless + ")"
		}
		fmt.Fprintf(&b, "%-*s%s\n", helpColumn, left, help)
	}
	if len(refused) > 0 {
		b.WriteString("\nOptions of Slurm that are refused until they are supported:\n")
		line := " "
		for _, name := range refused {
			if len(line)+len(name) > 96 {
				b.WriteString(line + "\n")
				line = " "
			}
			line += " " + name
		}
		b.WriteString(line + "\n")
	}
	return b.String()
}
