package client

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"testing"
	"time"
)

func TestHandshakesWaitForRoomAndGiveItBack(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	silent := make(chan net.Conn, mostHandshakes+1) // accepted and never answered
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				close(silent)
				return
			}
			silent <- conn
		}
	}()
	d := newSecureDialer(new(net.Dialer), &tls.Config{InsecureSkipVerify: true})
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, mostHandshakes)
	for range mostHandshakes {
		go func() {
			_, err := d.dial(ctx, "tcp", listener.Addr().String())
			failed <- err
		}()
	}
	for range mostHandshakes {
		defer (<-silent).Close()
	}
	late, stop := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer stop()
	if _, err := d.dial(late, "tcp", listener.Addr().String()); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("one more: %v", err)
	}
	select {
	case <-silent:
		t.Error("one connection more than there is room for was made")
	default:
	}
	cancel()
	for range mostHandshakes {
		if err := <-failed; err == nil {
			t.Error("a silent server was taken for a good one")
		}
	}
	if n := len(d.slots); n != 0 {
		t.Errorf("%d places are still taken", n)
	}
}
