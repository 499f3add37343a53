// Muster-supervisor owns the processes of one step on one node. The agent starts it; everything it needs is in the
// step's directory, and what it has to say goes to its standard error, the directory's log.
//
//	muster-supervisor DIR
//
// An agent also starts some ahead, which wait for their directory at a socket; they have the room for it as their argument,
// and end when the agent does.
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
	config, dir := supervise.Config{Log: log, Times: supervise.DefaultTimes}, os.Args[1]
	if supervise.IsIdle(dir) {
		handed, err := supervise.Await(os.Args)
		if err != nil {
			log.Error("the supervisor that was started ahead gives up", "error", err)
			os.Exit(1)
		}
		if handed == nil {
			return
		}
		config.Handed, dir = handed, handed.Dir
	}
	if err := supervise.Run(dir, config); err != nil {
		log.Error("the supervisor gives up", "dir", dir, "error", err)
		os.Exit(1)
	}
}
