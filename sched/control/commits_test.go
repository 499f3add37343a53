package control

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-hpc/muster/fsm/replica"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// fullLog is a log whose disk can be full.
type fullLog struct {
	*fakeLog
	full atomic.Bool
}

func (l *fullLog) Propose(ctx context.Context, cmd *logv1.Command) (*logv1.Result, error) {
	if l.full.Load() {
		return nil, fmt.Errorf("%w: make space in /data", replica.ErrDiskFull)
	}
	return l.fakeLog.Propose(ctx, cmd)
}

// A leader that stays the leader although its disk is full, because nobody can take over, says so at once and then once a minute, however
// many agents are not acknowledged.
func TestAFullLeaderSaysOnceAMinuteThatNothingIsAcknowledged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, log: newFakeLog(), agents: map[string]*agent{}}
		r.ctx, r.cancel = context.WithCancel(t.Context())
		r.must(&logv1.Command{Op: &logv1.Command_Bootstrap{Bootstrap: &logv1.Bootstrap{Incarnation: 1, ClusterId: "x",
			Configuration: &apiv1.Configuration{ClusterName: "test", Partitions: []*apiv1.Partition{{Name: "main", Nodes: "ALL", IsDefault: true}}}}}})
		var text bytes.Buffer // read only while nobody writes
		l := &fullLog{fakeLog: r.log}
		r.control = New(Config{Replica: l, Log: slog.New(slog.NewTextHandler(&text, nil))})
		r.lead()
		defer r.end()
		r.cluster(3)
		said := func() int {
			synctest.Wait()
			return strings.Count(text.String(), "liveness can't be acknowledged")
		}
		time.Sleep(10 * time.Second)
		if n := said(); n != 0 {
			t.Fatalf("said %d times while the disk has room", n)
		}
		l.full.Store(true)
		time.Sleep(15 * time.Second)
		if n := said(); n != 1 {
			t.Errorf("said %d times in the first seconds", n)
		}
		time.Sleep(5 * time.Minute)
		if n := said(); n < 5 || n > 6 {
			t.Errorf("said %d times in five minutes", n)
		}
		if log := text.String(); !strings.Contains(log, "the disk of this member is full: make space in /data") || !strings.Contains(log, "times=") {
			t.Errorf("it does not say why, and how often:\n%s", log)
		}
		l.full.Store(false)
		before := said()
		time.Sleep(5 * time.Minute)
		if n := said(); n != before {
			t.Errorf("it goes on to say so after space was made: %d times", n-before)
		}
	})
}
