package pmi

import (
	"fmt"
	"strings"
	"testing"
)

func TestRanksExchangeTheirAddressesWithBothProtocols(t *testing.T) {
	for _, shape := range [][]int{{1}, {4}, {2, 2}, {1, 3, 2}, {1, 1, 1, 1, 1, 1, 1, 1}} {
		for version := 1; version <= 2; version++ {
			t.Run(fmt.Sprintf("PMI-%d on nodes of %v tasks", version, shape), func(t *testing.T) {
				nodes := step(t, DefaultTimes, shape...)
				all := tasks(t, nodes)
				within(t, func() {
					if version == 1 {
						each(all, func(c *task) { exchange1(c, len(all)) })
					} else {
						each(all, func(c *task) { exchange2(c, len(all)) })
					}
				})
				for _, n := range nodes {
					n.alive(t)
				}
			})
		}
	}
}

func exchange1(c *task, size int) {
	c.expect(c.ask("cmd=init pmi_version=1 pmi_subversion=1"), "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0")
	c.expect(c.ask("cmd=get_maxes"), "cmd=maxes kvsname_max=17 keylen_max=64 vallen_max=896")
	c.expect(c.ask("cmd=get_appnum"), "cmd=appnum appnum=0")
	c.expect(c.ask("cmd=get_universe_size"), fmt.Sprintf("cmd=universe_size size=%d", size))
	c.expect(c.ask("cmd=get_my_kvsname"), "cmd=my_kvsname kvsname=kvs_17.0")
	for round := range 3 {
		c.expect(c.ask(fmt.Sprintf("cmd=put kvsname=kvs_17.0 key=r%d-%d value=card=%d", round, c.rank, c.rank)), "cmd=put_result rc=0 msg=success")
		c.expect(c.ask("cmd=barrier_in"), "cmd=barrier_out rc=0")
		for other := range size {
			c.expect(c.ask(fmt.Sprintf("cmd=get kvsname=kvs_17.0 key=r%d-%d", round, other)),
				fmt.Sprintf("cmd=get_result rc=0 msg=success value=card=%d", other))
		}
	}
	c.expect(c.ask("cmd=get kvsname=kvs_17.0 key=none"), "cmd=get_result rc=-1 msg=key_none_not_found value=unknown")
	c.expect(c.ask("cmd=get kvsname=other key=r0-0"), "cmd=get_result rc=-1 msg=key_r0-0_not_found value=unknown")
	listed := map[string]bool{}
	for i := range 3 * size {
		answer := c.ask(fmt.Sprintf("cmd=getbyidx kvsname=kvs_17.0 idx=%d", i))
		rest, _ := strings.CutPrefix(answer, fmt.Sprintf("cmd=getbyidx_results rc=0 nextidx=%d key=r", i+1))
		listed[rest] = true
	}
	for i := range 3 * size {
		if want := fmt.Sprintf("%d-%d val=card=%d", i/size, i%size, i%size); !listed[want] {
			c.t.Errorf("rank %d does not find %s by its index", c.rank, want)
		}
	}
	c.expect(c.ask(fmt.Sprintf("cmd=getbyidx kvsname=kvs_17.0 idx=%d", 3*size)), "cmd=getbyidx_results rc=-2 reason=no_more_keyvals")
	c.expect(c.ask("cmd=barrier_in"), "cmd=barrier_out rc=0")
	c.expect(c.ask("cmd=finalize"), "cmd=finalize_ack rc=0")
}

func exchange2(c *task, size int) {
	c.expect(c.ask("cmd=init pmi_version=2 pmi_subversion=0"), "cmd=response_to_init pmi_version=2 pmi_subversion=0 rc=0")
	c.expect(c.ask2(fmt.Sprintf("cmd=fullinit;pmijobid=17.0;pmirank=%d;threaded=FALSE;", c.rank)), fmt.Sprintf(
		"cmd=fullinit-response;rc=0;pmi-version=2;pmi-subversion=0;rank=%d;size=%d;appnum=0;debugged=FALSE;pmiverbose=FALSE;", c.rank, size))
	c.expect(c.ask2("cmd=job-getid;"), "cmd=job-getid-response;rc=0;jobid=17.0;")
	c.expect(c.ask2("cmd=info-getjobattr;key=universeSize;"), fmt.Sprintf("cmd=info-getjobattr-response;rc=0;found=TRUE;value=%d;", size))
	c.expect(c.ask2("cmd=info-getjobattr;key=nothing;"), "cmd=info-getjobattr-response;rc=0;found=FALSE;")
	for round := range 3 {
		c.expect(c.ask2(fmt.Sprintf("cmd=kvs-put;key=r%d-%d;value=a;;b=%d;", round, c.rank, c.rank)), "cmd=kvs-put-response;rc=0;")
		c.expect(c.ask2("cmd=kvs-fence;thrid=7;"), "cmd=kvs-fence-response;thrid=7;rc=0;")
		for other := range size {
			c.expect(c.ask2(fmt.Sprintf("cmd=kvs-get;jobid=17.0;srcid=%d;key=r%d-%d;", other, round, other)),
				fmt.Sprintf("cmd=kvs-get-response;rc=0;found=TRUE;value=a;;b=%d;", other))
		}
	}
	c.expect(c.ask2("cmd=kvs-get;jobid=;srcid=-1;key=none;"), "cmd=kvs-get-response;rc=0;found=FALSE;")
	c.expect(c.ask2("cmd=kvs-fence;"), "cmd=kvs-fence-response;rc=0;")
	c.expect(c.ask2("cmd=finalize;"), "cmd=finalize-response;rc=0;")
}

