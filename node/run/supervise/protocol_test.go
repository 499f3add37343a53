package supervise_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/muster-hpc/muster/node/run"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

func dial(t *testing.T, s *step) net.Conn {
	t.Helper()
	c, err := run.Dial(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestUnknownVerbIsUnsupported(t *testing.T) {
	s := launch(t, normal, shell("true"))
	c := dial(t, s)
	b := protowire.AppendTag(nil, 1, protowire.VarintType)
	b = protowire.AppendVarint(b, 5)
	b = protowire.AppendTag(b, 1000, protowire.BytesType)
	b = protowire.AppendBytes(b, []byte("from the future"))
	if _, err := c.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...)); err != nil {
		t.Fatal(err)
	}
	e := new(supervisorv1.Event)
	if err := run.ReadFrame(c, e); err != nil {
		t.Fatal(err)
	}
	if e.GetId() != 5 || !strings.HasPrefix(e.GetError(), "UNSUPPORTED: ") || e.GetState().GetPhase() != supervisorv1.Phase_PHASE_PREPARED {
		t.Errorf("answer %v", e)
	}
}

func TestNonsenseClosesOnlyItsConnection(t *testing.T) {
	s := launch(t, normal, shell("true"))
	for name, b := range map[string][]byte{
		"too long":  {0x7f, 0xff, 0xff, 0xff},
		"malformed": {0, 0, 0, 2, 0xff, 0xff},
	} {
		c := dial(t, s)
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
		if n, err := c.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
			t.Errorf("%s: read %d bytes, error %v", name, n, err)
		}
	}
	s.start()
	wantExit(t, s.ended(), 0, "0:0")
}

func TestSlowWatcherHoldsUpNobody(t *testing.T) {
	var scripts []string
	for range 60 {
		scripts = append(scripts, "exec sleep 1000")
	}
	s := launch(t, normal, shell(scripts...))
	slow := dial(t, s) // It asks for everything and reads nothing.
	for id := range uint64(20) {
		if err := run.WriteFrame(slow, &supervisorv1.Request{Id: id + 1, Verb: &supervisorv1.Request_Watch{}}); err != nil {
			t.Fatal(err)
		}
	}
	s.start()
	for ordinal := range uint32(300) {
		if _, err := s.Signal(bound(t), ordinal+1, uint32(unix.SIGCONT), false); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Terminate(bound(t), time.Minute, ""); err != nil {
		t.Fatal(err)
	}
	s.ended()
	// When it reads at last, the newest state is there.
	for {
		e := new(supervisorv1.Event)
		if err := run.ReadFrame(slow, e); err != nil {
			t.Fatal(err)
		}
		if final(e.GetState()) {
			break
		}
	}
}

func TestNewAgentDisplacesTheOldestConnection(t *testing.T) {
	s := launch(t, normal, shell("true"))
	s.phase(supervisorv1.Phase_PHASE_PREPARED)
	for range 20 {
		h, err := run.Attach(bound(t), s.dir)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = h.Close() })
		s.Handle = h
	}
	s.start()
	wantExit(t, s.ended(), 0, "0:0")
}

func TestRequestsAtTheSameTimeAreAllAnswered(t *testing.T) {
	s := launch(t, normal, shell("exec sleep 1000"))
	s.start()
	errs := make(chan error)
	for range 200 {
		go func() {
			_, err := s.Extend(bound(t), 1)
			errs <- err
		}()
	}
	for range 200 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

func FuzzReadFrame(f *testing.F) {
	var b bytes.Buffer
	if err := run.WriteFrame(&b, &supervisorv1.Request{Id: 1, Verb: &supervisorv1.Request_Start{Start: &supervisorv1.Start{Env: []string{"A=1"}}}}); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Add([]byte{0, 0x10, 0, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		q := new(supervisorv1.Request)
		if err := run.ReadFrame(bytes.NewReader(b), q); err != nil {
			return
		}
		var again bytes.Buffer
		if err := run.WriteFrame(&again, q); err != nil {
			t.Fatal(err)
		}
		r := new(supervisorv1.Request)
		if err := run.ReadFrame(&again, r); err != nil || !proto.Equal(q, r) {
			t.Errorf("%v became %v, error %v", q, r, err)
		}
	})
}
