package environ

import (
	"slices"
	"strings"
	"testing"
)

func TestOnlyTasksOfAnSrunKnowItsAddress(t *testing.T) {
	r := Request{Node: "n1", Cluster: "base", Order: job(0), Step: parallelStep(0, 1)}
	outer := []string{"SLURM_LAUNCH_NODE_IPADDR=10.9.9.9", "SLURM_SRUN_COMM_HOST=10.9.9.9"}
	for what, c := range map[string]struct {
		user []string
		want string
	}{
		"started by srun":                       {append([]string{LaunchVariable + "=10.0.0.7"}, outer...), "10.0.0.7"},
		"started otherwise, from within a step": {outer, ""},
	} {
		r.User = c.user
		for _, env := range Tasks(r) {
			for _, name := range []string{"SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_HOST"} {
				has := slices.Contains(env, name+"="+c.want)
				if any := slices.ContainsFunc(env, func(v string) bool { return strings.HasPrefix(v, name+"=") }); any != (c.want != "") || any && !has {
					t.Errorf("%s: %s is not %q in %q", what, name, c.want, env)
				}
			}
			if slices.ContainsFunc(env, func(v string) bool { return strings.HasPrefix(v, LaunchVariable) }) {
				t.Errorf("%s: tasks would hand %s on", what, LaunchVariable)
			}
		}
	}
}
