package value

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

func TestTimeLimits(t *testing.T) {
	for text, want := range map[string]uint32{
		"4:00": 240, "1:30": 120, "2-12": 216000, "10": 600, "1-00": 86400, "0-0:30:00": 1800, "1-24:60:60": 176460, "100:00:00": 360000,
		"7-00:00": 604800, "0": Unlimited, "UNLIMITED": Unlimited, "infinite": Unlimited, "0:10:00": 600, "960": 57600, "00:00:01": 60,
	} {
		if got, err := TimeLimit(text); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "1d", "90s", "1.5", "1:2:3:4", "1-", "-5", "+5", "=", "1 0", "1-2-3", ":"} {
		if got, err := TimeLimit(text); err == nil {
			t.Errorf("%q is accepted as %d", text, got)
		}
	}
}

func TestMemory(t *testing.T) {
	for text, want := range map[string]uint64{
		"64gb": 65536, "8G": 8192, "1k": 1, "1500K": 2, "1000M": 1000, "460000": 460000, "0": 0, "1T": 1 << 20, "1024000000K": 1000000, "1GB": 1024,
	} {
		if got, err := MemoryMB(text); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "2.5G", "10GiB", "-1", "G", "GB", "1GG", "1 G", "1e3", "9999999999999999999T"} {
		if got, err := MemoryMB(text); err == nil {
			t.Errorf("%q is accepted as %d", text, got)
		}
	}
}

func TestNodeCounts(t *testing.T) {
	for text, want := range map[string][2]uint32{"2": {2, 2}, "1-4": {1, 4}, "4k": {4096, 4096}, "0": {0, 0}} {
		if low, high, err := NodeCount(text); err != nil || low != want[0] || high != want[1] {
			t.Errorf("%s: %d-%d, %v", text, low, high, err)
		}
	}
	for _, text := range []string{"2-1", "", "-", "a", "1-", "-1", "+1"} {
		if low, high, err := NodeCount(text); err == nil {
			t.Errorf("%q is accepted as %d-%d", text, low, high)
		}
	}
}

func TestGresAndGPUs(t *testing.T) {
	for text, want := range map[string]struct {
		list string
		err  error
	}{
		"gpu:8": {"gpu::8", nil}, "gpu": {"gpu::1", nil}, "gpu:v100:4": {"gpu:v100:4", nil}, "gpu:A100:1": {"gpu:a100:1", nil},
		"gres:gpu:1": {"gpu::1", nil}, "gres/gpu:1": {"gpu::1", nil}, "gpu:a100=1": {"gpu:a100:1", nil}, "gpu:0": {"gpu::0", nil},
		"gpu:h100": {"gpu:h100:1", nil}, "gpu:2g.24gb:1": {"gpu:2g.24gb:1", nil}, "none": {"", nil}, "": {"", nil}, "NULL": {"", nil},
		"gpu:1,gpu:2": {"gpu::3", nil}, "gpu:a100:1,ib:2,gpu:h100:4": {"gpu:a100:1 ib::2 gpu:h100:4", nil}, "fpga:1k": {"fpga::1024", nil},
		"gpu:1,gpu:a100:1": {"", ErrGresMixed}, "gpu:a100:1,gpu": {"", ErrGresMixed}, "shard:11264": {"", ErrGres}, "mps:10": {"", ErrGres},
		"gpu:-1": {"", ErrGres}, "gpu:a:b:1": {"", ErrGres}, "gpu:a:b:c:1": {"", ErrGres}, "a b": {"", ErrGres}, "gpu,": {"", ErrGres}, ":1": {"", ErrGres},
	} {
		list, err := GresList(text)
		var words []string
		for _, g := range list {
			words = append(words, fmt.Sprintf("%s:%s:%d", g.Name, g.Type, g.Count))
		}
		if strings.Join(words, " ") != want.list || !errors.Is(err, want.err) {
			t.Errorf("%s: %v %v", text, words, err)
		}
	}
	for text, want := range map[string]uint32{"8": 8, "a100:4": 4, "l40s:1": 1, "0": 0, "v100-16:1": 1} {
		if _, n, err := GPUs(text); err != nil || n != want {
			t.Errorf("%s: %d, %v", text, n, err)
		}
	}
	for _, text := range []string{"", "a:b:1", ":1", "-1", "a:"} {
		if _, n, err := GPUs(text); err == nil {
			t.Errorf("%q is accepted as %d", text, n)
		}
	}
}

