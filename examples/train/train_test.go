package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// together runs the program as several processes would, each in a goroutine, and returns rank 0's output.
func together(t *testing.T, world int, args ...string) (string, error) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(listener.Addr().String())
	listener.Close()
	outputs := make([]bytes.Buffer, world)
	failures := make([]error, world)
	var group sync.WaitGroup
	for rank := range world {
		group.Go(func() {
			env := map[string]string{"RANK": strconv.Itoa(rank), "WORLD_SIZE": strconv.Itoa(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
			failures[rank] = run(context.Background(), args, func(name string) string { return env[name] }, &outputs[rank])
		})
	}
	group.Wait()
	for rank := 1; rank < world; rank++ {
		if outputs[rank].Len() > 0 {
			t.Errorf("rank %d wrote %q; only rank 0 speaks", rank, outputs[rank].String())
		}
	}
	return outputs[0].String(), errors.Join(failures...)
}

func TestTheDigitsAreLearned(t *testing.T) {
	out, err := together(t, 4, "--dir", t.TempDir(), "--steps", "300", "--timeout", "20s")
	if err != nil {
		t.Fatal(err)
	}
	match := regexp.MustCompile(`accuracy (\S+) on 297 images`).FindStringSubmatch(out)
	if match == nil {
		t.Fatalf("no accuracy in %q", out)
	}
	if accuracy, err := strconv.ParseFloat(match[1], 64); err != nil || accuracy < 0.88 {
		t.Errorf("accuracy %s after 300 steps, expected at least 0.88 (%v)", match[1], err)
	}
	if !strings.Contains(out, "step 300 loss ") {
		t.Errorf("the last step is missing in %q", out)
	}
}

func TestAResumedRunEndsWithTheSameNumbersAsAnUndisturbedOne(t *testing.T) {
	whole, parts := t.TempDir(), t.TempDir()
	if _, err := together(t, 3, "--dir", whole, "--steps", "60", "--timeout", "20s"); err != nil {
		t.Fatal(err)
	}
	for _, steps := range []string{"25", "60"} {
		if _, err := together(t, 3, "--dir", parts, "--steps", steps, "--timeout", "20s"); err != nil {
			t.Fatal(err)
		}
	}
	s := settings{hidden: 96, seed: 1, batch: 240}
	name := fmt.Sprintf(checkpointPattern, 60)
	a, err := load(filepath.Join(whole, name), s)
	if err != nil {
		t.Fatal(err)
	}
	b, err := load(filepath.Join(parts, name), s)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(a.params, b.params) || !slices.Equal(a.velocity, b.velocity) {
		t.Error("the resumed run ended elsewhere")
	}
}

func TestTheNewestCompleteCheckpointIsChosenAndTornOnesAreNamed(t *testing.T) {
	dir := t.TempDir()
	s := settings{hidden: 4, seed: 7, batch: 10}
	make1 := func(step int) []byte {
		p := progress{step: step, params: make([]float32, paramCount(4)), velocity: make([]float32, paramCount(4))}
		p.params[0] = float32(step)
		path, err := save(dir, s, p)
		if err != nil {
			t.Fatal(err)
		}
		contents, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return contents
	}
	make1(100)
	whole := make1(200)
	path := filepath.Join(dir, fmt.Sprintf(checkpointPattern, 200))
	for name, bad := range map[string][]byte{
		"empty":       {},
		"cut":         whole[:len(whole)-1],
		"header only": whole[:40],
		"zero-filled": append(bytes.Clone(whole[:len(whole)-paramCount(4)*8]), make([]byte, paramCount(4)*8)...),
		"flipped bit": func() []byte { c := bytes.Clone(whole); c[len(c)-paramCount(4)*8] ^= 1; return c }(),
	} {
		if err := os.WriteFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		p, from, skipped, err := resume(dir, s)
		if err != nil || p.step != 100 || p.params[0] != 100 || !strings.Contains(from, "step-00000100") {
			t.Errorf("%s: resumed from step %d, %s, %v", name, p.step, from, err)
		}
		if len(skipped) != 1 || !strings.Contains(skipped[0], "step-00000200") {
			t.Errorf("%s: passed over %q", name, skipped)
		}
	}
	if _, _, _, err := resume(dir, settings{hidden: 4, seed: 8, batch: 10}); err == nil || !strings.Contains(err.Error(), "seed 7") {
		t.Errorf("another seed: %v", err)
	}
}

func TestASilentPeerIsAnErrorNotAHang(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	listener.Close()
	_, err = joinRing(group{rank: 0, world: 2, master: address, run: "x"}, 300*time.Millisecond)
	if err == nil || !strings.Contains(err.Error(), "1 of 2 processes came") {
		t.Errorf("rank 0 alone: %v", err)
	}
	_, err = joinRing(group{rank: 1, world: 2, master: address, run: "x"}, 300*time.Millisecond)
	if err == nil {
		t.Error("rank 1 alone joined")
	}
}

func TestAStrangerIsTurnedAwayAndTheGroupStillMeets(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	listener.Close()
	rings := make([]*ring, 2)
	failures := make([]error, 3)
	var wait sync.WaitGroup
	wait.Go(func() { rings[0], failures[0] = joinRing(group{0, 2, address, "new"}, 10*time.Second) })
	wait.Go(func() { _, failures[2] = joinRing(group{1, 2, address, "old"}, 10*time.Second) })
	wait.Go(func() { rings[1], failures[1] = joinRing(group{1, 2, address, "new"}, 10*time.Second) })
	wait.Wait()
	if failures[0] != nil || failures[1] != nil {
		t.Fatalf("the group did not meet: %v, %v", failures[0], failures[1])
	}
	if failures[2] == nil {
		t.Error("a process of an old run was admitted")
	}
	var sums [2][]float32
	for rank := range 2 {
		wait.Go(func() {
			sums[rank] = []float32{float32(rank + 1), 10, -1}
			failures[rank] = rings[rank].sum(sums[rank])
			rings[rank].close()
		})
	}
	wait.Wait()
	for rank := range 2 {
		if failures[rank] != nil || !slices.Equal(sums[rank], []float32{3, 20, -2}) {
			t.Errorf("rank %d: sum %v, %v", rank, sums[rank], failures[rank])
		}
	}
}

func TestTheGradientIsTheSlopeOfTheLoss(t *testing.T) {
	train, _, err := loadDigits()
	if err != nil {
		t.Fatal(err)
	}
	m := newModel(8, 3)
	indices := []int{0, 1, 2, 3}
	gradient := make([]float32, len(m.params))
	m.gradient(train, indices, gradient)
	scratch := make([]float32, len(m.params))
	for _, i := range []int{20, 30, 8*pixels + 2, 8*pixels + 8 + 5, len(m.params) - 1} {
		const h = 1e-2
		before := m.params[i]
		m.params[i] = before + h
		up := m.gradient(train, indices, scratch)
		m.params[i] = before - h
		down := m.gradient(train, indices, scratch)
		m.params[i] = before
		slope := float64(up-down) / (2 * h)
		if math.Abs(slope-float64(gradient[i])) > 0.02*math.Max(1, math.Abs(slope)) {
			t.Errorf("parameter %d: gradient %.4f, slope %.4f", i, gradient[i], slope)
		}
	}
}

func TestEveryEpochSeesEveryImageAtMostOnce(t *testing.T) {
	seen := map[int]bool{}
	for step := range trainCount / 240 {
		for _, i := range batchAt(1, step, 240, trainCount) {
			if seen[i] {
				t.Fatalf("image %d twice in one epoch", i)
			}
			seen[i] = true
		}
	}
	if slices.Equal(batchAt(1, 0, 240, trainCount), batchAt(1, 6, 240, trainCount)) {
		t.Error("the second epoch has the order of the first")
	}
}

func TestBadSurroundingsAreRefusedWithASentence(t *testing.T) {
	for name, c := range map[string]struct {
		env  map[string]string
		args []string
		want string
	}{
		"no master":     {map[string]string{"RANK": "0", "WORLD_SIZE": "2"}, nil, "MASTER_ADDR"},
		"rank too high": {map[string]string{"RANK": "2", "WORLD_SIZE": "2"}, nil, "rank 2 of 2"},
		"not a number":  {map[string]string{"SLURM_PROCID": "x"}, nil, "SLURM_PROCID"},
		"uneven":        {map[string]string{"SLURM_PROCID": "0", "SLURM_NTASKS": "7", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, nil, "shared evenly"},
		"no steps":      {nil, []string{"--steps", "0"}, "--steps"},
		"stray word":    {nil, []string{"now"}, `"now"`},
	} {
		err := run(context.Background(), c.args, func(n string) string { return c.env[n] }, &bytes.Buffer{})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, expected %q", name, err, c.want)
		}
	}
}
