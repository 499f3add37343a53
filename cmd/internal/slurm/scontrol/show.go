package scontrol

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strings"

	"connectrpc.com/connect/v2"

	"github.com/muster-hpc/muster/cmd/internal/slurm/document"
	"github.com/muster-hpc/muster/cmd/internal/slurm/fetch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// entities are what show knows, by the shortest prefix that is accepted.
var entities = []struct {
	name, least string
	run         func(context.Context, *call, string) error
	refuse      string
}{
	{name: "aliases", least: "al", refuse: "nodes are known by their names only"},
	{name: "assoc_mgr", least: "ass", refuse: "there are no associations yet"},
	{name: "bbstat", least: "bbs", refuse: "Muster has no burst buffers"},
	{name: "burstbuffer", least: "bu", refuse: "Muster has no burst buffers"},
	{name: "config", least: "con", run: showConfig},
	{name: "daemons", least: "da", refuse: "use the service manager of the host"},
	{name: "dwstat", least: "dw", refuse: "Muster has no burst buffers"},
	{name: "federation", least: "fed", refuse: "there is no federation"},
	{name: "frontend", least: "f", refuse: "there are no front ends"},
	{name: "hostlistsorted", least: "hostlists", run: showHostListSorted},
	{name: "hostlist", least: "hostl", run: showHostList},
	{name: "hostnames", least: "hostn", run: showHostNames},
	{name: "jobs", least: "j", run: showJobs},
	{name: "jobids", least: "jobi", run: showJobs},
	{name: "licenses", least: "lic", refuse: "Muster does not count licenses"},
	{name: "nodes", least: "n", run: showNodes},
	{name: "partitions", least: "p", run: showPartitions},
	{name: "reservations", least: "r", refuse: "reservations come with a later release"},
	{name: "slurmd", least: "slurmd", refuse: "use `muster nodes`"},
	{name: "steps", least: "s", run: showSteps},
	{name: "topology", least: "t", refuse: "the planner does not know the network yet"},
}

// show dispatches "show ENTITY [ID]", "show ENTITY=ID".
func show(ctx context.Context, c *call) error {
	if len(c.words) == 0 {
		fmt.Fprintln(c.s.Stderr, "too few arguments for keyword:show")
		return errSilent
	}
	name, id, assigned := strings.Cut(c.words[0], "=")
	if !assigned && len(c.words) > 1 {
		id = strings.Join(c.words[1:], ",")
	}
	for _, e := range entities {
		word := strings.ToLower(name)
		if !strings.HasPrefix(e.name, word) || !strings.HasPrefix(word, e.least) {
			continue
		}
		if e.refuse != "" {
			return fmt.Errorf("show %s is not supported yet: %s", e.name, e.refuse)
		}
		return e.run(ctx, c, id)
	}
	fmt.Fprintf(c.s.Stderr, "invalid entity:%s for keyword:show \n", name)
	return errSilent
}

// print writes records: one a line with --oneliner, otherwise their lines as they are, and an empty line after each.
func (c *call) print(records [][]string, tail string) error {
	out := bufio.NewWriter(c.s.Stdout)
	for _, lines := range records {
		for i, line := range lines {
			lines[i] = value.Safe(line)
		}
		if c.options.Has("oneliner") {
			for i, line := range lines {
				lines[i] = strings.TrimSpace(line)
			}
			fmt.Fprintf(out, "%s \n", strings.TrimRight(strings.Join(lines, " "), " "))
			continue
		}
		fmt.Fprintf(out, "%s\n%s\n", strings.Join(lines, "\n"), tail)
	}
	if err := out.Flush(); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	return nil
}

func (c *call) wantsJSON() (bool, error) {
	v, ok := c.options.Get("json")
	if ok && v.Given && !document.Speaks(v.Text) {
		return false, fmt.Errorf("--json=%s: only %s is spoken", v.Text, document.Parser)
	}
	return ok, nil
}

