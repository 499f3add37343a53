package virtual

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

const (
	members     = 3
	snapshotAt  = 400 // entries since the last snapshot
	flushWait   = 200 * time.Millisecond
	fsyncMost   = 8 * time.Millisecond
	resendEvery = 5 * time.Second
)

var (
	errNotLeader = errors.New("not the leader")
	errUnknown   = errors.New("outcome unknown")
)

type entry struct {
	term uint64
	data []byte
	// newer is what a newer program makes of an entry that this one does not know; nil if there is nothing to know.
	newer []byte
}

// disk is what a member keeps.
type disk struct {
	term uint64
	// log begins after index base, whose entry had baseTerm.
	base, baseTerm uint64
	log            []entry
	// durable is the last index that a crash can't take away.
	durable uint64
	snap    []byte
}

func (d *disk) last() uint64 { return d.base + uint64(len(d.log)) }

func (d *disk) termAt(index uint64) uint64 {
	if index == d.base {
		return d.baseTerm
	}
	return d.log[index-d.base-1].term
}

func (d *disk) lastTerm() uint64 { return d.termAt(d.last()) }

// waiter waits for the result of a proposed command.
type waiter struct {
	cmd  *logv1.Command
	done func(*logv1.Result, error)
}

// replicaState is what a member loses in a crash.
type replicaState struct {
	machine *fsm.Machine
	view    *fsm.View
	applied uint64
	commit  uint64
	leads   bool
	leader  int // who leads, as far as known; -1 if nobody
	// As leader.
	began       uint64 // index of the first entry of its term
	next, match [members]uint64
	queue       []waiter
	flushing    bool
	pumping     bool
	waiting     map[uint64][]waiter
	sentCommit  [members]uint64
	acked       [members]uint64 // commit index that a member has said to know
}

// appendMessage carries entries, or nothing but the commit index.
type appendMessage struct {
	term           uint64
	from           int
	prev, prevTerm uint64
	entries        []entry
	commit         uint64
	// snapshot instead of entries.
	snap                []byte
	snapIndex, snapTerm uint64
}

// boot starts a member from its disk.
func (c *controller) boot() {
	c.life++
	c.up = true
	c.replicaState = replicaState{machine: fsm.New(fsm.WithFaults(c.s.bugs.fsm)), leader: -1, waiting: map[uint64][]waiter{}}
	c.serving = newServing()
	if c.disk.snap != nil {
		if err := c.machine.Restore(bytes.NewReader(c.disk.snap)); err != nil {
			c.s.fail("G8: controller %d can't restore its snapshot: %v", c.id, err)
			return
		}
		c.applied, c.commit = c.disk.base, c.disk.base
	}
	c.view = c.machine.Publish()
	c.s.checkDigest(c, c.applied, c.view)
	c.s.checkInvariants(c.view, "after a restart")
	c.s.trace("boot", uint64(c.id), c.applied, c.disk.last())
}

// crash ends a member; what was not durable is gone.
func (c *controller) crash() {
	c.s.trace("crash", uint64(c.id), c.disk.last(), c.disk.durable)
	c.up = false
	c.life++
	c.manual = nil
	c.disk.log = c.disk.log[:min(uint64(len(c.disk.log)), c.disk.durable-min(c.disk.durable, c.disk.base))]
	c.replicaState = replicaState{leader: -1}
	c.serving = newServing()
}

