package rpc

import (
	"testing"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

func TestOneUserCannotKeepOthersOut(t *testing.T) {
	guard := new(Guard)
	const limit = 8
	alice, bob := &apiv1.Principal{Kind: user, Uid: 1000, Name: "alice"}, &apiv1.Principal{Kind: user, Uid: 1001, Name: "bob"}
	var leaves []func()
	enter := func(p *apiv1.Principal, operator bool) error {
		leave, err := guard.enter("/x", p, operator, limit)
		if err == nil {
			leaves = append(leaves, leave)
		}
		return err
	}
	for range limit / UserShare {
		if err := enter(alice, false); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 { // what is refused does not count
		if err := enter(alice, false); Reason(err) != ReasonBusy {
			t.Errorf("alice's next call: %v", err)
		}
	}
	if err := enter(bob, false); err != nil {
		t.Errorf("bob: %v", err)
	}
	for range limit - limit/UserShare - 1 {
		if err := enter(callers["root"], true); err != nil {
			t.Errorf("an operator: %v", err)
		}
	}
	if err := enter(bob, false); Reason(err) != ReasonBusy {
		t.Errorf("beyond the bound for all: %v", err)
	}
	for _, leave := range leaves {
		leave()
	}
	if n := guard.userCalls.Load(); n != 0 || len(guard.each) != 0 {
		t.Errorf("afterwards %d calls are counted, by user %v", n, guard.each)
	}
	if err := enter(alice, false); err != nil {
		t.Errorf("alice, later: %v", err)
	}
}
