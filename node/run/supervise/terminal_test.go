package supervise_test

import (
	"os"
	"strings"
	"testing"

	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
)

func withTerminal(scripts ...string) *supervisorv1.StepPlan {
	plan := shell(scripts...)
	plan.Tasks[0].StdinPath = ""
	plan.Tasks[0].Terminal = &supervisorv1.Terminal{Rows: 33, Columns: 101}
	return plan
}

func TestTaskWithATerminalIsLeaderOfItsSession(t *testing.T) {
	s := launch(t, normal, withTerminal("test -t 0 && test -t 1 && test -t 2 && echo three; stty size; tty >/dev/null && echo named; echo of one >/dev/tty; echo error >&2; ls -l /proc/$$/fd | grep -c pts"))
	s.start()
	wantExit(t, s.ended(), 0, "0:0")
	if got := strings.ReplaceAll(s.file("out.0"), "\r", ""); !strings.HasPrefix(got, "three\n33 101\nnamed\nof one\nerror\n") {
		t.Errorf("output %q", got)
	}
	if got := s.file("err.0"); got != "" {
		t.Errorf("stderr %q", got)
	}
}

func TestTerminalIsResized(t *testing.T) {
	s := launch(t, normal, withTerminal("trap 'stty size; exit 4' WINCH; echo ready; while :; do sleep 0.01; done"))
	s.start()
	s.ready()
	if err := s.Resize(bound(t), 50, 160); err != nil {
		t.Fatal(err)
	}
	wantExit(t, s.ended(), 0, "4:0")
	if got := s.file("out.0"); !strings.Contains(got, "50 160\r\n") {
		t.Errorf("output %q", got)
	}
	// A step without one is not concerned.
	s = launch(t, normal, shell("exec sleep 1000"))
	if err := s.Resize(bound(t), 50, 160); err != nil {
		t.Error(err)
	}
}

func TestInputIsTypedAndItsEndIsTheTerminals(t *testing.T) {
	for what, text := range map[string]string{"whole lines": "one\ntwo\n", "a line that is not complete": "one\ntwo"} {
		s := launch(t, normal, withTerminal("stty -echo; echo ready; cat; echo end $?"))
		s.start()
		s.ready()
		if n, err := s.Input(bound(t), 0, []byte(text), true); err != nil || n != uint64(len(text)) {
			t.Fatalf("%s: %d bytes were taken, error %v", what, n, err)
		}
		wantExit(t, s.ended(), 0, "0:0")
		got := strings.ReplaceAll(s.file("out.0"), "\r\n", "\n")
		if got = strings.ReplaceAll(got, "twoend", "two\nend"); got != "ready\none\ntwo\nend 0\n" {
			t.Errorf("%s: output %q", what, got)
		}
	}
}

func TestAllThatATerminalShowedIsInItsFile(t *testing.T) {
	s := launch(t, normal, withTerminal("stty -opost; seq 200000; printf last"))
	s.start()
	wantExit(t, s.ended(), 0, "0:0")
	got := s.file("out.0")
	if lines := strings.Count(got, "\n"); lines != 200000 || !strings.HasSuffix(got, "\n200000\nlast") {
		t.Errorf("%d lines; the end is %q", lines, got[max(0, len(got)-40):])
	}
}

func TestEveryControlCharacterWorksInATerminal(t *testing.T) {
	s := launch(t, normal, withTerminal("trap 'echo interrupted; exit 5' INT; echo ready; while :; do sleep 0.01; done"))
	s.start()
	s.ready()
	if _, err := s.Input(bound(t), 0, []byte{3}, false); err != nil {
		t.Fatal(err)
	}
	wantExit(t, s.ended(), 0, "5:0")
}

func TestTerminalAfterAPrologAndOfTheUser(t *testing.T) {
	plan := withTerminal("test -t 0 && echo $A; stat -c %u $(tty)")
	plan.Tasks[0].Prologs = []string{script(t, "echo export A=from the prolog")}
	plan.Tasks[0].Epilogs = []string{script(t, "echo after")}
	if isRoot() {
		plan.Uid, plan.Gid = 65533, 65532
	}
	s := launch(t, normal, plan)
	s.start()
	wantExit(t, s.ended(), 0, "0:0")
	want := "from the prolog\n65533\nafter\n"
	if got := strings.ReplaceAll(s.file("out.0"), "\r", ""); got != want && isRoot() || !strings.HasSuffix(got, "after\n") {
		t.Errorf("output %q, want %q", got, want)
	}
}

func isRoot() bool { return os.Getuid() == 0 }
