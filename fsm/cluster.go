package fsm

import (
	"fmt"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"

	"github.com/muster-hpc/muster/fsm/state"
)

const (
	// maxPartitions bounds the partitions of a configuration.
	maxPartitions = 1000
	// maxMembers bounds the announced controllers.
	maxMembers = 64
	// maxExplanations bounds the reasons in one ExplainJobs, as the protocol says.
	maxExplanations = 1000
	// maxNameBytes bounds names of jobs, nodes, partitions, and free text.
	maxNameBytes = 1024
	// maxJobID is the highest job id that is given out.
	maxJobID = ^uint32(0) - 1
)

// bootstrap begins the cluster's life, or a new incarnation of a state that was restored from a backup.
func (m *Machine) bootstrap(b *logv1.Bootstrap) *logv1.Result {
	refusal := m.checkBootstrap(b)
	if refusal != nil {
		if m.s.Bootstrapped() {
			m.s.Advance(m.rev, m.cmd.ProposedAt)
		}
		return refused(refusal)
	}
	m.rev = &apiv1.Revision{Incarnation: b.Incarnation, Index: m.rev.Index, Ordinal: m.rev.Ordinal}
	m.s.Advance(m.rev, m.cmd.ProposedAt)
	clusterID := b.ClusterId
	if m.s.Bootstrapped() {
		clusterID = m.s.ClusterID()
	}
	m.s.Begin(clusterID, m.cmd.Level, b.JobIdsAbove, m.rev)
	if b.Configuration != nil {
		if err := m.s.Configure(b.Configuration, m.rev); err != nil {
			panic("fsm: checked configuration: " + err.Error()) // checkConfiguration expanded the same lists
		}
	}
	return &logv1.Result{}
}

func (m *Machine) checkBootstrap(b *logv1.Bootstrap) *apiv1.ErrorDetail {
	switch {
	case m.s.Bootstrapped() && b.Incarnation <= m.s.Incarnation():
		return refuse("ALREADY_BOOTSTRAPPED", "cluster", "the cluster has been bootstrapped; its incarnation is %d", m.s.Incarnation())
	case b.Incarnation == 0:
		return refuse("BOOTSTRAP_INVALID", "cluster", "a cluster begins with incarnation 1 or higher")
	case b.JobIdsAbove >= maxJobID:
		return refuse("BOOTSTRAP_INVALID", "cluster", "no job ids are left above %d", b.JobIdsAbove)
	case m.s.Bootstrapped() && b.ClusterId != "" && b.ClusterId != m.s.ClusterID():
		return refuse("BOOTSTRAP_INVALID", "cluster", "the state is that of cluster %s, not %s", m.s.ClusterID(), b.ClusterId)
	case m.s.Bootstrapped() && b.Configuration == nil:
		return nil
	case b.ClusterId == "" && !m.s.Bootstrapped():
		return refuse("BOOTSTRAP_INVALID", "cluster", "a cluster needs an id")
	}
	return CheckConfiguration(b.Configuration)
}

// CheckConfiguration says what is wrong with a configuration, or returns nil. It needs no state, so that a command can check a
// file before it sends it.
func CheckConfiguration(c *apiv1.Configuration) *apiv1.ErrorDetail {
	bad := func(subject, sentence string, args ...any) *apiv1.ErrorDetail {
		return refuse("CONFIGURATION_INVALID", subject, sentence, args...)
	}
	if !validName(c.GetClusterName()) {
		return bad("cluster_name", "the cluster's name %q is not a name: letters, digits, '_', '-' and '.' are allowed", c.GetClusterName())
	}
	if len(c.Partitions) == 0 || len(c.Partitions) > maxPartitions {
		return bad("partitions", "a configuration has 1 to %d partitions, this one has %d", maxPartitions, len(c.Partitions))
	}
	seen := make(map[string]bool, len(c.Partitions))
	withDefault := ""
	for _, p := range c.Partitions {
		subject := "partition " + p.Name
		if !validName(p.Name) {
			return bad(subject, "the partition's name %q is not a name: letters, digits, '_', '-' and '.' are allowed", p.Name)
		}
		if seen[p.Name] {
			return bad(subject, "partition %s is there twice", p.Name)
		}
		seen[p.Name] = true
		if p.IsDefault {
			if withDefault != "" {
				return bad(subject, "partitions %s and %s are both the default; there can be one", withDefault, p.Name)
			}
			withDefault = p.Name
		}
		if p.MaxTimeS != 0 && p.DefaultTimeS > p.MaxTimeS {
			return bad(subject, "the default time of partition %s, %d s, is above its maximum, %d s", p.Name, p.DefaultTimeS, p.MaxTimeS)
		}
		names, all, err := state.ExpandPartition(p)
		if err != nil {
			return bad(subject, "%s", err.Error())
		}
		if !all && len(names) == 0 {
			return bad(subject, "partition %s has no nodes; name them, or write %s", p.Name, state.AllNodes)
		}
	}
	return checkSettings(c.Settings)
}