// elect lets a member stand for election: it needs the votes of a majority that has no newer log.
func (c *controller) elect() {
	s := c.s
	term := c.disk.term
	for _, o := range s.controllers {
		if o.up && s.reach(c, o) {
			term = max(term, o.disk.term)
		}
	}
	term++
	votes := 0
	for _, o := range s.controllers {
		if !o.up || !s.reach(c, o) {
			continue
		}
		o.newTerm(term)
		if c.disk.lastTerm() > o.disk.lastTerm() || c.disk.lastTerm() == o.disk.lastTerm() && c.disk.last() >= o.disk.last() {
			votes++
		}
	}
	s.trace("election", uint64(c.id), term, uint64(votes))
	if votes <= members/2 {
		return
	}
	if prev := s.leaderOf[term]; prev != 0 {
		s.fail("the model of the log has two leaders in term %d", term)
	}
	s.leaderOf[term] = c.id + 1
	c.leads, c.leader, c.began = true, c.id, 0
	c.queue, c.flushing = nil, false
	for i := range members {
		c.next[i], c.match[i], c.sentCommit[i] = c.disk.last()+1, 0, 0
		c.acked[i] = 0
	}
	c.propose(&logv1.Command{Principal: c.principal(), Op: &logv1.Command_Tick{Tick: &logv1.Tick{}}}, func(*logv1.Result, error) {})
}

// newTerm takes a member into a higher term, in which it does not lead.
func (c *controller) newTerm(term uint64) {
	if term <= c.disk.term {
		return
	}
	c.disk.term = term
	c.stepDown()
}

func (c *controller) stepDown() {
	c.leader = -1
	if !c.leads {
		return
	}
	c.s.trace("stepdown", uint64(c.id), c.disk.term)
	c.leads, c.manual = false, nil
	c.serving.liveness = nil
	lost := c.queue
	c.queue = nil
	indexes := make([]uint64, 0, len(c.waiting))
	for index := range c.waiting {
		indexes = append(indexes, index)
	}
	slices.Sort(indexes)
	for _, w := range lost {
		w.done(nil, errNotLeader)
	}
	for _, index := range indexes {
		for _, w := range c.waiting[index] {
			w.done(nil, errUnknown)
		}
	}
	c.waiting = map[uint64][]waiter{}
}

func (c *controller) principal() *apiv1.Principal {
	return &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_MEMBER, Name: fmt.Sprintf("c%d", c.id)}
}

// propose writes a command; done gets its result when it is applied here, or an error.
func (c *controller) propose(cmd *logv1.Command, done func(*logv1.Result, error)) {
	if !c.up || !c.leads {
		done(nil, errNotLeader)
		return
	}
	c.queue = append(c.queue, waiter{cmd, done})
	if c.flushing {
		return
	}
	c.flushing = true
	life, term := c.life, c.disk.term
	c.s.after(flushWait, func() {
		if c.life == life && c.leads && c.disk.term == term {
			c.flush()
		}
	})
}

// flush writes what waits as one entry.
func (c *controller) flush() {
	c.flushing = false
	batch := &logv1.Batch{}
	for _, w := range c.queue {
		cmd := proto.CloneOf(w.cmd) // a request that was forwarded twice is two commands
		cmd.ProposedAt, cmd.Level = timestamppb.New(c.wall()), fsm.LevelOf(cmd)
		batch.Commands = append(batch.Commands, cmd)
	}
	data, err := proto.Marshal(batch)
	if err != nil {
		panic(err)
	}
	index := c.disk.last() + 1
	e := entry{term: c.disk.term, data: data}
	if at := c.s.bugs.unknownAt; at != 0 && index >= at && !c.s.poisoned {
		c.s.poisoned = true
		e = c.poison(batch)
	}
	c.disk.log = append(c.disk.log, e)
	if c.began == 0 {
		c.began = index
	}
	c.waiting[index], c.queue = c.queue, nil
	life, term := c.life, c.disk.term
	c.s.after(c.s.between(0, fsyncMost), func() {
		if c.life != life || c.disk.term != term || !c.leads {
			return
		}
		c.disk.durable = max(c.disk.durable, index)
		c.match[c.id] = max(c.match[c.id], index)
		c.advance()
	})
	c.replicate()
}

