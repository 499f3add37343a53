package salloc

import (
	"os"
	"os/signal"
	"syscall"
	"testing"
)

// TestMain lets commands die of a hangup, also where the tests themselves were started with it ignored (nohup): what is caught here is
// at its default in a child, what is ignored stays ignored.
func TestMain(m *testing.M) {
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	os.Exit(m.Run())
}