func TestMoments(t *testing.T) {
	now := time.Date(2026, 11, 30, 14, 10, 4, 0, time.UTC)
	for text, want := range map[string]string{
		"now": "2026-11-30T14:10:04", "now+1hour": "2026-11-30T15:10:04", "now+8hours": "2026-11-30T22:10:04", "now-2days": "2026-11-28T14:10:04",
		"now+60": "2026-11-30T14:11:04", "16:00": "2026-11-30T16:00:00", "4pm": "2026-11-30T16:00:00", "noon": "2026-12-01T12:00:00",
		"teatime": "2026-11-30T16:00:00", "tomorrow": "2026-12-01T00:00:00", "2010-01-20T12:34:00": "2010-01-20T12:34:00", "2026-12-01": "2026-12-01T00:00:00",
		"1970-01-01-00:00:01": "1970-01-01T00:00:01", "12/25/26": "2026-12-25T00:00:00", "1225": "2026-12-25T00:00:00", "uts1700000000": "2023-11-14T22:13:20",
		"2026-12-01T08:00": "2026-12-01T08:00:00",
	} {
		got, err := Moment(text, now, true)
		if err != nil || got.UTC().Format("2006-01-02T15:04:05") != want {
			t.Errorf("%s: %v, %v, want %s", text, got, err, want)
		}
	}
	for _, text := range []string{"", "now+", "now+1fortnight", "25:00", "13pm", "2026-13-01", "soon", "16:00:00:00"} {
		if got, err := Moment(text, now, true); err == nil {
			t.Errorf("%q is accepted as %v", text, got)
		}
	}
}

func TestExitCodesOfAccounting(t *testing.T) {
	if got := ExitCode(130, 0) + " " + AccountedExitCode(130, 0) + " " + AccountedExitCode(3, 0) + " " + AccountedExitCode(0, 9); got != "130:0 2:0 3:0 0:9" {
		t.Error(got)
	}
}

func TestEveryStateAndReasonHasAWord(t *testing.T) {
	for n := range apiv1.JobState_name {
		if s := apiv1.JobState(n); s != apiv1.JobState_JOB_STATE_UNSPECIFIED && StateOf(&apiv1.JobStatus{State: s}).Word == "" {
			t.Errorf("%v has no word", s)
		}
	}
	for n := range apiv1.WaitReason_name {
		if word := Reason(&apiv1.JobStatus{Reason: apiv1.WaitReason(n)}); strings.Contains(word, "WAIT_REASON") {
			t.Errorf("%v has no word", apiv1.WaitReason(n))
		}
	}
	if f, err := ParseStates("pd,RUNNING,cg,S"); err != nil || !f.States[apiv1.JobState_JOB_STATE_PENDING] || !f.Completing {
		t.Errorf("%v, %v", f, err)
	}
	if _, err := ParseStates("bogus"); err == nil {
		t.Error("an unknown state is accepted")
	}
}

func FuzzValuesNeverPanicAndAreWithinBounds(f *testing.F) {
	for _, seed := range []string{"1-2:3", "64gb", "gpu:a100:2,gpu:1", "now+1h", "4k-5", "SIGTERM", "12/25/26-16:00", "é", "-", ":"} {
		f.Add(seed)
	}
	now := time.Date(2026, 11, 30, 14, 10, 4, 0, time.UTC)
	f.Fuzz(func(t *testing.T, text string) {
		if s, err := TimeLimit(text); err == nil && (s == 0 || s != Unlimited && s%60 != 0) {
			t.Errorf("time %q: %d", text, s)
		}
		if low, high, err := NodeCount(text); err == nil && low > high {
			t.Errorf("nodes %q: %d-%d", text, low, high)
		}
		if mb, err := MemoryMB(text); err == nil {
			if back, err := MemoryMB(Size(mb)); err != nil || back != mb {
				t.Errorf("memory %q: %d is written %s and read %d", text, mb, Size(mb), back)
			}
		}
		if n, err := Signal(text); err == nil && (n < 1 || n > 64) {
			t.Errorf("signal %q: %d", text, n)
		}
		_, _ = GresList(text)
		_, _ = WarnSignal(text, true)
		_, _ = CPUBind(text)
		_, _ = GPUBind(text)
		_, _, _ = Distribution(text)
		_, _ = LimitNames(text)
		_, _, _ = GPUs(text)
		_, _ = Moment(text, now, true)
		_, _ = ParseStates(text)
	})
}