func TestWhereTheRanksAreIsToldInBothProtocols(t *testing.T) {
	nodes := step(t, DefaultTimes, 2, 2)
	c := nodes[0].task(t, 0)
	c.ask("cmd=init pmi_version=1 pmi_subversion=1")
	c.expect(c.ask("cmd=get kvsname=kvs_17.0 key=PMI_process_mapping"), "cmd=get_result rc=0 msg=success value=(vector,(0,2,2))")
	c = nodes[0].task(t, 1)
	c.ask("cmd=init pmi_version=2 pmi_subversion=0")
	c.expect(c.ask2("cmd=info-getjobattr;key=PMI_process_mapping;"), "cmd=info-getjobattr-response;rc=0;found=TRUE;value=(vector,(0,2,2));")
	for want, nodeOf := range map[string][]uint32{
		"":                                 nil,
		"(vector,(0,1,1))":                 {0},
		"(vector,(0,2,1),(0,2,1))":         {0, 1, 0, 1},
		"(vector,(0,1,3),(1,2,2))":         {0, 0, 0, 1, 1, 2, 2},
		"(vector,(2,1,1),(0,2,1),(5,1,2))": {2, 0, 1, 5, 5},
		"(vector,(0,3,1),(0,1,1),(2,1,1))": {0, 1, 2, 0, 2},
		"(vector,(0,4,1),(0,4,1),(0,4,1))": {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3},
		"(vector,(0,1000,2))":              blocks(1000, 2),
	} {
		if got := Mapping(nodeOf); got != want {
			t.Errorf("the mapping of %.20v is %q, want %q", nodeOf, got, want)
		}
	}
	var jumps []uint32
	for i := range uint32(1000) {
		jumps = append(jumps, i*7%1000)
	}
	if got := Mapping(jumps); got != "" {
		t.Errorf("a mapping that no library can read has %d bytes", len(got))
	}
}

func blocks(nodes, tasks int) (nodeOf []uint32) {
	for i := range nodes {
		for range tasks {
			nodeOf = append(nodeOf, uint32(i))
		}
	}
	return nodeOf
}

func TestAnAttributeOfANodeIsWaitedForAndStaysOnTheNode(t *testing.T) {
	nodes := step(t, DefaultTimes, 2, 1)
	all := tasks(t, nodes)
	for _, c := range all {
		c.ask("cmd=init pmi_version=2 pmi_subversion=0")
	}
	all[0].expect(all[0].ask2("cmd=info-getnodeattr;key=k;wait=FALSE;"), "cmd=info-getnodeattr-response;rc=0;found=FALSE;")
	all[0].tell("cmd=info-getnodeattr;key=k;wait=TRUE;thrid=5;")
	// Another thread of the same task is answered meanwhile.
	all[0].expect(all[0].ask2("cmd=job-getid;thrid=6;"), "cmd=job-getid-response;thrid=6;rc=0;jobid=17.0;")
	all[1].expect(all[1].ask2("cmd=info-putnodeattr;key=k;value=v 1;"), "cmd=info-putnodeattr-response;rc=0;")
	all[0].expect(all[0].message(), "cmd=info-getnodeattr-response;thrid=5;rc=0;found=TRUE;value=v 1;")
	all[0].expect(all[0].ask2("cmd=info-getnodeattr;key=k;wait=TRUE;"), "cmd=info-getnodeattr-response;rc=0;found=TRUE;value=v 1;")
	all[2].expect(all[2].ask2("cmd=info-getnodeattr;key=k;wait=FALSE;"), "cmd=info-getnodeattr-response;rc=0;found=FALSE;")
}

