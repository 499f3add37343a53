package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/muster-hpc/muster/cmd/internal/config"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
	"github.com/muster-hpc/muster/rpc/client"
)

func (a *app) clusterCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "cluster", Short: "Show and change the control plane", Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return a.clusterStatus(c.Context()) },
	}
	status := &cobra.Command{
		Use: "status", Short: "Show controllers, leader, level and job counts", Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return a.clusterStatus(c.Context()) },
	}
	c.AddCommand(status, a.membersCommand(), a.transferCommand(), a.configureCommand(), a.configurationCommand(), a.levelCommand())
	return c
}

func (a *app) clusterStatus(ctx context.Context) error {
	c, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	answer, err := c.Cluster().GetCluster(ctx, &apiv1.GetClusterRequest{})
	if rpc.Reason(err) == rpc.ReasonNoQuorum {
		old, again := c.Cluster().GetCluster(ctx, &apiv1.GetClusterRequest{
			Read: &apiv1.ReadOptions{Consistency: apiv1.ReadConsistency_READ_CONSISTENCY_STALE}})
		if again == nil {
			fmt.Fprintln(a.errOut, "muster: "+rpc.AsOf(old.Info, err))
			answer, err = old, nil
		}
	}
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(answer)
	}
	f := &fields{}
	f.add("Cluster", "%s", answer.Configuration.GetClusterName())
	f.add("Term", "%d", answer.Term)
	f.add("Level", "%d", answer.Level)
	f.add("Revision", "%s", formatRevision(answer.Info.GetRevision()))
	f.add("Digest", "%s", answer.Digest)
	var counts []string
	for state, n := range answer.JobsByState {
		if n > 0 {
			counts = append(counts, fmt.Sprintf("%s %d", strings.TrimPrefix(state, "JOB_STATE_"), n))
		}
	}
	slices.Sort(counts)
	f.add("Jobs", "%s", strings.Join(counts, ", "))
	if s := answer.Scheduler; s != nil {
		f.add("Scheduler", "%d passes, the last took %d µs over %d jobs; %d placed by this leader", s.Passes, s.LastPassUs, s.LastConsidered, s.Placed)
	}
	for _, alarm := range answer.Scheduler.GetAlarms() {
		f.add("Alarm", "%s", alarm)
	}
	f.write(a.out)
	fmt.Fprintln(a.out)
	a.printMembers(answer.Members)
	return nil
}

func (a *app) printMembers(members []*apiv1.Member) {
	t := table{
		header: []string{"CONTROLLER", "ROLE", "API", "RAFT", "APPLIED", "LEVEL", "VERSION", "ID", "TROUBLE"},
		right:  map[int]bool{4: true, 5: true},
	}
	for _, m := range members {
		role := "learner"
		switch {
		case m.Leader:
			role = "leader"
		case m.Voter:
			role = "voter"
		}
		t.add(m.Name, role, m.ApiAddress, m.RaftAddress, strconv.FormatUint(m.AppliedIndex, 10), strconv.Itoa(int(m.SupportedLevel)),
			m.Version, m.Id, strings.Join(append(m.Troubles, quarantine(m)...), "; "))
	}
	t.write(a.out, a.colour)
}

func quarantine(m *apiv1.Member) []string {
	if m.Quarantine == "" {
		return nil
	}
	return []string{m.Quarantine}
}

func (a *app) membersCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "members", Short: "List, add, promote and remove controllers, or move leadership", Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.changeMember(c.Context(), func([]*apiv1.Member) (*apiv1.ChangeMemberRequest, error) { return nil, nil })
		},
	}
	var id, raft, api string
	add := &cobra.Command{
		Use: "add NAME --id ID --raft HOST:PORT --api HOST:PORT", Short: "Let a controller take part as a learner", Args: exactlyOne("a name"),
		Long: "Let a controller take part as a learner, which votes when it is promoted. A controller started with --join adds itself.",
		RunE: func(c *cobra.Command, args []string) error {
			if id == "" || raft == "" || api == "" {
				return usagef("members add needs --id (the file \"id\" in the controller's directory), --raft and --api")
			}
			return a.changeMember(c.Context(), func([]*apiv1.Member) (*apiv1.ChangeMemberRequest, error) {
				return &apiv1.ChangeMemberRequest{Change: &apiv1.ChangeMemberRequest_AddLearner{
					AddLearner: &apiv1.Member{Id: id, Name: args[0], RaftAddress: raft, ApiAddress: api},
				}}, nil
			})
		},
	}
	add.Flags().StringVar(&id, "id", "", "its random `id`")
	add.Flags().StringVar(&raft, "raft", "", "`address` of its Raft port")
	add.Flags().StringVar(&api, "api", "", "`address` of its API port")
	one := func(use, short string, change func(id string) *apiv1.ChangeMemberRequest) *cobra.Command {
		return &cobra.Command{
			Use: use + " NAME|ID", Short: short, Args: exactlyOne("a controller's name or id"),
			RunE: func(c *cobra.Command, args []string) error {
				return a.changeMember(c.Context(), func(members []*apiv1.Member) (*apiv1.ChangeMemberRequest, error) {
					m, err := member(members, args[0])
					if err != nil {
						return nil, err
					}
					return change(m.Id), nil
				})
			},
		}
	}
	c.AddCommand(add,
		one("promote", "Let a learner vote", func(id string) *apiv1.ChangeMemberRequest {
			return &apiv1.ChangeMemberRequest{Change: &apiv1.ChangeMemberRequest_Promote{Promote: id}}
		}),
		one("remove", "Remove a controller", func(id string) *apiv1.ChangeMemberRequest {
			return &apiv1.ChangeMemberRequest{Change: &apiv1.ChangeMemberRequest_Remove{Remove: id}}
		}), a.transferCommand())
	return c
}

