package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-hpc/muster/cmd/internal/config"
	"github.com/muster-hpc/muster/cmd/internal/dev"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

func (a *app) devCommand() *cobra.Command {
	var dir string
	c := &cobra.Command{
		Use: "dev", Short: "Run a real cluster on this machine", Args: noArguments,
		Long: `Run a real cluster on this machine: real controllers, real agents, real processes on loopback addresses; only the hardware of the nodes
is declared rather than detected. For trying things out, for tests, demonstrations and bug reports. No root is needed.`,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.PersistentFlags().StringVar(&dir, "dir", os.Getenv("MUSTER_DEV_DIR"), "the cluster's `directory` (default: $MUSTER_DEV_DIR)")
	c.AddCommand(a.devUp(&dir), a.devStatus(&dir), a.devKill(&dir),
		a.devSignal(&dir, "pause", "Stop a process with SIGSTOP", "paused", (*dev.Cluster).Pause),
		a.devSignal(&dir, "resume", "Let a paused process go on (SIGCONT)", "resumed", (*dev.Cluster).Resume),
		a.devStart(&dir), a.devStop(&dir), a.devRejoin(&dir), a.devEnv(&dir), a.devLogs(&dir), a.devDown(&dir), a.demoCommand())
	return c
}

// settingFlags are the cluster's bounds as flags of dev up, in seconds.
type settingFlags struct {
	lease, fenceWindow, lostAfter, prepareTimeout, killGrace time.Duration
}

func (s *settingFlags) flags(c *cobra.Command) {
	f := c.Flags()
	f.DurationVar(&s.lease, "lease", 0, "lease of nodes (default: 10s)")
	f.DurationVar(&s.fenceWindow, "fence-window", 0, "time between a lost lease and the end of work that stops itself (default: 5s)")
	f.DurationVar(&s.lostAfter, "lost-after", 0, "silence after which a node is lost (default: 60s)")
	f.DurationVar(&s.prepareTimeout, "prepare-timeout", 0, "time in which a node must be prepared (default: 60s)")
	f.DurationVar(&s.killGrace, "kill-grace", 0, "time between TERM and KILL, whole seconds (default: 30s)")
}

func (s *settingFlags) settings() (*apiv1.Settings, error) {
	if s.killGrace%time.Second != 0 {
		return nil, usagef("--kill-grace %v: write whole seconds", s.killGrace)
	}
	for name, d := range map[string]time.Duration{"lease": s.lease, "fence-window": s.fenceWindow, "lost-after": s.lostAfter,
		"prepare-timeout": s.prepareTimeout, "kill-grace": s.killGrace} {
		if d < 0 || d > 24*time.Hour || d%time.Millisecond != 0 {
			return nil, usagef("--%s %v: write whole milliseconds, at most a day", name, d)
		}
	}
	ms := func(d time.Duration) uint32 { return uint32(d.Milliseconds()) }
	return &apiv1.Settings{
		LeaseMs: ms(s.lease), FenceWindowMs: ms(s.fenceWindow), LostAfterMs: ms(s.lostAfter), PrepareTimeoutMs: ms(s.prepareTimeout),
		KillGraceS: uint32(s.killGrace / time.Second),
	}, nil
}

func (a *app) devUp(dir *string) *cobra.Command {
	o := dev.Options{}
	var s settingFlags
	var file string
	c := &cobra.Command{
		Use: "up", Short: "Start a cluster; return when it is ready", Args: noArguments,
		Long: `Start a cluster and return when all controllers vote and all nodes have joined. Controllers are c1, c2, …, nodes n1, n2, …
In a directory that has a cluster, what does not run of it is started; its size and hardware stay as they are.`,
		Example: "  muster dev up --dir /tmp/m --nodes 8 --gpus 8\n  eval \"$(muster dev env --dir /tmp/m)\"\n  srun -N8 hostname",
		RunE: func(c *cobra.Command, _ []string) (err error) {
			o.Dir = *dir
			if o.Settings, err = s.settings(); err != nil {
				return err
			}
			if file != "" {
				if o.Configuration, err = config.Load(file); err != nil {
					return err
				}
			}
			o.Progress = func(line string) { fmt.Fprintln(a.errOut, "muster dev:", line) }
			cluster, resumed, err := dev.Up(c.Context(), o)
			if err != nil {
				if cluster != nil {
					return fmt.Errorf("%w\nWhat was started still runs: end it with `muster dev down --dir %s`", err, cluster.Dir())
				}
				return err
			}
			if resumed {
				fmt.Fprintf(a.errOut, "muster dev: %s had a cluster already; flags for its size and settings were not used\n", cluster.Dir())
			}
			return a.devReady(c.Context(), cluster)
		},
	}
	f := c.Flags()
	f.IntVar(&o.Controllers, "controllers", 3, "`number` of controllers")
	f.IntVar(&o.Nodes, "nodes", 4, "`number` of nodes")
	f.IntVar(&o.AgentsPerProcess, "agents-per-process", 1, "nodes that share one agent process: for large clusters; they die together")
	f.IntVar(&o.CPUs, "cpus", 64, "CPUs that each node declares")
	f.StringVar(&o.Memory, "memory", "512G", "memory that each node declares")
	f.IntVar(&o.GPUs, "gpus", 8, "GPUs that each node declares")
	f.StringVar(&o.GPUType, "gpu-type", "h100", "type of the GPUs")
	f.StringVar(&file, "config", "", "configuration the cluster begins with, JSON `file` (default: a partition main with all nodes)")
	f.StringVar(&o.Bin, "bin", "", "`directory` of the programs (default: that of this one)")
	f.StringVar(&o.Timing, "timing", "development", "`profile` of the controllers' timeouts: development or production")
	s.flags(c)
	return c
}

// devReady says that the cluster is ready and what to do next.
func (a *app) devReady(ctx context.Context, cluster *dev.Cluster) error {
	status, err := cluster.Status(ctx)
	if err != nil {
		return err
	}
	if a.json {
		return a.printValue(status)
	}
	fmt.Fprintf(a.out, "Cluster %s is ready in %s: %s\n\n", status.Cluster, status.Dir, count(status))
	fmt.Fprintf(a.out, "    eval \"$(muster dev env --dir %s)\"     # then sbatch, srun, squeue and muster talk to it\n", quote(status.Dir))
	fmt.Fprintf(a.out, "    muster dev kill leader                 # see what that does to your jobs\n")
	fmt.Fprintf(a.out, "    muster dev down --dir %s\n", quote(status.Dir))
	return nil
}

func count(status *dev.Status) string {
	controllers, nodes := 0, 0
	for _, p := range status.Processes {
		if p.Role == dev.RoleController {
			controllers++
		}
		nodes += len(p.Nodes)
	}
	return fmt.Sprintf("%d controllers (leader %s), %d nodes", controllers, status.Leader, nodes)
}

func (a *app) devStatus(dir *string) *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Show the processes and the leader", Args: noArguments,
		Long: `Show the processes and the leader. With --json: {"leader","term","cluster","dir","processes":[{"name","role","pid","alive",
"address","paused","raft","answers","voter","index","nodes","sockets","boot_id","log"}]}.`,
		RunE: func(c *cobra.Command, _ []string) error {
			cluster, err := dev.Open(*dir)
			if err != nil {
				return err
			}
			status, err := cluster.Status(c.Context())
			if err != nil {
				return err
			}
			if a.json {
				return a.printValue(status)
			}
			a.printStatus(status)
			return nil
		},
	}
}

