package main

import (
	"github.com/muster-hpc/muster/rpc/server"
	"github.com/muster-hpc/muster/sched/control"
)

// newControl makes the leader's hands.
func newControl(c *controller, peers *server.Peers) *control.Control {
	return control.New(control.Config{Replica: c.member, Peers: peers, Block: c.block, Log: c.log})
}

// block makes the server refuse writes while the states of the controllers differ without a majority.
func (c *controller) block(sentence string) {
	c.server.Block(sentence)
	if sentence == "" {
		c.log.Info("the states of the controllers agree again")
		return
	}
	c.log.Error("no decisions are made", "reason", sentence)
}