// transferCommand is there twice: as a change of members, and where one looks for it in a hurry.
func (a *app) transferCommand() *cobra.Command {
	return &cobra.Command{
		Use: "transfer [NAME|ID]", Short: "Make another controller the leader", Args: cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return a.changeMember(c.Context(), func(members []*apiv1.Member) (*apiv1.ChangeMemberRequest, error) {
				to := "-"
				if len(args) == 1 && args[0] != "-" {
					m, err := member(members, args[0])
					if err != nil {
						return nil, err
					}
					to = m.Id
				}
				return &apiv1.ChangeMemberRequest{Change: &apiv1.ChangeMemberRequest_Transfer{Transfer: to}}, nil
			})
		},
	}
}

// member finds a controller by name or id.
func member(members []*apiv1.Member, name string) (*apiv1.Member, error) {
	var found []*apiv1.Member
	var names []string
	for _, m := range members {
		if m.Id == name {
			return m, nil
		}
		if m.Name == name {
			found = append(found, m)
		}
		names = append(names, m.Name+" ("+m.Id+")")
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return nil, fmt.Errorf("there is no controller %q: this cluster has %s", name, strings.Join(names, ", "))
	}
	return nil, fmt.Errorf("%d controllers are called %q: name one by its id: %s", len(found), name, strings.Join(names, ", "))
}

// changeMember looks up the members, makes a change if there is one, and prints the members after it.
func (a *app) changeMember(ctx context.Context, decide func([]*apiv1.Member) (*apiv1.ChangeMemberRequest, error)) error {
	c, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	before, err := c.Cluster().GetCluster(ctx, &apiv1.GetClusterRequest{})
	if err != nil {
		return err
	}
	answer := &apiv1.ChangeMemberResponse{Members: before.Members}
	change, err := decide(before.Members)
	if err != nil {
		return err
	}
	if change != nil {
		if answer, err = c.Cluster().ChangeMember(ctx, change); err != nil {
			return err
		}
	}
	if a.json {
		return a.printJSON(answer)
	}
	a.printMembers(answer.Members)
	return nil
}

func (a *app) configurationCommand() *cobra.Command {
	return &cobra.Command{
		Use: "configuration", Short: "Print the configuration as JSON, to be changed and given to configure", Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			api, err := a.open(c.Context())
			if err != nil {
				return err
			}
			defer api.Close()
			answer, err := api.Cluster().GetCluster(c.Context(), &apiv1.GetClusterRequest{})
			if err != nil {
				return err
			}
			return a.printJSON(answer.Configuration)
		},
	}
}

func (a *app) configureCommand() *cobra.Command {
	return &cobra.Command{
		Use: "configure FILE", Short: "Replace the configuration", Args: exactlyOne("a file"),
		Long: `Replace the configuration by that in FILE (JSON, as "muster cluster configuration" prints it). It is in force at once; running jobs
are never ended by it.`,
		RunE: func(c *cobra.Command, args []string) error {
			configuration, err := config.Load(args[0])
			if err != nil {
				return err
			}
			api, err := a.open(c.Context())
			if err != nil {
				return err
			}
			defer api.Close()
			answer, err := api.Cluster().Configure(c.Context(), &apiv1.ConfigureRequest{RequestId: client.NewRequestID(), Configuration: configuration})
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(answer)
			}
			fmt.Fprintf(a.out, "The configuration is in force at revision %s\n", formatRevision(answer.Revision))
			return nil
		},
	}
}

func (a *app) levelCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "level", Short: "Show or raise the feature level", Args: noArguments,
		Long: "Show the feature level in force, and the highest that every controller supports. It only rises, and only when told to.",
		RunE: func(c *cobra.Command, _ []string) error {
			api, err := a.open(c.Context())
			if err != nil {
				return err
			}
			defer api.Close()
			answer, err := api.Cluster().GetCluster(c.Context(), &apiv1.GetClusterRequest{})
			if err != nil {
				return err
			}
			common := commonLevel(answer.Members)
			if a.json {
				return a.printValue(map[string]uint32{"level": answer.Level, "supportedByAll": common})
			}
			fmt.Fprintf(a.out, "level %d; all controllers support %d\n", answer.Level, common)
			return nil
		},
	}
	raise := &cobra.Command{
		Use: "raise [LEVEL]", Short: "Raise the level (default: to the highest that all controllers support)", Args: cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return a.changeMember(c.Context(), func(members []*apiv1.Member) (*apiv1.ChangeMemberRequest, error) {
				to := commonLevel(members)
				if len(args) == 1 {
					n, err := strconv.ParseUint(args[0], 10, 32)
					if err != nil {
						return nil, usagef("%q is no level: write a number", args[0])
					}
					to = uint32(n)
				}
				return &apiv1.ChangeMemberRequest{Change: &apiv1.ChangeMemberRequest_RaiseLevel{RaiseLevel: to}}, nil
			})
		},
	}
	c.AddCommand(raise)
	return c
}

func commonLevel(members []*apiv1.Member) uint32 {
	if len(members) == 0 {
		return 0
	}
	level := members[0].SupportedLevel
	for _, m := range members {
		level = min(level, m.SupportedLevel)
	}
	return level
}
