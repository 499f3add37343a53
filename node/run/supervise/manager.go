package supervise

import (
	"fmt"
	"net"
	"os"
	"runtime/debug"
	"strings"

	"github.com/muster-hpc/muster/node/run/pmi"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"github.com/muster-hpc/muster/proto/notation"
	"golang.org/x/sys/unix"
)

// managerFD is the descriptor at which a task finds its connection to the process manager: those before it may have a use
// until the program is executed.
const managerFD = 6

// withManager adds a task's connection to the process manager to the descriptors that it gets; 0 if it has none.
func withManager(files []uintptr, fd int) []uintptr {
	if fd == 0 {
		return files
	}
	for len(files) < managerFD {
		files = append(files, ^uintptr(0)) // closed
	}
	return append(files, uintptr(fd))
}

// manager is the process manager of the MPI processes among the step's tasks. Only the loop uses it; what runs beside the
// loop reports through acts. A nil manager is that of a step without one, and does nothing.
type manager struct {
	s    *supervisor
	plan *supervisorv1.ProcessManager
	// listener is where the other nodes connect; nil if they do not, or once the root has it.
	listener net.Listener
	port     uint32
	// conns are the server's ends of the tasks' connections, until the server has them.
	conns []net.Conn
	// root is where the first node serves, as the start said.
	root string
	// server and star are nil before the start; star also on a node that is alone.
	server *pmi.Server
	star   interface {
		pmi.Exchange
		Start()
		Close()
	}
	// acts gets the end of the step, for the loop.
	acts chan func()
	// codes are the exit codes with which tasks aborted.
	codes map[uint32]uint32
	// closed is closed when everything beside the loop has ended; nil before close.
	closed chan struct{}
}

// manage prepares the process manager: a connection for each task, and a listener if other nodes are to connect.
func (s *supervisor) manage(p *prepared) *fault {
	plan := s.plan.GetProcessManager()
	if plan == nil {
		return nil
	}
	// All addresses of the step may be kept: what the runtime is given for a step without MPI is not enough.
	debug.SetGCPercent(100)
	debug.SetMemoryLimit(1 << 62)
	m := &manager{s: s, plan: plan, acts: make(chan func(), 1), codes: make(map[uint32]uint32)}
	s.mpi = m
	for i := range s.tasks {
		if err := m.connect(p, i); err != nil {
			return &fault{sentence: fmt.Sprintf("The connection of a task to the process manager cannot be made: %s.", errnoText(err))}
		}
	}
	if plan.GetNodes() < 2 || plan.GetNode() != 0 {
		return nil
	}
	var err error
	if m.listener, err = net.Listen("tcp", net.JoinHostPort(plan.GetListen(), "0")); err != nil && plan.GetListen() != "" {
		s.log.Warn("the process manager listens at all addresses", "instead_of", plan.GetListen(), "error", err)
		m.listener, err = net.Listen("tcp", ":0")
	}
	if err != nil {
		return &fault{sentence: fmt.Sprintf("The process manager cannot listen for the step's other nodes: %s.", errnoText(err))}
	}
	m.port = uint32(m.listener.Addr().(*net.TCPAddr).Port)
	return nil
}

// connect makes the connection of the i-th task.
func (m *manager) connect(p *prepared, i int) error {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	p.inputs = append(p.inputs, fds[1]) // closed when the task has it
	p.tasks[i].manager = fds[1]
	end := os.NewFile(uintptr(fds[0]), "pmi")
	conn, err := net.FileConn(end)
	_ = end.Close() // conn has a copy
	if err != nil {
		return err
	}
	m.conns = append(m.conns, conn)
	return nil
}

// done returns the channel of acts; nil, which blocks, for a step without a manager.
func (m *manager) done() <-chan func() {
	if m == nil {
		return nil
	}
	return m.acts
}

// told returns the port at which other nodes connect; 0 if they do not.
func (m *manager) told() uint32 {
	if m == nil {
		return 0
	}
	return m.port
}

// meet notes where the first node serves.
func (m *manager) meet(root string) {
	if m != nil {
		m.root = root
	}
}

// fail reports to the loop that the step cannot go on; what comes after that changes nothing.
func (m *manager) fail(f pmi.Failure) {
	select {
	case m.acts <- func() { m.s.failed(f) }:
	default:
	}
}

