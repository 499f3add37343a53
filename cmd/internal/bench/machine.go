package bench

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"time"
)

// Machine is what the machine does without Muster; figures compare as ratios to it.
type Machine struct {
	// CPUs that this program may use.
	CPUs int `json:"cpus"`
	// FsyncMs is the median time of appending 4 KiB and fsync, in milliseconds.
	FsyncMs float64 `json:"fsync_ms"`
	// ForkExecMs is the median time from starting `true` to its end, in milliseconds.
	ForkExecMs float64 `json:"fork_exec_ms"`
	// HTTPEchoPerSecond is how many requests a plain net/http server on loopback answers to 64 callers of this process.
	HTTPEchoPerSecond float64 `json:"http_echo_per_second"`
}

// measureMachine measures for about two seconds in dir.
func measureMachine(ctx context.Context, dir string) (Machine, error) {
	m := Machine{CPUs: runtime.NumCPU()}
	file, err := os.OpenFile(filepath.Join(dir, "fsync"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return m, fmt.Errorf("measure fsync: %w", err)
	}
	defer file.Close()
	page := make([]byte, 4096)
	var syncs, starts []float64
	for range 100 {
		begin := time.Now()
		if _, err := file.Write(page); err != nil {
			return m, fmt.Errorf("measure fsync: %w", err)
		}
		if err := file.Sync(); err != nil {
			return m, fmt.Errorf("measure fsync: %w", err)
		}
		syncs = append(syncs, milliseconds(time.Since(begin)))
	}
	for range 50 {
		begin := time.Now()
		if err := exec.CommandContext(ctx, "true").Run(); err != nil {
			return m, fmt.Errorf("measure starting a program: %w", err)
		}
		starts = append(starts, milliseconds(time.Since(begin)))
	}
	m.FsyncMs, m.ForkExecMs = median(syncs), median(starts)
	m.HTTPEchoPerSecond, err = measureEcho(ctx)
	return m, err
}

// measureEcho counts answers of a plain server for a second.
func measureEcho(ctx context.Context) (float64, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("measure HTTP: %w", err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(w, r.Body) // a broken connection shows at the caller
	})}
	var served sync.WaitGroup
	served.Go(func() { _ = server.Serve(listener) }) // ends with Close
	defer func() { server.Close(); served.Wait() }()
	transport := &http.Transport{MaxIdleConnsPerHost: 64}
	defer transport.CloseIdleConnections()
	const callers, span = 64, time.Second
	begin := time.Now()
	answers, err := parallel(ctx, callers, func(ctx context.Context, _ int) (int, error) {
		n := 0
		for time.Since(begin) < span {
			request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+listener.Addr().String(), nil)
			if err != nil {
				return n, err
			}
			answer, err := transport.RoundTrip(request)
			if err != nil {
				return n, err
			}
			if _, err := io.Copy(io.Discard, answer.Body); err != nil {
				return n, err
			}
			answer.Body.Close()
			n++
		}
		return n, nil
	})
	return float64(answers) / time.Since(begin).Seconds(), err
}

// parallel runs f by n callers and adds up what they did. The first error ends it.
func parallel(ctx context.Context, n int, f func(ctx context.Context, caller int) (int, error)) (int, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var group sync.WaitGroup
	var mu sync.Mutex
	var sum int
	var first error
	for i := range n {
		group.Go(func() {
			done, err := f(ctx, i)
			mu.Lock()
			defer mu.Unlock()
			sum += done
			if err != nil && first == nil {
				first = err
				cancel()
			}
		})
	}
	group.Wait()
	return sum, first
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
