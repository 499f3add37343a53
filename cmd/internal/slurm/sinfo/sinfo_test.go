package sinfo

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/cmd/internal/slurm/slurmtest"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
)

func TestListingsEqualTheRecordedOnes(t *testing.T) {
	drained := func(c *slurmtest.Cluster) {
		n := c.NodeList[3]
		n.Drain, n.Reason, n.ReasonBy, n.ReasonTime = true, "bad dimm", "root", timestamppb.New(slurmtest.Day("14:10:05"))
	}
	for _, test := range []struct {
		file   string
		words  []string
		change func(*slurmtest.Cluster)
	}{
		{"sinfo-default.txt", nil, nil},
		{"sinfo-drain.txt", nil, drained},
		{"sinfo-long.txt", []string{"-l"}, nil},
		{"sinfo-N.txt", []string{"-N"}, nil},
		{"sinfo-Nl.txt", []string{"-Nl"}, nil},
		{"sinfo-s.txt", []string{"-s"}, nil},
		{"sinfo-R.txt", []string{"-R"}, nil},
		{"sinfo-R-drain.txt", []string{"-R"}, drained},
		{"sinfo-o.txt", []string{"-o", "%n %G %C %t"}, nil},
	} {
		t.Run(test.file, func(t *testing.T) {
			c := slurmtest.Recorded(t)
			if test.change != nil {
				test.change(c)
			}
			want, err := os.ReadFile("testdata/" + test.file)
			if err != nil {
				t.Fatal(err)
			}
			got := c.Run(t, Run, append([]string{"sinfo"}, test.words...)...)
			if got.Stdout != string(want) || got.Code != 0 {
				t.Errorf("%+v\ngot:\n%s\nwant:\n%s", got.Code, got.Stdout+got.Stderr, want)
			}
		})
	}
}

func TestWhatExportersAndPortalsAskFor(t *testing.T) {
	for _, test := range []struct{ words, want string }{
		{"-h|-o| %C", " 4/60/0/64\n"},
		{"-h|-o| %D,%T", " 2,mixed\n 2,idle\n"},
		{"-h|-o|%R,%C", "main,4/60/0/64\n"},
		{"-o|%P", "PARTITION\nmain*\n"},
		{"-aho|%F/%C", "2/2/0/4/4/60/0/64\n"},
		{"-h|-p|nosuch", ""},
		{"-h|-t|idle|-o|%N", "n[3-4]\n"},
		{"-h|-n|n1,n3|-o|%N %t", "n1 mix\nn3 idle\n"},
		{"-h|-N|-O|NodeList:4,AllocMem:.3,Memory:6,CPUsState:10,StateLong", "" +
			"n1    08000  3/13/0/16 mixed               \nn2    08000  1/15/0/16 mixed               \n" +
			"n3    08000  0/16/0/16 idle                \nn4    08000  0/16/0/16 idle                \n"},
		{"-ahNO|nodehost:5,gresused:30", "n1   gpu:h100:2(IDX:0-1)           \nn2   gpu:h100:2(IDX:0-1)           \n" +
			"n3   gpu:h100:0(IDX:N/A)           \nn4   gpu:h100:0(IDX:N/A)           \n"},
	} {
		words := strings.Split(test.words, "|")
		got := slurmtest.Recorded(t).Run(t, Run, append([]string{"sinfo"}, words...)...)
		if got.Stdout != test.want || got.Code != 0 {
			t.Errorf("%s: %+v, want %q", test.words, got, test.want)
		}
	}
}

func TestStatesOfNodes(t *testing.T) {
	c := slurmtest.Recorded(t)
	c.NodeList[0].CpusAllocated = 16
	c.NodeList[1].Drain, c.NodeList[1].Reason = true, "fan"
	c.NodeList[2].State = apiv1.NodeState_NODE_STATE_DOWN
	c.NodeList[3].Owners = []uint64{6<<32 | 1}
	c.NodeList[3].CpusAllocated = 4
	for _, job := range c.JobList {
		if job.GetId() == 6 {
			job.Status.Completing = true
		}
	}
	got := c.Run(t, Run, "sinfo", "-h", "-o", "%n %t %T")
	want := "n3 down* down*\nn4 comp completing\nn2 drng draining\nn1 alloc allocated\n"
	if got.Stdout != want {
		t.Errorf("got:\n%swant:\n%s", got.Stdout, want)
	}
	for words, want := range map[string]string{"-r": "n[1-2,4]\n", "-d": "n3\n", "-t drng": "n2\n", "-t alloc,down": "n[1,3]\n", "-t drain&mix": "n2\n", "-t maint": ""} {
		got := c.Run(t, Run, append([]string{"sinfo", "-h", "-o", "%N"}, strings.Fields(words)...)...)
		if got.Stdout != want {
			t.Errorf("%s: %+v, want %q", words, got, want)
		}
	}
	if got := c.Run(t, Run, "sinfo", "-t", "bogus"); got.Code != 1 {
		t.Errorf("an unknown state: %+v", got)
	}
}

