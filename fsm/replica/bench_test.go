package replica

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// BenchmarkPropose measures acknowledged commands of about 300 bytes with three members in one process, on bolt with fsync.
func BenchmarkPropose(b *testing.B) {
	for _, clients := range []int{1, 64, 256} {
		b.Run(fmt.Sprint("clients=", clients), func(b *testing.B) {
			ms := cluster(b, 3, nil)
			lead := leaderOf(b, ms...)
			payload := strings.Repeat("x", 240)
			var next atomic.Int64
			first := lead.Applied()
			b.ResetTimer()
			var wg sync.WaitGroup
			for range clients {
				wg.Go(func() {
					for i := next.Add(1); i <= int64(b.N); i = next.Add(1) {
						c := tick("id")
						c.Traceparent = payload
						if _, err := lead.Propose(b.Context(), c); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			b.StopTimer()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "commands/s")
			b.ReportMetric(float64(b.N)/float64(lead.Applied()-first), "commands/entry")
		})
	}
}

// BenchmarkReadIndex measures linearizable reads, which share barriers.
func BenchmarkReadIndex(b *testing.B) {
	ms := cluster(b, 3, nil)
	lead := leaderOf(b, ms...)
	b.SetParallelism(32)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if _, err := lead.ReadIndex(b.Context()); err != nil {
				b.Error(err)
				return
			}
		}
	})
}
