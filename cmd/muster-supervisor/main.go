// Muster-supervisor owns the processes of one step on one node. The agent starts it; everything it needs is in the
// step's directory, and what it has to say goes to its standard error, the directory's log.
//
//	muster-supervisor DIR
//
// It leaves with 0 when the step's result is on disk and it was dismissed or nobody came, 2 if it was called wrongly,
// and 1 if it could not do its work.
package main

import (
	"fmt"
	"log/slog"
	"os"
	"runtime"

	"github.com/muster-hpc/muster/node/run/supervise"
)

// init keeps main on the process's first thread, the only one that certainly lives as long as the process.
func init() { runtime.LockOSThread() }

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: muster-supervisor DIR\nIt is started by muster-agent, which writes DIR/plan first.")
		os.Exit(2)
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if err := supervise.Run(os.Args[1], supervise.Config{Log: log, Times: supervise.DefaultTimes}); err != nil {
		log.Error("the supervisor gives up", "dir", os.Args[1], "error", err)
		os.Exit(1)
	}
}
