package launch

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strconv"
	"sync"
	"syscall"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// printer writes output and messages. All readers share it; it is safe for concurrent use.
type printer struct {
	mu       sync.Mutex
	options  Options
	width    int
	partial  map[source][]byte
	failed   chan struct{} // closed at the first write that fails
	writeErr error
}

func newPrinter(o Options, tasks uint32) *printer {
	width := 1
	if tasks > 1 {
		width = len(strconv.FormatUint(uint64(tasks-1), 10))
	}
	return &printer{options: o, width: width, partial: map[source][]byte{}, failed: make(chan struct{})}
}

// write prints data of one stream of one task.
func (p *printer) write(at source, data []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.options.Label {
		p.put(at.stream, data)
		return
	}
	rest := append(p.partial[at], data...)
	var lines []byte
	for {
		i := bytes.IndexByte(rest, '\n')
		if i < 0 && len(rest) < longestLine {
			break
		}
		line := rest
		if i >= 0 {
			line, rest = rest[:i], rest[i+1:]
		} else {
			rest = nil
		}
		lines = p.label(lines, at.rank, line)
	}
	p.partial[at] = append([]byte(nil), rest...)
	p.put(at.stream, lines)
}

// label appends one labelled line.
func (p *printer) label(to []byte, rank uint32, line []byte) []byte {
	to = fmt.Appendf(to, "%*d: ", p.width, rank)
	to = append(to, line...)
	return append(to, '\n')
}

// end prints the last line of a stream even if it has no newline.
func (p *printer) end(at source) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if rest := p.partial[at]; len(rest) > 0 {
		p.put(at.stream, p.label(nil, at.rank, rest))
	}
	delete(p.partial, at)
}

// flush ends all streams, in order of ranks.
func (p *printer) flush() {
	p.mu.Lock()
	var left []source
	for at := range p.partial {
		left = append(left, at)
	}
	p.mu.Unlock()
	slices.SortFunc(left, func(x, y source) int {
		if x.rank != y.rank {
			return int(x.rank) - int(y.rank)
		}
		return int(x.stream) - int(y.stream)
	})
	for _, at := range left {
		p.end(at)
	}
}

// put writes and remembers the first failure. The caller holds mu.
func (p *printer) put(stream nodev1.OutputStream, data []byte) {
	var to io.Writer = p.options.Stdout
	if stream == nodev1.OutputStream_OUTPUT_STREAM_STDERR {
		to = p.options.Stderr
	}
	p.putTo(to, data)
}

func (p *printer) putTo(to io.Writer, data []byte) {
	if len(data) == 0 || p.writeErr != nil || to == nil {
		return
	}
	if _, err := to.Write(data); err != nil {
		p.writeErr = err
		close(p.failed)
	}
}

// err is the first failure.
func (p *printer) err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.writeErr
}

// message prints a line of the program itself.
func (p *printer) message(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	// Names and sentences come from others: a terminal must not obey them, and one message is one line.
	text := notation.Printable(fmt.Sprintf(format, args...))
	to := p.options.Messages
	if to == nil {
		to = p.options.Stderr
	}
	p.putTo(to, []byte(p.options.Program+": "+text+"\n"))
}

// report says how the tasks of a node ended, a line for each kind of end; good ends are not mentioned. Why a program could
// not be executed is in the task's stderr already, where the supervisor wrote it.
func (p *printer) report(node string, exits []*apiv1.TaskExit) {
	if p.options.Quiet {
		return
	}
	var order []string
	ranks := map[string][]*apiv1.TaskExit{}
	for _, exit := range exits {
		text := describe(exit)
		if text == "" {
			continue
		}
		if ranks[text] == nil {
			order = append(order, text)
		}
		ranks[text] = append(ranks[text], exit)
	}
	for _, text := range order {
		if unprepared(ranks[text][0]) { // it is no end of a task: the node says why there was none
			p.message("error: %s: %s", node, text)
			continue
		}
		list, many := foldRanks(ranks[text])
		word := "task"
		if many {
			word = "tasks"
		}
		p.message("error: %s: %s %s: %s", node, word, list, text)
	}
}

// describe says how a task ended; empty for exit code 0.
func describe(exit *apiv1.TaskExit) string {
	switch {
	case unprepared(exit):
		return exit.GetLaunchError()
	case exit.GetOutOfMemory():
		return "Out Of Memory"
	case exit.GetSignal() != 0:
		return SignalText(int(exit.GetSignal()))
	case ExitCode(exit) != 0:
		return fmt.Sprintf("Exited with exit code %d", ExitCode(exit))
	}
	return ""
}

// SignalText is the text of a signal as the C library says it ("Killed").
func SignalText(signal int) string {
	if text, ok := signalTexts[syscall.Signal(signal)]; ok {
		return text
	}
	return fmt.Sprintf("Signal %d", signal)
}

var signalTexts = map[syscall.Signal]string{
	syscall.SIGHUP: "Hangup", syscall.SIGINT: "Interrupt", syscall.SIGQUIT: "Quit", syscall.SIGILL: "Illegal instruction",
	syscall.SIGTRAP: "Trace/breakpoint trap", syscall.SIGABRT: "Aborted", syscall.SIGBUS: "Bus error",
	syscall.SIGFPE: "Floating point exception", syscall.SIGKILL: "Killed", syscall.SIGUSR1: "User defined signal 1",
	syscall.SIGSEGV: "Segmentation fault", syscall.SIGUSR2: "User defined signal 2", syscall.SIGPIPE: "Broken pipe",
	syscall.SIGALRM: "Alarm clock", syscall.SIGTERM: "Terminated", syscall.SIGXCPU: "CPU time limit exceeded",
	syscall.SIGXFSZ: "File size limit exceeded", syscall.SIGSYS: "Bad system call",
}

// foldRanks folds ranks as "0-1,4", and tells whether there is more than one.
func foldRanks(exits []*apiv1.TaskExit) (string, bool) {
	type span struct{ from, to uint32 }
	var spans []span
	for _, e := range exits {
		spans = append(spans, span{e.GetFirstRank(), e.GetFirstRank() + max(e.GetCount(), 1) - 1})
	}
	slices.SortFunc(spans, func(x, y span) int { return int(x.from) - int(y.from) })
	merged := spans[:1]
	for _, s := range spans[1:] {
		if last := &merged[len(merged)-1]; s.from <= last.to+1 {
			last.to = max(last.to, s.to)
		} else {
			merged = append(merged, s)
		}
	}
	text, many := "", len(merged) > 1
	for i, s := range merged {
		if i > 0 {
			text += ","
		}
		text += strconv.FormatUint(uint64(s.from), 10)
		if s.to > s.from {
			text += "-" + strconv.FormatUint(uint64(s.to), 10)
			many = true
		}
	}
	return text, many
}
