package main

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"strconv"
	"time"
)

// group says which process this is, and where the others meet.
type group struct {
	rank, world int
	master      string // host:port of rank 0
	run         string // the same in all processes of one attempt; strangers are turned away
}

// hello is what a process tells rank 0; the answer is the list of all addresses.
type hello struct {
	Run     string `json:"run"`
	Rank    int    `json:"rank"`
	World   int    `json:"world"`
	Address string `json:"address"`
}

type welcome struct {
	Addresses []string `json:"addresses"` // by rank
	Refusal   string   `json:"refusal"`   // why the process may not take part
}

// ring joins the processes in a circle: each sends to the next rank and receives from the one before.
type ring struct {
	group
	timeout time.Duration // for each message
	next    net.Conn
	prev    net.Conn
	reader  *bufio.Reader
	out     chan []byte // to the sender, which owns next's writing side
	sent    chan error  // the sender's word on each message
}

// joinRing meets the other processes at the master address and connects the circle. With one process there is none.
func joinRing(g group, timeout time.Duration) (*ring, error) {
	r := &ring{group: g, timeout: timeout}
	if g.world == 1 {
		return r, nil
	}
	deadline := time.Now().Add(timeout)
	addresses, listener, err := meet(g, deadline)
	if err != nil {
		return nil, fmt.Errorf("rank %d: meet at %s: %w", g.rank, g.master, err)
	}
	defer listener.Close()
	r.next, err = dialUntil(addresses[(g.rank+1)%g.world], deadline)
	if err != nil {
		return nil, fmt.Errorf("rank %d: connect to rank %d: %w", g.rank, (g.rank+1)%g.world, err)
	}
	if _, err := fmt.Fprintf(r.next, "%s %d\n", g.run, g.rank); err != nil {
		return nil, fmt.Errorf("rank %d: introduce itself to rank %d: %w", g.rank, (g.rank+1)%g.world, err)
	}
	if err := r.acceptPrevious(listener, deadline); err != nil {
		return nil, fmt.Errorf("rank %d: wait for rank %d: %w", g.rank, r.previous(), err)
	}
	r.out, r.sent = make(chan []byte), make(chan error, 1)
	go r.send()
	return r, nil
}

func (r *ring) previous() int { return (r.rank - 1 + r.world) % r.world }

// acceptPrevious takes the connection of the rank before; a stranger's is closed and the wait goes on.
func (r *ring) acceptPrevious(listener *net.TCPListener, deadline time.Time) error {
	want := fmt.Sprintf("%s %d\n", r.run, r.previous())
	for {
		if err := listener.SetDeadline(deadline); err != nil {
			return err
		}
		conn, err := listener.Accept()
		if err != nil {
			return err
		}
		_ = conn.SetReadDeadline(deadline)
		reader := bufio.NewReaderSize(conn, 1<<16)
		line, err := reader.ReadString('\n')
		if err == nil && line == want {
			r.prev, r.reader = conn, reader
			return nil
		}
		conn.Close()
	}
}

// meet gives every process the addresses of all: rank 0 collects them and answers.
func meet(g group, deadline time.Time) ([]string, *net.TCPListener, error) {
	host, port, err := net.SplitHostPort(g.master)
	if err != nil {
		return nil, nil, fmt.Errorf("MASTER_ADDR and MASTER_PORT: %w", err)
	}
	if g.rank == 0 {
		return host0(g, host, port, deadline)
	}
	conn, err := dialUntil(g.master, deadline)
	if err != nil {
		return nil, nil, err
	}
	defer conn.Close()
	_ = conn.SetDeadline(deadline)
	own, _, err := net.SplitHostPort(conn.LocalAddr().String())
	if err != nil {
		return nil, nil, err
	}
	listener, err := listen(own)
	if err != nil {
		return nil, nil, err
	}
	var answer welcome
	err = json.NewEncoder(conn).Encode(hello{Run: g.run, Rank: g.rank, World: g.world, Address: listener.Addr().String()})
	if err == nil {
		err = json.NewDecoder(conn).Decode(&answer)
	}
	if err == nil && answer.Refusal != "" {
		err = errors.New(answer.Refusal)
	}
	if err == nil && len(answer.Addresses) != g.world {
		err = fmt.Errorf("rank 0 named %d addresses, expected %d", len(answer.Addresses), g.world)
	}
	if err != nil {
		listener.Close()
		return nil, nil, err
	}
	return answer.Addresses, listener, nil
}

// host0 is rank 0's side of meet.
func host0(g group, host, port string, deadline time.Time) ([]string, *net.TCPListener, error) {
	number, err := strconv.Atoi(port)
	if err != nil {
		return nil, nil, fmt.Errorf("MASTER_PORT %q is not a number", port)
	}
	door, err := net.ListenTCP("tcp", &net.TCPAddr{Port: number})
	if err != nil {
		return nil, nil, err
	}
	defer door.Close()
	own, err := net.ResolveTCPAddr("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		return nil, nil, err
	}
	listener, err := listen(own.IP.String())
	if err != nil {
		return nil, nil, err
	}
	addresses := make([]string, g.world)
	addresses[0] = listener.Addr().String()
	var guests []net.Conn
	defer func() {
		for _, guest := range guests {
			guest.Close()
		}
	}()
	for len(guests) < g.world-1 {
		if err := door.SetDeadline(deadline); err != nil {
			return nil, nil, err
		}
		conn, err := door.Accept()
		if err != nil {
			listener.Close()
			return nil, nil, fmt.Errorf("%d of %d processes came: %w", len(guests)+1, g.world, err)
		}
		_ = conn.SetDeadline(deadline)
		if address, rank, ok := admit(conn, g, addresses); ok {
			addresses[rank] = address
			guests = append(guests, conn)
		} else {
			conn.Close()
		}
	}
	for _, guest := range guests {
		if err := json.NewEncoder(guest).Encode(welcome{Addresses: addresses}); err != nil {
			listener.Close()
			return nil, nil, fmt.Errorf("answer %s: %w", guest.RemoteAddr(), err)
		}
	}
	return addresses, listener, nil
}