func TestSignalsAheadOfTheTimeLimit(t *testing.T) {
	for text, want := range map[string]string{
		"USR1": "10 60 false", "B:USR1@90": "10 90 true", "B:SIGUSR1@90": "10 90 true", "15@180": "15 180 false", "BR:USR1@90": "10 90 true",
		"B:USR1": "10 60 true", "usr2@0": "12 0 false", "R:TERM@65535": "15 65535 false", "RB:1@1": "1 1 true",
	} {
		w, err := WarnSignal(text, true)
		if got := fmt.Sprintf("%d %d %v", w.GetSignal(), w.GetLeadS(), w.GetBatchOnly()); err != nil || got != want {
			t.Errorf("%s: %s, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "NOSUCH@60", "USR1@65536", "USR1@", "X:USR1", ":USR1", "B:", "USR1@1m", "0", "65", "@60"} {
		if w, err := WarnSignal(text, true); err == nil {
			t.Errorf("%q is accepted as %v", text, w)
		}
	}
	if w, err := WarnSignal("B:USR1", false); err == nil {
		t.Errorf("a step has no batch shell, but %v", w)
	}
}

func TestBindings(t *testing.T) {
	for text, want := range map[string]string{
		"none": "none", "no": "none", "q": "", "quiet": "", "v": "verbose", "verbose": "verbose", "quiet,none": "none", "v,cores": "verbose,cores",
		"Core": "cores", "thread": "threads", "sockets": "sockets", "rank": "rank", "map_cpu:0,2,0x4": "map_cpu:0,2,0x4", "verbose,mask_cpu:0xf0,f": "verbose,mask_cpu:0xf0,f",
		"map_cpu:0*4,1": "map_cpu:0*4,1",
	} {
		if got, err := CPUBind(text); err != nil || got != want {
			t.Errorf("--cpu-bind=%s: %q, %v", text, got, err)
		}
	}
	var known *BindError
	for _, text := range []string{"ldoms", "rank_ldom", "map_ldom:0", "verbose,mask_ldom:1"} {
		if got, err := CPUBind(text); !errors.As(err, &known) {
			t.Errorf("--cpu-bind=%s: %q, %v", text, got, err)
		}
	}
	for _, text := range []string{"bogus", "map_cpu", "map_cpu:", "map_cpu:a", "map_cpu:1,", "mask_cpu:xyz", "mask_cpu:0x", "cores:1", "quiet,", "map_cpu:1*0"} {
		if got, err := CPUBind(text); !errors.Is(err, ErrInvalid) {
			t.Errorf("--cpu-bind=%s: %q, %v", text, got, err)
		}
	}
	for text, want := range map[string]string{
		"none": "none", "closest": "closest", "verbose,single:2": "verbose,single:2", "per_task:1": "per_task:1", "map:0,1": "map_gpu:0,1",
		"map_gpu:3,2": "map_gpu:3,2", "mask:0x3": "mask_gpu:0x3", "q,mask_gpu:3,c": "mask_gpu:3,c",
	} {
		if got, err := GPUBind(text); err != nil || got != want {
			t.Errorf("--gpu-bind=%s: %q, %v", text, got, err)
		}
	}
	for _, text := range []string{"single", "single:0", "per_task:x", "cores", "map:"} {
		if got, err := GPUBind(text); !errors.Is(err, ErrInvalid) {
			t.Errorf("--gpu-bind=%s: %q, %v", text, got, err)
		}
	}
}

func TestDistributions(t *testing.T) {
	for text, want := range map[string]string{
		"block": "block", "Cyclic": "cyclic", "*": "block", "*:*": "block", "block:cyclic": "block:cyclic", "cyclic:block:fcyclic": "cyclic:block:fcyclic",
		"plane=4": "plane=4", "arbitrary": "arbitrary", "block,NoPack": "block", "cyclic:*": "cyclic", "*:cyclic": "block:cyclic",
	} {
		got, arbitrary, err := Distribution(text)
		if err != nil || got != want || arbitrary != (text == "arbitrary") {
			t.Errorf("%s: %q %v %v", text, got, arbitrary, err)
		}
	}
	for _, text := range []string{"", "plane", "plane=0", "plane=x", "diagonal", "block:", "block:x", "a:b:c:d", "block,maybe"} {
		if got, _, err := Distribution(text); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: %q %v", text, got, err)
		}
	}
	var known *BindError
	if _, _, err := Distribution("block,Pack"); !errors.As(err, &known) {
		t.Errorf("Pack: %v", err)
	}
}

func TestNamesOfLimits(t *testing.T) {
	for text, want := range map[string]int{"": 10, "ALL": 10, "none": 0, "NOFILE": 1, "nofile,RLIMIT_STACK,NOFILE": 2} {
		if names, err := LimitNames(text); err != nil || len(names) != want {
			t.Errorf("%q: %v, %v", text, names, err)
		}
	}
	if names, err := LimitNames("NOFILE,BOGUS"); err == nil {
		t.Errorf("an unknown limit gives %v", names)
	}
}
