package launch

import (
	"io"
	"testing"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

func TestNoAgentCountsAsSilentWhileAnotherSaysSomething(t *testing.T) {
	reader := func(name string) *nodeReader {
		return &nodeReader{share: &apiv1.NodeShare{Node: name}, cancel: func() {}}
	}
	busy, quiet := reader("n1"), reader("n2")
	a := &attachment{nodes: map[string]*nodeReader{"n1": busy, "n2": quiet}, step: &apiv1.Step{},
		printer: newPrinter(Options{Stdout: io.Discard, Stderr: io.Discard}, 2)}
	const looks = int(drainAfterEnd / drainLook)
	for range 3 * looks {
		busy.contact.came()
		busy.contact.waits()
		a.settle()
	}
	if quiet.done {
		t.Fatal("an agent was given up while output of another came")
	}
	for i := range looks {
		if quiet.done {
			t.Fatalf("given up after %d looks at which nothing came, not %d", i, looks)
		}
		a.settle()
	}
	if !quiet.done || !busy.done && busy.silent == 0 {
		t.Error("a silent agent is waited for without end")
	}
}