func showJobs(ctx context.Context, c *call, id string) error {
	json, err := c.wantsJSON()
	if err != nil {
		return err
	}
	cluster, err := c.cluster(ctx)
	if err != nil {
		return err
	}
	view := &record.View{Names: c.s, Now: c.s.Now(), Cluster: cluster.ClusterName()}
	rows, shares, err := c.jobs(ctx, cluster, id, view)
	if err != nil {
		return err
	}
	if json {
		jobs := []document.Object{}
		for _, r := range rows {
			jobs = append(jobs, document.Job(r, shares[r.Job.GetId()]))
		}
		if document.Print(c.s, view.Cluster, document.Object{{Key: "jobs", Value: jobs}, {Key: "last_update", Value: document.Moment(view.Now)}}) != 0 {
			return errSilent
		}
		return nil
	}
	if len(rows) == 0 {
		fmt.Fprintln(c.s.Stdout, "No jobs in the system")
		return nil
	}
	var records [][]string
	for _, r := range rows {
		records = append(records, jobLines(r, shares[r.Job.GetId()], c.options.Has("details")))
	}
	return c.print(records, "")
}

// jobs reads one job with its placement, or all jobs that a controller of Slurm would still have in memory.
func (c *call) jobs(ctx context.Context, cluster session.Cluster, word string, view *record.View) ([]*record.Row, map[uint32][]*apiv1.NodeShare, error) {
	shares := map[uint32][]*apiv1.NodeShare{}
	if word == "" {
		listing, err := fetch.Jobs(ctx, cluster, &apiv1.ListJobsRequest{Filter: &apiv1.JobFilter{EndedSince: fetch.Recent(c.s.Now())}})
		if err != nil {
			fmt.Fprintln(c.s.Stderr, fetch.Error("slurm_load_jobs", err))
			return nil, nil, errSilent
		}
		view.Now = listing.Now
		var rows []*record.Row
		for _, job := range listing.Jobs {
			rows = append(rows, &record.Row{Job: job, View: view})
		}
		return rows, shares, nil
	}
	var rows []*record.Row
	for item := range strings.SplitSeq(word, ",") {
		id, known, err := fetch.JobID(item)
		var answer *apiv1.GetJobResponse
		if err == nil && known {
			answer, err = cluster.Jobs().GetJob(ctx, &apiv1.GetJobRequest{JobId: id})
		}
		switch {
		case !known, connect.CodeOf(err) == connect.CodeNotFound:
			fmt.Fprintln(c.s.Stderr, "slurm_load_jobs error: Invalid job id specified")
			return nil, nil, errSilent
		case err != nil:
			fmt.Fprintln(c.s.Stderr, fetch.Error("slurm_load_jobs", err))
			return nil, nil, errSilent
		}
		view.Now = fetch.StateTime(answer.GetInfo())
		rows = append(rows, &record.Row{Job: answer.GetJob(), View: view})
		shares[id] = answer.GetShares()
	}
	return rows, shares, nil
}

func showSteps(ctx context.Context, c *call, word string) error {
	cluster, err := c.cluster(ctx)
	if err != nil {
		return err
	}
	request := &apiv1.ListJobsRequest{Filter: &apiv1.JobFilter{Active: true}, Steps: true, Brief: true}
	var only *uint32
	if word != "" {
		job, step, dotted, err := fetch.Step(word)
		if err != nil {
			return err
		}
		request.Filter = &apiv1.JobFilter{JobIds: []uint32{job}}
		if dotted {
			only = &step
		}
	}
	listing, err := fetch.Jobs(ctx, cluster, request)
	if err != nil {
		fmt.Fprintln(c.s.Stderr, fetch.Error("slurm_get_job_steps", err))
		return errSilent
	}
	jobs := map[uint32]*apiv1.Job{}
	for _, job := range listing.Jobs {
		jobs[job.GetId()] = job
	}
	var records [][]string
	for _, step := range listing.Steps {
		if job := jobs[step.GetJobId()]; job != nil && (only == nil || *only == step.GetId()) {
			records = append(records, stepLines(job, step))
		}
	}
	if len(records) == 0 {
		if word == "" {
			fmt.Fprintln(c.s.Stdout, "No job steps in the system")
			return nil
		}
		fmt.Fprintf(c.s.Stdout, "Job step %s not found\n", word)
		return errSilent
	}
	return c.print(records, "")
}

