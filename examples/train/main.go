package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"
)

// options are the program's flags.
type options struct {
	settings
	dir       string
	steps     int
	saveEvery int
	logEvery  int
	keep      int
	rate      float64
	momentum  float64
	pace      time.Duration
	timeout   time.Duration
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx, os.Args[1:], os.Getenv, os.Stdout)
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case errors.Is(err, errInterrupted):
		fmt.Fprintln(os.Stderr, "train:", err)
		os.Exit(128 + int(syscall.SIGTERM))
	case err != nil:
		fmt.Fprintln(os.Stderr, "train:", err)
		os.Exit(1)
	}
}

// errInterrupted says that the run was told to end, and that its progress is saved.
var errInterrupted = errors.New("told to end; the progress is saved")

func parse(args []string) (options, error) {
	var o options
	flags := flag.NewFlagSet("train", flag.ContinueOnError)
	flags.StringVar(&o.dir, "dir", "checkpoints", "`directory` of the checkpoints, shared by all processes' rank 0")
	flags.IntVar(&o.steps, "steps", 1500, "steps in all, those before a resume included")
	flags.IntVar(&o.batch, "batch", 240, "images of a step, over all processes")
	flags.IntVar(&o.hidden, "hidden", 96, "hidden units")
	flags.Uint64Var(&o.seed, "seed", 1, "decides the first weights and the order of the data")
	flags.Float64Var(&o.rate, "rate", 0.02, "learning rate")
	flags.Float64Var(&o.momentum, "momentum", 0.9, "momentum")
	flags.IntVar(&o.saveEvery, "save-every", 100, "steps between checkpoints")
	flags.IntVar(&o.keep, "keep", 3, "checkpoints that are kept")
	flags.IntVar(&o.logEvery, "log-every", 10, "steps between lines of output")
	flags.DurationVar(&o.pace, "pace", 0, "shortest time of a step: makes so small a training last long enough to be watched; 0 is full speed")
	flags.DurationVar(&o.timeout, "timeout", 60*time.Second, "silence of a peer after which the run fails")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	for name, value := range map[string]int{
		"steps": o.steps, "batch": o.batch, "hidden": o.hidden, "save-every": o.saveEvery, "keep": o.keep, "log-every": o.logEvery,
	} {
		if value < 1 {
			return o, fmt.Errorf("--%s is %d; it must be at least 1", name, value)
		}
	}
	if o.batch > trainCount {
		return o, fmt.Errorf("--batch is %d; there are only %d images to learn from", o.batch, trainCount)
	}
	return o, nil
}

// groupFrom reads the launcher's environment: PyTorch's names first, then Slurm's; alone without either.
func groupFrom(getenv func(string) string) (group, error) {
	number := func(otherwise int, names ...string) (int, error) {
		for _, name := range names {
			if text := getenv(name); text != "" {
				n, err := strconv.Atoi(text)
				if err != nil {
					return 0, fmt.Errorf("%s=%q is not a number", name, text)
				}
				return n, nil
			}
		}
		return otherwise, nil
	}
	var g group
	var err error
	if g.rank, err = number(0, "RANK", "SLURM_PROCID"); err != nil {
		return g, err
	}
	if g.world, err = number(1, "WORLD_SIZE", "SLURM_NTASKS"); err != nil {
		return g, err
	}
	if g.world < 1 || g.rank < 0 || g.rank >= g.world {
		return g, fmt.Errorf("rank %d of %d processes makes no sense: look at RANK and WORLD_SIZE", g.rank, g.world)
	}
	if g.world > 1 {
		if getenv("MASTER_ADDR") == "" || getenv("MASTER_PORT") == "" {
			return g, errors.New("MASTER_ADDR and MASTER_PORT are not set: start this program with srun, or set them to rank 0's host and a free port")
		}
		g.master = net.JoinHostPort(getenv("MASTER_ADDR"), getenv("MASTER_PORT"))
	}
	g.run = fmt.Sprintf("%s.%s.%s", orDash(getenv("SLURM_JOB_ID")), orDash(getenv("SLURM_RESTART_COUNT")), orDash(getenv("SLURM_STEP_ID")))
	return g, nil
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func run(ctx context.Context, args []string, getenv func(string) string, out io.Writer) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	g, err := groupFrom(getenv)
	if err != nil {
		return err
	}
	if o.batch%g.world != 0 {
		return fmt.Errorf("--batch %d cannot be shared evenly by %d processes", o.batch, g.world)
	}
	train, heldOut, err := loadDigits()
	if err != nil {
		return err
	}
	ring, err := joinRing(g, o.timeout)
	if err != nil {
		return err
	}
	defer ring.close()
	p, err := begin(o, ring, out)
	if err != nil {
		return err
	}
	network := newModel(o.hidden, o.seed)
	if p.step > 0 {
		copy(network.params, p.params)
	}
	p.params = network.params
	if err := descendTo(ctx, o, ring, network, &p, train, out); err != nil {
		return err
	}
	if g.rank == 0 {
		fmt.Fprintf(out, "accuracy %.4f on %d images it never saw\n", network.accuracy(heldOut), len(heldOut))
	}
	return nil
}