// admit hears one process, and turns it away if it does not belong to the group.
func admit(conn net.Conn, g group, known []string) (address string, rank int, ok bool) {
	var h hello
	if json.NewDecoder(io.LimitReader(conn, 4096)).Decode(&h) != nil {
		return "", 0, false
	}
	refusal := ""
	switch {
	case h.Run != g.run:
		refusal = fmt.Sprintf("run %q meets here, not %q", g.run, h.Run)
	case h.World != g.world:
		refusal = fmt.Sprintf("%d processes meet here, not %d", g.world, h.World)
	case h.Rank < 1 || h.Rank >= g.world:
		refusal = fmt.Sprintf("rank %d is outside 1…%d", h.Rank, g.world-1)
	case known[h.Rank] != "":
		refusal = fmt.Sprintf("rank %d is here already", h.Rank)
	}
	if refusal != "" {
		_ = json.NewEncoder(conn).Encode(welcome{Refusal: refusal})
		return "", 0, false
	}
	return h.Address, h.Rank, true
}

func listen(ip string) (*net.TCPListener, error) {
	return net.ListenTCP("tcp", &net.TCPAddr{IP: net.ParseIP(ip)})
}

// dialUntil tries until somebody listens: the others may have been started a moment later.
func dialUntil(address string, deadline time.Time) (net.Conn, error) {
	for {
		conn, err := net.DialTimeout("tcp", address, time.Until(deadline))
		if err == nil {
			return conn, nil
		}
		if time.Until(deadline) < dialPause {
			return nil, err
		}
		time.Sleep(dialPause)
	}
}

// dialPause is the time between two tries to reach a process that does not listen yet.
const dialPause = 50 * time.Millisecond

// send writes what is put into out; it ends when out is closed. A sender of its own is what keeps a circle of
// processes that all write before they read from waiting for each other.
func (r *ring) send() {
	for message := range r.out {
		_ = r.next.SetWriteDeadline(time.Now().Add(r.timeout))
		_, err := r.next.Write(message)
		r.sent <- err
	}
	close(r.sent)
}

// exchange sends one piece to the next rank while it receives one of the given length from the rank before.
func (r *ring) exchange(send, receive []float32) error {
	message := make([]byte, 4*len(send))
	for i, v := range send {
		binary.LittleEndian.PutUint32(message[4*i:], math.Float32bits(v))
	}
	r.out <- message
	buffer := make([]byte, 4*len(receive))
	_ = r.prev.SetReadDeadline(time.Now().Add(r.timeout))
	_, readErr := io.ReadFull(r.reader, buffer)
	if err := <-r.sent; err != nil {
		return fmt.Errorf("rank %d: send to rank %d: %w", r.rank, (r.rank+1)%r.world, err)
	}
	if readErr != nil {
		return fmt.Errorf("rank %d: receive from rank %d: %w", r.rank, r.previous(), readErr)
	}
	for i := range receive {
		receive[i] = math.Float32frombits(binary.LittleEndian.Uint32(buffer[4*i:]))
	}
	return nil
}

// sum replaces v in all processes by the sum of all their v, element by element: a ring all-reduce, which moves
// 2·(N-1)/N times the vector whatever the number of processes. Every element is added up by one process, in rank order,
// and copied to the others: the result is the same, bit for bit, everywhere and every time.
func (r *ring) sum(v []float32) error {
	n := r.world
	if n == 1 {
		return nil
	}
	piece := func(i int) []float32 {
		i = ((i % n) + n) % n
		return v[i*len(v)/n : (i+1)*len(v)/n]
	}
	received := make([]float32, len(v)/n+1)
	for s := range n - 1 {
		target := piece(r.rank - s - 1)
		part := received[:len(target)]
		if err := r.exchange(piece(r.rank-s), part); err != nil {
			return err
		}
		for i, x := range part {
			target[i] += x
		}
	}
	for s := range n - 1 {
		if err := r.exchange(piece(r.rank+1-s), piece(r.rank-s)); err != nil {
			return err
		}
	}
	return nil
}

// share gives every process rank 0's v.
func (r *ring) share(v []float32) error {
	if r.world == 1 {
		return nil
	}
	if r.rank != 0 {
		clear(v)
	}
	return r.sum(v) // x + 0 is exact
}

// close ends the sender and the connections. All processes have finished their last exchange then.
func (r *ring) close() {
	if r.world == 1 {
		return
	}
	close(r.out)
	for range r.sent { // until the sender has ended
	}
	r.next.Close()
	r.prev.Close()
}
