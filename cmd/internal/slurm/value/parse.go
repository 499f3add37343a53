// Package value reads and writes the words of Slurm's dialect: time limits, sizes, moments, node counts, GPU requests,
// signals, states, reasons and exit codes.
//
// Invariants: pure functions; a value that Slurm refuses is refused; what is written reads back to the same value where
// both directions exist. Units are in the names.
//
// It is called by the commands of cmd/internal/slurm. It never reads clocks: moments that depend on "now" get it.
package value

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"syscall"
)

// Unlimited is the time limit "UNLIMITED" in seconds.
const Unlimited = math.MaxUint32

// ErrInvalid is returned for a word that Slurm refuses; the caller names the option.
var ErrInvalid = errors.New("invalid value")

// TimeLimit reads a time limit: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS, "infinite" or "UNLIMITED". It
// returns seconds, rounded up to whole minutes; 0 asks for no limit as in Slurm.
func TimeLimit(s string) (uint32, error) {
	switch strings.ToLower(s) {
	case "infinite", "unlimited", "-1":
		return Unlimited, nil
	}
	days, clock, dashed := strings.Cut(s, "-")
	if !dashed {
		days, clock = "0", s
	}
	parts := strings.Split(clock, ":")
	if len(parts) > 3 {
		return 0, ErrInvalid
	}
	var n [3]uint64
	for i, part := range parts {
		v, err := strconv.ParseUint(part, 10, 32)
		if err != nil || part[0] == '+' {
			return 0, ErrInvalid
		}
		n[i] = v
	}
	d, err := strconv.ParseUint(days, 10, 32)
	if err != nil {
		return 0, ErrInvalid
	}
	seconds := d * 86400
	switch {
	case dashed:
		seconds += n[0]*3600 + n[1]*60 + n[2]
	case len(parts) == 1:
		seconds = n[0] * 60
	case len(parts) == 2:
		seconds = n[0]*60 + n[1]
	default:
		seconds = n[0]*3600 + n[1]*60 + n[2]
	}
	seconds = (seconds + 59) / 60 * 60
	if seconds == 0 || seconds >= Unlimited {
		return Unlimited, nil
	}
	return uint32(seconds), nil
}

// MemoryMB reads a size with an optional unit (K, M, G, T, also "KB" …; default M) and returns MiB, rounded up.
func MemoryMB(s string) (uint64, error) {
	digits := strings.TrimRight(s, "kKmMgGtTbB")
	unit := strings.ToLower(s[len(digits):])
	if unit != "b" {
		unit = strings.TrimSuffix(unit, "b")
	}
	n, err := strconv.ParseUint(digits, 10, 63)
	if err != nil || digits[0] == '+' {
		return 0, ErrInvalid
	}
	factor := uint64(1)
	switch unit {
	case "", "m":
	case "k":
		return n/1024 + (n%1024+1023)/1024, nil
	case "g":
		factor = 1 << 10
	case "t":
		factor = 1 << 20
	default:
		return 0, ErrInvalid
	}
	if n > math.MaxInt64/factor {
		return 0, ErrInvalid
	}
	return n * factor, nil
}

// NodeCount reads "2", "1-4" or "4k" (1,024 each).
func NodeCount(s string) (low, high uint32, err error) {
	first, second, ranged := strings.Cut(s, "-")
	if low, err = scaled(first); err != nil {
		return 0, 0, err
	}
	if !ranged {
		return low, low, nil
	}
	if high, err = scaled(second); err != nil {
		return 0, 0, err
	}
	if high < low {
		return 0, 0, fmt.Errorf("%w: the smallest number of nodes (%d) is above the largest (%d)", ErrInvalid, low, high)
	}
	return low, high, nil
}

// scaled reads a count with an optional "k" or "m".
func scaled(s string) (uint32, error) {
	factor := uint64(1)
	switch {
	case strings.HasSuffix(strings.ToLower(s), "k"):
		factor, s = 1<<10, s[:len(s)-1]
	case strings.HasSuffix(strings.ToLower(s), "m"):
		factor, s = 1<<20, s[:len(s)-1]
	}
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || s[0] == '+' || n*factor > math.MaxInt32 {
		return 0, ErrInvalid
	}
	return uint32(n * factor), nil
}

// Count reads a number of things, at least low.
func Count(s string, low uint32) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 31)
	if err != nil || uint32(n) < low || s[0] == '+' {
		return 0, ErrInvalid
	}
	return uint32(n), nil
}

// GPUs reads "[TYPE:]NUMBER" of --gpus and its relatives. The type is returned in lower case.
func GPUs(s string) (kind string, count uint32, err error) {
	if before, after, typed := strings.Cut(s, ":"); typed {
		if before == "" || strings.ContainsAny(after, ":") {
			return "", 0, ErrInvalid
		}
		kind, s = strings.ToLower(before), after
	}
	count, err = Count(s, 0)
	if err != nil && kind == "" && s != "" && !strings.ContainsAny(s[:1], "0123456789-+") {
		return strings.ToLower(s), 1, nil // a type alone means one
	}
	return kind, count, err
}

// Errors of generic resources, in Slurm's words.
var (
	// ErrGres is a list that cannot be understood or names a resource that is not a GPU.
	ErrGres = errors.New("Invalid generic resource (gres) specification")
	// ErrGresMixed is a list with typed and untyped GPUs, or with two types.
	ErrGresMixed = errors.New("Invalid GRES specification (with and without type identification)")
)

// gresNumber reads a count, with "k" for 1,024; numbers below zero are not numbers here.
func gresNumber(s string) (uint32, bool) {
	if s == "" || s[0] < '0' || s[0] > '9' {
		return 0, false
	}
	n, err := scaled(s)
	return n, err == nil
}

// Signal reads "TERM", "SIGTERM", "term" or "15".
func Signal(s string) (int, error) {
	if n, err := strconv.Atoi(s); err == nil {
		if n < 1 || n > 64 {
			return 0, ErrInvalid
		}
		return n, nil
	}
	name := strings.TrimPrefix(strings.ToUpper(s), "SIG")
	if n, ok := signals[name]; ok {
		return int(n), nil
	}
	return 0, ErrInvalid
}

var signals = map[string]syscall.Signal{
	"HUP": syscall.SIGHUP, "INT": syscall.SIGINT, "QUIT": syscall.SIGQUIT, "ABRT": syscall.SIGABRT,
	"KILL": syscall.SIGKILL, "ALRM": syscall.SIGALRM, "TERM": syscall.SIGTERM, "USR1": syscall.SIGUSR1,
	"USR2": syscall.SIGUSR2, "URG": syscall.SIGURG, "CONT": syscall.SIGCONT, "STOP": syscall.SIGSTOP,
	"TSTP": syscall.SIGTSTP, "TTIN": syscall.SIGTTIN, "TTOU": syscall.SIGTTOU, "XCPU": syscall.SIGXCPU,
	"ILL": syscall.SIGILL, "TRAP": syscall.SIGTRAP, "BUS": syscall.SIGBUS, "FPE": syscall.SIGFPE, "SEGV": syscall.SIGSEGV,
	"PIPE": syscall.SIGPIPE, "CHLD": syscall.SIGCHLD, "XFSZ": syscall.SIGXFSZ, "PROF": syscall.SIGPROF,
	"WINCH": syscall.SIGWINCH, "IO": syscall.SIGIO, "SYS": syscall.SIGSYS, "PWR": syscall.SIGPWR, "VTALRM": syscall.SIGVTALRM,
}