func showNodes(ctx context.Context, c *call, word string) error {
	json, err := c.wantsJSON()
	if err != nil {
		return err
	}
	var names []string
	if word != "" && !strings.EqualFold(word, "ALL") {
		if names, err = notation.Expand(word); err != nil {
			return err
		}
	}
	cluster, err := c.cluster(ctx)
	if err != nil {
		return err
	}
	list, err := fetch.ListNodes(ctx, cluster, nil)
	if err != nil {
		fmt.Fprintln(c.s.Stderr, fetch.Error("slurm_load_node", err))
		return errSilent
	}
	by := map[string]*apiv1.Node{}
	for _, n := range list.Nodes {
		by[n.GetSpec().GetName()] = n
	}
	chosen, missing := list.Nodes, false
	if names != nil {
		chosen = nil
		for _, name := range names {
			if by[name] == nil {
				fmt.Fprintf(c.s.Stdout, "Node %s not found\n", name)
				missing = true
				continue
			}
			chosen = append(chosen, by[name])
		}
	}
	if json {
		rows := []document.Object{}
		for _, n := range chosen {
			rows = append(rows, nodeObject(n, list))
		}
		if document.Print(c.s, cluster.ClusterName(), document.Object{{Key: "nodes", Value: rows}, {Key: "last_update", Value: document.Moment(list.Now)}}) != 0 {
			return errSilent
		}
	} else {
		var records [][]string
		for _, n := range chosen {
			records = append(records, nodeLines(n, list, c.options.Has("details")))
		}
		if err := c.print(records, ""); err != nil {
			return err
		}
	}
	if missing {
		return errSilent
	}
	return nil
}

func showPartitions(ctx context.Context, c *call, word string) error {
	json, err := c.wantsJSON()
	if err != nil {
		return err
	}
	cluster, err := c.cluster(ctx)
	if err != nil {
		return err
	}
	list, err := fetch.ListNodes(ctx, cluster, nil)
	if err != nil {
		fmt.Fprintln(c.s.Stderr, fetch.Error("slurm_load_partitions", err))
		return errSilent
	}
	var records [][]string
	rows := []document.Object{}
	for _, p := range list.Partitions {
		if word != "" && word != p.GetName() {
			continue
		}
		members := record.Members(p, list.Nodes)
		records = append(records, partitionLines(p, members))
		rows = append(rows, document.Partition(p, len(members), members))
	}
	if len(records) == 0 && word != "" {
		fmt.Fprintf(c.s.Stdout, "Partition %s not found\n", word)
		return errSilent
	}
	if json {
		if document.Print(c.s, cluster.ClusterName(), document.Object{{Key: "partitions", Value: rows}, {Key: "last_update", Value: document.Moment(list.Now)}}) != 0 {
			return errSilent
		}
		return nil
	}
	return c.print(records, "")
}

// hostList is the list that a host list command is about: its argument, or the nodes of the enclosing job.
func (c *call) hostList(word string) (string, bool) {
	if word == "" && len(c.words) < 2 && !strings.Contains(c.words[0], "=") {
		if list, ok := c.s.Lookup("SLURM_JOB_NODELIST"); ok {
			return list, true
		}
		if list, ok := c.s.Lookup("SLURM_NODELIST"); ok {
			return list, true
		}
		c.s.Errorf("host list is empty")
		return "", false
	}
	return word, true
}

func showHostNames(_ context.Context, c *call, word string) error {
	list, ok := c.hostList(word)
	if !ok {
		return nil
	}
	if strings.TrimSpace(list) == "" {
		fmt.Fprintln(c.s.Stdout)
		return nil
	}
	names, err := notation.Expand(list)
	if err != nil {
		c.s.Errorf("%v", err)
		fmt.Fprintf(c.s.Stdout, "Invalid hostlist: %s\n", list)
		return nil // as in Slurm, this is no failure
	}
	out := bufio.NewWriter(c.s.Stdout)
	for _, name := range names {
		fmt.Fprintln(out, name)
	}
	return out.Flush()
}

func showHostList(_ context.Context, c *call, word string) error { return c.foldHosts(word, false) }

func showHostListSorted(_ context.Context, c *call, word string) error {
	return c.foldHosts(word, true)
}

// foldHosts folds names, which may be in a file.
func (c *call) foldHosts(word string, sorted bool) error {
	list, ok := c.hostList(word)
	if !ok {
		return nil
	}
	if strings.HasPrefix(list, "/") {
		data, err := os.ReadFile(list)
		if err != nil {
			return err
		}
		list = strings.Join(strings.Fields(string(data)), ",")
	}
	names, err := notation.Expand(list)
	if err != nil {
		c.s.Errorf("%v", err)
		fmt.Fprintf(c.s.Stdout, "Invalid hostlist: %s\n", list)
		return nil
	}
	if sorted {
		notation.Sort(names)
	}
	fmt.Fprintln(c.s.Stdout, notation.Fold(names))
	return nil
}