func (a *app) printStatus(status *dev.Status) {
	leader := status.Leader
	if leader == "" {
		leader = "none"
	}
	fmt.Fprintf(a.out, "%s in %s: leader %s, term %d\n\n", status.Cluster, status.Dir, leader, status.Term)
	t := table{header: []string{"NAME", "ROLE", "PID", "STATE", "ADDRESS", "NODES"}, right: map[int]bool{2: true}}
	for _, p := range status.Processes {
		state, pid := "dead", ""
		switch {
		case p.Paused:
			state = "paused"
		case p.Alive && p.Role == dev.RoleController && !p.Answers:
			state = "silent"
		case p.Alive && p.Name == status.Leader:
			state = "leads"
		case p.Alive:
			state = "runs"
		}
		if p.Alive {
			pid = strconv.Itoa(p.Pid)
		}
		nodes := ""
		if len(p.Nodes) > 1 {
			nodes = p.Nodes[0] + " … " + p.Nodes[len(p.Nodes)-1]
		}
		t.add(p.Name, p.Role, pid, state, p.Address, nodes)
	}
	t.write(a.out, a.colour)
}

func (a *app) devKill(dir *string) *cobra.Command {
	var agentOnly bool
	c := &cobra.Command{
		Use: "kill NAME|leader", Short: "Kill a process with SIGKILL; a node with everything on it", Args: exactlyOne("a name, or leader"),
		Long: `Kill a process with SIGKILL. A node dies with its agent, its supervisors and all tasks, as in a power loss: its next start is a new boot.
With --agent-only just its agent dies, and its tasks go on. With --json: {"name","role","pid","others","at"}, like pause, resume, start.`,
		RunE: func(c *cobra.Command, args []string) error {
			cluster, err := dev.Open(*dir)
			if err != nil {
				return err
			}
			action, err := cluster.Kill(c.Context(), args[0], agentOnly)
			if err != nil {
				return err
			}
			return a.report(action, "killed")
		},
	}
	c.Flags().BoolVar(&agentOnly, "agent-only", false, "only the node's agent")
	return c
}

