package dev

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"

	"github.com/muster-hpc/muster/ops/pki"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/muster/api/v1/apiv1connect"
)

// TestMain makes this test binary a controller, an agent or a supervisor when it goes by such a name: programs that keep
// the contract of the command line, certificates, API and ready line, and nothing else.
func TestMain(m *testing.M) {
	switch filepath.Base(os.Args[0]) {
	case "muster-controller":
		fakeController(arguments())
	case "muster-agent":
		fakeAgent(arguments())
	case "muster-supervisor":
		select {}
	default:
		os.Exit(m.Run())
	}
}

func arguments() map[string]string {
	all := map[string]string{}
	for i := 1; i+1 < len(os.Args); i += 2 {
		all[strings.TrimPrefix(os.Args[i], "--")] = os.Args[i+1]
	}
	return all
}

func must[T any](value T, err error) T {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return value
}

// fakeCluster keeps the "replicated state" in files beside the controllers' directories.
type fakeCluster struct {
	apiv1connect.UnimplementedClusterServiceHandler
	root string
}

// findOneOf ends the program if none of the addresses answers.
func (f fakeCluster) findOneOf(addresses []string) {
	for _, address := range addresses {
		if conn, err := net.Dial("tcp", address); err == nil {
			conn.Close()
			return
		}
	}
	fmt.Println("nobody answers at", addresses)
	os.Exit(1)
}

func (f fakeCluster) path(kind, name string) string {
	return filepath.Join(f.root, "fake-"+kind+"-"+name)
}

func (f fakeCluster) members() (all []*apiv1.Member) {
	for _, path := range must(filepath.Glob(f.path("member", "*"))) {
		name := strings.TrimPrefix(filepath.Base(path), "fake-member-")
		address := string(must(os.ReadFile(path)))
		_, err := os.Stat(f.path("voter", name))
		all = append(all, &apiv1.Member{Id: "id-" + name, Name: name, ApiAddress: address, Voter: err == nil})
	}
	for _, m := range all {
		if conn, err := net.Dial("tcp", m.ApiAddress); err == nil && m.Voter { // the first that listens leads
			conn.Close()
			m.Leader = true
			break
		}
	}
	return all
}

func (f fakeCluster) GetCluster(context.Context, *apiv1.GetClusterRequest) (*apiv1.GetClusterResponse, error) {
	return &apiv1.GetClusterResponse{Members: f.members(), Term: 1}, nil
}

func (f fakeCluster) ChangeMember(_ context.Context, in *apiv1.ChangeMemberRequest) (*apiv1.ChangeMemberResponse, error) {
	if err := os.WriteFile(f.path("voter", strings.TrimPrefix(in.GetPromote(), "id-")), nil, 0o600); err != nil {
		return nil, connect.NewError(connect.CodeInternal, err.Error())
	}
	return &apiv1.ChangeMemberResponse{Members: f.members()}, nil
}

func (f fakeCluster) ListNodes(context.Context, *apiv1.ListNodesRequest) (*apiv1.ListNodesResponse, error) {
	answer := &apiv1.ListNodesResponse{}
	for _, path := range must(filepath.Glob(f.path("node", "*"))) {
		answer.Nodes = append(answer.Nodes, &apiv1.Node{
			State: apiv1.NodeState_NODE_STATE_UP, Spec: &apiv1.NodeSpec{Name: strings.TrimPrefix(filepath.Base(path), "fake-node-")},
		})
	}
	return answer, nil
}

func fakeController(flags map[string]string) {
	f := fakeCluster{root: filepath.Dir(flags["dir"])}
	identity := must(pki.Load(filepath.Join(flags["dir"], "tls")))
	_, known := os.Stat(f.path("member", flags["name"]))
	switch {
	case known == nil && flags["bootstrap"]+flags["join"] != "":
		fmt.Println("I am a member already")
		os.Exit(1)
	case flags["bootstrap"] != "":
		must(os.ReadFile(flags["bootstrap"]))
		must(0, os.WriteFile(f.path("voter", flags["name"]), nil, 0o600))
	case flags["join"] != "":
		f.findOneOf(strings.Split(flags["join"], ","))
	case known != nil:
		fmt.Println("I have neither state nor anybody to join")
		os.Exit(1)
	}
	listener := must(net.Listen("tcp", flags["listen"]))
	must(0, os.WriteFile(f.path("member", flags["name"]), []byte(flags["listen"]), 0o600))
	services, mux := connect.NewServer(), http.NewServeMux()
	apiv1connect.RegisterClusterServiceHandler(services, f)
	connecthttp.Mount(mux, services)
	server := &http.Server{Handler: mux, TLSConfig: identity.ServerTLS()}
	fmt.Println("ready", flags["name"])
	fmt.Println(server.ServeTLS(listener, "", ""))
	os.Exit(1)
}

// fakeAgent joins, and runs one task for each node, under a supervisor.
func fakeAgent(flags map[string]string) {
	nodes := []declaredNode{{Dir: flags["dir"], Name: flags["name"], BootID: flags["boot-id"]}}
	if flags["nodes"] != "" {
		nodes = nil
		must(0, json.Unmarshal(must(os.ReadFile(flags["nodes"])), &nodes))
	}
	for _, n := range nodes {
		must(pki.Load(filepath.Join(n.Dir, "tls")))
		must(net.Listen("unix", filepath.Join(n.Dir, fmt.Sprintf("s%d", os.Getpid())))) // as long as a name may be
		supervisor := exec.Command(flags["supervisor"], filepath.Join(n.Dir, "steps", "1.1.0"))
		task := exec.Command("/bin/sleep", "600")
		task.Env = []string{"SLURM_JOB_ID=1", "MUSTER_AGENT_SOCKET=" + filepath.Join(n.Dir, "agent.sock")}
		for _, c := range []*exec.Cmd{supervisor, task} {
			c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
			must(0, c.Start())
		}
		must(0, os.WriteFile(fakeCluster{root: filepath.Dir(n.Dir)}.path("node", n.Name), []byte(n.BootID), 0o600))
		fmt.Println("ready", n.Name, n.Listen)
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	<-stop
}

// fakePrograms returns a directory with the fakes.
func fakePrograms(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, name := range []string{"muster-controller", "muster-agent", "muster-supervisor"} {
		if err := os.Symlink(self, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// belonging returns the processes that have the directory in their command line or environment.
func belonging(t *testing.T, c *Cluster) (commands []string) {
	t.Helper()
	s, err := loadState(c.dir)
	if err != nil {
		t.Fatal(err)
	}
	all, err := look()
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range all {
		line := strings.Join(one.command, " ") + " " + one.socket
		if one.pid != os.Getpid() && (strings.Contains(line, c.dir) || s.Link != "" && strings.Contains(line, s.Link)) {
			commands = append(commands, line)
		}
	}
	slices.Sort(commands)
	return commands
}
