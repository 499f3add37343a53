package dev

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// start runs a shell command and waits until it has written its first line, which is returned.
func start(t *testing.T, environment []string, name string, script string) (pid int, start uint64, line string) {
	t.Helper()
	command := exec.Command("/bin/bash", "-c", script)
	if name != "" { // under another name, as the kernel shows it
		command.Args = append([]string{name}, "-c", script)
	}
	command.Env = append([]string{"PATH=" + os.Getenv("PATH")}, environment...)
	command.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	out, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = command.Process.Kill(); _ = command.Wait() })
	buffer := make([]byte, 64)
	n, err := out.Read(buffer)
	if err != nil {
		t.Fatal(err)
	}
	s, err := statOf(command.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	return command.Process.Pid, s.start, strings.TrimSpace(string(buffer[:n]))
}

func TestAPidThatWasGivenToSomebodyElseIsNeverSignalled(t *testing.T) {
	pid, begun, _ := start(t, nil, "", "echo up; exec sleep 60")
	if running(pid, begun+1) || !running(pid, begun) {
		t.Fatal("the start time does not tell processes apart")
	}
	if hit, err := send(pid, begun+1, syscall.SIGKILL); hit || err != nil {
		t.Errorf("signalled %v, %v", hit, err)
	}
	if !running(pid, begun) {
		t.Fatal("the stranger was killed")
	}
	if hit, err := send(pid, begun, syscall.SIGKILL); !hit || err != nil {
		t.Errorf("signalled %v, %v", hit, err)
	}
	if err := awaitEnd(pid, begun, 5*time.Second); err != nil {
		t.Error(err)
	}
	if hit, err := send(pid, begun, syscall.SIGKILL); hit || err != nil {
		t.Errorf("a dead process: signalled %v, %v", hit, err)
	}
}

func TestKillingANodeTakesItsTasksAndSupervisorsAndNothingElse(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "n1", "agent.sock")
	job := []string{"SLURM_JOB_ID=1", "MUSTER_AGENT_SOCKET=" + socket}
	type proc struct {
		name  string
		pid   int
		start uint64
		dies  bool
	}
	var procs []proc
	add := func(name string, dies bool, environment []string, as, script string) string {
		pid, begun, line := start(t, environment, as, script)
		procs = append(procs, proc{name, pid, begun, dies})
		return line
	}
	add("task", true, job, "", "echo up; sleep 60; :")
	add("task that ignores TERM", true, job, "", "trap '' TERM; echo up; sleep 60; :")
	add("supervisor", true, nil, "/opt/bin/muster-supervisor", "echo up; : "+dir+"/n1/steps/1.1.0; sleep 60; :")
	add("shell of a user of this node", false, job[1:], "", "echo up; exec sleep 60")
	add("task of another node", false, []string{job[0], "MUSTER_AGENT_SOCKET=" + dir + "/n10/agent.sock"}, "", "echo up; exec sleep 60")
	add("supervisor of another node", false, nil, "/opt/bin/muster-supervisor", "echo up; : "+dir+"/n10/steps/1.1.0; sleep 60; :")
	// A grandchild that shed its environment and session is a descendant still.
	line := add("task with a daemon", true, job, "", "env -i setsid sleep 61 & echo $!; wait")
	daemon, err := strconv.Atoi(line)
	if err != nil {
		t.Fatal(err)
	}
	begun, err := statOf(daemon)
	if err != nil {
		t.Fatal(err)
	}
	procs = append(procs, proc{"daemon", daemon, begun.start, true})

	places := []place{{dirs: []string{filepath.Join(dir, "n1")}, sockets: []string{socket}}}
	// The supervisor's directory is an argument of its own in reality; bash -c has it inside the script.
	all, err := look()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		if len(s.command) == 3 && strings.HasSuffix(s.command[0], "muster-supervisor") && strings.Contains(s.command[2], dir+"/n1/") {
			s.command = []string{s.command[0], dir + "/n1/steps/1.1.0"}
		}
	}
	found := map[int]bool{}
	for _, s := range tree(all, places) {
		found[s.pid] = true
	}
	for _, p := range procs {
		if found[p.pid] != p.dies {
			t.Errorf("%s (%d): belongs to the node: %v, expected %v", p.name, p.pid, found[p.pid], p.dies)
		}
	}
	if _, err := killTree(places); err != nil {
		t.Fatal(err)
	}
	for _, p := range procs {
		if p.name == "supervisor" {
			continue // see above
		}
		if alive := running(p.pid, p.start); alive == p.dies {
			t.Errorf("%s: alive is %v after the kill", p.name, alive)
		}
	}
}