func TestWhatIsNotSupportedIsAnsweredWithAnError(t *testing.T) {
	nodes := step(t, DefaultTimes, 2)
	c := nodes[0].task(t, 0)
	c.ask("cmd=init pmi_version=1 pmi_subversion=1")
	for ask, want := range map[string]string{
		"mcmd=spawn\nnprocs=1\nexecname=/bin/true\nendcmd":                     "cmd=spawn_result rc=-1 status=-1 msg=starting_further",
		"cmd=publish_name service=s port=p":                                    "cmd=publish_result info=fail rc=-1 msg=publishing",
		"cmd=unpublish_name service=s":                                         "cmd=unpublish_result info=fail rc=-1 msg=publishing",
		"cmd=lookup_name service=s":                                            "cmd=lookup_result info=fail rc=-1 msg=publishing",
		"cmd=put kvsname=kvs_17.0 key=k":                                       "cmd=put_result rc=-1 msg=put_without_a_value",
		"cmd=put kvsname=x key=k value=v":                                      "cmd=put_result rc=-1 msg=there_is_no_key-value_space",
		"cmd=put kvsname=kvs_17.0 value=v":                                     "cmd=put_result rc=-1 msg=a_pair_has_no_key",
		"cmd=put kvsname=kvs_17.0 key=" + strings.Repeat("k", 65) + " value=v": "cmd=put_result rc=-1 msg=a_key_has_65_bytes",
		"cmd=put kvsname=kvs_17.0 key=k value=" + strings.Repeat("v", 1025):    "cmd=put_result rc=-1 msg=the_value_of_key_\"k\"_has_1025_bytes",
		"cmd=getbyidx kvsname=kvs_17.0 idx=x":                                  "cmd=getbyidx_results rc=-1 reason=",
	} {
		if got := c.ask(ask); !strings.HasPrefix(got, want) {
			t.Errorf("%q is answered with %q, want %q…", ask, got, want)
		}
	}
	c = nodes[0].task(t, 1)
	c.expect(c.ask("cmd=init pmi_version=3 pmi_subversion=0"), "cmd=response_to_init pmi_version=2 pmi_subversion=0 rc=-1")
	c.ask("cmd=init pmi_version=2 pmi_subversion=0")
	for _, name := range []string{"spawn", "name-publish", "name-unpublish", "name-lookup", "job-connect", "job-disconnect", "ring", "fullinit;pmirank=0"} {
		short, _, _ := strings.Cut(name, ";")
		if got, want := c.ask2("cmd="+name+";thrid=3;"), "cmd="+short+"-response;thrid=3;rc=-1;errmsg="; !strings.HasPrefix(got, want) {
			t.Errorf("%s is answered with %q, want %q…", name, got, want)
		}
	}
	nodes[0].alive(t)
}

func TestAProgramThatFollowsAnotherInTheSameTaskBeginsAnew(t *testing.T) {
	nodes := step(t, DefaultTimes, 1, 1)
	all := tasks(t, nodes)
	within(t, func() {
		each(all, func(c *task) {
			for run := range 3 {
				c.expect(c.ask("cmd=init pmi_version=1 pmi_subversion=1"), "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0")
				c.ask(fmt.Sprintf("cmd=put kvsname=kvs_17.0 key=k%d value=%d", c.rank, run))
				c.expect(c.ask("cmd=barrier_in"), "cmd=barrier_out rc=0")
				c.expect(c.ask(fmt.Sprintf("cmd=get kvsname=kvs_17.0 key=k%d", 1-c.rank)), fmt.Sprintf("cmd=get_result rc=0 msg=success value=%d", run))
				c.expect(c.ask("cmd=barrier_in"), "cmd=barrier_out rc=0")
				c.expect(c.ask("cmd=finalize"), "cmd=finalize_ack rc=0")
			}
		})
	})
}

func TestATaskThatAbortsEndsTheStepOnAllNodesWithItsCode(t *testing.T) {
	for from := range 3 {
		for version := 1; version <= 2; version++ {
			nodes := step(t, DefaultTimes, 1, 1, 1)
			all := tasks(t, nodes)
			for _, c := range all {
				c.ask(fmt.Sprintf("cmd=init pmi_version=%d pmi_subversion=0", version))
			}
			if version == 1 { // so that all are connected
				within(t, func() { each(all, func(c *task) { c.ask("cmd=barrier_in") }) })
			} else {
				within(t, func() { each(all, func(c *task) { c.ask2("cmd=kvs-fence;") }) })
			}
			if version == 1 {
				all[from].send("cmd=abort exitcode=7\n")
			} else {
				all[from].tell("cmd=abort;isworld=TRUE;msg=it went wrong;;;")
			}
			code, words := 7, "task %d aborted the step with exit code 7"
			if version == 2 {
				code, words = 1, "task %d aborted the step with exit code 1: it went wrong;"
			}
			for i, n := range nodes {
				want := Failure{Rank: from, Code: code, Sentence: fmt.Sprintf(words, from), Remote: i != from}
				if got := n.failed(t); got != want {
					t.Errorf("node %d: %+v, want %+v", i, got, want)
				}
			}
		}
	}
}
