package sacct

import (
	"bufio"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
)

// Layouts of Slurm.
const (
	layoutUsual = "jobid,jobname,partition,account,alloccpus,state,exitcode"
	layoutBrief = "jobid,state,exitcode"
	layoutLong  = "jobid,jobidraw,jobname,partition,maxvmsize,maxvmsizenode,maxvmsizetask,avevmsize,maxrss,maxrssnode,maxrsstask,averss," +
		"maxpages,maxpagesnode,maxpagestask,avepages,mincpu,mincpunode,mincputask,avecpu,ntasks,alloccpus,elapsed,state,exitcode," +
		"avecpufreq,reqcpufreqmin,reqcpufreqmax,reqcpufreqgov,reqmem,consumedenergy,maxdiskread,maxdiskreadnode,maxdiskreadtask," +
		"avediskread,maxdiskwrite,maxdiskwritenode,maxdiskwritetask,avediskwrite,reqtres,alloctres"
)

// layout is how lines are written.
type layout struct {
	columns   []field
	delimiter string // parsable output; empty: columns of their widths
	trailing  bool   // a delimiter after the last column too
	header    bool
}

func parseLayout(o *option.Set) (layout, error) {
	l := layout{header: !o.Has("noheader")}
	text := layoutUsual
	switch {
	case o.Has("long"):
		text = layoutLong
	case o.Has("brief"):
		text = layoutBrief
	}
	if v, ok := o.Get("format"); ok {
		text = v.Text
	}
	for item := range strings.SplitSeq(text, ",") {
		item = strings.TrimSpace(item)
		if item == "" {
			continue
		}
		if strings.EqualFold(item, "ALL") {
			l.columns = append(l.columns, fields...)
			continue
		}
		name, width, sized := strings.Cut(item, "%")
		f, ok := find(name)
		if !ok {
			return l, fmt.Errorf("Invalid field requested: \"%s\"", name)
		}
		if sized {
			n, err := strconv.Atoi(width)
			if err != nil {
				return l, fmt.Errorf("Invalid width of a field: \"%s\"", item)
			}
			if n != 0 {
				f.width = n
			}
		}
		l.columns = append(l.columns, f)
	}
	if o.Has("parsable") || o.Has("parsable2") {
		l.delimiter, l.trailing = "|", !o.Has("parsable2")
		if v, ok := o.Get("delimiter"); ok && v.Text != "" {
			l.delimiter = v.Text
		}
	}
	return l, nil
}

// write prints the header and the lines.
func (l layout) write(to io.Writer, lines []*line) error {
	out := bufio.NewWriter(to)
	if l.header {
		l.put(out, func(f field) string { return f.name })
		if l.delimiter == "" {
			l.put(out, func(f field) string { return strings.Repeat("-", max(f.width, -f.width)) })
		}
	}
	for _, row := range lines {
		l.put(out, func(f field) string { return value.Safe(f.value(row)) })
	}
	return out.Flush()
}

func (l layout) put(out *bufio.Writer, text func(field) string) {
	for i, f := range l.columns {
		if l.delimiter == "" {
			out.WriteString(pad(text(f), f.width)) // errors of a bufio.Writer come back from Flush
			out.WriteByte(' ')
			continue
		}
		out.WriteString(text(f))
		if l.trailing || i+1 < len(l.columns) {
			out.WriteString(l.delimiter)
		}
	}
	out.WriteByte('\n')
}

// pad puts text into a field; what is too wide ends with "+".
func pad(text string, width int) string {
	left := width < 0
	width = max(width, -width)
	n := utf8.RuneCountInString(text)
	switch {
	case n > width:
		runes := []rune(text)
		return string(runes[:width-1]) + "+"
	case left:
		return text + strings.Repeat(" ", width-n)
	}
	return strings.Repeat(" ", width-n) + text
}

// helpFormat lists the names of columns, four in a line.
func helpFormat(to io.Writer) {
	for i, f := range fields {
		end := ""
		if i%4 == 3 || i == len(fields)-1 {
			end = "\n"
		}
		fmt.Fprintf(to, "%-19s%s", f.name, end)
	}
}
