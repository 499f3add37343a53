package level

import (
	"fmt"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// Max is the highest level that this program knows.
const Max uint32 = 2

// Current returns the ladder of this program.
func Current() *Ladder { return current }

var current = must(New(Max, map[protoreflect.Name]uint32{
	"submit_jobs":     1,
	"cancel_jobs":     1,
	"update_jobs":     1,
	"place":           1,
	"start_attempt":   1,
	"end_attempt":     1,
	"create_step":     1,
	"start_step":      1,
	"end_step":        1,
	"report_tasks":    1,
	"join_node":       1,
	"lose_node":       1,
	"fence_node":      1,
	"update_nodes":    1,
	"configure":       1,
	"put_blob":        1,
	"announce_member": 1,
	"raise_level":     1,
	"tick":            1,
	"explain_jobs":    1,
	"prune":           1,
	"bootstrap":       1,
	"report_health":   2,
}, map[protoreflect.FullName]uint32{
	"muster.api.v1.ResourceRequest.relative":       2,
	"muster.api.v1.ResourceRequest.exact":          2,
	"muster.api.v1.ResourceRequest.overlap":        2,
	"muster.api.v1.ResourceRequest.task_nodes":     2,
	"muster.api.v1.ResourceRequest.gres":           2,
	"muster.api.v1.ResourceRequest.ntasks_per_gpu": 2,
	"muster.api.v1.ResourceRequest.cpus_per_gpu":   2,
	"muster.api.v1.ResourceRequest.overcommit":     2,
	"muster.api.v1.TaskOptions.mpi":                2,
	"muster.api.v1.TaskOptions.cpu_bind":           2,
	"muster.api.v1.TaskOptions.gpu_bind":           2,
	"muster.api.v1.TaskOptions.pty":                2,
	"muster.api.v1.TaskOptions.pty_rows":           2,
	"muster.api.v1.TaskOptions.pty_columns":        2,
	"muster.api.v1.TaskOptions.programs":           2,
	"muster.api.v1.TaskOptions.nice":               2,
	"muster.api.v1.TaskOptions.rlimits":            2,
	"muster.api.v1.TaskOptions.task_prolog":        2,
	"muster.api.v1.TaskOptions.task_epilog":        2,
	"muster.api.v1.JobSpec.warn_signal":            2,
	"muster.api.v1.JobSpec.no_kill":                2,
	"muster.api.v1.NodeGroup.gres":                 2,
	"muster.api.v1.StepSpec.parts":                 2,
	"muster.api.v1.StepSpec.warn_signal":           2,
	"muster.api.v1.StepSpec.no_kill":               2,
	"muster.api.v1.Gpu.pci":                        2,
	"muster.api.v1.Gpu.numa":                       2,
	"muster.api.v1.Gpu.cpu_mask":                   2,
	"muster.api.v1.Gpu.mig_parent":                 2,
	"muster.api.v1.Gpu.device_files":               2,
	"muster.api.v1.Gpu.nvlinks":                    2,
	"muster.api.v1.NodeSpec.gres":                  2,
	"muster.api.v1.PreparedNode.pmi_port":          2,
	"muster.api.v1.Settings.prolog":                2,
	"muster.api.v1.Settings.epilog":                2,
	"muster.api.v1.Settings.task_prolog":           2,
	"muster.api.v1.Settings.task_epilog":           2,
	"muster.api.v1.Settings.prolog_timeout_s":      2,
	"muster.api.v1.Settings.health_checks":         2,
	"muster.api.v1.Settings.health_drain_percent":  2,
	"muster.log.v1.CancelJobs.complete":            2,
	"muster.log.v1.StepEnded.elapsed_ms":           2,
	"muster.log.v1.StepEnded.exec_time":            2,
	"muster.log.v1.StepEnded.usage":                2,
}))

func must(l *Ladder, err error) *Ladder {
	if err != nil {
		panic(err) // A row that names nothing is a mistake in this file; every test finds it.
	}
	return l
}

// Ladder maps operations and fields to the level they need.
type Ladder struct {
	max    uint32
	ops    map[protoreflect.FieldNumber]uint32
	fields map[protoreflect.FullName]uint32
	// leading has, for each message that can be in a command, the fields that have a row or lead to one: the others need not be looked at.
	leading map[protoreflect.FullName][]protoreflect.FieldDescriptor
}

// New makes a ladder from its rows: ops by the name of the field in Command's oneof, fields by full name
// ("muster.api.v1.JobSpec.deadline"). It fails if an operation has no row, a row names nothing, or a level is not in 1..max.
func New(highest uint32, ops map[protoreflect.Name]uint32, fields map[protoreflect.FullName]uint32) (*Ladder, error) {
	l := &Ladder{max: highest, ops: make(map[protoreflect.FieldNumber]uint32, len(ops)), fields: fields}
	arms := (&logv1.Command{}).ProtoReflect().Descriptor().Oneofs().ByName("op").Fields()
	for i := range arms.Len() {
		arm := arms.Get(i)
		level, found := ops[arm.Name()]
		if !found {
			return nil, fmt.Errorf("ladder: operation %s has no row", arm.Name())
		}
		l.ops[arm.Number()] = level
	}
	if len(ops) != arms.Len() {
		return nil, fmt.Errorf("ladder: %d rows for %d operations", len(ops), arms.Len())
	}
	for name, level := range ops {
		if level == 0 || level > highest {
			return nil, fmt.Errorf("ladder: operation %s needs level %d; the highest is %d", name, level, highest)
		}
	}
	for name, level := range fields {
		d, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
		if err != nil {
			return nil, fmt.Errorf("ladder: field %s: %w", name, err)
		}
		if _, isField := d.(protoreflect.FieldDescriptor); !isField {
			return nil, fmt.Errorf("ladder: %s is not a field", name)
		}
		if level == 0 || level > highest {
			return nil, fmt.Errorf("ladder: field %s needs level %d; the highest is %d", name, level, highest)
		}
	}
	l.lead((&logv1.Command{}).ProtoReflect().Descriptor())
	return l, nil
}

// lead fills in leading for the messages reachable from one. A message may contain itself, so it is repeated until nothing is added.
func (l *Ladder) lead(root protoreflect.MessageDescriptor) {
	var all []protoreflect.MessageDescriptor
	seen := make(map[protoreflect.FullName]bool)
	var collect func(d protoreflect.MessageDescriptor)
	collect = func(d protoreflect.MessageDescriptor) {
		if seen[d.FullName()] {
			return
		}
		seen[d.FullName()] = true
		all = append(all, d)
		for i := range d.Fields().Len() {
			if m := d.Fields().Get(i).Message(); m != nil {
				collect(m)
			}
		}
	}
	collect(root)
	l.leading = make(map[protoreflect.FullName][]protoreflect.FieldDescriptor)
	for added := true; added; {
		added = false
		for _, d := range all {
			var leads []protoreflect.FieldDescriptor
			for i := range d.Fields().Len() {
				f := d.Fields().Get(i)
				if l.fields[f.FullName()] > 0 || f.Message() != nil && len(l.leading[f.Message().FullName()]) > 0 {
					leads = append(leads, f)
				}
			}
			if len(leads) > len(l.leading[d.FullName()]) {
				l.leading[d.FullName()], added = leads, true
			}
		}
	}
}

// Max returns the highest level of the ladder.
func (l *Ladder) Max() uint32 { return l.max }

// Of returns the level that a command needs: the highest of its operation and of every field that is set in it. It returns 0
// for a command without operation.
func (l *Ladder) Of(cmd *logv1.Command) uint32 {
	m := cmd.ProtoReflect()
	arm := m.WhichOneof(m.Descriptor().Oneofs().ByName("op"))
	if arm == nil {
		return 0
	}
	level := l.ops[arm.Number()]
	if len(l.fields) > 0 {
		level = max(level, l.highest(m))
	}
	return level
}

// highest looks at the set fields that have a row or lead to one.
func (l *Ladder) highest(m protoreflect.Message) uint32 {
	var level uint32
	for _, field := range l.leading[m.Descriptor().FullName()] {
		if !m.Has(field) {
			continue
		}
		level = max(level, l.fields[field.FullName()])
		switch {
		case field.Message() == nil:
		case field.IsList():
			list := m.Get(field).List()
			for i := range list.Len() {
				level = max(level, l.highest(list.Get(i).Message()))
			}
		default:
			level = max(level, l.highest(m.Get(field).Message()))
		}
	}
	return level
}