func checkSettings(s *apiv1.Settings) *apiv1.ErrorDetail {
	full := state.Defaults(s)
	bad := func(field, sentence string, args ...any) *apiv1.ErrorDetail {
		return refuse("CONFIGURATION_INVALID", "settings."+field, sentence, args...)
	}
	for _, b := range []struct {
		name               string
		value, least, most uint32
	}{
		{"lease_ms", full.LeaseMs, 500, 3_600_000},
		{"fence_window_ms", full.FenceWindowMs, 200, 3_600_000},
		{"lost_after_ms", full.LostAfterMs, 1_000, 86_400_000},
		{"kill_grace_s", full.KillGraceS, 1, 3_600},
		{"prepare_timeout_ms", full.PrepareTimeoutMs, 1_000, 3_600_000},
	} {
		if b.value < b.least || b.value > b.most {
			return bad(b.name, "%s is %d; %d to %d are possible", b.name, b.value, b.least, b.most)
		}
	}
	if refusal := checkSiteSettings(s); refusal != nil {
		return refusal
	}
	switch {
	case full.LostLimitPercent > 100:
		return bad("lost_limit_percent", "lost_limit_percent is %d; at most 100 percent of the nodes can be lost", full.LostLimitPercent)
	case full.LostAfterMs <= full.LeaseMs:
		return bad("lost_after_ms", "lost_after_ms is %d; it must be longer than the lease, %d ms", full.LostAfterMs, full.LeaseMs)
	case full.LaunchTries > 100:
		return bad("launch_tries", "launch_tries is %d; at most 100 are sensible", full.LaunchTries)
	default:
		return nil
	}
}

// validName allows what is safe in Slurm's lists and in file names.
func validName(name string) bool {
	if name == "" || len(name) > 255 {
		return false
	}
	for _, c := range []byte(name) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '_', c == '-', c == '.':
		default:
			return false
		}
	}
	return true
}

// configure replaces the configuration. Jobs that run, or wait in a partition that is gone, stay as they are.
func (m *Machine) configure(c *logv1.Configure) *logv1.Result {
	if c.Expected != nil && CompareRevisions(c.Expected, m.s.ConfigurationRevision()) != 0 {
		return refused(refuse("CONFIGURATION_CHANGED", "cluster",
			"the configuration was changed meanwhile; read it again and repeat the change"))
	}
	if refusal := CheckConfiguration(c.Configuration); refusal != nil {
		return refused(refusal)
	}
	if err := m.s.Configure(c.Configuration, m.rev); err != nil {
		panic("fsm: checked configuration: " + err.Error()) // CheckConfiguration expanded the same lists
	}
	return &logv1.Result{}
}

