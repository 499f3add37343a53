package fsm

import (
	"fmt"
	"io"
	"runtime"
	"testing"

	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// usualSpec is as large as what sbatch sends.
func usualSpec(i int) *apiv1.JobSpec {
	return &apiv1.JobSpec{
		Name: fmt.Sprintf("train-%d", i), Kind: apiv1.JobKind_JOB_KIND_BATCH, WorkDir: "/home/alice/project/experiments", Umask: 18,
		ScriptBlob: hashOf([]byte(script)), EnvironmentBlob: hashOf([]byte("HOME=/home/alice")), SubmitHost: "login1",
		CommandLine: "/home/alice/project/experiments/train.sh", StdoutPath: "slurm-%j.out", TimeLimitS: 3600, Requeue: true,
		Resources:   &apiv1.ResourceRequest{NodesMin: 2, NtasksPerNode: 8, CpusPerTask: 4, GpusPerNode: 8, MemoryPerNodeMb: 1000},
		TaskOptions: &apiv1.TaskOptions{KillOnBadExit: true},
	}
}

func benchRig(b *testing.B, nodes int) *rig {
	r := newRig(b)
	r.boot()
	for i := range nodes {
		r.join(fmt.Sprintf("n%d", i+1), 64, 8)
	}
	return r
}

// submission makes an entry of one command with n jobs.
func (r *rig) submission(first, n int) []byte {
	op := &logv1.SubmitJobs{Blobs: []*logv1.BlobContent{blobOf(script), blobOf("HOME=/home/alice")}}
	for i := range n {
		op.Specs = append(op.Specs, usualSpec(first+i))
	}
	cmd := command(op)
	cmd.Principal, cmd.RequestId = alice, mint(r.ms, fmt.Sprint(first))
	r.complete(cmd)
	encoded, err := proto.Marshal(&logv1.Batch{Commands: []*logv1.Command{cmd}})
	if err != nil {
		r.t.Fatal(err)
	}
	return encoded
}

func (r *rig) applyEntry(entry []byte) {
	r.index++
	if _, err := r.m.Apply(r.index, r.term, entry); err != nil {
		r.t.Fatal(err)
	}
}

// BenchmarkSubmit applies and publishes; one operation is one job.
func BenchmarkSubmit(b *testing.B) {
	for _, per := range []int{1, 100} {
		b.Run(fmt.Sprintf("%d-per-command", per), func(b *testing.B) {
			r := benchRig(b, 4)
			var entries [][]byte
			for i := 0; i < b.N; i += per {
				entries = append(entries, r.submission(i, per))
			}
			b.ResetTimer()
			for _, e := range entries {
				r.applyEntry(e)
				r.m.Publish()
			}
		})
	}
}

// BenchmarkPlace places gangs and publishes after each; one operation is one gang.
func BenchmarkPlace(b *testing.B) {
	for _, nodes := range []int{4, 1000} {
		b.Run(fmt.Sprintf("%d-nodes", nodes), func(b *testing.B) {
			r := benchRig(b, nodes)
			var all []uint32
			for i := range nodes {
				all = append(all, uint32(i+1))
			}
			for range b.N {
				spec := runSpec()
				job := r.submit(alice, spec)
				b.StartTimer()
				fence := r.start(job, r.placement(0xff, 0xff, all...))
				r.m.Publish()
				b.StopTimer()
				r.must(member, &logv1.EndAttempt{JobId: job, Fence: fence, Failure: apiv1.FailureClass_FAILURE_CLASS_USER_CODE})
				for _, n := range all {
					r.report(n, job, fence, &logv1.AttemptReaped{})
				}
				r.log = nil
			}
		})
	}
}

// BenchmarkPublish changes one job of many and publishes.
func BenchmarkPublish(b *testing.B) {
	r := benchRig(b, 4)
	for i := range 1000 {
		r.applyEntry(r.submission(100*i, 100))
	}
	r.m.Publish()
	b.ResetTimer()
	for i := range b.N {
		r.m.cmd, r.m.rev = command(&logv1.Tick{}), &apiv1.Revision{Incarnation: 1, Index: r.index + uint64(i) + 1}
		r.m.changeJob(r.m.s.Job(uint32(1+i%100_000)), func(s *apiv1.JobStatus) { s.Sentence = "waits" })
		r.m.Publish()
	}
}

// BenchmarkMemory reports the bytes of state for each pending job, with indexes, in two ways of submitting.
func BenchmarkMemory(b *testing.B) {
	for _, c := range []struct{ jobs, per int }{{100_000, 1}, {100_000, 100}, {1_000_000, 100}} {
		b.Run(fmt.Sprintf("%d-jobs-%d-per-command", c.jobs, c.per), func(b *testing.B) {
			for range b.N {
				var before, after runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&before)
				r := benchRig(b, 4)
				for i := 0; i < c.jobs; i += c.per {
					r.applyEntry(r.submission(i, c.per))
					if i%1000 == 0 {
						r.m.Publish()
					}
				}
				r.log = nil
				v := r.m.Publish()
				runtime.GC()
				runtime.ReadMemStats(&after)
				b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/float64(c.jobs), "B/job")
				b.ReportMetric(float64(v.ActiveJobCount()), "jobs")
			}
		})
	}
}

// BenchmarkSnapshot writes 100,000 jobs.
func BenchmarkSnapshot(b *testing.B) {
	r := benchRig(b, 4)
	for i := range 1000 {
		r.applyEntry(r.submission(100*i, 100))
	}
	v := r.m.Publish()
	b.ResetTimer()
	for range b.N {
		if err := v.WriteSnapshot(io.Discard); err != nil {
			b.Fatal(err)
		}
	}
}
