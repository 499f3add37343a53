package sstat

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// field is a column.
type field struct {
	name  string
	width int // negative: aligned to the left
	value func(*row) string
}

func empty(*row) string { return "" }

// measure is a figure of a task, and how it is written.
type measure struct {
	of   func(*nodev1.TaskUsage) uint64
	text func(r *row, n uint64) string
}

// size writes bytes: in the largest unit in which they are a whole number, or with --noconvert as they are.
func size(r *row, n uint64) string {
	if r.raw {
		return strconv.FormatUint(n, 10)
	}
	units := " KMGTP"
	for n >= 1024 && n%1024 == 0 && len(units) > 1 {
		n, units = n/1024, units[1:]
	}
	return strings.TrimSpace(strconv.FormatUint(n, 10) + units[:1])
}

func count(_ *row, n uint64) string { return strconv.FormatUint(n, 10) }

// clock writes milliseconds as H:M:S.
func clock(_ *row, n uint64) string { return value.Padded(int64(n / 1000)) }

var (
	rss    = measure{func(u *nodev1.TaskUsage) uint64 { return 1024 * u.GetMaxRssKb() }, size}
	vm     = measure{func(u *nodev1.TaskUsage) uint64 { return 1024 * u.GetVirtualKb() }, size}
	reads  = measure{(*nodev1.TaskUsage).GetReadBytes, size}
	writes = measure{(*nodev1.TaskUsage).GetWriteBytes, size}
	pages  = measure{(*nodev1.TaskUsage).GetMajorFaults, count}
	cpu    = measure{func(u *nodev1.TaskUsage) uint64 { return u.GetUserMs() + u.GetSystemMs() }, clock}
)

// extreme is the task with the highest figure, or the lowest.
func (m measure) extreme(r *row, lowest bool) used {
	return slices.MaxFunc(r.tasks, func(a, b used) int {
		x, y := m.of(a.TaskUsage), m.of(b.TaskUsage)
		if lowest {
			x, y = y, x
		}
		switch {
		case x < y:
			return -1
		case x > y:
			return 1
		}
		return 0
	})
}

// with makes a column that is empty when no task is known.
func with(f func(*row) string) func(*row) string {
	return func(r *row) string {
		if len(r.tasks) == 0 {
			return ""
		}
		return f(r)
	}
}

// columns are the highest (or lowest) figure, its node and its task.
func (m measure) columns(name string, lowest bool, widths [3]int) []field {
	return []field{
		{name, widths[0], with(func(r *row) string { return m.text(r, m.of(m.extreme(r, lowest).TaskUsage)) })},
		{name + "Node", widths[1], with(func(r *row) string { return m.extreme(r, lowest).node })},
		{name + "Task", widths[2], with(func(r *row) string { return strconv.FormatUint(uint64(m.extreme(r, lowest).GetRank()), 10) })},
	}
}

// average is the mean of the tasks' figures.
func (m measure) average(name string, width int) field {
	return field{name, width, with(func(r *row) string {
		sum := uint64(0)
		for _, u := range r.tasks {
			sum += m.of(u.TaskUsage)
		}
		return m.text(r, sum/uint64(len(r.tasks)))
	})}
}

