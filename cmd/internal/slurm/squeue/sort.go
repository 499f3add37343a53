package squeue

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/slurm/format"
	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
)

// moment orders times; one that is not known comes last.
func moment(t time.Time) int64 {
	if t.IsZero() {
		return math.MaxInt64
	}
	return t.Unix()
}

// numeric are the fields that sort as numbers.
var numeric = map[byte]func(*row) int64{
	'A': jobNumber, 'i': jobNumber, 'F': jobNumber, 'K': jobNumber,
	'c': func(r *row) int64 { return int64(r.MinCPUs()) },
	'C': func(r *row) int64 { return int64(r.CPUs()) },
	'D': func(r *row) int64 { return int64(r.Nodes()) },
	'e': func(r *row) int64 { return moment(r.End()) },
	'G': func(r *row) int64 { return int64(gid(r)) },
	'l': limitNumber,
	'L': func(r *row) int64 {
		if n := limitNumber(r); n != math.MaxInt64 {
			return n - r.Used()
		}
		return math.MaxInt64
	},
	'm': func(r *row) int64 { return int64(r.Job.GetSpec().GetResources().GetMemoryPerNodeMb()) },
	'M': func(r *row) int64 {
		if r.Step != nil {
			return stepUsed(r)
		}
		return r.Used()
	},
	'p': func(r *row) int64 { return int64(r.Priority()) },
	'Q': func(r *row) int64 { return int64(r.Priority()) },
	'S': func(r *row) int64 { return moment(r.Start()) },
	'U': func(r *row) int64 { return int64(uid(r)) },
	'V': func(r *row) int64 { return moment(record.At(r.Job.GetStatus().GetSubmitTime())) },
	'y': func(r *row) int64 { return int64(r.Job.GetSpec().GetNice()) },
}

func jobNumber(r *row) int64 { return int64(r.Job.GetId())<<32 | int64(r.Step.GetId()) }

func limitNumber(r *row) int64 {
	if n, ok := r.LimitSeconds(); ok {
		return n
	}
	return math.MaxInt64
}

// order sorts rows, which are in order of ids, by the keys; equal rows stay in that order.
func order(rows []*row, keys []format.SortKey) {
	var compare []func(a, b *row) int
	for _, key := range keys {
		var by func(a, b *row) int
		if number, ok := numeric[key.Letter]; ok {
			by = func(a, b *row) int { return cmp.Compare(number(a), number(b)) }
		} else {
			letter := key.Letter
			if letter == 'T' {
				letter = 't'
			}
			text := letters[letter].Value
			if text == nil {
				continue
			}
			by = func(a, b *row) int { return strings.Compare(text(a), text(b)) }
		}
		if key.Down {
			up := by
			by = func(a, b *row) int { return up(b, a) }
		}
		compare = append(compare, by)
	}
	slices.SortStableFunc(rows, func(a, b *row) int {
		for _, by := range compare {
			if n := by(a, b); n != 0 {
				return n
			}
		}
		return 0
	})
}