// report says what was done to a process.
func (a *app) report(action dev.Action, verb string) error {
	if a.json {
		return a.printValue(action)
	}
	text := fmt.Sprintf("%s %s", verb, action.Name)
	if action.Pid != 0 {
		text += fmt.Sprintf(" (process %d)", action.Pid)
	}
	if action.Others > 0 {
		text += fmt.Sprintf(" and %d processes of its jobs", action.Others)
	}
	_, err := fmt.Fprintln(a.out, text)
	return err
}

// signalFunc is dev.Cluster.Pause or Resume.
type signalFunc func(c *dev.Cluster, ctx context.Context, name string, whole bool) (dev.Action, error)

func (a *app) devSignal(dir *string, use, short, verb string, f signalFunc) *cobra.Command {
	var whole bool
	c := &cobra.Command{
		Use: use + " NAME|leader", Short: short, Args: exactlyOne("a name, or leader"),
		RunE: func(c *cobra.Command, args []string) error {
			cluster, err := dev.Open(*dir)
			if err != nil {
				return err
			}
			action, err := f(cluster, c.Context(), args[0], whole)
			if err != nil {
				return err
			}
			return a.report(action, verb)
		},
	}
	c.Flags().BoolVar(&whole, "tree", false, "a node's supervisors and tasks, too")
	return c
}

func (a *app) devStart(dir *string) *cobra.Command {
	var bin string
	c := &cobra.Command{
		Use: "start NAME", Short: "Start a process that does not run; return when it is ready", Args: exactlyOne("a name"),
		RunE: func(c *cobra.Command, args []string) error {
			cluster, err := dev.Open(*dir)
			if err != nil {
				return err
			}
			if bin != "" {
				if bin, err = filepath.Abs(bin); err != nil {
					return err
				}
			}
			action, err := cluster.Start(c.Context(), args[0], bin)
			if err != nil {
				return err
			}
			return a.report(action, "started")
		},
	}
	c.Flags().StringVar(&bin, "bin", "", "`directory` of another build, for this process from now on (an upgrade, or the way back)")
	return c
}

