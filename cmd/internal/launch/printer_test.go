package launch

import (
	"bytes"
	"testing"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

func TestMessagesHaveNoControlCharactersOfOthers(t *testing.T) {
	var out bytes.Buffer
	p := newPrinter(Options{Program: "srun", Stderr: &out}, 1)
	p.message("error: step 1.0: %s", "no\x1b[2Jsuch\nsrun: job 1 completed")
	p.report("n\x071", []*apiv1.TaskExit{{Count: 1, Code: 3}})
	want := `srun: error: step 1.0: no\x1b[2Jsuch\nsrun: job 1 completed` + "\n" + `srun: error: n\x071: task 0: Exited with exit code 3` + "\n"
	if out.String() != want {
		t.Errorf("it prints %q, want %q", out.String(), want)
	}
}
