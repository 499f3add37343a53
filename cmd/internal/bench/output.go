package bench

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/config"
)

const (
	// EmitCommand is the hidden argument of `muster bench` with which it is a task that writes.
	EmitCommand = "emit"
	// memoryLook is how often the memory of supervisors is looked at: they are gone with their step.
	memoryLook = 250 * time.Millisecond
	// boundMB is what no process may need while output passes through it, however much.
	boundMB = 256
)

// output measures the labelled output of many ranks through one srun: each byte is compared with what was written.
func output(ctx context.Context, r *run) error {
	size, err := config.ParseMemory(r.Bytes)
	if err != nil {
		return fmt.Errorf("the bytes of each rank: %w", err)
	}
	bytes := int64(size) << 20 // of MiB
	var rates, agents, supervisors, sruns, controllers, cpus []float64
	for i := range r.Repeat {
		r.say("%d ranks of %s, run %d of %d", r.Ranks, r.Bytes, i+1, r.Repeat)
		before, err := r.usages(ctx)
		if err != nil {
			return err
		}
		watch := r.watchSupervisors(ctx)
		begin := time.Now()
		state, err := r.writeAndCheck(ctx, bytes)
		took := time.Since(begin)
		most := watch()
		if err != nil {
			return err
		}
		after, err := r.usages(ctx)
		if err != nil {
			return err
		}
		agentCPU, _ := spent(before, after, isAgent)
		rates = append(rates, float64(r.Ranks)*float64(bytes)/1e6/took.Seconds())
		agents = append(agents, peak(after, isAgent))
		if most > 0 { // otherwise none was seen, and nothing is said of them
			supervisors = append(supervisors, most)
		}
		sruns, controllers = append(sruns, peakOf(state)), append(controllers, peak(after, isController))
		cpus = append(cpus, agentCPU+(state.UserTime()+state.SystemTime()).Seconds())
	}
	r.tell("rate", "MB/s", rates...)
	r.add("memory_of_agent", "MB", boundMB, false, agents)
	if len(supervisors) > 0 {
		r.add("memory_of_supervisor", "MB", boundMB, false, supervisors)
	}
	r.add("memory_of_srun", "MB", boundMB, false, sruns)
	r.add("memory_of_controller", "MB", boundMB, false, controllers)
	r.tell("cpu_agents_and_srun", "CPU s", cpus...)
	return nil
}

// writeAndCheck runs the tasks and compares all that they write.
func (r *run) writeAndCheck(ctx context.Context, size int64) (*os.ProcessState, error) {
	srun, err := r.find("srun")
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, srun, "--label", "-N4", "-n"+strconv.Itoa(r.Ranks), self, "bench", EmitCommand, strconv.FormatInt(size, 10))
	cmd.Env, cmd.Dir = r.env, r.dir
	var stderr strings.Builder
	cmd.Stderr = &stderr
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c := &checker{next: make([]int, r.Ranks)}
	readErr := c.read(pipe)
	if readErr != nil {
		_ = cmd.Process.Kill() // it may have ended
	}
	if err := cmd.Wait(); readErr == nil && err != nil {
		return nil, fmt.Errorf("srun: %w: %s", err, lastOf(stderr.String()))
	}
	if readErr != nil {
		return nil, readErr
	}
	return cmd.ProcessState, c.check(int(size / lineLength))
}

// watchSupervisors looks at the memory of the cluster's supervisors until the returned function is called, which
// returns the highest peak.
func (r *run) watchSupervisors(ctx context.Context) func() float64 {
	ctx, cancel := context.WithCancel(ctx)
	most := 0.0
	var group sync.WaitGroup
	group.Go(func() {
		for rest(ctx, memoryLook) == nil {
			pids, err := r.supervisors()
			if err != nil {
				r.say("cannot look at the supervisors: %v", err)
				return
			}
			for _, pid := range pids {
				if mb, err := memoryMB(pid, "VmHWM"); err == nil { // otherwise it has ended
					most = max(most, mb)
				}
			}
		}
	})
	return func() float64 {
		cancel()
		group.Wait()
		return most
	}
}
