package pmi

import "strconv"

// The messages of PMI-2 are those of its published wire protocol, version 2.0.

// handle2 answers a command of PMI-2. An error ends the connection.
func (c *client) handle2(asked command) error {
	s := c.s
	answer := func(fields ...string) []byte {
		if id := asked.field("thrid"); id != "" {
			fields = append([]string{"thrid", id}, fields...)
		}
		return message(asked.name+"-response", fields...)
	}
	refuse := func(text string) error { return c.write(answer("rc", "-1", "errmsg", text)) }
	found := func(value string, ok bool) error {
		if !ok {
			return c.write(answer("rc", "0", "found", "FALSE"))
		}
		return c.write(answer("rc", "0", "found", "TRUE", "value", value))
	}
	done := func(err error) error {
		if err != nil {
			return refuse(err.Error())
		}
		return c.write(answer("rc", "0"))
	}
	switch asked.name {
	case "fullinit":
		return c.fullInit(asked, answer, refuse)
	case "job-getid":
		return c.write(answer("rc", "0", "jobid", s.c.JobID))
	case "info-getjobattr":
		return found(s.jobAttribute(asked.field("key")))
	case "info-putnodeattr":
		return done(s.putAttribute(Pair{asked.field("key"), asked.field("value")}))
	case "info-getnodeattr":
		key := asked.field("key")
		if err := (Pair{Key: key}).check(); err != nil {
			return refuse(err.Error())
		}
		if asked.field("wait") != "TRUE" {
			return found(s.attribute(key))
		}
		return c.later(s.await(key), func() []byte {
			value, _ := s.attribute(key)
			return answer("rc", "0", "found", "TRUE", "value", value)
		})
	case "kvs-put":
		return done(s.put(Pair{asked.field("key"), asked.field("value")}))
	case "kvs-get":
		return found(s.get(asked.field("key")))
	case "kvs-fence":
		return c.fence(answer("rc", "0"))
	case "finalize":
		return c.write(answer("rc", "0"))
	case "abort":
		s.abort(c.rank, 1, asked.field("msg"))
		return nil
	case "spawn":
		return refuse(noSpawn)
	case "name-publish", "name-unpublish", "name-lookup":
		return refuse(noNames)
	case "job-connect", "job-disconnect":
		return refuse("connecting jobs is not supported")
	case "ring":
		return refuse("the ring exchange is not supported: use fences")
	}
	return malformedf("there is no command %.40q in PMI-2", asked.name)
}

// fullInit tells a task who it is. It says its own rank, from its environment.
func (c *client) fullInit(asked command, answer func(...string) []byte, refuse func(string) error) error {
	if said := asked.field("pmirank"); said != "" && said != strconv.FormatUint(uint64(c.rank), 10) {
		return refuse("this connection is that of rank " + strconv.FormatUint(uint64(c.rank), 10))
	}
	return c.write(answer(
		"rc", "0", "pmi-version", "2", "pmi-subversion", "0", "rank", strconv.FormatUint(uint64(c.rank), 10),
		"size", strconv.Itoa(c.s.c.Size), "appnum", "0", "debugged", "FALSE", "pmiverbose", "FALSE"))
}
