package fsm

import (
	"io"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"
)

// Views are read, marshalled and written as snapshots by many goroutines while the machine goes on. The race detector judges.
func TestViewsAreReadWhileTheMachineGoesOn(t *testing.T) {
	w := newWalk(t, 11)
	views := make(chan *View)
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			for v := range views {
				for j := range v.Jobs(0) {
					if _, err := proto.Marshal(j); err != nil {
						t.Error(err)
					}
				}
				if err := CheckInvariants(v); err != nil {
					t.Error(err)
				}
				if err := v.WriteSnapshot(io.Discard); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 200 {
		cmd, _ := w.next()
		w.entry(cmd)
		v := w.m.Publish()
		for range 4 { // the same view to several readers
			select {
			case views <- v:
			default:
			}
		}
	}
	close(views)
	readers.Wait()
}
