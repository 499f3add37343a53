package scontrol

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/muster-hpc/muster/cmd/internal/slurm/fetch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	"github.com/muster-hpc/muster/ops/version"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// pingLines says of each controller whether it answers; the leader is the primary.
func pingLines(members []*apiv1.Member) (lines []string, up bool) {
	sorted := slices.Clone(members)
	slices.SortStableFunc(sorted, func(a, b *apiv1.Member) int {
		if a.GetLeader() != b.GetLeader() {
			if a.GetLeader() {
				return -1
			}
			return 1
		}
		return cmp.Compare(a.GetName(), b.GetName())
	})
	for i, m := range sorted {
		role, state := "primary", "UP"
		if i > 0 {
			role = fmt.Sprintf("backup%d", i)
		}
		if !m.GetLeader() && (m.GetAppliedIndex() == 0 || m.GetQuarantine() != "") {
			state = "DOWN"
		}
		lines = append(lines, fmt.Sprintf("Slurmctld(%s) at %s is %s", role, m.GetName(), state))
		up = up || m.GetLeader()
	}
	return lines, up
}

func ping(ctx context.Context, c *call) error {
	cluster, err := c.cluster(ctx)
	if err != nil {
		return err
	}
	answer, err := cluster.Cluster().GetCluster(ctx, &apiv1.GetClusterRequest{})
	if err != nil {
		fmt.Fprintln(c.s.Stdout, "Slurmctld(primary) is DOWN")
		submit.Explain(c.s, "slurm_ping error", err)
		return errSilent
	}
	lines, up := pingLines(answer.GetMembers())
	fmt.Fprintln(c.s.Stdout, strings.Join(lines, "\n"))
	if !up {
		return errSilent
	}
	return nil
}

// milliseconds writes a setting, or its default, in seconds.
func milliseconds(ms, usual uint32) string {
	if ms == 0 {
		ms = usual
	}
	return fmt.Sprintf("%d sec", ms/1000)
}

// showConfig writes what of Slurm's configuration Muster has.
func showConfig(ctx context.Context, c *call, _ string) error {
	cluster, err := c.cluster(ctx)
	if err != nil {
		return err
	}
	answer, err := cluster.Cluster().GetCluster(ctx, &apiv1.GetClusterRequest{})
	if err != nil {
		fmt.Fprintln(c.s.Stderr, fetch.Error("slurm_load_ctl_conf", err))
		return errSilent
	}
	settings := answer.GetConfiguration().GetSettings()
	grace := settings.GetKillGraceS()
	if grace == 0 {
		grace = 30
	}
	jobs := settings.GetMaxActiveJobs()
	if jobs == 0 {
		jobs = 1_000_000
	}
	hook := settings.GetSubmitHook()
	if hook == "" {
		hook = "(null)"
	}
	var out bytes.Buffer
	line := func(key, text string) { fmt.Fprintf(&out, "%-23s = %s\n", key, text) }
	fmt.Fprintf(&out, "Configuration data as of %s\n", fetch.StateTime(answer.GetInfo()).Format("2006-01-02T15:04:05"))
	line("AccountingStorageType", "accounting_storage/muster")
	line("ClusterName", cluster.ClusterName())
	line("EnforcePartLimits", "ALL")
	line("GresTypes", "gpu")
	line("JobRequeue", "1")
	line("JobSubmitPlugins", hook)
	line("KillWait", fmt.Sprintf("%d sec", grace))
	line("MaxArraySize", "1001")
	line("MaxJobCount", fmt.Sprint(jobs))
	line("MaxStepCount", "40000")
	line("MinJobAge", fmt.Sprintf("%d sec", int(fetch.MinJobAge.Seconds())))
	line("MpiDefault", "none")
	line("PreemptMode", "OFF")
	line("PreemptType", "preempt/none")
	line("PriorityType", "priority/basic")
	line("ProctrackType", "proctrack/muster")
	line("ReturnToService", "2")
	line("SchedulerType", "sched/muster")
	line("SelectType", "select/cons_tres")
	line("SelectTypeParameters", "CR_CPU_MEMORY")
	for i, m := range answer.GetMembers() {
		line(fmt.Sprintf("SlurmctldHost[%d]", i), m.GetName()+"("+m.GetApiAddress()+")")
	}
	line("SlurmdTimeout", milliseconds(settings.GetLostAfterMs(), 60_000))
	line("SLURM_VERSION", version.Slurm)
	line("SwitchType", "switch/none")
	line("TopologyPlugin", "topology/default")
	lines, _ := pingLines(answer.GetMembers())
	fmt.Fprintf(&out, "\n%s\n", strings.Join(lines, "\n"))
	if _, err := c.s.Stdout.Write(out.Bytes()); err != nil {
		return err
	}
	return nil
}

// write stores a job's script: "write batch_script JOB [FILE|-]".
func write(ctx context.Context, c *call) error {
	if len(c.words) == 0 || !strings.HasPrefix("batch_script", strings.ToLower(c.words[0])) || len(c.words) < 2 {
		return fmt.Errorf("`write batch_script JOB [FILE|-]` is supported; the configuration is shown by `show config`")
	}
	id, known, err := fetch.JobID(c.words[1])
	if err != nil || !known {
		return fmt.Errorf("Invalid job id: %s", c.words[1])
	}
	cluster, err := c.cluster(ctx)
	if err != nil {
		return err
	}
	job, err := cluster.Jobs().GetJob(ctx, &apiv1.GetJobRequest{JobId: id})
	if err != nil {
		submit.Explain(c.s, "job script retrieval failed", err)
		return errSilent
	}
	sha := job.GetJob().GetSpec().GetScriptBlob()
	if sha == "" {
		return fmt.Errorf("job script retrieval failed: job %d has no batch script", id)
	}
	blob, err := cluster.Cluster().GetBlob(ctx, &apiv1.GetBlobRequest{Sha256: sha, JobId: id})
	if err != nil {
		submit.Explain(c.s, "job script retrieval failed", err)
		return errSilent
	}
	path := fmt.Sprintf("slurm-%d.sh", id)
	if len(c.words) > 2 {
		path = c.words[2]
	}
	if path == "-" {
		_, err := c.s.Stdout.Write(blob.GetData())
		return err
	}
	if err := os.WriteFile(submit.Absolute(c.s.Dir, path), blob.GetData(), 0o700); err != nil {
		return fmt.Errorf("failed to write the script of job %d: %w", id, err)
	}
	fmt.Fprintf(c.s.Stdout, "batch script for job %d written to %s\n", id, path)
	return nil
}
