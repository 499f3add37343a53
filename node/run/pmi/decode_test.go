package pmi

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestSenselessWordsCostATaskItsConnectionOnly(t *testing.T) {
	for _, words := range []string{
		"hello\n", "\n", "cmd\n", "cmd=\n", "cmd=nothing\n", strings.Repeat("x", 1<<20), "cmd=put\x00\n\x00", "mcmd=spawn\n" + strings.Repeat("a=b\n", 5000),
		"mcmd=spawn\n" + lines(2000), "cmd=init pmi_version=x\n", "cmd=init pmi_version=-1\n", "cmd=barrier_in\ncmd=barrier_in\n", "mcmd=spawn\n",
		"cmd=init pmi_version=2 pmi_subversion=0\nabcdef", "cmd=init pmi_version=2 pmi_subversion=0\n999999cmd=x;",
		"cmd=init pmi_version=2 pmi_subversion=0\n     0", "cmd=init pmi_version=2 pmi_subversion=0\n    10cmd=a",
		"cmd=init pmi_version=2 pmi_subversion=0\n    -1cmd=x;", "cmd=init pmi_version=2 pmi_subversion=0\n     5hello",
		"cmd=init pmi_version=2 pmi_subversion=0\n    12cmd=nothing;",
		"cmd=init pmi_version=2 pmi_subversion=0\n" + strings.Repeat("    37cmd=info-getnodeattr;key=k;wait=TRUE;", 20),
	} {
		nodes := step(t, DefaultTimes, 2, 1)
		all := tasks(t, nodes)
		go func() {
			_, _ = all[0].file.WriteString(words) // it may be cut off
		}()
		within(t, func() {
			if strings.HasPrefix(words, "mcmd=spawn\n") && len(words) < 20 || strings.HasSuffix(words, "cmd=a") {
				_ = all[0].file.Close() // it ends in the middle
				return
			}
			if _, err := io.Copy(io.Discard, all[0].r); err != nil && !errors.Is(err, io.EOF) && !strings.Contains(err.Error(), "reset") {
				t.Errorf("%.40q: %v", words, err)
			}
		})
		for _, c := range all[1:] {
			c.expect(c.ask("cmd=get_appnum"), "cmd=appnum appnum=0")
		}
	}
}

func lines(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "k%d=v\n", i)
	}
	return b.String() + "endcmd\n"
}

func TestStoresAreBounded(t *testing.T) {
	nodes := step(t, DefaultTimes, 1)
	s := nodes[0].server
	value := strings.Repeat("v", MaxValue)
	for i := 0; ; i++ {
		err := s.put(Pair{fmt.Sprint(i), value})
		if errors.Is(err, ErrFull) {
			break
		}
		if err != nil || i > maxPart/MaxValue {
			t.Fatalf("after %d pairs: %v", i, err)
		}
	}
	for i := 0; ; i++ {
		err := s.putAttribute(Pair{fmt.Sprint(i), value})
		if errors.Is(err, ErrFull) {
			break
		}
		if err != nil || i > maxAttributes/MaxValue {
			t.Fatalf("after %d attributes: %v", i, err)
		}
	}
	small := newStore(200)
	for range 1000 { // the same key again takes no more room
		if err := small.put(Pair{"key", value[:100]}); err != nil {
			t.Fatal(err)
		}
	}
	if err := small.put(Pair{"other", ""}); !errors.Is(err, ErrFull) || len(small.order) != 1 {
		t.Errorf("%v, %d keys", err, len(small.order))
	}
}

func TestPairsSurviveTheirEncoding(t *testing.T) {
	pairs := []Pair{{"a", ""}, {"b", "1"}, {strings.Repeat("k", MaxKey), strings.Repeat("v", MaxValue)}, {"a", "again;=\n"}}
	got, err := decodePairs(encodePairs(pairs))
	if err != nil || !reflect.DeepEqual(got, pairs) {
		t.Errorf("%v, %v", got, err)
	}
}

func FuzzPairs(f *testing.F) {
	f.Add(encodePairs([]Pair{{"key", "value"}, {"k", ""}}))
	f.Add([]byte{1, 'a', 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		pairs, err := decodePairs(b)
		if err != nil {
			return
		}
		again, err := decodePairs(encodePairs(pairs))
		if err != nil || !reflect.DeepEqual(pairs, again) {
			t.Errorf("%v became %v, %v", pairs, again, err)
		}
	})
}

func FuzzLines(f *testing.F) {
	f.Add([]byte("cmd=put kvsname=k key=a value=b=c\ncmd=get\n"))
	f.Add([]byte("mcmd=spawn\nnprocs=1\nendcmd\ncmd=x\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bufio.NewReaderSize(bytes.NewReader(b), maxLine)
		for n := 0; ; n++ {
			c, err := readLine(r)
			if err != nil {
				break
			}
			if n > len(b) || len(c.fields) > maxFields {
				t.Fatalf("%d commands, %d fields", n, len(c.fields))
			}
		}
	})
}

func FuzzMessages(f *testing.F) {
	f.Add([]byte("    29cmd=kvs-put;key=k;value=a;;b;"))
	f.Add(message("kvs-get", "key", "a;b", "value", ";;"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		for {
			c, err := readMessage(r)
			if err != nil {
				break
			}
			for name, value := range c.fields { // what was read can be said again
				if name == "cmd" || strings.HasSuffix(value, ";") || value == "" || strings.HasPrefix(value, ";") {
					continue
				}
				again, err := readMessage(bytes.NewReader(message("x", name, value)))
				if err == nil && again.field(name) != value {
					t.Errorf("%q=%q became %q", name, value, again.field(name))
				}
			}
		}
	})
}

func FuzzFailures(f *testing.F) {
	f.Add(encodeFailure(Failure{Rank: 3, Code: 7, Sentence: "why"}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if got, err := decodeFailure(b); err == nil && !bytes.Equal(encodeFailure(got)[8:], b[8:]) {
			t.Errorf("%v from %q", got, b)
		}
	})
}

// FuzzTask lets a task say anything to a server with a store and others.
func FuzzTask(f *testing.F) {
	f.Add([]byte("cmd=init pmi_version=1 pmi_subversion=1\ncmd=put kvsname=kvs_17.0 key=a value=b\ncmd=barrier_in\ncmd=getbyidx kvsname=kvs_17.0 idx=-1\ncmd=finalize\n"))
	f.Add([]byte("cmd=init pmi_version=2 pmi_subversion=0\n    24cmd=kvs-put;key=k;value=v    14cmd=kvs-fence;"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s := NewServer(Config{JobID: "17.0", Size: 1, Ranks: []uint32{0}, Exchange: Alone{}, End: func(Failure) {}, Log: testLog(t)})
		server, file := ends(t)
		s.Serve(0, server)
		go func() {
			_, _ = file.Write(b) // it may be cut off
			_ = unix.Shutdown(int(file.Fd()), unix.SHUT_WR)
		}()
		_, _ = io.Copy(io.Discard, file) // until the server has seen the end
		_ = file.Close()
		s.Close()
	})
}
