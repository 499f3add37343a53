package stage

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Name is argument 0 of a process that shall be a stage.
const Name = "muster-stage"

// Descriptors of a stage beside the task's own.
const (
	PlanFD      = 3
	StatusFD    = 4
	NamespaceFD = 5
)

// FailureCode is with what a stage exits that could not execute its program.
const FailureCode = 124

// Plan is what a stage shall do.
type Plan struct {
	// Parent is the process id of the supervisor: if it is not the parent any more, the stage ends.
	Parent int
	// Groups are files into which it writes "0" to enter control groups.
	Groups []string
	// Namespace: it enters the mount namespace at NamespaceFD.
	Namespace bool
	// CPUs are those that it may run on, bit i of word w is CPU 64w+i; empty leaves the group's.
	CPUs []uint64
	// SetNice: its nice value becomes Nice.
	SetNice bool
	Nice    int
	// SetUser: it becomes the user with these ids.
	SetUser    bool
	UID, GID   uint32
	Supplement []uint32
	// Limits are soft limits of resources.
	Limits []Limit
	// Dir is the working directory.
	Dir string
	// Program is the path to execute with Args, of which the first is its name, and Env.
	Program string
	Args    []string
	Env     []string
	// Prints are lines for its standard output and Lines for its standard error before that; "%p" is its process id.
	Prints, Lines []string
}

// Limit is a soft limit of a resource; the largest number means none.
type Limit struct {
	Resource int
	Soft     uint64
}

// Failure is what a stage could not do.
type Failure struct {
	// Call names it: "execve", "chdir", "setrlimit", "entering a control group", …
	Call string
	// Errno is the error number.
	Errno uint32
}

const (
	// Started is the byte that says that all is done but the execution.
	Started = 'E'
	// failed begins a failure.
	failed = 'F'
)

// errPlan means that descriptor PlanFD has no plan.
var errPlan = errors.New("the plan of the stage is damaged")

// Encode makes bytes of a plan.
func (p *Plan) Encode() []byte {
	var e encoder
	e.number(int64(p.Parent))
	e.list(p.Groups)
	e.flag(p.Namespace)
	e.number(int64(len(p.CPUs)))
	for _, word := range p.CPUs {
		e.number(int64(word))
	}
	e.flag(p.SetNice)
	e.number(int64(p.Nice))
	e.flag(p.SetUser)
	e.number(int64(p.UID))
	e.number(int64(p.GID))
	e.number(int64(len(p.Supplement)))
	for _, group := range p.Supplement {
		e.number(int64(group))
	}
	e.number(int64(len(p.Limits)))
	for _, l := range p.Limits {
		e.number(int64(l.Resource))
		e.number(int64(l.Soft))
	}
	e.text(p.Dir)
	e.text(p.Program)
	e.list(p.Args)
	e.list(p.Env)
	e.list(p.Prints)
	e.list(p.Lines)
	return e.b
}

// Decode reads a plan. Any bytes are safe.
func Decode(b []byte) (*Plan, error) {
	d := decoder{b: b}
	p := &Plan{Parent: int(d.number()), Groups: d.list(), Namespace: d.flag()}
	for range d.count() {
		p.CPUs = append(p.CPUs, uint64(d.number()))
	}
	p.SetNice, p.Nice = d.flag(), int(d.number())
	p.SetUser, p.UID, p.GID = d.flag(), uint32(d.number()), uint32(d.number())
	for range d.count() {
		p.Supplement = append(p.Supplement, uint32(d.number()))
	}
	for range d.count() {
		p.Limits = append(p.Limits, Limit{Resource: int(d.number()), Soft: uint64(d.number())})
	}
	p.Dir, p.Program, p.Args, p.Env = d.text(), d.text(), d.list(), d.list()
	p.Prints, p.Lines = d.list(), d.list()
	if d.bad || len(d.b) > 0 {
		return nil, errPlan
	}
	return p, nil
}

// Encode makes bytes of a failure.
func (f *Failure) Encode() []byte {
	return append(binary.LittleEndian.AppendUint32([]byte{failed}, f.Errno), f.Call...)
}

// DecodeStatus reads everything that a stage wrote to its status. started is false if it did not come as far as to execute
// its program; failure is nil unless it said why.
func DecodeStatus(b []byte) (started bool, failure *Failure, err error) {
	if len(b) > 0 && b[0] == Started {
		started, b = true, b[1:]
	}
	switch {
	case len(b) == 0:
		return started, nil, nil
	case b[0] != failed, len(b) < 5:
		return started, nil, fmt.Errorf("the status of a stage is not understood: % x", b)
	}
	return started, &Failure{Errno: binary.LittleEndian.Uint32(b[1:]), Call: string(b[5:])}, nil
}

type encoder struct{ b []byte }

func (e *encoder) number(n int64) { e.b = binary.AppendVarint(e.b, n) }

func (e *encoder) flag(yes bool) {
	n := int64(0)
	if yes {
		n = 1
	}
	e.number(n)
}

func (e *encoder) text(s string) {
	e.number(int64(len(s)))
	e.b = append(e.b, s...)
}

func (e *encoder) list(all []string) {
	e.number(int64(len(all)))
	for _, s := range all {
		e.text(s)
	}
}

type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) number() int64 {
	n, size := binary.Varint(d.b)
	if size <= 0 {
		d.bad, d.b = true, nil
		return 0
	}
	d.b = d.b[size:]
	return n
}

// count is a number of things that follow, each of at least a byte.
func (d *decoder) count() int {
	n := d.number()
	if n < 0 || n > int64(len(d.b)) {
		d.bad, d.b = true, nil
		return 0
	}
	return int(n)
}

func (d *decoder) flag() bool { return d.number() != 0 }

func (d *decoder) text() string {
	n := d.count()
	s := string(d.b[:n])
	d.b = d.b[n:]
	return s
}

func (d *decoder) list() []string {
	n := d.count()
	all := make([]string, 0, min(n, 1024))
	for range n {
		all = append(all, d.text())
	}
	return all
}
