package pmi

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// The lines of PMI-1 are those that MPICH's process managers speak: no other specification of them is known.

// noSpawn and noNames are why a request is refused; words of PMI-1 have no blanks.
const (
	noSpawn = "starting further processes is not supported: the tasks of a step are fixed when it starts"
	noNames = "publishing and looking up names is not supported: there is no name server"
)

// word makes one word of a sentence.
func word(text string) string {
	return strings.Map(func(r rune) rune {
		if r == ' ' || r == '\n' || r == 0 {
			return '_'
		}
		return r
	}, text)
}

// handle1 answers a command of PMI-1. An error ends the connection.
func (c *client) handle1(asked command) error {
	s := c.s
	reply := func(format string, args ...any) error { return c.write(fmt.Appendf(nil, format+"\n", args...)) }
	switch asked.name {
	case "initack":
		if err := reply("cmd=initack rc=0"); err != nil {
			return err
		}
		return c.write(fmt.Appendf(nil, "cmd=set size=%d\ncmd=set rank=%d\ncmd=set debug=0\n", s.c.Size, c.rank))
	case "init":
		return c.init(asked)
	case "get_maxes":
		return reply("cmd=maxes kvsname_max=%d keylen_max=%d vallen_max=%d", 2*len(s.kvsName())+1, MaxKey, maxValue1)
	case "get_appnum":
		return reply("cmd=appnum appnum=0")
	case "get_my_kvsname":
		return reply("cmd=my_kvsname kvsname=%s", s.kvsName())
	case "get_universe_size":
		return reply("cmd=universe_size size=%d", s.c.Universe)
	case "put":
		if err := c.putLine(asked); err != nil {
			return reply("cmd=put_result rc=-1 msg=%s", word(err.Error()))
		}
		return reply("cmd=put_result rc=0 msg=success")
	case "get":
		return c.getLine(asked)
	case "getbyidx":
		return c.getIndex(asked)
	case "barrier_in":
		return c.fence([]byte("cmd=barrier_out rc=0\n"))
	case "finalize":
		return reply("cmd=finalize_ack rc=0")
	case "abort":
		code, err := strconv.Atoi(asked.field("exitcode"))
		if err != nil || code == 0 {
			code = 1
		}
		s.abort(c.rank, exitCode(code), "")
		return nil
	case "spawn":
		return reply("cmd=spawn_result rc=-1 status=-1 msg=%s", word(noSpawn))
	case "publish_name":
		return reply("cmd=publish_result info=fail rc=-1 msg=%s", word(noNames))
	case "unpublish_name":
		return reply("cmd=unpublish_result info=fail rc=-1 msg=%s", word(noNames))
	case "lookup_name":
		return reply("cmd=lookup_result info=fail rc=-1 msg=%s", word(noNames))
	}
	return malformedf("there is no command %.40q in PMI-1", asked.name)
}

// exitCode makes an exit code of a number: its last eight bits, as exit does, but never success.
func exitCode(code int) int {
	if code &= 0xff; code == 0 {
		return 1
	}
	return code
}

// init agrees on the version: 2 if the task asks for it, otherwise 1.
func (c *client) init(asked command) error {
	version, err := strconv.Atoi(asked.field("pmi_version"))
	if err != nil || version < 1 {
		return malformedf("pmi_version=%.40q is no version", asked.field("pmi_version"))
	}
	if version > 2 {
		return c.write([]byte("cmd=response_to_init pmi_version=2 pmi_subversion=0 rc=-1\n"))
	}
	subversion := 2 - version // 1.1, 2.0
	c.version = version
	return c.write(fmt.Appendf(nil, "cmd=response_to_init pmi_version=%d pmi_subversion=%d rc=0\n", version, subversion))
}

func (s *Server) kvsName() string { return "kvs_" + s.c.JobID }

// ours checks the name of the space that a command means.
func (s *Server) ours(asked command) error {
	if name := asked.field("kvsname"); name != s.kvsName() {
		return fmt.Errorf("there is no key-value space %.64q", name)
	}
	return nil
}

func (c *client) putLine(asked command) error {
	if err := c.s.ours(asked); err != nil {
		return err
	}
	value, ok := asked.fields["value"]
	if !ok {
		return errors.New("put without a value")
	}
	return c.s.put(Pair{asked.field("key"), value})
}

func (c *client) getLine(asked command) error {
	err, key := c.s.ours(asked), asked.field("key")
	value, found := "", false
	if err == nil {
		if value, found = c.s.jobAttribute(key); !found {
			value, found = c.s.get(key)
		}
	}
	if !found {
		return c.write(fmt.Appendf(nil, "cmd=get_result rc=-1 msg=key_%.64s_not_found value=unknown\n", word(key)))
	}
	return c.write(fmt.Appendf(nil, "cmd=get_result rc=0 msg=success value=%s\n", word(value)))
}

func (c *client) getIndex(asked command) error {
	index, err := strconv.Atoi(asked.field("idx"))
	if err == nil {
		err = c.s.ours(asked)
	}
	if err != nil {
		return c.write(fmt.Appendf(nil, "cmd=getbyidx_results rc=-1 reason=%s\n", word(err.Error())))
	}
	p, ok := c.s.at(index)
	if !ok {
		return c.write([]byte("cmd=getbyidx_results rc=-2 reason=no_more_keyvals\n"))
	}
	return c.write(fmt.Appendf(nil, "cmd=getbyidx_results rc=0 nextidx=%d key=%s val=%s\n", index+1, word(p.Key), word(p.Value)))
}