// begin serves the tasks; they are executed next.
func (m *manager) begin() {
	if m == nil {
		return
	}
	exchange, err := m.exchange()
	if err != nil {
		exchange = pmi.Alone{}
		m.fail(pmi.Failure{Rank: -1, Sentence: "the MPI processes cannot exchange their addresses: " + err.Error()})
	}
	var ranks []uint32
	for _, t := range m.s.tasks {
		ranks = append(ranks, t.plan.GetRank())
	}
	m.server = pmi.NewServer(pmi.Config{
		JobID: m.jobID(), Size: int(m.plan.GetSize()), Universe: int(m.plan.GetUniverseSize()), Ranks: ranks,
		Mapping: m.plan.GetMapping(), Exchange: exchange, End: m.fail, Log: m.s.log,
	})
	for i, conn := range m.conns {
		m.server.Serve(ranks[i], conn)
	}
	m.conns = nil
}

// exchange connects the step's nodes.
func (m *manager) exchange() (pmi.Exchange, error) {
	if m.plan.GetNodes() < 2 {
		return pmi.Alone{}, nil
	}
	c := pmi.StarConfig{
		Key: m.plan.GetKey(), Node: int(m.plan.GetNode()), Nodes: int(m.plan.GetNodes()), Name: m.name, End: m.fail,
		Times: pmi.DefaultTimes, Log: m.s.log,
	}
	if c.Node == 0 {
		root, err := pmi.NewRoot(c, m.listener)
		if err != nil {
			return nil, err
		}
		m.listener, m.star = nil, root
	} else {
		if m.root == "" {
			return nil, fmt.Errorf("it was not told where node %s serves them (is a controller older than this agent?)", m.name(0))
		}
		leaf, err := pmi.NewLeaf(c, m.root)
		if err != nil {
			return nil, err
		}
		m.star = leaf
	}
	m.star.Start()
	return m.star, nil
}

// jobID is the step's number without the attempt, as Slurm names it.
func (m *manager) jobID() string {
	part := strings.Split(m.s.plan.GetLabel(), ".") // job.attempt.step
	if len(part) != 3 {
		return "0.0"
	}
	return part[0] + "." + part[2]
}

// name is that of a node by its index.
func (m *manager) name(node int) string {
	names, err := notation.Expand(m.plan.GetNodeList())
	if err != nil || node < 0 || node >= len(names) {
		return fmt.Sprintf("number %d of the step", node)
	}
	return names[node]
}

// environment returns the variables that a task needs beside those of its plan.
func (m *manager) environment(t *task, more []string) []string {
	if m == nil {
		return more
	}
	return append(m.server.Environment(t.plan.GetRank(), managerFD), more...)
}

// ended notes the end of a task. One that asked for the end of the step has the exit code that it gave then, even if it
// was ended before it could leave with it.
func (m *manager) ended(t *task, exit *apiv1.TaskExit) {
	if m == nil {
		return
	}
	if code := m.codes[t.plan.GetRank()]; code != 0 && exit.GetSignal() != 0 {
		exit.Code, exit.Signal = code, 0
	}
	if m.server != nil {
		m.server.Left(t.plan.GetRank())
	}
}

// failed ends a step whose MPI processes cannot go on.
func (s *supervisor) failed(f pmi.Failure) {
	if f.Code != 0 && f.Rank >= 0 {
		s.mpi.codes[uint32(f.Rank)] = uint32(f.Code)
	}
	if s.ending || s.over() {
		return
	}
	s.log.Warn("the MPI processes cannot go on", "why", f.Sentence, "remote", f.Remote)
	s.say(strings.ToUpper(f.Sentence[:1]) + f.Sentence[1:] + ".")
	line := ""
	if !f.Remote { // the node that found it says it to the user, once
		line = s.voice() + f.Sentence
	}
	s.end(s.grace(), line)
}

// close ends what runs beside the loop, without waiting.
func (m *manager) close() {
	if m == nil || m.closed != nil {
		return
	}
	m.closed = make(chan struct{})
	if m.listener != nil {
		_ = m.listener.Close() // nobody was to come
	}
	for _, conn := range m.conns {
		_ = conn.Close() // no task has the other end
	}
	go func() {
		defer close(m.closed)
		if m.star != nil {
			m.star.Close() // tells the other nodes
		}
		if m.server != nil {
			m.server.Close()
		}
	}()
}

// wait waits for what close has ended.
func (m *manager) wait() {
	if m != nil && m.closed != nil {
		<-m.closed
	}
}