func TestSilentNodesAreMarked(t *testing.T) {
	c := slurmtest.Recorded(t)
	c.Silent = []*apiv1.SilentNode{{Node: c.NodeList[1].GetNumber(), SilentMs: 14_000}, {Node: c.NodeList[2].GetNumber(), SilentMs: 12_000}}
	c.NodeList[2].Drain, c.NodeList[2].Reason = true, "fan"
	for words, want := range map[string]string{
		"-h -N -o|%n %t %T": "n1 mix mixed\nn2 mix* mixed*\nn3 drain* drained*\nn4 idle idle\n",
		"-h -N -O|NodeHost:4,StateCompact:7,StateLong:9": "n1  mix    mixed    \nn2  mix*   mixed*   \nn3  drain* drained* \nn4  idle   idle     \n",
		"-h -r -o|%N":            "n[1,4]\n", // -r: those that respond
		"-h -d -o|%N":            "n[2-3]\n",
		"-h -t mix* -o|%N":       "n2\n",
		"-h -t no_respond -o|%N": "n[2-3]\n",
		"-h -t idle -o|%N":       "n4\n",
		"-h -o|%C":               "4/44/16/64\n", // what is free counts as idle; only the mark says that nothing is placed there
	} {
		options, format, _ := strings.Cut(words, "|")
		got := c.Run(t, Run, append(append([]string{"sinfo"}, strings.Fields(options)...), format)...)
		if got.Stdout != want || got.Code != 0 {
			t.Errorf("%s: %+v, want %q", words, got, want)
		}
	}
	got := c.Run(t, Run, "sinfo", "-N", "--json")
	var d struct {
		Sinfo []struct{ Node struct{ State []string } }
	}
	if err := json.Unmarshal([]byte(got.Stdout), &d); err != nil || len(d.Sinfo) != 4 {
		t.Fatal(err, got)
	}
	for i, want := range []string{"MIXED", "MIXED NOT_RESPONDING", "IDLE DRAIN NOT_RESPONDING", "IDLE"} {
		if state := strings.Join(d.Sinfo[i].Node.State, " "); state != want {
			t.Errorf("node %d is %s, want %s", i+1, state, want)
		}
	}
}

func TestWithoutAQuorumTheListingIsOldAndSaysSo(t *testing.T) {
	c := slurmtest.Recorded(t)
	fresh := c.Run(t, Run, "sinfo")
	c.NoQuorum = rpc.Refuse(connect.CodeUnavailable, rpc.ReasonNoQuorum, "", "1 of 3 controllers answers")
	if got := c.Run(t, Run, "sinfo"); got.Code != 0 || got.Stdout != fresh.Stdout || got.Stderr != "as of 1m0s ago: no quorum: 1 of 3 controllers answers\n" {
		t.Errorf("%+v", got)
	}
	c.Fail = c.NoQuorum
	if got := c.Run(t, Run, "sinfo"); got.Code != 1 || got.Stdout != "" || !strings.Contains(got.Stderr, "1 of 3 controllers answers") {
		t.Errorf("nobody has anything: %+v", got)
	}
}

func TestNodesOfDifferentSizesShareALineUnlessExact(t *testing.T) {
	c := slurmtest.Recorded(t)
	c.NodeList[3].Spec.MemoryMb = 16000
	if got := c.Run(t, Run, "sinfo", "-h", "-o", "%N %m"); got.Stdout != "n[1-4] 8000+\n" {
		t.Errorf("%+v", got)
	}
	if got := c.Run(t, Run, "sinfo", "-he", "-o", "%N %m"); got.Stdout != "n[1-3] 8000\nn4 16000\n" {
		t.Errorf("%+v", got)
	}
}

func TestEveryLetterHasARoleAndAValue(t *testing.T) {
	for letter := byte('A'); letter <= 'z'; letter++ {
		f, ok := letters[letter]
		if _, has := roles[letter]; has && !ok {
			t.Errorf("%%%c has a role and no field", letter)
		}
		if ok && (f.Value == nil || f.Header == "") {
			t.Errorf("%%%c has no value or no header", letter)
		}
	}
	for name, letter := range byName {
		if _, ok := letters[letter]; !ok {
			t.Errorf("-O %s shows %%%c, which does not exist", name, letter)
		}
	}
}

func TestJSONNamesItsDialect(t *testing.T) {
	got := slurmtest.Recorded(t).Run(t, Run, "sinfo", "-N", "--partition=main", "--responding", "--json")
	var d struct {
		Sinfo []struct {
			Node  struct{ State []string }
			Nodes struct{ Nodes []string }
		}
		Meta struct {
			Plugin struct {
				Parser string `json:"data_parser"`
			}
		}
	}
	if err := json.Unmarshal([]byte(got.Stdout), &d); err != nil || got.Code != 0 {
		t.Fatal(err, got.Stderr)
	}
	if len(d.Sinfo) != 4 || d.Sinfo[0].Node.State[0] != "MIXED" || d.Sinfo[0].Nodes.Nodes[0] != "n1" || d.Meta.Plugin.Parser != "data_parser/v0.0.42" {
		t.Errorf("%+v", d)
	}
}