func TestALongDirectoryGetsAShortNameThatNobodyElseHas(t *testing.T) {
	short := "/tmp/x"
	if link, err := shortLink(short); link != "" || err != nil {
		t.Errorf("%s: %q, %v", short, link, err)
	}
	dir := filepath.Join(t.TempDir(), strings.Repeat("long/", 20)+"end")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	link, err := shortLink(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(link) })
	if again, err := shortLink(dir); again != link || err != nil {
		t.Errorf("the second time: %q, %v", again, err)
	}
	listener, err := net.Listen("unix", link+"/"+strings.Repeat("x", 46))
	if err != nil {
		t.Fatalf("a socket in it: %v", err)
	}
	listener.Close()
	if err := removeLink(link, dir); err != nil {
		t.Error(err)
	}
	if err := os.Symlink("/nowhere", link); err != nil {
		t.Fatal(err)
	}
	if _, err := shortLink(dir); err == nil || !strings.Contains(err.Error(), "--dir") {
		t.Errorf("a name that is taken: %v", err)
	}
	if err := removeLink(link, dir); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(link); err != nil {
		t.Errorf("somebody else's link was removed: %v", err)
	}
}

func TestFreeAddressesAreDifferentAndOutsideTheKernelsRange(t *testing.T) {
	addresses, err := freeAddresses(50)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, a := range addresses {
		if seen[a] {
			t.Errorf("%s twice", a)
		}
		seen[a] = true
		address, err := net.ResolveTCPAddr("tcp", a)
		if err != nil || address.Port >= 32768 || !address.IP.IsLoopback() {
			t.Errorf("%s, %v", a, err)
		}
	}
	if _, err := freeAddresses(1 << 20); err == nil {
		t.Error("a million ports were found")
	}
}

func TestAProcessThatEndsBeforeItIsReadyIsShownWithItsLastWords(t *testing.T) {
	log := filepath.Join(t.TempDir(), "x.log")
	p := &process{Name: "c1"}
	var offset int64
	var err error
	if err := os.WriteFile(log, []byte("ready from the life before\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p.Pid, p.Start, offset, err = launch("/bin/sh", []string{"-c", "echo the disk is on fire; exit 3"}, log, "/")
	if err != nil {
		t.Fatal(err)
	}
	if err := awaitReady(context.Background(), p, log, offset); err == nil || !strings.Contains(err.Error(), "the disk is on fire") || strings.Contains(err.Error(), "life before") {
		t.Errorf("%v", err)
	}
	p.Pid, p.Start, offset, err = launch("/bin/sh", []string{"-c", "echo hello; echo ready 1; exec sleep 60"}, log, "/")
	if err != nil {
		t.Fatal(err)
	}
	if err := awaitReady(context.Background(), p, log, offset); err != nil {
		t.Error(err)
	}
	if _, err := send(p.Pid, p.Start, syscall.SIGKILL); err != nil {
		t.Error(err)
	}
	if err := awaitEnd(p.Pid, p.Start, 5*time.Second); err != nil {
		t.Error(err)
	}
}

func TestImpossibleOptionsAreRefusedByName(t *testing.T) {
	bin := t.TempDir()
	for _, program := range []string{"muster-controller", "muster-agent", "muster-supervisor"} {
		if err := os.WriteFile(filepath.Join(bin, program), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for want, o := range map[string]Options{
		"--dir":         {},
		"--nodes":       {Dir: "/x", Bin: bin, Nodes: 100000},
		"--controllers": {Dir: "/x", Bin: bin, Controllers: -1},
		"--gpus":        {Dir: "/x", Bin: bin, GPUs: 1000},
		"--memory":      {Dir: "/x", Bin: bin, Memory: "lots"},
		"--timing":      {Dir: "/x", Bin: bin, Timing: "lucky"},
		"make build":    {Dir: "/x", Bin: t.TempDir()},
	} {
		if err := o.complete(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	if _, err := Open(t.TempDir()); !errors.Is(err, ErrNoCluster) || !strings.Contains(err.Error(), "muster dev up") {
		t.Errorf("an empty directory: %v", err)
	}
}