// poison makes an entry with a command that only controller 0 knows: to the others it is a field without a name.
func (c *controller) poison(batch *logv1.Batch) entry {
	extra := &logv1.Command{Principal: c.principal(), ProposedAt: timestamppb.New(c.wall()), Level: 1,
		Op: &logv1.Command_LoseNode{LoseNode: &logv1.LoseNode{Node: 1, Epoch: c.view.Node(1).GetEpoch(), Sentence: "said by a newer program"}}}
	newer, err := proto.Marshal(&logv1.Batch{Commands: append(slices.Clone(batch.Commands), extra)})
	if err != nil {
		panic(err)
	}
	const noFieldYet = 200
	extra.Op = nil
	extra.ProtoReflect().SetUnknown(protowire.AppendBytes(protowire.AppendTag(nil, noFieldYet, protowire.BytesType), []byte{8, 1}))
	data, err := proto.Marshal(&logv1.Batch{Commands: append(slices.Clone(batch.Commands), extra)})
	if err != nil {
		panic(err)
	}
	return entry{term: c.disk.term, data: data, newer: newer}
}

// replicate sends every other member what it lacks.
func (c *controller) replicate() {
	for i, o := range c.s.controllers {
		if i == c.id || c.next[i] > c.disk.last() && c.sentCommit[i] == c.commit {
			continue
		}
		c.sendTo(o)
	}
	c.pump()
}

func (c *controller) sendTo(o *controller) {
	m := appendMessage{term: c.disk.term, from: c.id, commit: c.commit}
	if c.next[o.id] <= c.disk.base {
		m.snap, m.snapIndex, m.snapTerm = c.disk.snap, c.disk.base, c.disk.baseTerm
		c.next[o.id] = c.disk.base + 1
	} else {
		m.prev = c.next[o.id] - 1
		m.prevTerm = c.disk.termAt(m.prev)
		m.entries = slices.Clone(c.disk.log[m.prev-c.disk.base:])
		c.next[o.id] = c.disk.last() + 1
	}
	c.sentCommit[o.id] = c.commit
	c.s.send(c, o, longDelays, func() { o.appended(&m) })
}

// pump sends again what was not acknowledged.
func (c *controller) pump() {
	if c.pumping {
		return
	}
	c.pumping = true
	life := c.life
	c.s.after(resendEvery, func() {
		if c.life != life {
			return
		}
		c.pumping = false
		if !c.leads {
			return
		}
		behind := false
		for i, o := range c.s.controllers {
			if i != c.id && (c.match[i] < c.disk.last() || c.acked[i] < c.commit) {
				behind = true
				c.next[i] = max(c.match[i]+1, 1)
				c.sendTo(o)
			}
		}
		if behind {
			c.pump()
		}
	})
}

// appended takes in what a leader sends.
func (c *controller) appended(m *appendMessage) {
	if m.term < c.disk.term {
		c.reply(m, false, 0)
		return
	}
	c.newTerm(m.term)
	if c.leads {
		c.s.fail("the model of the log has two leaders in term %d", m.term)
		return
	}
	c.leader = m.from
	if m.snap != nil {
		c.install(m)
		c.reply(m, true, max(m.snapIndex, c.commit))
		return
	}
	if m.prev > c.disk.last() || m.prev >= c.disk.base && c.disk.termAt(m.prev) != m.prevTerm {
		c.reply(m, false, min(c.disk.last(), m.prev-1))
		return
	}
	for i, e := range m.entries {
		index := m.prev + uint64(i) + 1
		if index <= c.disk.base {
			continue
		}
		if index <= c.disk.last() {
			if c.disk.termAt(index) == e.term {
				continue
			}
			if index <= c.commit {
				c.s.fail("the model of the log truncates committed entry %d", index)
			}
			c.disk.log = c.disk.log[:index-c.disk.base-1]
		}
		c.disk.log = append(c.disk.log, e)
	}
	have := m.prev + uint64(len(m.entries))
	c.disk.durable = c.disk.last()
	if commit := min(m.commit, have); commit > c.commit {
		c.commit = commit
		c.apply()
	}
	c.reply(m, true, have)
}

func (c *controller) reply(m *appendMessage, ok bool, index uint64) {
	leader, term, commit := c.s.controllers[m.from], c.disk.term, c.commit
	c.s.send(c, leader, shortDelays, func() { leader.replied(c.id, m.term, term, ok, index, commit) })
}

