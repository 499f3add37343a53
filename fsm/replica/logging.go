package replica

import (
	"context"
	"fmt"
	"io"
	"log/slog"

	"github.com/hashicorp/go-hclog"
)

// raftLogger makes a logger for hashicorp/raft that writes to log, one level lower: what that library calls an error is mostly a
// peer that does not answer.
func raftLogger(log *slog.Logger) hclog.Logger {
	l := hclog.NewInterceptLogger(&hclog.LoggerOptions{Name: "raft", Level: hclog.Debug, Output: io.Discard})
	l.RegisterSink(&slogSink{log.With("part", "raft")})
	return l
}

type slogSink struct{ log *slog.Logger }

// Accept takes one line.
func (s *slogSink) Accept(_ string, level hclog.Level, msg string, args ...any) {
	to := slog.LevelDebug - 4
	if level >= hclog.Error {
		to = slog.LevelWarn
	} else if level >= hclog.Warn {
		to = slog.LevelInfo
	} else if level >= hclog.Info {
		to = slog.LevelDebug
	}
	if !s.log.Enabled(context.Background(), to) {
		return
	}
	for i, a := range args {
		if f, ok := a.(hclog.Format); ok && len(f) > 0 {
			args[i] = fmt.Sprintf(fmt.Sprint(f[0]), f[1:]...)
		}
	}
	s.log.Log(context.Background(), to, msg, args...)
}
