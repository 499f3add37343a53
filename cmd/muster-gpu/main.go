// Muster-gpu reads a node's NVIDIA GPUs and says what it finds as JSON: the messages of proto/muster/node/v1/gpu.proto,
// where every field, its unit and what its absence means are described. It is the only program of Muster that loads
// NVIDIA's library (NVML), which may hang for minutes with a sick GPU or end its process: therefore it is a process of its
// own, to which the agent gives a time limit.
//
//	muster-gpu inventory|health|processes|watch [flags]
//
// Invariants:
//   - It only reads. It never resets, configures or frees anything.
//   - A driver or library that is absent or fails is an answer ("unknown" with a code and a sentence) and no error: it leaves with 0.
//   - A field that the driver does not offer is left out; zeros are measured.
//   - It judges nothing. What a reading means is decided by package node/gpu.
//
// It leaves with 2 if it was called wrongly and with 1 if it could not write its answer. Built without cgo it answers that
// nothing is known. Flags that begin with --mock are for tests.
package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

const usage = `muster-gpu reads this node's NVIDIA GPUs.

  muster-gpu inventory    which GPUs and MIG instances there are, and how they are connected
  muster-gpu health       one reading of temperatures, memory errors, links and use
  muster-gpu processes    who uses them
  muster-gpu watch        an inventory first and whenever it changes, health every period, and
                          errors (XIDs) as the driver reports them; one JSON document a line

Output is JSON as described in proto/muster/node/v1/gpu.proto. If the driver can't be asked, the
answer says "unknown" and why.

Flags:
`

var verbs = []string{"inventory", "health", "processes", "watch"}

// options are the flags.
type options struct {
	interval time.Duration
	indent   bool
	attached bool
	mock     string
	faults   string
}

// probe reads GPUs. All its methods may hang as long as the driver does. None is called concurrently.
type probe interface {
	// inventory reads what there is.
	inventory() *nodev1.GpuInventory
	// health reads how it is.
	health() *nodev1.GpuHealth
	// processes reads who uses it.
	processes() *nodev1.GpuProcesses
	// listen makes sure that errors of all GPUs that are there now are reported to wait.
	listen()
	// wait returns the next error, or nil after the timeout.
	wait(timeout time.Duration) *nodev1.GpuXid
	// close gives the library back.
	close()
}

func main() {
	o, verb, err := parse(os.Args[1:], os.Stderr)
	if err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return
		}
		fmt.Fprintln(os.Stderr, "muster-gpu:", err)
		os.Exit(2)
	}
	if o.attached {
		go leaveWith(os.Stdin)
	}
	if err := run(o, verb, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "muster-gpu:", err)
		os.Exit(1)
	}
}

// leaveWith ends the process when whoever started it is gone.
func leaveWith(parent io.Reader) {
	_, _ = io.Copy(io.Discard, parent)
	os.Exit(0)
}