// fields are all columns in the order of --helpformat.
var fields = slices.Concat(
	[]field{
		cpu.average("AveCPU", 10), {"AveCPUFreq", 10, empty}, reads.average("AveDiskRead", 14), writes.average("AveDiskWrite", 14),
		pages.average("AvePages", 10), rss.average("AveRSS", 10), vm.average("AveVMSize", 10), {"ConsumedEnergy", 14, empty}, {"ConsumedEnergyRaw", 17, empty},
		{"JobID", -12, func(r *row) string { return fmt.Sprintf("%d.%s", r.job, record.StepName(r.step)) }},
	},
	reads.columns("MaxDiskRead", false, [3]int{12, 15, 15}), writes.columns("MaxDiskWrite", false, [3]int{12, 16, 16}),
	pages.columns("MaxPages", false, [3]int{8, 12, 12}), rss.columns("MaxRSS", false, [3]int{10, 10, 10}), vm.columns("MaxVMSize", false, [3]int{10, 14, 14}),
	cpu.columns("MinCPU", true, [3]int{10, 10, 10}),
	[]field{
		{"Nodelist", -20, func(r *row) string { return r.nodes }},
		{"NTasks", 8, func(r *row) string { return strconv.Itoa(len(r.tasks)) }},
		{"Pids", 20, func(r *row) string {
			var pids []string
			for _, u := range r.tasks {
				for _, pid := range u.GetPids() {
					pids = append(pids, strconv.FormatUint(uint64(pid), 10))
				}
			}
			return strings.Join(pids, ",")
		}},
		{"ReqCPUFreq", 10, empty}, {"ReqCPUFreqMin", 13, empty}, {"ReqCPUFreqMax", 13, empty}, {"ReqCPUFreqGov", 13, empty},
		{"TRESUsageInAve", 14, empty}, {"TRESUsageInMax", 14, empty}, {"TRESUsageInMaxNode", 18, empty}, {"TRESUsageInMaxTask", 18, empty},
		{"TRESUsageInMin", 14, empty}, {"TRESUsageInMinNode", 18, empty}, {"TRESUsageInMinTask", 18, empty}, {"TRESUsageInTot", 14, empty},
		{"TRESUsageOutAve", 15, empty}, {"TRESUsageOutMax", 15, empty}, {"TRESUsageOutMaxNode", 19, empty}, {"TRESUsageOutMaxTask", 19, empty},
		{"TRESUsageOutMin", 15, empty}, {"TRESUsageOutMinNode", 19, empty}, {"TRESUsageOutMinTask", 19, empty}, {"TRESUsageOutTot", 15, empty},
	},
)

// Layouts of Slurm.
const (
	layoutUsual = "jobid,maxvmsize,maxvmsizenode,maxvmsizetask,avevmsize,maxrss,maxrssnode,maxrsstask,averss,maxpages,maxpagesnode,maxpagestask," +
		"avepages,mincpu,mincpunode,mincputask,avecpu,ntasks,avecpufreq,reqcpufreqmin,reqcpufreqmax,reqcpufreqgov,consumedenergy," +
		"maxdiskread,maxdiskreadnode,maxdiskreadtask,avediskread,maxdiskwrite,maxdiskwritenode,maxdiskwritetask,avediskwrite"
	layoutPids = "jobid,nodelist,pids"
)

// layout is how rows are written.
type layout struct {
	columns   []field
	delimiter string // parsable output; empty: columns of their widths
	trailing  bool
	header    bool
}

func find(name string) (field, bool) {
	low := strings.ToLower(name)
	i := slices.IndexFunc(fields, func(f field) bool { return strings.ToLower(f.name) == low })
	if i < 0 {
		i = slices.IndexFunc(fields, func(f field) bool { return low != "" && strings.HasPrefix(strings.ToLower(f.name), low) })
	}
	if i < 0 {
		return field{}, false
	}
	return fields[i], true
}

func parseLayout(o *option.Set) (layout, error) {
	l := layout{header: !o.Has("noheader")}
	text := layoutUsual
	if o.Has("pidformat") {
		text = layoutPids
	}
	if v, ok := o.Get("format"); ok {
		text = v.Text
	}
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item == "" {
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
	}
	return l, nil
}

func (l layout) write(to io.Writer, rows []*row) error {
	out := bufio.NewWriter(to)
	if l.header {
		l.put(out, func(f field) string { return f.name })
		if l.delimiter == "" {
			l.put(out, func(f field) string { return strings.Repeat("-", max(f.width, -f.width)) })
		}
	}
	for _, r := range rows {
		l.put(out, func(f field) string { return value.Safe(f.value(r)) })
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
		return string([]rune(text)[:width-1]) + "+"
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