func (a *app) devStop(dir *string) *cobra.Command {
	return &cobra.Command{
		Use: "stop NAME|leader", Short: "End a process in order (SIGTERM): leadership is handed over, work goes on", Args: exactlyOne("a name, or leader"),
		RunE: func(c *cobra.Command, args []string) error {
			cluster, err := dev.Open(*dir)
			if err != nil {
				return err
			}
			action, err := cluster.Stop(c.Context(), args[0])
			if err != nil {
				return err
			}
			return a.report(action, "stopped")
		},
	}
}

func (a *app) devRejoin(dir *string) *cobra.Command {
	return &cobra.Command{
		Use: "rejoin NAME", Short: "Rebuild a dead controller: set its state aside, come back as a new member", Args: exactlyOne("a name"),
		RunE: func(c *cobra.Command, args []string) error {
			cluster, err := dev.Open(*dir)
			if err != nil {
				return err
			}
			action, err := cluster.Rejoin(c.Context(), args[0])
			if err != nil {
				return err
			}
			return a.report(action, "rebuilt")
		},
	}
}

func (a *app) devEnv(dir *string) *cobra.Command {
	var node string
	c := &cobra.Command{
		Use: "env", Short: "Print shell exports with which commands find the cluster", Args: noArguments,
		Long: `Print shell exports: PATH with the commands, MUSTER_AGENT_SOCKET (of the first node, or of --node), MUSTER_CONTROLLERS and MUSTER_DEV_DIR.
Use it as eval "$(muster dev env --dir DIR)".`,
		RunE: func(*cobra.Command, []string) error {
			cluster, err := dev.Open(*dir)
			if err != nil {
				return err
			}
			variables, err := cluster.Env(node)
			if err != nil {
				return err
			}
			if a.json {
				object := map[string]string{}
				for _, v := range variables {
					object[v.Name] = v.Value
				}
				return a.printValue(object)
			}
			for _, v := range variables {
				value := quote(v.Value)
				if v.Name == "PATH" {
					value += `:"$PATH"`
				}
				fmt.Fprintf(a.out, "export %s=%s\n", v.Name, value)
			}
			return nil
		},
	}
	c.Flags().StringVar(&node, "node", "", "the `node` on which commands shall seem to run")
	return c
}

// quote makes a word for the shell.
func quote(text string) string {
	plain := strings.Trim(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-:,+=@%") == ""
	if plain && text != "" {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}

func (a *app) devLogs(dir *string) *cobra.Command {
	return &cobra.Command{
		Use: "logs NAME", Short: "Print the log of a process", Args: exactlyOne("a name"),
		RunE: func(c *cobra.Command, args []string) error {
			cluster, err := dev.Open(*dir)
			if err != nil {
				return err
			}
			path, err := cluster.Log(args[0])
			if err != nil {
				return err
			}
			file, err := os.Open(path)
			if err != nil {
				return fmt.Errorf("open the log of %s: %w", args[0], err)
			}
			defer file.Close()
			_, err = io.Copy(a.out, file)
			return err
		},
	}
}

func (a *app) devDown(dir *string) *cobra.Command {
	var remove bool
	c := &cobra.Command{
		Use: "down", Short: "End the cluster and all its jobs; leave no process behind", Args: noArguments,
		Long: "End the cluster and all its jobs; leave no process behind. Data and logs stay, and `muster dev up` goes on with them.",
		RunE: func(c *cobra.Command, _ []string) error {
			cluster, err := dev.Open(*dir)
			if errors.Is(err, dev.ErrNoCluster) { // down already
				fmt.Fprintln(a.errOut, "muster dev:", err)
				return nil
			} else if err != nil {
				return err
			}
			if err := cluster.Down(); err != nil {
				return err
			}
			if remove {
				if err := os.RemoveAll(cluster.Dir()); err != nil {
					return fmt.Errorf("the processes ended, but the directory stays: %w", err)
				}
			}
			return nil
		},
	}
	c.Flags().BoolVar(&remove, "remove", false, "also remove the directory with its data and logs")
	return c
}
