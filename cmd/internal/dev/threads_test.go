package dev

import (
	"bufio"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A process by this name listens, says where, and then ends its first thread only.
const headless = "muster-headless"

func init() {
	if filepath.Base(os.Args[0]) != headless {
		return
	}
	runtime.LockOSThread() // the first thread of the process: init runs on it
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	go func() {
		must(os.Stdout.WriteString(l.Addr().String() + "\n"))
		select {}
	}()
	_, _, _ = syscall.RawSyscall(syscall.SYS_EXIT, 0, 0, 0)
}

// Found by killing leaders under load: a controller that was killed while it wrote showed as a zombie, was started again, and could not
// listen because its former life still held the port.
func TestAProcessWhoseFirstThreadIsGoneStillRuns(t *testing.T) {
	name := filepath.Join(t.TempDir(), headless)
	if err := os.Link(must(os.Executable()), name); err != nil {
		if err = os.Symlink(must(os.Executable()), name); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(name)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	address, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var stat procStat
	for end := time.Now().Add(10 * time.Second); stat.state != 'Z'; time.Sleep(time.Millisecond) { // /proc has nothing to wait on
		if stat, err = statOf(cmd.Process.Pid); err != nil || time.Now().After(end) {
			t.Fatalf("its first thread does not end: %c, %v", stat.state, err)
		}
	}
	if l, err := net.Listen("tcp", strings.TrimSpace(address)); err == nil {
		l.Close()
		t.Fatal("the port is free: the test proves nothing")
	}
	if !running(cmd.Process.Pid, stat.start) {
		t.Error("it holds a port and does not run, it is said")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := awaitEnd(cmd.Process.Pid, stat.start, killWait); err != nil {
		t.Error(err)
	}
	if l, err := net.Listen("tcp", strings.TrimSpace(address)); err != nil {
		t.Errorf("it has ended, and its port is taken: %v", err)
	} else {
		l.Close()
	}
}