// announceMember records what a controller supports, or forgets it.
func (m *Machine) announceMember(a *logv1.AnnounceMember) *logv1.Result {
	id := a.GetMember().GetId()
	if id == "" {
		return refused(refuse("MEMBER_INVALID", "member", "a controller has an id"))
	}
	known := m.s.Member(id)
	if a.Remove {
		if !m.s.RemoveMember(id) {
			return refused(refuse("MEMBER_UNKNOWN", "member "+id, "there is no controller with the id %s", id))
		}
		return &logv1.Result{}
	}
	if a.Member.SupportedLevel < m.s.Level() {
		return refused(refuse("MEMBER_TOO_OLD", "member "+id,
			"controller %s supports feature level %d and the cluster is at level %d; upgrade its program", a.Member.Name,
			a.Member.SupportedLevel, m.s.Level()))
	}
	members := 0
	for range m.s.Members() {
		members++
	}
	if known == nil && members >= maxMembers {
		return refused(refuse("MEMBERS_TOO_MANY", "member "+id, "%d controllers are announced; remove those that are gone", members))
	}
	record := &apiv1.Member{
		Id: id, Name: a.Member.Name, RaftAddress: a.Member.RaftAddress, ApiAddress: a.Member.ApiAddress,
		SupportedLevel: a.Member.SupportedLevel, Version: a.Member.Version,
	}
	m.s.PutMember(record)
	return &logv1.Result{}
}

// raiseLevel raises the feature level. It is an error, which stops the replica, if every member announced the level and this
// program does not know it.
func (m *Machine) raiseLevel(r *logv1.RaiseLevel) (*logv1.Result, error) {
	if r.Level <= m.s.Level() {
		return refused(refuse("LEVEL_NOT_HIGHER", "cluster", "the cluster is at feature level %d; levels only rise", m.s.Level())), nil
	}
	members := 0
	for member := range m.s.Members() {
		members++
		if member.SupportedLevel < r.Level {
			return refused(refuse("LEVEL_UNSUPPORTED", "member "+member.Id,
				"controller %s supports feature level %d, not %d; upgrade its program first", member.Name, member.SupportedLevel, r.Level)), nil
		}
	}
	if members == 0 {
		return refused(refuse("LEVEL_UNSUPPORTED", "cluster", "no controller has announced what it supports yet; try again")), nil
	}
	if r.Level > m.ladder.Max() {
		return nil, fmt.Errorf("the feature level was raised to %d; this program knows levels up to %d", r.Level, m.ladder.Max())
	}
	if m.s.Level() < levelLaunch && r.Level >= levelLaunch {
		m.shareSteps()
	}
	m.s.SetLevel(r.Level)
	return &logv1.Result{}, nil
}

// explainJobs records why jobs wait. Reasons of jobs that do not wait any more are ignored.
func (m *Machine) explainJobs(e *logv1.ExplainJobs) *logv1.Result {
	if len(e.Reasons) > maxExplanations {
		return refused(refuse("TOO_MANY", "reasons", "%d reasons came at once; at most %d may", len(e.Reasons), maxExplanations))
	}
	for _, r := range e.Reasons {
		job := m.s.Job(r.JobId)
		if job == nil || job.Status.State != apiv1.JobState_JOB_STATE_PENDING ||
			job.Status.Reason == r.Reason && job.Status.Sentence == r.Sentence {
			continue
		}
		m.changeJob(job, func(s *apiv1.JobStatus) { s.Reason, s.Sentence = r.Reason, r.Sentence })
	}
	return &logv1.Result{}
}

// prune removes finished jobs, blobs that nothing refers to, and old unfinished uploads. The result has the jobs removed.
func (m *Machine) prune(p *logv1.Prune) *logv1.Result {
	result := &logv1.Result{}
	for _, id := range p.JobIds {
		job := m.s.Job(id)
		if job == nil || !state.Ended(job.Status.State) || job.Status.Completing {
			continue
		}
		m.releaseBlobs(job.Spec.ScriptBlob, job.Spec.EnvironmentBlob)
		for step := range m.s.Steps(id) {
			m.releaseBlobs(step.Spec.EnvironmentBlob)
		}
		m.s.RemoveJob(id)
		result.JobIds = append(result.JobIds, id)
	}
	for _, sha := range p.Blobs {
		if b := m.s.Blob(sha); b != nil && b.References == 0 && seconds(b.BeginTime) < m.now().Seconds-blobGraceS {
			m.s.RemoveBlob(state.BlobKey{SHA256: sha})
		}
	}
	m.pruneUploads(p)
	return result
}
