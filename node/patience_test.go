package node

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"
)

func TestControllersThatAreAllSlowAreGivenLonger(t *testing.T) {
	f := newFake(t)
	l := f.begin(filepath.Join(t.TempDir(), "agent"), nil)
	f.eventually("joined", func() bool { return len(f.syncs) > 0 })
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // nothing is sent
	talk := &talk{a: l.a, answers: make(chan answer, 16), slack: syncSlack}
	for round, want := range []time.Duration{2 * syncSlack, 4 * syncSlack, syncSlackMost} {
		for i, address := range []string{"c1", "c2"} {
			if before := talk.slack; i == 0 && round > 0 && before != min(syncSlack<<round, syncSlackMost) {
				t.Errorf("one slow controller changed the slack to %v", before)
			}
			x := &exchange{address: address, cancel: func() {}}
			talk.newest = x
			if err := talk.failed(ctx, x, errors.New("too slow")); err != nil && !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
		}
		if talk.slack != want {
			t.Errorf("after %d rounds the slack is %v, not %v", round+1, talk.slack, want)
		}
	}
	for len(talk.out) > 0 {
		talk.remove((<-talk.answers).x)
	}
}