func parse(args []string, help io.Writer) (options, string, error) {
	var o options
	f := flag.NewFlagSet("muster-gpu", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.DurationVar(&o.interval, "interval", 10*time.Second, "watch: `period` between readings of health, at least 10ms")
	f.BoolVar(&o.indent, "indent", false, "write JSON for reading; not with watch")
	f.BoolVar(&o.attached, "attached", false, "end when standard input is closed")
	f.StringVar(&o.mock, "mock", "", "for tests: pretend to be a `MACHINE`: dgxa100, dgxh100, dgxh200 or dgxb200, with a seed for its UUIDs after a colon (dgxh100:n1)")
	f.StringVar(&o.faults, "mock-faults", "", "for tests: `FILE` with the faults that the pretended machine has, read again at every reading")
	if len(args) == 0 || args[0] == "-h" || args[0] == "-help" || args[0] == "--help" || args[0] == "help" {
		fmt.Fprint(help, usage)
		f.SetOutput(help)
		f.PrintDefaults()
		if len(args) == 0 {
			return o, "", fmt.Errorf("a verb is missing: %s", strings.Join(verbs, ", "))
		}
		return o, "", flag.ErrHelp
	}
	verb := args[0]
	if err := f.Parse(args[1:]); err != nil {
		return o, "", fmt.Errorf("%w; see muster-gpu --help", err)
	}
	switch {
	case !slices.Contains(verbs, verb):
		return o, "", fmt.Errorf("%q is no verb: %s", verb, strings.Join(verbs, ", "))
	case f.NArg() > 0:
		return o, "", fmt.Errorf("%q is one argument too many; see muster-gpu --help", f.Arg(0))
	case o.interval < 10*time.Millisecond:
		return o, "", fmt.Errorf("--interval %v is too short; at least 10ms", o.interval)
	case o.indent && verb == "watch":
		return o, "", errors.New("--indent and watch exclude each other: a watch is one JSON document a line")
	case o.faults != "" && o.mock == "":
		return o, "", errors.New("--mock-faults needs --mock: real GPUs can't be given faults")
	}
	return o, verb, nil
}

// run carries out a verb and writes its answer.
func run(o options, verb string, w io.Writer) error {
	out := &output{w: bufio.NewWriter(w), format: protojson.MarshalOptions{Multiline: o.indent}}
	if verb == "watch" {
		return watch(o, out)
	}
	var read func(probe) proto.Message
	var unknown func(*nodev1.GpuUnknown) proto.Message
	switch verb {
	case "inventory":
		read = func(p probe) proto.Message { return p.inventory() }
		unknown = func(u *nodev1.GpuUnknown) proto.Message { return unknownInventory(u, o) }
	case "health":
		read = func(p probe) proto.Message { return p.health() }
		unknown = func(u *nodev1.GpuUnknown) proto.Message { return &nodev1.GpuHealth{Unknown: u} }
	case "processes":
		read = func(p probe) proto.Message { return p.processes() }
		unknown = func(u *nodev1.GpuUnknown) proto.Message { return &nodev1.GpuProcesses{Unknown: u} }
	default:
		return fmt.Errorf("%q is no verb: %s", verb, strings.Join(verbs, ", "))
	}
	p, why, err := open(o)
	switch {
	case err != nil:
		return err
	case why != nil:
		return out.write(unknown(why))
	default:
		defer p.close()
		return out.write(read(p))
	}
}

func unknownInventory(u *nodev1.GpuUnknown, o options) *nodev1.GpuInventory {
	inv := &nodev1.GpuInventory{Unknown: u, Mock: o.mock != ""}
	if !inv.Mock {
		inv.PciGpus = countOnBus("/sys")
	}
	return inv
}

// inventoryEvery is after how many readings of health the inventory is read again although nothing in the readings changed (MIG
// instances may have): it asks each link of each GPU, which a watch that costs nothing can't do all the time.
const inventoryEvery = 6

// watcher is one watch.
type watcher struct {
	o options
	p probe
	// inventory is the last one that was read; readings is how many readings of health were taken with it.
	inventory *nodev1.GpuInventory
	readings  int
	// signature is what in the readings tells that there are other devices.
	signature string
}

// watch writes events until its reader is gone. While nothing can be read it tries again every period, so that it notices a
// driver that is loaded later.
func watch(o options, out *output) error {
	w := watcher{o: o}
	for {
		before := w.inventory
		health, err := w.read()
		if err != nil {
			return err
		}
		if before == nil || !proto.Equal(w.inventory, before) {
			if w.p != nil {
				w.p.listen()
			}
			if err := out.event(&nodev1.GpuEvent{What: &nodev1.GpuEvent_Inventory{Inventory: w.inventory}}); err != nil {
				return err
			}
		}
		if err := out.event(&nodev1.GpuEvent{What: &nodev1.GpuEvent_Health{Health: health}}); err != nil {
			return err
		}
		if err := errorsUntil(w.p, time.Now().Add(o.interval), out); err != nil {
			return err
		}
	}
}

// read takes one reading and if needed an inventory, and opens or closes the probe as far as that is possible and needed.
func (w *watcher) read() (*nodev1.GpuHealth, error) {
	if w.p == nil {
		p, why, err := open(w.o)
		if err != nil {
			return nil, err
		}
		if why != nil {
			w.inventory = unknownInventory(why, w.o)
			return &nodev1.GpuHealth{Unknown: why}, nil
		}
		w.p, w.signature = p, ""
	}
	health := w.p.health()
	if signature := signatureOf(health); signature != w.signature || w.readings >= inventoryEvery {
		w.inventory, w.signature, w.readings = w.p.inventory(), signature, 0
	}
	w.readings++
	if health.Unknown != nil && w.inventory.Unknown == nil {
		w.inventory = unknownInventory(health.Unknown, w.o)
	}
	if w.inventory.Unknown != nil {
		w.p.close()
		w.p = nil
		return &nodev1.GpuHealth{Unknown: w.inventory.Unknown}, nil
	}
	return health, nil
}

// signatureOf says which GPUs there are, which of them can be reached, and how many links they have up.
func signatureOf(h *nodev1.GpuHealth) string {
	var b strings.Builder
	b.WriteString("gpus")
	for _, r := range h.Gpus {
		fmt.Fprintf(&b, " %d %s %t %d", r.Index, r.Uuid, r.Lost, r.GetNvlinksActive())
	}
	return b.String()
}

// errorsUntil writes errors as they come, until the next reading is due.
func errorsUntil(p probe, due time.Time, out *output) error {
	if p == nil {
		time.Sleep(time.Until(due))
		return nil
	}
	for {
		left := time.Until(due)
		if left <= 0 {
			return nil
		}
		if xid := p.wait(left); xid != nil {
			if err := out.event(&nodev1.GpuEvent{What: &nodev1.GpuEvent_Xid{Xid: xid}}); err != nil {
				return err
			}
		}
	}
}

// output writes one JSON document a line.
type output struct {
	w      *bufio.Writer
	format protojson.MarshalOptions
}

func (o *output) write(m proto.Message) error {
	text, err := o.format.Marshal(m)
	if err != nil {
		return fmt.Errorf("write the answer: %w", err)
	}
	if _, err := o.w.Write(append(text, '\n')); err != nil {
		return fmt.Errorf("write the answer: %w", err)
	}
	if err := o.w.Flush(); err != nil {
		return fmt.Errorf("write the answer: %w", err)
	}
	return nil
}

func (o *output) event(e *nodev1.GpuEvent) error {
	e.Time = timestamppb.Now()
	return o.write(e)
}