// begin decides where to start: rank 0 looks for a checkpoint and gives it to the others.
func begin(o options, r *ring, out io.Writer) (progress, error) {
	count := paramCount(o.hidden)
	p := progress{params: make([]float32, count), velocity: make([]float32, count)}
	state := make([]float32, 3+2*count) // failed, step (two halves: exact in 24 bits), params, velocity
	var failure error
	if r.rank == 0 {
		found, path, skipped, err := resume(o.dir, o.settings)
		for _, sentence := range skipped {
			fmt.Fprintf(out, "passed over: %s\n", sentence)
		}
		switch {
		case err != nil:
			failure, state[0] = err, 1
		case path != "":
			fmt.Fprintf(out, "resumed from %s at step %d\n", path, found.step)
			state[1], state[2] = float32(found.step>>12), float32(found.step&0xfff)
			copy(state[3:], found.params)
			copy(state[3+count:], found.velocity)
		}
	}
	if err := r.share(state); err != nil {
		return p, err
	}
	if failure != nil {
		return p, failure
	}
	if state[0] != 0 {
		return p, errors.New("rank 0 could not read the checkpoint")
	}
	p.step = int(state[1])<<12 | int(state[2])
	copy(p.params, state[3:])
	copy(p.velocity, state[3+count:])
	return p, nil
}

// descendTo trains until o.steps steps are done, and saves on the way and at the end.
func descendTo(ctx context.Context, o options, r *ring, network *model, p *progress, train []sample, out io.Writer) error {
	gradient := make([]float32, paramCount(o.hidden)+1) // the last element is the loss
	share := o.batch / r.world
	saved := p.step
	store := func() error {
		if r.rank != 0 || saved == p.step {
			return nil
		}
		if _, err := save(o.dir, o.settings, *p); err != nil {
			return err
		}
		saved = p.step
		return prune(o.dir, o.keep)
	}
	for p.step < o.steps {
		began := time.Now()
		clear(gradient)
		batch := batchAt(o.seed, p.step, o.batch, len(train))
		own := batch[r.rank*share : (r.rank+1)*share]
		gradient[len(gradient)-1] = network.gradient(train, own, gradient[:len(gradient)-1])
		if err := r.sum(gradient); err != nil {
			if ctx.Err() != nil { // peers were told to end, too
				return errors.Join(errInterrupted, store())
			}
			return err
		}
		for i := range gradient {
			gradient[i] /= float32(o.batch)
		}
		loss := gradient[len(gradient)-1]
		if math.IsNaN(float64(loss)) || math.IsInf(float64(loss), 0) {
			return fmt.Errorf("step %d: the loss is %v: lower --rate", p.step+1, loss)
		}
		network.descend(gradient[:len(gradient)-1], p.velocity, float32(o.rate), float32(o.momentum))
		p.step++
		if r.rank == 0 && (p.step%o.logEvery == 0 || p.step == 1 || p.step == o.steps) {
			fmt.Fprintf(out, "step %d loss %.4f\n", p.step, loss)
		}
		if p.step%o.saveEvery == 0 || p.step == o.steps {
			if err := store(); err != nil {
				return err
			}
		}
		if err := wait(ctx, o.pace-time.Since(began)); err != nil {
			return errors.Join(errInterrupted, store())
		}
	}
	return nil
}

// wait pauses for d, and fails as soon as the run is told to end.
func wait(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
