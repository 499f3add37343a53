package state

import (
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// The copies below are shallow: the new message shares submessages and lists with the old one, which stays as it is. Lists
// must be replaced, never changed in place. A test checks that no field is forgotten.

// CopyJob returns a shallow copy of a job.
func CopyJob(from *apiv1.Job) *apiv1.Job {
	return &apiv1.Job{
		Id:       from.Id,
		Revision: from.Revision,
		Spec:     from.Spec,
		Owner:    from.Owner,
		Status:   from.Status,
	}
}

// CopyJobStatus returns a shallow copy of a job's status.
func CopyJobStatus(from *apiv1.JobStatus) *apiv1.JobStatus {
	return &apiv1.JobStatus{
		State:             from.State,
		Reason:            from.Reason,
		Sentence:          from.Sentence,
		Attempt:           from.Attempt,
		Restarts:          from.Restarts,
		SubmitTime:        from.SubmitTime,
		EligibleTime:      from.EligibleTime,
		StartTime:         from.StartTime,
		EndTime:           from.EndTime,
		ExitCode:          from.ExitCode,
		ExitSignal:        from.ExitSignal,
		DerivedExitCode:   from.DerivedExitCode,
		DerivedExitSignal: from.DerivedExitSignal,
		Partition:         from.Partition,
		Priority:          from.Priority,
		Held:              from.Held,
		CancelledBy:       from.CancelledBy,
		NodeList:          from.NodeList,
		NumNodes:          from.NumNodes,
		NumCpus:           from.NumCpus,
		NumGpus:           from.NumGpus,
		LaunchFailures:    from.LaunchFailures,
		NotBefore:         from.NotBefore,
		Completing:        from.Completing,
		TimeLimitS:        from.TimeLimitS,
		MemoryMb:          from.MemoryMb,
		NumTasks:          from.NumTasks,
	}
}

// CopyJobSpec returns a shallow copy of a specification.
func CopyJobSpec(from *apiv1.JobSpec) *apiv1.JobSpec {
	return &apiv1.JobSpec{
		Name:              from.Name,
		Kind:              from.Kind,
		Account:           from.Account,
		Partitions:        from.Partitions,
		Comment:           from.Comment,
		Nice:              from.Nice,
		Priority:          from.Priority,
		Hold:              from.Hold,
		ScriptBlob:        from.ScriptBlob,
		Args:              from.Args,
		EnvironmentBlob:   from.EnvironmentBlob,
		WorkDir:           from.WorkDir,
		StdinPath:         from.StdinPath,
		StdoutPath:        from.StdoutPath,
		StderrPath:        from.StderrPath,
		OpenAppend:        from.OpenAppend,
		Umask:             from.Umask,
		Resources:         from.Resources,
		TimeLimitS:        from.TimeLimitS,
		Requeue:           from.Requeue,
		AutomaticRecovery: from.AutomaticRecovery,
		TaskOptions:       from.TaskOptions,
		SubmitHost:        from.SubmitHost,
		CommandLine:       from.CommandLine,
		BeginTime:         from.BeginTime,
		KillGraceS:        from.KillGraceS,
		Qos:               from.Qos,
		Wckey:             from.Wckey,
		WarnSignal:        from.WarnSignal,
		NoKill:            from.NoKill,
	}
}

// CopyAttempt returns a shallow copy of an attempt.
func CopyAttempt(from *apiv1.Attempt) *apiv1.Attempt {
	return &apiv1.Attempt{
		JobId:       from.JobId,
		Number:      from.Number,
		Revision:    from.Revision,
		Fence:       from.Fence,
		State:       from.State,
		Placement:   from.Placement,
		Unaccounted: from.Unaccounted,
		Prepared:    from.Prepared,
		PlaceTime:   from.PlaceTime,
		StartTime:   from.StartTime,
		EndTime:     from.EndTime,
		Failure:     from.Failure,
		EndSentence: from.EndSentence,
		FaultNode:   from.FaultNode,
		Signals:     from.Signals,
		TimeLimitS:  from.TimeLimitS,
		FinalState:  from.FinalState,
		Leftovers:   from.Leftovers,
		Unprepared:  from.Unprepared,
	}
}

// CopyStep returns a shallow copy of a step.
func CopyStep(from *apiv1.Step) *apiv1.Step {
	return &apiv1.Step{
		JobId:         from.JobId,
		Id:            from.Id,
		Attempt:       from.Attempt,
		Revision:      from.Revision,
		Spec:          from.Spec,
		State:         from.State,
		Placement:     from.Placement,
		Exits:         from.Exits,
		Unreported:    from.Unreported,
		CreateTime:    from.CreateTime,
		StartTime:     from.StartTime,
		EndTime:       from.EndTime,
		NodeList:      from.NodeList,
		NumTasks:      from.NumTasks,
		Ending:        from.Ending,
		Prepared:      from.Prepared,
		EndSentence:   from.EndSentence,
		FinalState:    from.FinalState,
		StartSkewUs:   from.StartSkewUs,
		Usage:         from.Usage,
		PartRanks:     from.PartRanks,
		FirstExecTime: from.FirstExecTime,
		LastExecTime:  from.LastExecTime,
		ElapsedMs:     from.ElapsedMs,
	}
}

// CopyNode returns a shallow copy of a node.
func CopyNode(from *apiv1.Node) *apiv1.Node {
	return &apiv1.Node{
		Number:              from.Number,
		Revision:            from.Revision,
		Spec:                from.Spec,
		Epoch:               from.Epoch,
		Instance:            from.Instance,
		State:               from.State,
		Drain:               from.Drain,
		Reason:              from.Reason,
		ReasonBy:            from.ReasonBy,
		ReasonTime:          from.ReasonTime,
		JoinTime:            from.JoinTime,
		FencedEpoch:         from.FencedEpoch,
		Owners:              from.Owners,
		LaunchFailures:      from.LaunchFailures,
		CpusAllocated:       from.CpusAllocated,
		MemoryAllocatedMb:   from.MemoryAllocatedMb,
		GpusAllocatedMask:   from.GpusAllocatedMask,
		LastBusyTime:        from.LastBusyTime,
		CpusAllocatedMask:   from.CpusAllocatedMask,
		LostOnSilence:       from.LostOnSilence,
		Conditions:          from.Conditions,
		DrainedByHealth:     from.DrainedByHealth,
		HealthDrainWithheld: from.HealthDrainWithheld,
		GpusUnusableMask:    from.GpusUnusableMask,
		CpusUnusableMask:    from.CpusUnusableMask,
		GresAllocated:       from.GresAllocated,
		FormerBootIds:       from.FormerBootIds,
	}
}

// CopyBlob returns a shallow copy of a blob.
func CopyBlob(from *logv1.BlobRecord) *logv1.BlobRecord {
	return &logv1.BlobRecord{
		Sha256:     from.Sha256,
		Data:       from.Data,
		Size:       from.Size,
		References: from.References,
		Uids:       from.Uids,
		BeginTime:  from.BeginTime,
		Revision:   from.Revision,
	}
}