func (c *controller) replied(from int, asked, term uint64, ok bool, index, commit uint64) {
	if term > c.disk.term {
		c.newTerm(term)
	}
	if !c.leads || asked != c.disk.term {
		return
	}
	c.acked[from] = max(c.acked[from], commit)
	if !ok {
		if index < c.next[from] && index+1 > c.match[from] {
			c.next[from] = index + 1
			c.sendTo(c.s.controllers[from])
		}
		return
	}
	if index > c.match[from] {
		c.match[from] = index
		c.advance()
	}
}

// advance commits what a majority has, if it is of this term.
func (c *controller) advance() {
	sorted := c.match
	slices.Sort(sorted[:])
	index := sorted[members/2]
	if index <= c.commit || c.disk.termAt(index) != c.disk.term {
		return
	}
	c.commit = index
	c.apply()
	c.replicate()
	if c.leads && c.manual == nil && c.began != 0 && c.commit >= c.began {
		c.reign()
	}
}

// apply applies what is committed.
func (c *controller) apply() {
	before := c.view.Revision()
	busy := false
	for c.applied < c.commit {
		index := c.applied + 1
		e := c.disk.log[index-c.disk.base-1]
		c.s.committed(index, e)
		data := e.data
		if e.newer != nil && c.id == 0 {
			data = e.newer
		}
		results, err := c.machine.Apply(index, e.term, data)
		if err != nil {
			c.s.fail("G8: controller %d stopped: %v", c.id, err)
			return
		}
		c.applied = index
		c.view = c.machine.Publish()
		c.s.checkDigest(c, index, c.view)
		if c.s.fails() {
			return
		}
		waiting := c.waiting[index]
		delete(c.waiting, index)
		for i, w := range waiting {
			busy = busy || w.cmd.GetTick() == nil
			w.done(results[i], nil)
		}
		if !c.up {
			return
		}
	}
	c.published(before, busy)
	if c.applied >= c.disk.base+snapshotAt {
		c.snapshot()
	}
}

func (c *controller) snapshot() {
	var b bytes.Buffer
	if err := c.view.WriteSnapshot(&b); err != nil {
		c.s.fail("G8: controller %d can't write a snapshot: %v", c.id, err)
		return
	}
	c.s.trace("snapshot", uint64(c.id), c.applied, uint64(b.Len()))
	// The state is that at applied: the log begins after it. Followers that lag a little get what is kept behind it no more: the
	// snapshot's index is the log's base, so that a restart needs nothing else.
	c.disk.snap = b.Bytes()
	c.disk.baseTerm = c.disk.termAt(c.applied)
	c.disk.log = slices.Clone(c.disk.log[c.applied-c.disk.base:])
	c.disk.base = c.applied
	c.disk.durable = max(c.disk.durable, c.applied)
}

// install takes over a leader's snapshot.
func (c *controller) install(m *appendMessage) {
	if m.snapIndex <= c.commit {
		return
	}
	before := c.view.Revision()
	machine := fsm.New(fsm.WithFaults(c.s.bugs.fsm))
	if err := machine.Restore(bytes.NewReader(m.snap)); err != nil {
		c.s.fail("G8: controller %d can't restore the leader's snapshot: %v", c.id, err)
		return
	}
	c.s.trace("install", uint64(c.id), m.snapIndex)
	if m.snapIndex <= c.disk.last() && m.snapIndex >= c.disk.base && c.disk.termAt(m.snapIndex) == m.snapTerm {
		c.disk.log = slices.Clone(c.disk.log[m.snapIndex-c.disk.base:])
	} else {
		c.disk.log = nil
	}
	c.disk.base, c.disk.baseTerm, c.disk.snap = m.snapIndex, m.snapTerm, m.snap
	c.disk.durable = c.disk.last()
	c.machine, c.applied, c.commit = machine, m.snapIndex, m.snapIndex
	c.view = machine.Publish()
	c.s.checkDigest(c, c.applied, c.view)
	c.s.checkInvariants(c.view, "after the installation of a snapshot")
	c.published(before, false)
}
